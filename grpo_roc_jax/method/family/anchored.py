"""A price for demonstrations among the rollouts: TempSamp-R1. Source: arXiv:2509.18056."""

from collections.abc import Sequence
from dataclasses import field

import numpy as np

from grpo_roc_jax.method.advantage import Estimator, GroupRelative
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import NotNegative, kind

DEMONSTRATION = "demonstration"
"""Kind of the condition of a trajectory that was not sampled from the policy."""


@kind("anchored")
class Anchored(Estimator):
    """Demonstrations leave their group's statistics and get a multiple of its best advantage (arXiv:2509.18056)."""

    factor: NotNegative = 1.2
    """That multiple."""
    of: GroupRelative = field(default_factory=GroupRelative)
    """The estimate of the other trajectories."""

    def estimate(self, groups: Sequence[Features], rewards: Sequence[np.ndarray], state: AlgoState) -> list[np.ndarray]:
        own = [np.array([condition != DEMONSTRATION for condition in found.conditions], bool) for found in groups]
        on_policy = self.of.estimate(
            [found.take(np.flatnonzero(mask)) for found, mask in zip(groups, own, strict=True)],
            [r[mask] for r, mask in zip(rewards, own, strict=True)],
            state,
        )
        out = []
        for values, mask in zip(on_policy, own, strict=True):
            full = np.full(len(mask), anchor_value(values, self.factor))
            full[mask] = values
            out.append(full)
        return out


def anchor_value(on_policy: np.ndarray, factor: float) -> float:
    """Advantage of an injected off-policy trajectory: `factor` times the best on-policy one, at least 0.

    The on-policy ones are standardized without it. Source: TempSamp-R1, arXiv:2509.18056, there with 1.2.
    """
    return factor * max(float(np.max(on_policy, initial=0.0)), 0.0)
