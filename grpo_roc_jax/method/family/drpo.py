"""DRPO: DisCO with short successes counting more. Source: arXiv:2510.04474."""

import numpy as np

from grpo_roc_jax.method.family.score_based import Constrained, contrast, soft_maximum
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.settings.options import AtLeast1, Positive, kind


@kind("drpo")
class Drpo(Constrained):
    """Short successes against the soft maximum of the failures (DRPO, arXiv:2510.04474)."""

    tau: Positive = 10.0
    """Temperature over the failures' scores."""
    length_temperature: Positive = 0.1
    """Temperature over the successes' lengths."""
    max_length: AtLeast1 = 8192
    """Longest response, in policy tokens: the unit of length."""

    def coefficients(self, scores: np.ndarray, rewards: np.ndarray, found: Features) -> np.ndarray:
        return drpo_coefficients(
            scores, found.correct, found.lengths, self.max_length, self.length_temperature, self.tau
        )


def drpo_weights(lengths: np.ndarray, max_length: int, temperature: float = 0.1) -> np.ndarray:
    """softmax(u / temperature) over the successes, u = 1 - n / max_length: short ones count more (arXiv:2510.04474)."""
    logits = (1 - np.asarray(lengths, np.float64) / max_length) / temperature
    shares = np.exp(logits - logits.max(initial=-np.inf))
    return shares / shares.sum() if len(shares) else shares


def drpo_objective(
    scores: np.ndarray, correct: np.ndarray, lengths: np.ndarray, max_length: int, temperature: float, tau: float
) -> float:
    """sum_pos w s - tau log mean_neg exp(s / tau), w from `drpo_weights`."""
    weights = drpo_weights(lengths[correct], max_length, temperature)
    return float(weights @ scores[correct]) - soft_maximum(scores[~correct], tau)


def drpo_coefficients(
    scores: np.ndarray, correct: np.ndarray, lengths: np.ndarray, max_length: int, temperature: float, tau: float
) -> np.ndarray:
    """`drpo_weights` for successes, -softmax_neg(s / tau) for failures; zeros for a group of one kind."""
    return contrast(scores, correct, drpo_weights(lengths[correct], max_length, temperature), tau)
