"""Focal weights: hard problems count more."""

import numpy as np

from grpo_roc_jax.method.advantage import Adjustment
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.settings.options import NotNegative, kind


@kind("focal")
class Focal(Adjustment):
    """Groups weighted by (1 - accuracy) ^ exponent: a variant of the focal loss (arXiv:1708.02002) for groups."""

    exponent: NotNegative = 1.0
    """0 weights all groups alike."""

    def group(self, advantages: np.ndarray, rewards: np.ndarray, features: Features) -> np.ndarray:
        return advantages * (1 - features.correct.mean()) ** self.exponent
