"""MC-GRPO: the median as baseline, the median absolute deviation as scale, the pivot untrained.

Source: arXiv:2601.22582.
"""

import numpy as np

from grpo_roc_jax.method.advantage import Adjustment, Baseline, Scale, deviation, flat
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.method.weights import Mask
from grpo_roc_jax.settings.options import kind
from grpo_roc_jax.types import Group


@kind("median")
class Median(Baseline):
    """The median of the group (MC-GRPO, arXiv:2601.22582)."""

    def values(self, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray | float:
        return rewards if flat(rewards) else float(np.median(rewards))


@kind("mad")
class Mad(Scale):
    """The median absolute deviation of the group (MC-GRPO, arXiv:2601.22582)."""

    def group(self, rewards: np.ndarray) -> float:
        return mad_scale(rewards) if len(rewards) else 1.0


@kind("rescale_nonzero")
class RescaleNonzero(Adjustment):
    """Times the size of the group over the number of its non-zero advantages (arXiv:2601.22582)."""

    def group(self, advantages: np.ndarray, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray:
        return rescale_nonzero(advantages)


@kind("pivot")
class Pivot(Mask):
    """Leaves the trajectory at the median of an odd group untrained; sample one more than the group needs."""

    def trains(self, group: Group, rewards: np.ndarray) -> np.ndarray:
        return np.arange(group.size) != pivot_index(rewards)


def mad_scale(rewards: np.ndarray, floor: float = 0.05, eps: float = 1e-3) -> float:
    """Median absolute deviation + 1e-3; the standard deviation where the former is below `floor`; else 1.

    With 0/1 rewards and an odd group the MAD is always 0, and dividing by 1e-3 alone would blow the step up.
    Source: MC-GRPO, arXiv:2601.22582; the guard is not in the paper.
    """
    mad = float(np.median(np.abs(rewards - np.median(rewards))))
    if mad > floor:
        return mad + eps
    return deviation(rewards) or 1.0


def rescale_nonzero(advantages: np.ndarray) -> np.ndarray:
    """Times G over the number of non-zero entries, so that a zeroed pivot does not shrink the step."""
    nonzero = np.count_nonzero(advantages)
    return advantages * (len(advantages) / nonzero) if nonzero else advantages


def pivot_index(rewards: np.ndarray) -> int:
    """First trajectory whose reward is the median of an odd group (MC-GRPO, arXiv:2601.22582); -1 for an even one."""
    return int(np.flatnonzero(rewards == np.median(rewards))[0]) if len(rewards) % 2 else -1
