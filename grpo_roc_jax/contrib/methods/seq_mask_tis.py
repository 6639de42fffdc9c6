"""Rejection of tokens and trajectories on which sampler and trainer disagree, as in verl (`rollout_corr_helper`).

What is rejected leaves the loss and its counts; what stays keeps its weight, so rejection combines with the importance
weights of `mismatch`. m is the difference of scored and recorded log-probability.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from grpo_roc_jax.method.divergence import k2, k3
from grpo_roc_jax.method.weights import LEVELS, Bounded, SamplerGap, clamped, ratios
from grpo_roc_jax.settings.options import PositiveShare, kind

MEASURES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "k2": k2,
    "k3": k3,
    "error": lambda m: np.exp(np.abs(m)),
}


@kind("rejection")
class Rejection(Bounded):
    """Token or trajectory is left out where the measure leaves [low, high] (verl; NeMo-RL's `seq-mask-tis` with
    geometric ratios, its error mask with `error`)."""

    level: Literal["token", "product", "geometric", "max"] = "geometric"
    """What is measured: a token, or a trajectory by the sum (`product`), mean (`geometric`) or maximum over its tokens;
    ratios are multiplied instead of added."""
    measure: Literal["ratio", "k2", "k3", "error"] = "ratio"
    """The ratio e^m, m^2 / 2, e^m - 1 - m, or e^|m|."""

    @property
    def agreement(self) -> float:
        return float(self.measure in ("ratio", "error"))

    @property
    def label(self) -> str:
        return f"{super().label}_{self.measure}"

    def values(self, gap: np.ndarray) -> np.ndarray:
        over = "token" if self.level == "max" else self.level
        each = ratios(gap, over) if self.measure == "ratio" else LEVELS[over](MEASURES[self.measure](clamped(gap)))
        return np.max(each, keepdims=True) if self.level == "max" else np.atleast_1d(each)


@kind("veto")
class Veto(SamplerGap):
    """A trajectory is left out if the ratio of any of its tokens is below `low` (earlier verl)."""

    low: PositiveShare = 1e-4
    """Smallest ratio that a token may have."""

    def values(self, gap: np.ndarray) -> np.ndarray:
        return np.min(ratios(gap, "token"), keepdims=True)

    def outside(self, values: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"vetoed": values < self.low}
