"""XRPO's extra pay for unlikely successes. Source: arXiv:2510.06672."""

import numpy as np

from grpo_roc_jax.method.advantage import Adjustment
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import NotNegative, kind


@kind("novelty")
class Novelty(Adjustment):
    """Extra pay for unlikely successes (XRPO, arXiv:2510.06672)."""

    strength: NotNegative = 1.0
    """Size of the extra pay."""
    cap: NotNegative = 1.0
    """Largest extra pay as a multiple of the advantage."""

    def group(self, advantages: np.ndarray, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray:
        return novelty_sharpened(advantages, found.correct, found.mean_logprobs, self.strength, self.cap)


def novelty_sharpened(
    advantages: np.ndarray, correct: np.ndarray, mean_logprobs: np.ndarray, strength: float = 1.0, cap: float = 1.0
) -> np.ndarray:
    """A + min(max(strength (1 - eta), 0), cap A) for successes, eta = exp(s - mean s), s the mean log-probability.

    Unlikely successes are paid more; failures keep their advantage. Source: XRPO, arXiv:2510.06672.
    """
    eta = np.exp(mean_logprobs - mean_logprobs.mean())
    bonus = np.minimum(np.maximum(strength * (1 - eta), 0.0), cap * np.maximum(advantages, 0.0))
    return np.where(correct, advantages + bonus, advantages)
