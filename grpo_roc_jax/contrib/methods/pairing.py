"""Rarely and nearly always solved problems in pairs, and signed rewards. Source: arXiv:2602.03452."""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.planning import ProblemSampler
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import AtLeast1, AtLeast2, kind
from grpo_roc_jax.types import Problem


@kind("pairs")
class Pairs(ProblemSampler):
    """Rarely and nearly always solved problems by turns (arXiv:2602.03452).

    Rarely: 0 < p <= 1/2, lowest first. Nearly always: 1 - 2/G <= p <= 1 - 1/G, highest first, and above 1/2.
    """

    pool: AtLeast2 = 2
    """Candidates drawn from the stream for each problem trained on."""
    group: AtLeast1 = 8
    """G, by which a problem is nearly always solved: one or two failures in a group of this size."""

    def choose(self, pool: Sequence[Problem], count: int, state: AlgoState, rng: np.random.Generator) -> list[int]:
        rows = state.table.get([p.uid for p in pool])
        rates = np.where(rows["visits"] > 0, rows["successes"] / np.maximum(rows["visits"], 1), np.nan)
        failures = (1 - rates) * self.group  # in a group
        hard = np.flatnonzero((rates > 0) & (rates <= 0.5))
        easy = np.flatnonzero((failures >= 1 - 1e-9) & (failures <= 2 + 1e-9) & ~(rates <= 0.5))
        hard, easy = hard[np.argsort(rates[hard], kind="stable")], easy[np.argsort(-rates[easy], kind="stable")]
        turns = [int(i) for pair in zip(hard, easy, strict=False) for i in pair]
        rest = [i for i in range(len(pool)) if i not in set(turns)]
        return sorted((turns + rest)[:count])


@kind("outcome")
class Outcome(Shaping):
    """+1 for success, `-negative` for failure (arXiv:2602.03452); cancels under a z-score of the group."""

    negative: float = 1.0
    """Size of a failure's reward."""

    overwrites = True

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        return np.where(features.correct, 1.0, -self.negative)
