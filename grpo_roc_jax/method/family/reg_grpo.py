"""Reg-GRPO: advantages regressed on. Source: arXiv:2506.07464."""

from typing import Literal

import numpy as np

from grpo_roc_jax.method.advantage import deviation, flat, z_score
from grpo_roc_jax.method.family.score_based import ScoreBased
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.settings.options import NotNegative, kind


@kind("reg")
class Reg(ScoreBased):
    """Standardized log-ratios regressed on advantages (Reg-GRPO, arXiv:2506.07464)."""

    ddof: Literal[0, 1] = 1
    """1 divides by n - 1 in the advantage's deviation, 0 by n."""
    eps: NotNegative = 1e-6
    """Added to that deviation."""

    @property
    def average(self) -> bool:
        return False

    def coefficients(self, scores: np.ndarray, rewards: np.ndarray, found: Features) -> np.ndarray:
        if flat(rewards):
            return np.zeros(len(rewards))
        return reg_coefficients(scores, z_score(rewards, self.ddof, self.eps))


REG_FLOOR = 1e-2
"""Least deviation of the log-ratios that Reg-GRPO divides by: right after sampling they are all 0 and a z-score of
them means nothing."""


def reg_targets(scores: np.ndarray, floor: float = REG_FLOOR, eps: float = 1e-6) -> np.ndarray:
    """The predicted advantage (s - mean) / (max(std, floor) + eps) (Reg-GRPO, arXiv:2506.07464)."""
    return (scores - scores.mean()) / (max(deviation(scores), floor) + eps)


def reg_loss(scores: np.ndarray, advantages: np.ndarray, floor: float = REG_FLOOR, eps: float = 1e-6) -> float:
    """mean (A - predicted)^2."""
    return float(np.mean((advantages - reg_targets(scores, floor, eps)) ** 2))


def reg_coefficients(
    scores: np.ndarray, advantages: np.ndarray, floor: float = REG_FLOOR, eps: float = 1e-6
) -> np.ndarray:
    """-d loss / ds. With z predicted and u = (2/G)(A - z): (u - mean u - z sum(u z) / (G - 1)) / std, the last term of
    the bracket only where the deviation is above its floor."""
    n, spread = len(scores), deviation(scores)
    scale = max(spread, floor) + eps
    z = (scores - scores.mean()) / scale
    u = 2 / n * (advantages - z)
    bracket = u - u.mean()
    if spread > floor:
        # d std / ds_i = (s_i - mean) / ((G - 1) std), and s - mean = z scale.
        bracket = bracket - z * scale / spread * (u @ z) / (n - 1)
    return bracket / scale
