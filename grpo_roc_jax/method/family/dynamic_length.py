"""Length penalty on the best-solved problems of a batch: GRPO-lambda. Source: arXiv:2505.18086."""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import PositiveShare, kind


@kind("dynamic_length")
class DynamicLength(Shaping):
    """Shortens the successes of the best-solved problems of the batch (GRPO-lambda, arXiv:2505.18086)."""

    fraction: PositiveShare = 0.2
    """Share of the batch's problems, the best solved ones, whose successes are shortened."""
    alpha: float = 0.6
    """Largest cut of a success's reward."""

    def batch(self, rewards: Sequence[np.ndarray], groups: Sequence[Features], state: AlgoState) -> list[np.ndarray]:
        correct, lengths = [found.correct for found in groups], [found.lengths for found in groups]
        return dynamic_length(correct, lengths, self.fraction, self.alpha)


def dynamic_length(
    correct: Sequence[np.ndarray], lengths: Sequence[np.ndarray], fraction: float = 0.2, alpha: float = 0.6
) -> list[np.ndarray]:
    """1 - alpha sigmoid((n - mean) / std) for successes of the best-solved `fraction` of the groups, 1 for the others'.

    Mean and deviation are over the group's successes; failures have 0. Source: GRPO-lambda, arXiv:2505.18086.
    """
    accuracy = np.array([np.mean(c) for c in correct])
    chosen = set(np.argsort(-accuracy, kind="stable")[: int(np.ceil(fraction * len(correct)))])
    shaped = []
    for g, (won, n) in enumerate(zip(correct, lengths, strict=True)):
        won = won.astype(bool)
        value = won.astype(np.float64)
        if g in chosen and won.any():
            spread = max(float(np.std(n[won])), 1e-6)
            # tanh keeps the exponential from overflowing: sigmoid(x) = (1 + tanh(x / 2)) / 2.
            gate = 0.5 * (1 + np.tanh(0.5 * (n - n[won].mean()) / spread))
            value = value * (1 - alpha * gate)
        shaped.append(value)
    return shaped
