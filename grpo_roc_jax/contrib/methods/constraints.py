"""Reward channels held above targets by dual variables. Source: arXiv:2604.08476."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_roc_jax.method.advantage import Adjustment, Deviation, z_score
from grpo_roc_jax.method.features import features
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.shaping import channel
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import NotNegative, kind
from grpo_roc_jax.types import Group

DUALS = "constraints"
"""Name of the dual variables in the method's memory."""


@kind("constraints")
class Constraints(Deviation, Adjustment):
    """Adds lambda z(c) for each channel c, lambda a dual variable that rises while c is below its target
    (arXiv:2604.08476)."""

    channels: tuple[str, ...] = ()
    """Reward channels."""
    targets: tuple[float, ...] = ()
    """Target of the batch mean of each channel."""
    lr: NotNegative = 0.1
    """Step size of the dual variables."""
    max: NotNegative = 5.0
    """Largest dual variable."""

    def __post_init__(self) -> None:
        if len(self.channels) != len(self.targets):
            raise ValueError(
                f"constraints name {len(self.channels)} channels but {len(self.targets)} targets; give one target per "
                "channel"
            )

    def initial_memory(self) -> Mapping[str, np.ndarray]:
        return {DUALS: np.zeros(len(self.channels))}

    def batch(self, advantages: Sequence[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        out = list(advantages)
        for name, dual in zip(self.channels, batch.state.memory[DUALS], strict=True):
            scores = [z_score(channel(f, name, self.prefix), self.ddof, self.eps) for f in batch.features]
            out = [a + dual * z for a, z in zip(out, scores, strict=True)]
        return out

    def next_memory(
        self, sampled: Sequence[Group], trained: Sequence[Group], method: Any, state: AlgoState
    ) -> Mapping[str, np.ndarray]:
        """clip(lambda + lr (target - mean), 0, max): ascent on the multipliers."""
        feature_list = [features(group) for group in trained]
        if not feature_list or not self.channels:
            return {}
        channel_values = [[channel(f, name, self.prefix) for f in feature_list] for name in self.channels]
        means = np.array([np.concatenate(values).mean() for values in channel_values])
        return {DUALS: np.clip(state.memory[DUALS] + self.lr * (np.array(self.targets) - means), 0.0, self.max)}
