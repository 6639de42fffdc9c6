"""Pairwise preferences instead of scores: Pref-GRPO. Source: arXiv:2508.20751."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.options import kind


@kind("win_rate")
class WinRate(Shaping):
    """The share of the group that a trajectory wins against, a tie counting half (Pref-GRPO, arXiv:2508.20751)."""

    judge: str = ""
    """Function of the features of a group -> [G,G] with 1 where a trajectory wins against another, 0.5 for a tie.
    Empty: correctness decides, then fewer failed calls."""

    overwrites = True

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        judge, n = resolve("shaping.judge", self.judge) or tidier, features.size
        wins = np.asarray(judge(features), np.float64)
        if wins.shape != (n, n) or not np.allclose((wins + wins.T)[~np.eye(n, dtype=bool)], 1):
            raise ValueError(
                f"shaping.judge returned shape {wins.shape}; it must be [{n},{n}] with 1 for a win and 0 for the loss "
                "across the diagonal, or 0.5 twice for a tie"
            )
        return (wins.sum(axis=1) - np.diag(wins)) / max(n - 1, 1)


def tidier(features: Features) -> np.ndarray:
    """[G,G]: a correct trajectory wins against a wrong one, among equals the one with fewer failed calls."""
    rank = 2.0 * features.correct * (1 + features.tool_errors.max(initial=0)) - features.tool_errors
    return 0.5 * (1 + np.sign(rank[:, None] - rank[None, :]))
