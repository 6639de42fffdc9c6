"""NGRPO: statistics with one virtual best reward, so that groups of failures alone learn. Source: arXiv:2509.18851."""

from typing import Literal

import numpy as np

from grpo_roc_jax.method.advantage import Baseline, Scale, deviation
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import NotNegative, kind


@kind("virtual_max")
class VirtualMax(Baseline):
    """The mean of the group with one virtual best reward (NGRPO, arXiv:2509.18851)."""

    reward: float = 1.0
    """The best possible reward."""

    def values(self, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray | float:
        return float(with_virtual(rewards, self.reward).mean())


@kind("virtual_std")
class VirtualStd(Scale):
    """The standard deviation of the group with one virtual best reward (NGRPO, arXiv:2509.18851)."""

    reward: float = 1.0
    """The best possible reward."""
    ddof: Literal[0, 1] = 1
    """1 divides by n - 1, 0 by n."""
    eps: NotNegative = 1e-6
    """Added to the deviation."""

    def group(self, rewards: np.ndarray) -> float:
        return deviation(with_virtual(rewards, self.reward), self.ddof) + self.eps


def with_virtual(rewards: np.ndarray, virtual: float) -> np.ndarray:
    """The rewards with one virtual best, for the statistics of NGRPO (arXiv:2509.18851)."""
    return np.append(rewards, virtual)
