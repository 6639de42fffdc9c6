"""Reward channels held above targets by dual variables. Source: arXiv:2604.08476."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from grpo_roc_jax.method.advantage import Adjustment, z_score
from grpo_roc_jax.method.features import Features, features
from grpo_roc_jax.method.shaping import channel
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import NotNegative, kind
from grpo_roc_jax.types import Group

DUALS = "constraints"
"""Name of the dual variables in the method's memory."""


@kind("constraints")
class Constraints(Adjustment):
    """Channels held above `targets` by dual variables (arXiv:2604.08476)."""

    channels: tuple[str, ...] = ()
    """Reward channels."""
    targets: tuple[float, ...] = ()
    """Target of the batch mean of each channel."""
    lr: NotNegative = 0.1
    """Step size of the dual variables."""
    max: NotNegative = 5.0
    """Largest dual variable."""
    ddof: Literal[0, 1] = 1
    """1 divides by n - 1, 0 by n."""
    eps: NotNegative = 1e-6
    """Added to a deviation."""

    def __post_init__(self) -> None:
        if len(self.channels) != len(self.targets):
            raise ValueError(
                f"constraints name {len(self.channels)} channels but {len(self.targets)} targets; give one target per "
                "channel"
            )

    def initial_memory(self) -> Mapping[str, np.ndarray]:
        return {DUALS: np.zeros(len(self.channels))}

    def group(self, advantages: np.ndarray, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray:
        for name, dual in zip(self.channels, state.memory[DUALS], strict=True):
            held = channel(found, name, self.prefix)
            advantages = advantages + dual * z_score(held, self.ddof, self.eps)
        return advantages

    def next_memory(
        self, sampled: Sequence[Group], trained: Sequence[Group], method: Any, state: AlgoState
    ) -> Mapping[str, np.ndarray]:
        kept = [features(group) for group in trained]
        if not kept or not self.channels:
            return {}
        held = [[channel(f, name, self.prefix) for f in kept] for name in self.channels]
        means = np.array([np.concatenate(values).mean() for values in held])
        return {DUALS: dual_step(state.memory[DUALS], means, np.array(self.targets), self.lr, self.max)}


def dual_step(
    duals: np.ndarray, means: np.ndarray, targets: np.ndarray, lr: float = 0.1, largest: float = 5.0
) -> np.ndarray:
    """clip(lambda + lr (target - mean), 0, largest): ascent on the multipliers (arXiv:2604.08476)."""
    return np.clip(duals + lr * (targets - means), 0.0, largest)
