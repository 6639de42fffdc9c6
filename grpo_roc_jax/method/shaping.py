"""Maps rewards to rewards, on the kept groups before the advantage: the chain of steps that `shaping` lists.

Selection has already happened on raw rewards; a step decides only how much a kept trajectory is worth. GRPO-RoC lists
no steps. Further steps are kinds in files of `contrib/methods/`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.part import Part
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import described_error, resolve
from grpo_roc_jax.settings.options import AtLeast1, kind


class Shaping(Part, axis="shaping"):
    """Maps rewards to rewards."""

    overwrites: ClassVar[bool] = False
    """Whether it computes the reward without reading it, so that earlier steps would have no effect."""

    def prompt_suffix(self, step: int) -> str:
        """Text at the end of the prompts of a step, such as a token budget that rewards depend on."""
        return ""

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        """float64[G] -> float64[G] for one group."""
        raise NotImplementedError

    def batch(self, rewards: Sequence[np.ndarray], groups: Sequence[Features], state: AlgoState) -> list[np.ndarray]:
        """The shaped rewards of all groups; override it for a step that compares groups or reads the method's state."""
        return [self.group(r, features) for r, features in zip(rewards, groups, strict=True)]


@kind("custom")
class CustomShaping(Shaping):
    """A user function."""

    function: str = ""
    """`package.module:function`, or a name passed to `train(functions=...)`: (rewards, features, state) -> rewards of
    one group."""

    def batch(self, rewards: Sequence[np.ndarray], groups: Sequence[Features], state: AlgoState) -> list[np.ndarray]:
        return custom_maps(self.prefix, resolve("shaping.function", self.function), rewards, groups, state)


def shape_rewards(groups: Sequence[Features], steps: Sequence[Shaping], state: AlgoState) -> list[np.ndarray]:
    """float64[G] of each group after these steps, in order.

    Raises:
        ValueError: A step reads a channel that no reward function provides, or a custom function broke its contract.
    """
    rewards = [features.rewards.astype(np.float64) for features in groups]
    for step in steps:
        rewards = step.batch(rewards, groups, state)
        if step.overwrites:
            rewards = [kept_failures(r, features) for r, features in zip(rewards, groups, strict=True)]
    return rewards


def kept_failures(rewards: np.ndarray, features: Features) -> np.ndarray:
    """Restores truncated failures in rewards that were computed without reading the scorer's: each gets the smaller of
    the reward it was scored with and the least reward of a trajectory that was not truncated."""
    if not features.failed.any():
        return rewards
    least = float(np.min(rewards[~features.failed], initial=np.inf))
    return np.where(features.failed, np.minimum(features.rewards, least), rewards)


def prompt_suffix(steps: Sequence[Shaping], step: int) -> str:
    """Text at the end of the prompts of a training step, which tells the policy what is rewarded; usually empty."""
    return "".join(part.prompt_suffix(step) for part in steps)


def check_steps(steps: Sequence[Shaping]) -> None:
    """Refuses a step that overwrites the results of steps before it.

    Raises:
        ValueError: The message names that step.
    """
    late = [step.kind for step in steps[1:] if step.overwrites]
    if late:
        raise ValueError(
            f"shaping = {', '.join(step.kind for step in steps)}: {late[-1]} makes the reward from the trajectory, so "
            f"that nothing is left of the steps before it; list {late[-1]} first, or leave the others out"
        )


def custom_maps(
    name: str, function: Any, rewards: Sequence[np.ndarray], groups: Sequence[Features], state: AlgoState
) -> list[np.ndarray]:
    """Applies a user function to each group's rewards; returns float64.

    Raises:
        ValueError: The function raised, or a result has another shape than the rewards or is not finite.
    """
    out = []
    for r, features in zip(rewards, groups, strict=True):
        try:
            values = np.asarray(function(r.copy(), features, state), np.float64)
        except Exception as error:
            raise ValueError(f"{name} raised {described_error(error, function)}") from error
        if values.shape != r.shape or not np.isfinite(values).all():
            raise ValueError(
                f"{name} returned shape {values.shape} with {int((~np.isfinite(values)).sum())} non-finite values; it "
                f"must return {r.shape} finite numbers, one per trajectory"
            )
        out.append(values)
    return out


def channel(features: Features, name: str, reader: str) -> np.ndarray:
    """The named reward channel of a group, NaN as 0.

    Raises:
        ValueError: No reward function provides it; the message lists those that exist.
    """
    if name not in features.channels:
        raise ValueError(
            f"{reader} reads reward channel {name!r}, but the channels are {sorted(features.channels) or 'none'}; "
            "add a function of that name to reward.functions (channels exist from two functions on)"
        )
    return np.nan_to_num(features.channels[name])


# ---- DAPO's soft penalty for responses near the token budget (arXiv:2503.14476, eq. 13) -----------------------------


@kind("overlong")
class Overlong(Shaping):
    """A penalty that grows from 0 to 1 over the last tokens before a limit (DAPO, arXiv:2503.14476, eq. 13)."""

    limit: int = 20480
    """Response tokens (observations included) from which the penalty is 1."""
    buffer: AtLeast1 = 4096
    """Tokens before the limit over which the penalty grows."""

    def __post_init__(self) -> None:
        if self.limit < self.buffer:
            raise ValueError(f"shaping overlong: buffer = {self.buffer} is longer than limit = {self.limit}; lower it")

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        left = self.limit - self.buffer - features.response_lengths.astype(np.float64)
        return rewards + np.clip(left / self.buffer, -1.0, 0.0)


# ---- the penalty in the reward that resampling on correct does without (a control arm) ------------------------------


@kind("tool_errors")
class ToolErrors(Shaping):
    """R - coef errors / calls: the reward penalty that GRPO-RoC (arXiv:2508.20722, sec. 2.2.3) argues against."""

    coef: float = 0.5
    """Reward subtracted where every call failed."""

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        return rewards - self.coef * features.tool_errors / np.maximum(features.tool_calls, 1)
