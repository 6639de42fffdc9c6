"""Reg-GRPO: advantages regressed on. Source: arXiv:2506.07464."""

import numpy as np

from grpo_roc_jax.method.advantage import Deviation, deviation, flat, z_score
from grpo_roc_jax.method.family.score_based import ScoreBased
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.settings.options import kind

FLOOR, EPS = 1e-2, 1e-6
"""Least deviation of the log-ratios that they are divided by (right after sampling they are all 0, and a z-score of
them means nothing), and what is added to it."""


@kind("reg")
class Reg(Deviation, ScoreBased):
    """J = -mean (A - z)^2 with z = (s - mean) / (max(std, 0.01) + 1e-6), s the summed log-ratio (arXiv:2506.07464)."""

    def coefficients(self, scores: np.ndarray, rewards: np.ndarray, found: Features) -> np.ndarray:
        """With u = (2/G)(A - z): (u - mean u - z sum(u z) / (G - 1)) / std, the last term of the bracket only where
        the deviation is above its floor."""
        if flat(rewards):
            return np.zeros(len(rewards))
        n, spread = len(scores), deviation(scores)
        scale = max(spread, FLOOR) + EPS
        z = (scores - scores.mean()) / scale
        u = 2 / n * (z_score(rewards, self.ddof, self.eps) - z)
        bracket = u - u.mean()
        if spread > FLOOR:
            # d std / ds_i = (s_i - mean) / ((G - 1) std), and s - mean = z scale.
            bracket = bracket - z * scale / spread * (u @ z) / (n - 1)
        return bracket / scale
