"""DisCO: successes against the soft maximum of failures. Source: arXiv:2505.12366."""

import numpy as np

from grpo_roc_jax.contrib.methods.score_based import Constrained, contrast
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.settings.options import PositiveOrInfinite, kind


@kind("disco")
class Disco(Constrained):
    """J = mean_pos s - tau log mean_neg exp(s / tau); tau = inf is DisCO-b, the difference of means
    (arXiv:2505.12366)."""

    tau: PositiveOrInfinite = 10.0
    """Temperature over the failures' scores; `.inf` is DisCO-b."""

    reads_rewards = False

    def coefficients(self, scores: np.ndarray, rewards: np.ndarray, features: Features) -> np.ndarray:
        return contrast(scores, features.correct, 1 / max(int(features.correct.sum()), 1), self.tau)
