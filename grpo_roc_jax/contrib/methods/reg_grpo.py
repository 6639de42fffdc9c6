"""Reg-GRPO: advantages regressed on. Source: arXiv:2506.07464."""

import numpy as np

from grpo_roc_jax.contrib.methods.score_based import ScoreBased
from grpo_roc_jax.method.advantage import Deviation, deviation, flat, z_score
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.settings.options import Positive, kind

EPS = 1e-6
"""Added to the deviation of the log-ratios."""


@kind("reg")
class Reg(Deviation, ScoreBased):
    """J = -mean (A - z)^2 with z = (s - mean) / (max(std, floor) + 1e-6), s the summed log-ratio (arXiv:2506.07464)."""

    floor: Positive = 1.0
    """Least deviation of the log-ratios that they are divided by, in nats. Right after sampling they are all 0, and the
    gradient is 2 / floor times that of GRPO: a small floor makes it huge, which clipping of the norm hides."""

    def coefficients(self, scores: np.ndarray, rewards: np.ndarray, features: Features) -> np.ndarray:
        """With u = (2/G)(A - z): (u - mean u - z sum(u z) / (G - 1)) / std, the last term of the bracket only where
        the deviation is above its floor."""
        if flat(rewards):
            return np.zeros(len(rewards))
        n, spread = len(scores), deviation(scores)
        scale = max(spread, self.floor) + EPS
        z = (scores - scores.mean()) / scale
        u = 2 / n * (z_score(rewards, self.ddof, self.eps) - z)
        bracket = u - u.mean()
        if spread > self.floor:
            # d std / ds_i = (s_i - mean) / ((G - 1) std), and s - mean = z scale.
            bracket = bracket - z * scale / spread * (u @ z) / (n - 1)
        return bracket / scale
