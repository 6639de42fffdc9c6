"""MicroCoder-GRPO's masking of truncated successes. Source: arXiv:2603.07777."""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.method.advantage import Adjustment
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.settings.options import Share, kind


@kind("truncation_mask")
class TruncationMask(Adjustment):
    """Advantage 0, at random, for a correct, truncated, non-repeating trajectory (arXiv:2603.07777)."""

    draws = True

    probability: Share = 0.3
    """Probability of the 0."""

    def batch(self, advantages: Sequence[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        if batch.rng is None:
            raise ValueError("advantage.adjust truncation_mask draws at random; pass rng to train_rows")
        repeating = [
            np.array([repeats(t.tokens[t.prompt_length :]) for t in group.trajectories]) for group in batch.groups
        ]
        return [
            truncation_masked(a, f.truncated, f.correct, loops, batch.rng.random(f.size), self.probability)
            for a, f, loops in zip(advantages, batch.features, repeating, strict=True)
        ]


def truncation_masked(
    advantages: np.ndarray,
    truncated: np.ndarray,
    correct: np.ndarray,
    repeating: np.ndarray,
    draws: np.ndarray,
    probability: float = 0.3,
) -> np.ndarray:
    """Advantage 0 where a correct, truncated, non-repeating trajectory draws below `probability`.

    Source: MicroCoder-GRPO, arXiv:2603.07777.
    """
    masked = truncated & correct & ~repeating & (draws < probability)
    return np.where(masked, 0.0, advantages)


def repeats(tokens: np.ndarray, window: int = 128) -> bool:
    """Whether the last `window` tokens equal the `window` before them."""
    tail = tokens[-2 * window :]
    return len(tail) == 2 * window and bool(np.array_equal(tail[:window], tail[window:]))
