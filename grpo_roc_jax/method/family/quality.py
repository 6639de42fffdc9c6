"""A share of a success's reward for its quality: C-GRPO. Source: arXiv:2601.06021."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping, channel
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import Share, kind


@kind("quality")
class Quality(Shaping):
    """Blends the reward of successes with a quality channel (C-GRPO, arXiv:2601.06021)."""

    weight: Share = 0.3
    """Share of a success's reward that comes from the channel."""
    quality_channel: str = "quality"
    """Reward channel with the quality; a custom reward function provides it."""

    def group(self, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray:
        return quality_blend(rewards, channel(found, self.quality_channel, self.prefix), self.weight)


def quality_blend(outcomes: np.ndarray, quality: np.ndarray, weight: float = 0.3, relative: bool = True) -> np.ndarray:
    """(1 - w) o + w q / max q for successes, o for failures (C-GRPO, arXiv:2601.06021); `relative` divides by max q."""
    won = np.asarray(outcomes) > 0
    top = float(np.max(quality, initial=0.0)) if relative else 1.0
    scaled = quality / top if top > 0 else np.zeros(len(quality))
    return np.where(won, (1 - weight) * outcomes + weight * scaled, outcomes)
