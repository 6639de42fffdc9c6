"""MC-GRPO: the median as baseline, the median absolute deviation as scale, the pivot untrained.

Source: arXiv:2601.22582.
"""

import numpy as np

from grpo_roc_jax.method.advantage import Adjustment, Baseline, Scale, deviation, flat
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.weights import Mask
from grpo_roc_jax.settings.options import kind
from grpo_roc_jax.types import Group


@kind("median")
class Median(Baseline):
    """The median of the group (MC-GRPO, arXiv:2601.22582)."""

    def values(self, rewards: np.ndarray, features: Features) -> np.ndarray | float:
        return rewards if flat(rewards) else float(np.median(rewards))


@kind("mad")
class Mad(Scale):
    """The median absolute deviation of the group plus 1e-3 (MC-GRPO, arXiv:2601.22582).

    With 0/1 rewards and an odd group the deviation is always 0, so that advantages are in the thousands and only the
    clip of the gradient's norm bounds the step; `mad_or_std` is for such rewards.
    """

    def group(self, rewards: np.ndarray) -> float:
        return (float(np.median(np.abs(rewards - np.median(rewards)))) if len(rewards) else 0.0) + 1e-3


@kind("mad_or_std")
class MadOrStd(Mad):
    """`mad` where the deviation is above 0.05, else the standard deviation, and 1 where that is 0: a guard that is not
    in the paper (arXiv:2601.22582)."""

    def group(self, rewards: np.ndarray) -> float:
        divisor = super().group(rewards)
        return divisor if divisor > 0.05 + 1e-3 else deviation(rewards) or 1.0


@kind("rescale_nonzero")
class RescaleNonzero(Adjustment):
    """Times the size of the group over the number of its non-zero advantages, so that a zeroed pivot does not shrink
    the step (MC-GRPO, arXiv:2601.22582)."""

    def group(self, advantages: np.ndarray, rewards: np.ndarray, features: Features) -> np.ndarray:
        nonzero = np.count_nonzero(advantages)
        return advantages * (len(advantages) / nonzero) if nonzero else advantages


@kind("pivot")
class Pivot(Mask):
    """Leaves the first trajectory at the median of an odd group untrained (MC-GRPO, arXiv:2601.22582); sample one more
    than the group needs."""

    def trains(self, group: Group, rewards: np.ndarray) -> np.ndarray:
        pivot = np.flatnonzero(rewards == np.median(rewards))[0] if group.size % 2 else -1
        return np.arange(group.size) != pivot
