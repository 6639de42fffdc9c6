"""More pay for unlikely successes. Source: arXiv:2506.02355."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import kind


@kind("unlikeliness")
class Unlikeliness(Shaping):
    """Lowers the reward of likely trajectories by their rank in the group (arXiv:2506.02355)."""

    beta: float = 0.25
    """Share of the reward that the most likely success loses."""

    def group(self, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray:
        return unlikeliness(rewards, found.mean_logprobs, self.beta)


def unlikeliness(rewards: np.ndarray, mean_logprobs: np.ndarray, beta: float = 0.25) -> np.ndarray:
    """R (1 - beta rank / G), rank 0 for the least likely trajectory (arXiv:2506.02355)."""
    rank = np.argsort(np.argsort(mean_logprobs, kind="stable"), kind="stable")
    return rewards * (1 - beta * rank / len(rewards))
