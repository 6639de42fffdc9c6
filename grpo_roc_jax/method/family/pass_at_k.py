"""Advantages of pass@k. Source: arXiv:2508.10751."""

from collections.abc import Sequence
from math import comb

import numpy as np

from grpo_roc_jax.method.advantage import Estimator, flat
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import AtLeast1, NotNegative, kind


@kind("pass_at_k")
class PassAtK(Estimator):
    """A trajectory is worth the mean over the k-subsets that hold it (arXiv:2508.10751)."""

    k: AtLeast1 = 2
    """k of pass@k."""
    eps: NotNegative = 1e-6
    """Added to the deviation."""

    def estimate(self, groups: Sequence[Features], rewards: Sequence[np.ndarray], state: AlgoState) -> list[np.ndarray]:
        return [pass_at_k_advantages(r, self.k, self.eps) for r in rewards]


def pass_at_k_advantages(rewards: np.ndarray, k: int, eps: float = 1e-6) -> np.ndarray:
    """Advantages of pass@k for 0/1 rewards: each trajectory is worth the mean over the k-subsets that hold it.

    With n trajectories, c failures: p = 1 - C(c, k) / C(n, k) is the mean, s = sqrt(p (1 - p)) the deviation; a success
    gets (1 - p) / s, a failure (1 - p - C(c - 1, k - 1) / C(n - 1, k - 1)) / s. Source: arXiv:2508.10751.
    """
    n, c = len(rewards), int((rewards <= 0).sum())
    if flat(rewards) or n < k:
        return np.zeros(n)
    mean = 1 - comb(c, k) / comb(n, k)
    scale = (mean * (1 - mean)) ** 0.5 + eps
    failure = 1 - mean - (comb(c - 1, k - 1) / comb(n - 1, k - 1) if c else 0.0)
    return np.where(rewards > 0, (1 - mean) / scale, failure / scale)
