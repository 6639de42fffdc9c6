"""More reward for unlikely successes. Source: arXiv:2506.02355."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.settings.options import kind


@kind("unlikeliness")
class Unlikeliness(Shaping):
    """R (1 - beta rank / G) for successes, rank 0 for the least likely trajectory of the group (arXiv:2506.02355)."""

    beta: float = 0.25
    """Share of the reward that the most likely success loses."""

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        rank = np.argsort(np.argsort(features.mean_logprobs, kind="stable"), kind="stable")
        return np.where(features.correct, rewards * (1 - self.beta * rank / len(rewards)), rewards)
