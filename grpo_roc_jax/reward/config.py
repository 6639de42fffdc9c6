"""Settings of the reward stage: reward functions by kind, and how answers are read."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal

from grpo_roc_jax.hints.other_names import CONTRIB_METHODS
from grpo_roc_jax.settings.callables import passed
from grpo_roc_jax.settings.options import AtLeast1, Axis, Positive, kind, settings
from grpo_roc_jax.types import Problem, Trajectory

RewardFunction = Callable[[Problem, Sequence[Trajectory]], Any]
"""(problem, trajectories) -> for each trajectory a number, one number per turn, or None where the function does not
apply; a sequence or an awaitable of one."""


@settings
class Reward(Axis, axis="reward.functions"):
    """A reward function: its rewards are multiplied by `weight` and added to those of the others."""

    other: ClassVar[str] = "function"
    weight: float = 1.0
    """Factor in the reward."""

    @property
    def name(self) -> str:
        """Name of its channel."""
        return self.kind

    @classmethod
    def read(cls, value: Any) -> Any:
        name = value.get("kind") if isinstance(value, Mapping) else value
        if isinstance(name, str) and name not in cls.kinds and ":" not in name and passed(name) is None:
            _import_further_kinds()
        return super().read(value)


def _import_further_kinds() -> None:
    """Registers the reward functions of other modules, which a configuration of a whole run registers when it is
    imported."""
    importlib.import_module("grpo_roc_jax.reward.graded")
    if CONTRIB_METHODS.is_dir():
        importlib.import_module("grpo_roc_jax.contrib.methods")


@kind("answer")
class AnswerReward(Reward):
    """1 for a correct final answer."""

    workers: AtLeast1 = 2
    """Processes for symbolic comparison; started at the first answer that integers and fractions cannot decide."""
    timeout_s: Positive = 5.0
    """CPU seconds of a worker per comparison; counted by the worker itself, so a busy machine causes no timeouts."""
    memory_mb: AtLeast1 = 2048
    """Address space of a worker, in MiB; a comparison that needs more ends as `crash`."""
    strict: bool = False
    """Units count, 50% is 0.5 only, and a decimal equals exact values only; docs/rewards.md has a table."""


@kind("format")
class FormatReward(Reward):
    """1 for exactly one well-formed answer."""


@kind("clean_tools")
class CleanToolsReward(Reward):
    """1 without a failed call."""


@kind("environment")
class EnvironmentReward(Reward):
    """The rewards of the environment or agent, for turns and at the end; a rollout that it could not judge leaves its
    group. With `part`, one of the further numbers that it gave."""

    part: str = ""
    """Name of the number that pays, which is that of the channel; empty: the reward itself. A rollout that was given
    other numbers, but not this one, is not judged by it."""

    success: float = 1.0
    """Smallest reward of the environment at which a rollout counts as correct, unless reward function `answer` decides
    that."""

    @property
    def name(self) -> str:
        return self.part or self.kind


@kind("function")
class FunctionReward(Reward):
    """A function (problem, trajectories) -> numbers."""

    path: str = ""
    """`package.module:function`, or a name passed to `train(functions=...)`."""
    timeout_s: Positive = 60.0
    """Wall-clock seconds of one call; if it is late, its trajectories leave the group."""

    @property
    def name(self) -> str:
        return self.path


class TruncatedReward(Axis, axis="reward.truncated"):
    """How a trajectory is judged that the token budget, the turn limit or a deadline cut."""

    reward: ClassVar[float] = 0.0


@kind("fail")
class TruncatedFails(TruncatedReward):
    """It stays in the group as a failure with reward 0, also in each channel. If functions give negative rewards, it
    gets the least reward of a finished trajectory of the group. Dropping such trajectories raised truncation
    (arXiv:2508.20722, sec. 4.3.1)."""


@kind("fixed")
class TruncatedGets(TruncatedReward):
    """It gets a reward of its own."""

    reward: float = field()
    """Reward of the trajectory, and its value in each channel."""


@kind("score")
class TruncatedScored(TruncatedReward):
    """It is judged by its text like any other, as in the published code."""


@settings
class RewardConfig:
    """How a finished trajectory is judged."""

    functions: tuple[Reward, ...] = field(default_factory=lambda: (AnswerReward(),))
    """Reward functions, summed over those that apply to a trajectory. With more than one, each is also kept as a
    channel of its name, for methods that combine channels themselves. A text that is no kind names a function:
    `answer mine:brevity`."""
    extraction: Literal["strict", "lenient"] = "strict"
    r"""`strict`: the last `\boxed{}` in the last complete answer block of the last turn. `lenient` also takes, in this
    order and without what stands in thoughts: a block without a box, a box outside a block, the last sentence that says
    what the answer is (`The answer is 42.`, `**Final Answer:** 42`, `#### 42`, also on the next line), or a reply that
    is nothing but an answer."""
    answer_tag: str = "answer"
    """Name of the tag around the final answer."""
    truncated: TruncatedReward = field(default_factory=TruncatedFails)
    """How a trajectory is judged that the token budget, the turn limit or a deadline cut."""

    def __post_init__(self) -> None:
        names = self.names
        if not names or not all(names):
            raise ValueError("reward.functions has no function, or one without a path; name at least one, e.g. answer")
        if len(set(names)) != len(names):
            raise ValueError(f"reward.functions repeats a name: {', '.join(names)}; add up its weights instead")
        if not self.answer_tag.isidentifier():
            raise ValueError(f"reward.answer_tag = {self.answer_tag!r}; must be a plain name such as answer")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions, which are those of their channels."""
        return tuple(function.name for function in self.functions)

    @property
    def weights(self) -> dict[str, float]:
        """Factor of each function in the reward, by name, in order."""
        return {function.name: function.weight for function in self.functions}

    @property
    def answer(self) -> AnswerReward | None:
        """The reward for a correct answer, if it is one of the functions; else None."""
        return next((part for part in self.functions if isinstance(part, AnswerReward)), None)

    @property
    def custom(self) -> tuple[FunctionReward, ...]:
        """The user's functions."""
        return tuple(part for part in self.functions if isinstance(part, FunctionReward))
