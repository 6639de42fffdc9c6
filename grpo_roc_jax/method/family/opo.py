"""OPO: the length-weighted mean, the baseline of least variance. Source: arXiv:2505.23585."""

import numpy as np

from grpo_roc_jax.method.advantage import Baseline, flat
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import kind


@kind("length_weighted")
class LengthWeighted(Baseline):
    """The length-weighted mean of the group (OPO, arXiv:2505.23585)."""

    def values(self, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray | float:
        return rewards if flat(rewards) else length_weighted_mean(rewards, found.lengths)


def length_weighted_mean(rewards: np.ndarray, lengths: np.ndarray) -> float:
    """sum n R / sum n: the baseline of least variance when gradient norms grow with length (OPO, arXiv:2505.23585)."""
    return float(lengths @ rewards / max(lengths.sum(), 1))
