"""NGRPO: statistics with one virtual best reward, so that groups of failures alone learn. Source: arXiv:2509.18851."""

import numpy as np

from grpo_roc_jax.method.advantage import Baseline, Deviation, Scale
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.settings.options import kind


@kind("virtual_max")
class VirtualMax(Baseline):
    """The mean of the group with one virtual best reward (NGRPO, arXiv:2509.18851)."""

    reward: float = 1.0
    """The best possible reward."""

    def values(self, rewards: np.ndarray, features: Features) -> np.ndarray | float:
        return float(np.append(rewards, self.reward).mean())


@kind("virtual_std")
class VirtualStd(Deviation, Scale):
    """The standard deviation of the group with one virtual best reward (NGRPO, arXiv:2509.18851)."""

    reward: float = 1.0
    """The best possible reward."""

    def group(self, rewards: np.ndarray) -> float:
        return self.divisor(np.append(rewards, self.reward))
