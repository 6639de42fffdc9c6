"""SPO: single-stream policy optimization, a success tracker per problem instead of a group.

Source: arXiv:2509.13232.
"""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.method.advantage import Baseline
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.planning import ProblemSampler
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import AtLeast2, kind
from grpo_roc_jax.types import Problem


@kind("tracker")
class Tracker(Baseline):
    """The problem's own success tracker (SPO, arXiv:2509.13232); `method.tracker_decay` is its memory."""

    def batch(self, batch: MethodBatch) -> list[np.ndarray | float]:
        return tracked(batch.state, [found.uid for found in batch.features]).tolist()


@kind("uncertainty")
class Uncertainty(ProblemSampler):
    """Problems of middling success v are drawn more often, with weight sqrt(v (1 - v)) + 0.05 (SPO,
    arXiv:2509.13232)."""

    pool: AtLeast2 = 2
    """Candidates drawn from the stream for each problem trained on."""

    def choose(self, pool: Sequence[Problem], count: int, state: AlgoState, rng: np.random.Generator) -> list[int]:
        values = tracked(state, [p.uid for p in pool])
        weights = np.sqrt(np.clip(values * (1 - values), 0, None)) + 0.05
        keys = rng.gumbel(size=len(pool)) + np.log(weights)
        return sorted(int(i) for i in np.argsort(-keys, kind="stable")[:count])


def tracked(state: AlgoState, uids: Sequence[str]) -> np.ndarray:
    """float64[n]: alpha / (alpha + beta), the tracker's estimate of each problem's success."""
    rows = state.table.get(uids)
    return rows["alpha"] / (rows["alpha"] + rows["beta"])
