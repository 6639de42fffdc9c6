"""Advantages of pass@k. Source: arXiv:2508.10751."""

from math import comb

import numpy as np

from grpo_roc_jax.method.advantage import Estimator
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.settings.options import AtLeast1, NotNegative, kind


@kind("pass_at_k")
class PassAtK(Estimator):
    """A trajectory is worth the mean over the k-subsets that hold it, 1 for one with a success (arXiv:2508.10751).
    Rewards are not read.

    With n trajectories, c failures: p = 1 - C(c, k) / C(n, k) is the mean, s = sqrt(p (1 - p)) the deviation; a success
    gets (1 - p) / s, a failure (1 - p - C(c - 1, k - 1) / C(n - 1, k - 1)) / s.
    """

    k: AtLeast1 = 2
    """k of pass@k."""
    eps: NotNegative = 1e-6
    """Added to the deviation."""

    def estimate(self, batch: MethodBatch) -> list[np.ndarray]:
        return [self._group(found.correct) for found in batch.features]

    def _group(self, correct: np.ndarray) -> np.ndarray:
        n, c, k = len(correct), int((~correct).sum()), self.k
        if c in (0, n) or n < k:
            return np.zeros(n)
        mean = 1 - comb(c, k) / comb(n, k)
        scale = (mean * (1 - mean)) ** 0.5 + self.eps
        failure = 1 - mean - (comb(c - 1, k - 1) / comb(n - 1, k - 1) if c else 0.0)
        return np.where(correct, (1 - mean) / scale, failure / scale)
