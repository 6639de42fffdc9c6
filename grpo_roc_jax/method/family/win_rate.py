"""Pairwise preferences instead of scores: Pref-GRPO. Source: arXiv:2508.20751."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.options import kind


@kind("win_rate")
class WinRate(Shaping):
    """The share of a group that a trajectory wins against (Pref-GRPO, arXiv:2508.20751)."""

    judge: str = ""
    """Function of the features of a group -> [G,G] with 1 where a trajectory wins against another, 0.5 for a tie.
    Empty: correctness decides, then fewer failed calls."""

    overwrites = True

    def group(self, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray:
        judge = resolve("shaping.judge", self.judge) or tidier
        return win_rate(judged(judge(found), found.size))


def win_rate(wins: np.ndarray) -> np.ndarray:
    """Mean over the other trajectories of wins[i, j] in {0, 0.5, 1}, [G,G] -> [G] (Pref-GRPO, arXiv:2508.20751)."""
    wins = np.asarray(wins, np.float64)
    return (wins.sum(axis=1) - np.diag(wins)) / max(len(wins) - 1, 1)


def tidier(found: Features) -> np.ndarray:
    """[G,G]: a correct trajectory wins against a wrong one, among alike the one with fewer failed calls; else a tie."""
    rank = 2.0 * found.correct * (1 + found.tool_errors.max(initial=0)) - found.tool_errors
    return 0.5 * (1 + np.sign(rank[:, None] - rank[None, :]))


def judged(wins: np.ndarray, size: int) -> np.ndarray:
    """The judge's matrix; each pair must share one point.

    Raises:
        ValueError: The matrix has another shape, or a pair shares more or less.
    """
    wins = np.asarray(wins, np.float64)
    if wins.shape != (size, size) or not np.allclose((wins + wins.T)[~np.eye(size, dtype=bool)], 1):
        raise ValueError(
            f"shaping.judge returned shape {wins.shape}; it must be [{size},{size}] with 1 for a win and 0 for the "
            "loss across the diagonal, or 0.5 twice for a tie"
        )
    return wins
