"""DisCO: successes against the soft maximum of failures. Source: arXiv:2505.12366."""

import numpy as np

from grpo_roc_jax.method.family.score_based import Constrained, contrast, soft_maximum
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.settings.options import Positive, kind


@kind("disco")
class Disco(Constrained):
    """Successes against the soft maximum of the failures (DisCO, arXiv:2505.12366)."""

    tau: Positive = 10.0
    """Temperature over the failures' scores."""

    def coefficients(self, scores: np.ndarray, rewards: np.ndarray, found: Features) -> np.ndarray:
        return disco_coefficients(scores, found.correct, self.tau)


def disco_objective(scores: np.ndarray, correct: np.ndarray, tau: float) -> float:
    """mean_pos s - tau log mean_neg exp(s / tau); tau = inf is DisCO-b, the difference of means (arXiv:2505.12366)."""
    return float(scores[correct].mean()) - soft_maximum(scores[~correct], tau)


def disco_coefficients(scores: np.ndarray, correct: np.ndarray, tau: float) -> np.ndarray:
    """1 / #pos for successes, -softmax_neg(s / tau) for failures; zeros for a group of one kind."""
    return contrast(scores, correct, np.full(int(correct.sum()), 1 / max(int(correct.sum()), 1)), tau)
