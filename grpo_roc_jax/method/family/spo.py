"""SPO: single-stream policy optimization, a success tracker per problem instead of a group.

Source: arXiv:2509.13232.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from annotated_types import Ge

from grpo_roc_jax.method.advantage import Baseline
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.planning import ProblemSampler
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import kind
from grpo_roc_jax.types import Problem


@kind("tracker")
class Tracker(Baseline):
    """The problem's own success tracker (SPO, arXiv:2509.13232); `method.tracker_decay` is its memory."""

    def values(self, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray | float:
        row = state.table.get([found.uid])
        return float(row["alpha"][0] / (row["alpha"][0] + row["beta"][0]))


@kind("uncertainty")
class Uncertainty(ProblemSampler):
    """Problems of middling success are drawn more often (SPO, arXiv:2509.13232)."""

    pool: Annotated[int, Ge(2)] = 2
    """Candidates drawn from the stream for each problem trained on."""

    def choose(self, pool: Sequence[Problem], count: int, state: AlgoState, rng: np.random.Generator) -> list[int]:
        rows = state.table.get([p.uid for p in pool])
        weights = uncertainty_weights(rows["alpha"] / (rows["alpha"] + rows["beta"]))
        keys = rng.gumbel(size=len(pool)) + np.log(weights)
        return sorted(int(i) for i in np.argsort(-keys, kind="stable")[:count])


def uncertainty_weights(values: np.ndarray, floor: float = 0.05) -> np.ndarray:
    """sqrt(v (1 - v)) + floor: problems of middling value are drawn more often (SPO, arXiv:2509.13232)."""
    return np.sqrt(np.clip(values * (1 - values), 0, None)) + floor
