"""TW-GRPO's token weights: positions at which a group's predictions differ count more (arXiv:2505.24718).

Full-vocabulary log-probabilities of a group exist for one chunk of positions at a time, never as [G,T,V]. Multiply the
`weights` of a group's training rows by the result before packing.
"""

from collections.abc import Iterable

import numpy as np


def divergence(logprobs: np.ndarray) -> np.ndarray:
    """float64[C] from log-probabilities [G,C,V]: mean over the group of sum_v (e^u - u - 1), u = clip(mu - log p, -11,
    11) with mu the group's mean log-probabilities. Padding rows hold uniform ones."""
    u = np.clip(logprobs.mean(axis=0, keepdims=True) - logprobs, -11.0, 11.0)
    return (np.exp(u) - u - 1).sum(axis=-1).mean(axis=0)


def token_weights(chunks: Iterable[np.ndarray], alpha: float = 1.4) -> np.ndarray:
    """float64[T]: 1 + (alpha - 1) times the divergence, scaled to 0..1 over the positions; 1 where all are alike.

    Args:
        chunks: [G,C,V] log-probabilities of consecutive positions.
        alpha: Weight of the position that differs most.
    """
    values = np.concatenate([divergence(chunk) for chunk in chunks])
    spread = np.ptp(values)
    return 1 + (alpha - 1) * (values - values.min()) / spread if spread > 0 else np.ones(len(values))
