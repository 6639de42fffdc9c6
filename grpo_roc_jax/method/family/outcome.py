"""Success and failure as +1 and a negative number. Source: arXiv:2602.03452."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import kind


@kind("outcome")
class Outcome(Shaping):
    """+1 for success, `-negative` for failure (arXiv:2602.03452); cancels under a z-score of the group."""

    negative: float = 1.0
    """Size of a failure's reward."""

    overwrites = True

    def group(self, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray:
        return outcome(found.correct, self.negative)


def outcome(correct: np.ndarray, negative: float = 1.0) -> np.ndarray:
    """+1 for success, -negative for failure (arXiv:2602.03452)."""
    return np.where(correct, 1.0, -negative)
