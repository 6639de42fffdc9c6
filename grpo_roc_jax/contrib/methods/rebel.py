"""REBEL: regression of reward differences. Source: arXiv:2404.16767."""

import numpy as np

from grpo_roc_jax.contrib.methods.score_based import ScoreBased
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.settings.options import kind


@kind("rebel")
class Rebel(ScoreBased):
    """J = -mean over pairs of ((s_i - s_j) - eta (R_i - R_j))^2, s the summed log-ratio (arXiv:2404.16767)."""

    eta: float = 1.0
    """Factor on reward differences."""

    def coefficients(self, scores: np.ndarray, rewards: np.ndarray, features: Features) -> np.ndarray:
        """-2 sum_j (x_i - x_j) / #pairs with x = s - eta R."""
        n = len(scores)
        if n < 2:
            return np.zeros(n)
        x = scores - self.eta * rewards
        return -2 * (n * x - x.sum()) / (n * (n - 1) / 2)
