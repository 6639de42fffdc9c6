"""Length penalty on the best-solved problems of a batch: GRPO-lambda. Source: arXiv:2505.18086."""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import PositiveShare, kind


@kind("dynamic_length")
class DynamicLength(Shaping):
    """1 - alpha sigmoid((n - mean) / std) for successes of the batch's best-solved problems, 1 for other successes, 0
    for failures; mean and std over the group's successes (GRPO-lambda, arXiv:2505.18086)."""

    fraction: PositiveShare = 0.2
    """Share of the batch's problems, the best solved ones, whose successes are shortened."""
    alpha: float = 0.6
    """Largest cut of a success's reward."""

    overwrites = True

    def batch(self, rewards: Sequence[np.ndarray], groups: Sequence[Features], state: AlgoState) -> list[np.ndarray]:
        accuracy = np.array([np.mean(features.correct) for features in groups])
        chosen = set(np.argsort(-accuracy, kind="stable")[: int(np.ceil(self.fraction * len(groups)))])
        shaped = []
        for g, features in enumerate(groups):
            won, n = features.correct, features.lengths
            shaped.append(won.astype(np.float64))
            if g in chosen and won.any():
                spread = max(float(np.std(n[won])), 1e-6)
                # tanh keeps the exponential from overflowing: sigmoid(x) = (1 + tanh(x / 2)) / 2.
                gate = 0.5 * (1 + np.tanh(0.5 * (n - n[won].mean()) / spread))
                shaped[-1] = shaped[-1] * (1 - self.alpha * gate)
        return shaped
