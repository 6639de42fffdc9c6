"""REBEL: regression of reward differences. Source: arXiv:2404.16767."""

import numpy as np

from grpo_roc_jax.method.family.score_based import ScoreBased
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.settings.options import kind


@kind("rebel")
class Rebel(ScoreBased):
    """Log-ratio differences regressed on reward differences (REBEL, arXiv:2404.16767)."""

    eta: float = 1.0
    """Factor on reward differences."""

    @property
    def average(self) -> bool:
        return False

    def coefficients(self, scores: np.ndarray, rewards: np.ndarray, found: Features) -> np.ndarray:
        return rebel_coefficients(scores, rewards, self.eta)


def rebel_loss(scores: np.ndarray, rewards: np.ndarray, eta: float = 1.0) -> float:
    """Mean over all pairs of ((s_i - s_j) - eta (R_i - R_j))^2, s the summed log-ratio (arXiv:2404.16767)."""
    first, second = np.triu_indices(len(scores), 1)
    gaps = (scores[first] - scores[second]) - eta * (rewards[first] - rewards[second])
    return float(np.mean(gaps**2)) if len(gaps) else 0.0


def rebel_coefficients(scores: np.ndarray, rewards: np.ndarray, eta: float = 1.0) -> np.ndarray:
    """-d loss / ds = -2 sum_j (x_i - x_j) / #pairs with x = s - eta R."""
    n = len(scores)
    if n < 2:
        return np.zeros(n)
    x = scores - eta * rewards
    return -2 * (n * x - x.sum()) / (n * (n - 1) / 2)
