"""Format and length as signals that need no reference answer. Source: arXiv:2505.19439."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping, channel
from grpo_roc_jax.settings.options import AtLeast1, kind


@kind("surrogate")
class SurrogateSignals(Shaping):
    """format + l where an answer parses, else min(0, l): no reference needed (arXiv:2505.19439).

    With x = n / length the length term l is 1 - (1 - 2x)^2 up to the half, 1 - 2 (2x - 1)^2 beyond it.
    """

    length: AtLeast1 = 3072
    """Tokens at which the length term reaches -1."""
    format_channel: str = "format"
    """Reward channel with the reward for the format."""

    overwrites = True

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        x = features.lengths / self.length
        term = np.where(x <= 0.5, 1 - (1 - x / 0.5) ** 2, 1 - 2 * ((x - 0.5) / 0.5) ** 2)
        paid = channel(features, self.format_channel, self.prefix)
        return np.where(features.answers > 0, paid + term, np.minimum(term, 0.0))
