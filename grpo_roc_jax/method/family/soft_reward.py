"""A soft map of rewards that damps the extremes: TempSamp-R1. Source: arXiv:2509.18056."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import kind


@kind("soft")
class SoftReward(Shaping):
    """Logarithmic above a threshold, exponential below it (TempSamp-R1, arXiv:2509.18056)."""

    tau: float = 0.8
    """Reward above which the map grows logarithmically."""
    above: float = 0.01
    """Factor of that logarithm."""
    below: float = 1.0
    """Curvature of the exponential below `tau`."""

    def group(self, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray:
        return soft_map(rewards, self.tau, self.above, self.below)


def soft_map(rewards: np.ndarray, tau: float = 0.8, above: float = 0.01, below: float = 1.0) -> np.ndarray:
    """tau + a1 ln(r - tau + 1) above tau, tau - (e^(a2 (tau - r)) - 1) / (e^a2 - 1) below (arXiv:2509.18056)."""
    rewards = np.asarray(rewards, np.float64)
    high = tau + above * np.log(np.maximum(rewards - tau, 0.0) + 1)
    low = tau - np.expm1(below * np.maximum(tau - rewards, 0.0)) / np.expm1(below)
    return np.where(rewards >= tau, high, low)
