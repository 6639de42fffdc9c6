"""PODS: the subset of rollouts with the largest reward variance. Source: arXiv:2504.13818."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.roc import Oversampled
from grpo_roc_jax.settings.options import kind


@kind("max_variance")
class MaxVariance(Oversampled):
    """The subset with the largest reward variance (PODS, arXiv:2504.13818): always some highest and the rest lowest.

    Ties go to fewer highest ones, and within equal rewards to rollout order.
    """

    def choose(self, found: Features, penalties: np.ndarray, keep: int, rng: np.random.Generator) -> np.ndarray:
        order = np.argsort(found.rewards, kind="stable")
        variances = split_variances(found.rewards[order], keep)
        # Rounding makes a tie of what differs by the last bits, so that the choice is the same on every machine.
        highest = int(np.argmax(np.round(variances / (variances.max() or 1.0), 12)))
        return np.sort(np.concatenate([order[: keep - highest], order[len(order) - highest :]]))


def split_variances(ascending: np.ndarray, keep: int) -> np.ndarray:
    """float64[keep + 1]: population variance of the k largest and keep - k smallest rewards, for k = 0..keep."""
    highest = np.arange(keep + 1)
    centered = ascending - ascending.mean()
    first, second = (np.concatenate([[0.0], np.cumsum(centered**power)]) for power in (1, 2))

    def split(sums: np.ndarray) -> np.ndarray:
        return sums[keep - highest] + sums[-1] - sums[len(ascending) - highest]

    return split(second) / keep - (split(first) / keep) ** 2
