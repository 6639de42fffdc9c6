"""Process rewards that count for successes only: P-GRPO. Source: arXiv:2508.05170."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping, channel
from grpo_roc_jax.settings.options import kind


@kind("posterior")
class Posterior(Shaping):
    """format + outcome + outcome quality: the process counts for successes only (P-GRPO, arXiv:2508.05170)."""

    format_channel: str = "format"
    """Reward channel with the reward for the format."""
    quality_channel: str = "quality"
    """Reward channel with the quality of the process; a custom reward function provides it."""

    overwrites = True

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        outcome = features.correct.astype(np.float64)
        process = channel(features, self.quality_channel, self.prefix)
        return channel(features, self.format_channel, self.prefix) + outcome + outcome * process
