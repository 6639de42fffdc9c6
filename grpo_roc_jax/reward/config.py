"""Settings of the reward stage."""

from dataclasses import dataclass
from typing import Literal

BUILTIN_REWARDS = ("answer", "format", "clean_tools")
"""Reward functions that need no dotted path; `reward.score` says what each pays."""


@dataclass(frozen=True)
class RewardConfig:
    """How a finished trajectory is judged."""

    functions: tuple[str, ...] = ("answer",)
    """Reward functions, summed with `weights`: `answer` (1 for a correct final answer), `format` (1 for exactly one
    well-formed answer), `clean_tools` (1 without a failed call), or `package.module:function`. With more than one,
    each is also kept as a channel of its name, for methods that combine channels themselves."""
    weights: tuple[float, ...] = (1.0,)
    """Weight of each function in the reward; as many as functions."""
    extraction: Literal["strict", "lenient"] = "strict"
    r"""`strict`: the last `\boxed{}` in the last complete answer block of the last turn. `lenient` also takes an
    unboxed block, a box outside a block, or what follows the last "answer is"."""
    answer_tag: str = "answer"
    """Name of the tag around the final answer."""
    truncated_reward: float = 0.0
    """Reward of a trajectory cut by the token budget, the turn limit or a deadline. 0 keeps it in the group as a
    failure; dropping such trajectories raised truncation (arXiv:2508.20722, sec. 4.3.1)."""
    score_truncated: bool = False
    """Judges a truncated trajectory by its text instead, as the published code does."""
    max_answer_chars: int = 500
    """Longer answers count as unparseable unless they equal the reference letter by letter."""
    verify_workers: int = 2
    """Processes for symbolic comparison; started at the first answer that integers and fractions cannot decide."""
    verify_timeout_s: float = 5.0
    """CPU seconds of a worker per comparison; counted by the worker itself, so a busy machine causes no false ones."""
    verify_memory_mb: int = 2048
    """Address space of a worker, MiB; a comparison that needs more ends as `crash`."""
    function_timeout_s: float = 60.0
    """Wall-clock seconds for one call of a custom reward function; its trajectories leave the group when it is late."""

    def __post_init__(self) -> None:
        if not self.functions:
            raise ValueError("reward.functions is empty; name at least one, e.g. answer")
        if len(self.functions) != len(self.weights):
            raise ValueError(
                f"reward.functions names {len(self.functions)} functions but reward.weights has {len(self.weights)} "
                "numbers; give one weight a function"
            )
        for name in self.functions:
            if name not in BUILTIN_REWARDS and ":" not in name:
                raise ValueError(
                    f"reward.functions: {name!r} is neither one of {', '.join(BUILTIN_REWARDS)} nor a dotted path; "
                    "write package.module:function"
                )
        if len(set(self.functions)) != len(self.functions):
            raise ValueError(f"reward.functions repeats a name: {self.functions}; add up its weights instead")
        for name in (
            "verify_workers",
            "verify_timeout_s",
            "verify_memory_mb",
            "function_timeout_s",
            "max_answer_chars",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"reward.{name} = {getattr(self, name)}; a positive number is wanted")
        if not self.answer_tag.isidentifier():
            raise ValueError(f"reward.answer_tag = {self.answer_tag!r}; a plain name such as answer is wanted")
