"""A share of a success's reward for its quality: C-GRPO. Source: arXiv:2601.06021."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping, channel
from grpo_roc_jax.settings.options import Share, kind


@kind("quality")
class Quality(Shaping):
    """(1 - w) R + w q / max q for successes, R for failures, with w the weight and q the quality (C-GRPO,
    arXiv:2601.06021)."""

    weight: Share = 0.3
    """Share of a success's reward that comes from the channel."""
    quality_channel: str = "quality"
    """Reward channel with the quality; a custom reward function provides it."""

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        quality = channel(features, self.quality_channel, self.prefix)
        top = float(np.max(quality, initial=0.0))
        scaled = quality / top if top > 0 else np.zeros(len(quality))
        return np.where(features.correct, (1 - self.weight) * rewards + self.weight * scaled, rewards)
