"""TempSamp-R1: demonstrations among the rollouts, and a soft map of rewards. Source: arXiv:2509.18056."""

from dataclasses import field

import numpy as np

from grpo_roc_jax.method.advantage import Estimator, GroupRelative
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.planning import DEMONSTRATION, SecondWave
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.settings.options import NotNegative, kind


@kind("demonstrate")
class Demonstrate(SecondWave):
    """A demonstration of each problem joins its group (TempSamp-R1, arXiv:2509.18056): the world's own, or the column
    `solution` of the data with the answer after it. Ratios need `surrogate.old_logprobs scored`."""

    demonstrates = unsampled = True
    extra_rows = 1


@kind("anchored")
class Anchored(Estimator):
    """Demonstrations leave their group's statistics and get `factor` times its best advantage, or 0 where that is
    negative (arXiv:2509.18056)."""

    factor: NotNegative = 1.2
    """Multiple of the best advantage."""
    of: GroupRelative = field(default_factory=GroupRelative)
    """The estimate of the other trajectories."""

    def estimate(self, batch: MethodBatch) -> list[np.ndarray]:
        sampled = [np.array([c != DEMONSTRATION for c in features.conditions], bool) for features in batch.features]
        out = []
        for values, mask in zip(self.of.estimate(batch.only(list(map(np.flatnonzero, sampled)))), sampled, strict=True):
            out.append(np.full(len(mask), self.factor * max(float(np.max(values, initial=0.0)), 0.0)))
            out[-1][mask] = values
        return out


@kind("soft")
class SoftReward(Shaping):
    """With t = tau: t + above ln(R - t + 1) above t, t - (e^(below (t - R)) - 1) / (e^below - 1) below it
    (arXiv:2509.18056)."""

    tau: float = 0.8
    """Reward above which the map grows logarithmically."""
    above: float = 0.01
    """Factor of that logarithm."""
    below: float = 1.0
    """Curvature of the exponential below `tau`; not 0."""

    def __post_init__(self) -> None:
        if self.below == 0:
            raise ValueError("shaping soft: below = 0; must not be 0, where the map is no number")

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        high = self.tau + self.above * np.log(np.maximum(rewards - self.tau, 0.0) + 1)
        low = self.tau - np.expm1(self.below * np.maximum(self.tau - rewards, 0.0)) / np.expm1(self.below)
        return np.where(rewards >= self.tau, high, low)
