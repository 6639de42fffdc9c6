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

    def values(self, rewards: np.ndarray, found: Features) -> np.ndarray | float:
        return rewards if flat(rewards) else float(np.median(rewards))


@kind("mad")
class Mad(Scale):
    """The median absolute deviation of the group plus 1e-3 (MC-GRPO, arXiv:2601.22582); up to 0.05 the standard
    deviation takes its place, and 1 where that is 0.

    With 0/1 rewards and an odd group the former is always 0, and dividing by 1e-3 alone would blow the step up. This
    guard is not in the paper.
    """

    def group(self, rewards: np.ndarray) -> float:
        mad = float(np.median(np.abs(rewards - np.median(rewards)))) if len(rewards) else 0.0
        return mad + 1e-3 if mad > 0.05 else deviation(rewards) or 1.0


@kind("rescale_nonzero")
class RescaleNonzero(Adjustment):
    """Times the size of the group over the number of its non-zero advantages, so that a zeroed pivot does not shrink
    the step (MC-GRPO, arXiv:2601.22582)."""

    def group(self, advantages: np.ndarray, rewards: np.ndarray, found: Features) -> np.ndarray:
        nonzero = np.count_nonzero(advantages)
        return advantages * (len(advantages) / nonzero) if nonzero else advantages


@kind("pivot")
class Pivot(Mask):
    """Leaves the first trajectory at the median of an odd group untrained (MC-GRPO, arXiv:2601.22582); sample one more
    than the group needs."""

    def trains(self, group: Group, rewards: np.ndarray) -> np.ndarray:
        pivot = np.flatnonzero(rewards == np.median(rewards))[0] if group.size % 2 else -1
        return np.arange(group.size) != pivot
