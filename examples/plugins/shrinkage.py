"""V_0.5's baseline: the group mean drawn towards a prior value as far as the two agree (arXiv:2603.10848). The prior is
the problem's success tracker, which every method keeps.

`--advantage custom --advantage.function examples.plugins.shrinkage:advantage`
"""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.state import AlgoState


def advantage(rewards: np.ndarray, features: Features, state: AlgoState) -> np.ndarray:
    """R - shrunk baseline of one group."""
    seen = state.table.get([features.uid])
    prior = float(seen["alpha"][0] / (seen["alpha"][0] + seen["beta"][0]))
    return rewards - shrunk_baseline(rewards, prior)[0]


def shrunk_baseline(rewards: np.ndarray, prior: float) -> tuple[float, float]:
    """((1 - w) mean + w prior, w) with w = s2 / (s2 + max((prior - mean)^2 - s2, 0)), s2 the variance of the mean.

    The weight minimizes the plug-in squared error. It is derived here, not taken from the paper, whose text was not
    available.
    """
    mean = float(rewards.mean())
    s2 = float(rewards.var(ddof=1)) / len(rewards) if len(rewards) > 1 else 0.0
    excess = max((prior - mean) ** 2 - s2, 0.0)
    weight = 1.0 if s2 + excess == 0 else s2 / (s2 + excess)
    return (1 - weight) * mean + weight * prior, weight
