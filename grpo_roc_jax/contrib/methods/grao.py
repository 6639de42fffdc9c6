"""GRAO: exploration, imitation of a reference answer, and alignment between the two. Source: arXiv:2508.07750.

The objective is a recollection of the paper's, and `imitation` and `alignment` are not its verified values.
"""

import numpy as np

from grpo_roc_jax.method.advantage import Estimator, z_score
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.planning import DEMONSTRATION
from grpo_roc_jax.settings.options import NotNegative, kind


@kind("grao")
class Grao(Estimator):
    """Coefficients of mean_i [A_i log p(o_i) + imitation A_y log p(y) + alignment (A_i - A_y) (log p(o_i) - log p(y))]
    for rollouts o_i and a demonstration y, A the z-score over all of them (GRAO, arXiv:2508.07750)."""

    imitation: NotNegative = 0.5
    """Weight of the demonstration's own term."""
    alignment: NotNegative = 0.5
    """Weight of the term that compares a rollout with the demonstration."""

    def estimate(self, batch: MethodBatch) -> list[np.ndarray]:
        shown = [np.array([c == DEMONSTRATION for c in features.conditions], bool) for features in batch.features]
        return [self.coefficients(rewards, mask) for rewards, mask in zip(batch.rewards, shown, strict=True)]

    def coefficients(self, rewards: np.ndarray, shown: np.ndarray) -> np.ndarray:
        """float64[G]: the z-score in a group without exactly one demonstration."""
        values = z_score(rewards)
        if shown.sum() != 1:
            return values
        gap = values[~shown] - values[shown]
        out = np.empty(len(values))
        out[~shown] = values[~shown] + self.alignment * gap
        out[shown] = len(gap) * self.imitation * values[shown] - self.alignment * gap.sum()
        return out
