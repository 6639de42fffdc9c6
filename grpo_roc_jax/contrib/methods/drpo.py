"""DRPO: DisCO with short successes counting more. Source: arXiv:2510.04474."""

import numpy as np

from grpo_roc_jax.contrib.methods.score_based import Constrained, contrast
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.settings.options import AtLeast1, Positive, kind


@kind("drpo")
class Drpo(Constrained):
    """J = sum_pos w s - tau log mean_neg exp(s / tau), w = softmax((1 - n / max_length) / length_temperature) over the
    successes (arXiv:2510.04474)."""

    tau: Positive = 10.0
    """Temperature over the failures' scores."""
    length_temperature: Positive = 0.1
    """Temperature over the successes' lengths."""
    max_length: AtLeast1 = 8192
    """Longest response, in policy tokens: the unit of length."""

    reads_rewards = False

    def coefficients(self, scores: np.ndarray, rewards: np.ndarray, features: Features) -> np.ndarray:
        logits = (1 - features.lengths[features.correct].astype(np.float64) / self.max_length) / self.length_temperature
        shares = np.exp(logits - logits.max(initial=-np.inf))
        return contrast(scores, features.correct, shares / shares.sum() if len(shares) else shares, self.tau)
