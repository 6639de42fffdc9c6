"""Advantages of pass@k. Source: arXiv:2508.10751."""

from math import comb

import numpy as np

from grpo_roc_jax.method.advantage import Estimator, flat
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.settings.options import AtLeast1, NotNegative, kind


@kind("pass_at_k")
class PassAtK(Estimator):
    """A trajectory is worth the mean over the k-subsets that hold it (arXiv:2508.10751); rewards are 0 or 1.

    With n trajectories, c failures: p = 1 - C(c, k) / C(n, k) is the mean, s = sqrt(p (1 - p)) the deviation; a success
    gets (1 - p) / s, a failure (1 - p - C(c - 1, k - 1) / C(n - 1, k - 1)) / s.
    """

    k: AtLeast1 = 2
    """k of pass@k."""
    eps: NotNegative = 1e-6
    """Added to the deviation."""

    def estimate(self, batch: MethodBatch) -> list[np.ndarray]:
        return [self._group(rewards) for rewards in batch.rewards]

    def _group(self, rewards: np.ndarray) -> np.ndarray:
        n, c, k = len(rewards), int((rewards <= 0).sum()), self.k
        if flat(rewards) or n < k:
            return np.zeros(n)
        mean = 1 - comb(c, k) / comb(n, k)
        scale = (mean * (1 - mean)) ** 0.5 + self.eps
        failure = 1 - mean - (comb(c - 1, k - 1) / comb(n - 1, k - 1) if c else 0.0)
        return np.where(rewards > 0, (1 - mean) / scale, failure / scale)
