"""Corrections for a sampler whose probabilities differ from the trainer's: truncated and masked importance weights.

w = exp(scored - recorded), a token's or the geometric mean of the trajectory's. They need `surrogate.old_logprobs`
scored, so that the ratio of the loss starts from what the trainer computes.
"""

from typing import Literal

import numpy as np

from grpo_roc_jax.method.weights import Factor
from grpo_roc_jax.settings.options import kind, settings
from grpo_roc_jax.types import Trajectory


@settings
class Mismatch(Factor):
    """Importance weights of trainer over sampler."""

    level: Literal["token", "sequence"] = "token"
    """Whether the ratio is a token's or the geometric mean over a trajectory."""
    cap: float = 2.0
    """Largest weight, at least 1."""

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise ValueError(f"weights.factors {self.kind}: cap = {self.cap}; must be at least 1")

    @property
    def needs_scores(self) -> bool:
        return True

    def ratio(self, recorded: np.ndarray, scored: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """float64[T]; 1 off the mask."""
        gap = np.where(mask, scored.astype(np.float64) - recorded, 0.0)
        if self.level == "sequence":
            gap = np.where(mask, gap.sum() / max(mask.sum(), 1), 0.0)
        return np.exp(np.clip(gap, -20.0, 20.0))


@kind("truncated_is")
class TruncatedImportance(Mismatch):
    """min(w, cap): truncated importance sampling (TIS)."""

    def tokens(self, trajectory: Trajectory, mask: np.ndarray, scores: np.ndarray | None) -> np.ndarray | None:
        return np.minimum(self.ratio(trajectory.logprobs, np.asarray(scores), mask), self.cap)


@kind("masked_is")
class MaskedImportance(Mismatch):
    """w within [1 / cap, cap]; outside, the token leaves the loss and its counts: masked importance sampling (MIS)."""

    def tokens(self, trajectory: Trajectory, mask: np.ndarray, scores: np.ndarray | None) -> np.ndarray | None:
        ratio = self.ratio(trajectory.logprobs, np.asarray(scores), mask)
        return np.where((ratio <= self.cap) & (ratio >= 1 / self.cap), ratio, 0.0)
