"""V_0.5: a baseline between the group mean and a prior value. Source: arXiv:2603.10848.

The paper's prior is a pretrained value model; here it is the problem's success tracker. The weight is derived here from
the squared error that the paper minimizes, since its own formula was not available.
"""

import numpy as np

from grpo_roc_jax.contrib.methods.spo import tracked
from grpo_roc_jax.method.advantage import Baseline
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.settings.options import kind


@kind("shrunk")
class Shrunk(Baseline):
    """The group mean drawn towards the problem's success tracker, as far as the two agree (V_0.5, arXiv:2603.10848)."""

    def batch(self, batch: MethodBatch) -> list[np.ndarray | float]:
        priors = tracked(batch.state, [group.problem for group in batch.groups]).tolist()
        pairs = zip(batch.rewards, priors, strict=True)
        return [shrunk_baseline(rewards, prior)[0] if len(rewards) else 0.0 for rewards, prior in pairs]


def shrunk_baseline(rewards: np.ndarray, prior: float) -> tuple[float, float]:
    """((1 - w) mean + w prior, w) with w = s2 / (s2 + max((prior - mean)^2 - s2, 0)), s2 the variance of the mean.

    The weight minimizes (1 - w)^2 s2 + w^2 b2, the squared error for a prior whose squared bias is estimated by b2.
    """
    mean = float(rewards.mean())
    s2 = float(rewards.var(ddof=1)) / len(rewards) if len(rewards) > 1 else 0.0
    excess = max((prior - mean) ** 2 - s2, 0.0)
    weight = 1.0 if s2 + excess == 0 else s2 / (s2 + excess)
    return (1 - weight) * mean + weight * prior, weight
