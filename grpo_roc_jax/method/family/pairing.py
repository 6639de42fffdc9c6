"""Rarely and nearly always solved problems in pairs. Source: arXiv:2602.03452."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from annotated_types import Ge

from grpo_roc_jax.method.planning import ProblemSampler
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import AtLeast1, kind
from grpo_roc_jax.types import Problem


@kind("pairs")
class Pairs(ProblemSampler):
    """Rarely and nearly always solved problems by turns (arXiv:2602.03452)."""

    pool: Annotated[int, Ge(2)] = 2
    """Candidates drawn from the stream for each problem trained on."""
    group: AtLeast1 = 8
    """Group size by which a problem is nearly always solved: one or two failures in a group."""

    def choose(self, pool: Sequence[Problem], count: int, state: AlgoState, rng: np.random.Generator) -> list[int]:
        rows = state.table.get([p.uid for p in pool])
        rates = np.where(rows["visits"] > 0, rows["successes"] / np.maximum(rows["visits"], 1), np.nan)
        hard, easy = hard_and_easy(rates, self.group)
        turns = [int(i) for pair in zip(hard, easy, strict=False) for i in pair]
        rest = [i for i in range(len(pool)) if i not in set(turns)]
        return sorted((turns + rest)[:count])


def hard_and_easy(rates: np.ndarray, size: int, easy_failures: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """(indices of rarely solved problems, indices of nearly always solved ones), for positive-negative pairing.

    Rarely: 0 < p <= 1/2, lowest first. Nearly always: 1 - easy_failures / G <= p <= 1 - 1/G, highest first, so that a
    group of G holds a failure or two. Source: arXiv:2602.03452.
    """
    hard = np.flatnonzero((rates > 0) & (rates <= 0.5))
    easy = np.flatnonzero((rates >= 1 - easy_failures / size) & (rates <= 1 - 1 / size))
    return hard[np.argsort(rates[hard], kind="stable")], easy[np.argsort(-rates[easy], kind="stable")]
