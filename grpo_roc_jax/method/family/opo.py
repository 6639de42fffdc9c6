"""OPO: the length-weighted mean, the baseline of least variance. Source: arXiv:2505.23585."""

import numpy as np

from grpo_roc_jax.method.advantage import Baseline, flat
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.settings.options import kind


@kind("length_weighted")
class LengthWeighted(Baseline):
    """sum n R / sum n: the baseline of least variance when gradient norms grow with length (OPO, arXiv:2505.23585)."""

    def values(self, rewards: np.ndarray, found: Features) -> np.ndarray | float:
        return rewards if flat(rewards) else float(found.lengths @ rewards / max(found.lengths.sum(), 1))
