"""Process rewards that count for successes only: P-GRPO. Source: arXiv:2508.05170."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping, channel
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import kind


@kind("posterior")
class Posterior(Shaping):
    """Format, outcome, and the process where the outcome is right (P-GRPO, arXiv:2508.05170)."""

    format_channel: str = "format"
    """Reward channel with the pay for the format."""
    quality_channel: str = "quality"
    """Reward channel with the quality of the process; a custom reward function provides it."""

    overwrites = True

    def group(self, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray:
        return posterior(
            channel(found, self.format_channel, self.prefix),
            found.correct.astype(np.float64),
            channel(found, self.quality_channel, self.prefix),
        )


def posterior(format_reward: np.ndarray, outcome_reward: np.ndarray, process: np.ndarray) -> np.ndarray:
    """format + outcome + outcome process: the process counts for successes only (P-GRPO, arXiv:2508.05170)."""
    return format_reward + outcome_reward + outcome_reward * process
