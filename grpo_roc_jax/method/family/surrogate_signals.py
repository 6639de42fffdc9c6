"""Format and length as signals that need no reference answer. Source: arXiv:2505.19439."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping, channel
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import AtLeast1, kind


@kind("surrogate")
class SurrogateSignals(Shaping):
    """Format and length instead of correctness (arXiv:2505.19439)."""

    length: AtLeast1 = 3072
    """Tokens at which the length term reaches -1."""
    format_channel: str = "format"
    """Reward channel with the pay for the format."""

    overwrites = True

    def group(self, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray:
        paid = channel(found, self.format_channel, self.prefix)
        return surrogate_signal(paid, found.answers > 0, found.lengths / self.length)


def surrogate_length(share: np.ndarray, peak: float = 0.5) -> np.ndarray:
    """1 - (1 - x/p)^2 up to the peak p, 1 - 2 ((x - p) / (1 - p))^2 above, x = n / L (arXiv:2505.19439)."""
    share = np.asarray(share, np.float64)
    return np.where(share <= peak, 1 - (1 - share / peak) ** 2, 1 - 2 * ((share - peak) / (1 - peak)) ** 2)


def surrogate_signal(format_reward: np.ndarray, answered: np.ndarray, share: np.ndarray) -> np.ndarray:
    """format + length where an answer parses, else min(0, length): no reference needed (arXiv:2505.19439)."""
    length = surrogate_length(share)
    return np.where(answered, format_reward + length, np.minimum(length, 0.0))
