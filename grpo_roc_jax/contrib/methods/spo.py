"""SPO: single-stream policy optimization, a success tracker per problem instead of a group.

Source: arXiv:2509.13232. Initial samples: the command `difficulty` writes them into the data (`state.begun`).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from grpo_roc_jax.method.advantage import Baseline
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.planning import ProblemSampler
from grpo_roc_jax.method.state import AlgoState, begun, problem_key
from grpo_roc_jax.settings.options import AtLeast2, Positive, kind
from grpo_roc_jax.types import Group, Problem, Trajectory, Verdict

FORGETTING = (0.875, 0.96)
"""Smallest and largest factor on the tracker's counts under adaptive forgetting."""
UNJUDGED = Verdict(0.0, "infrastructure", None, 0, 0, 0, False, 0)


@kind("tracker")
class Tracker(Baseline):
    """The problem's own success tracker v = alpha / (alpha + beta) (SPO, arXiv:2509.13232).

    A visit multiplies both counts by 2^(-D / half_life), at least 0.875 and at most 0.96, and adds the outcome. D is
    the mean |change| of the log-probability of a token since the problem was sampled last; its last sample is kept
    in checkpoints, nine bytes a token, and scored before the update.
    """

    forget: Literal["adaptive", "constant"] = "adaptive"
    """`constant` multiplies by `method.tracker_decay` instead, and keeps no samples."""
    half_life: Positive = 0.06
    """Change, in nats, at which an earlier outcome counts half."""

    def batch(self, batch: MethodBatch) -> list[np.ndarray | float]:
        return tracked(batch.state, [group.problem for group in batch.groups]).tolist()

    def earlier(self, groups: Sequence[Group], state: AlgoState) -> list[Group] | None:
        if self.forget == "constant":
            return None
        samples = recalled_samples(state)
        known = {g.problem.uid: g.problem for g in groups if problem_key(g.problem.uid) in samples}
        return [Group(p, (samples[problem_key(uid)],), (UNJUDGED,)) for uid, p in known.items()]

    def forgetting(self, decay: float | np.ndarray, uids: Sequence[str], drift: Mapping[str, float]) -> Any:
        if self.forget == "constant":
            return decay
        return np.clip(2.0 ** (-np.array([drift.get(uid, 0.0) for uid in uids]) / self.half_life), *FORGETTING)

    def next_memory(
        self, sampled: Sequence[Group], trained: Sequence[Group], method: Any, state: AlgoState
    ) -> Mapping[str, np.ndarray]:
        if self.forget == "constant":
            return {}
        new = {problem_key(g.problem.uid): g.trajectories[-1] for g in trained if g.trajectories[-1].policy_mask.any()}
        return remembered_samples(recalled_samples(state) | new)


@kind("uncertainty")
class Uncertainty(ProblemSampler):
    """Problems of middling success v are drawn more often, with weight sqrt(v (1 - v)) + 0.05 (SPO,
    arXiv:2509.13232)."""

    pool: AtLeast2 = 2
    """Candidates drawn from the stream for each problem trained on."""

    def choose(self, pool: Sequence[Problem], count: int, state: AlgoState, rng: np.random.Generator) -> list[int]:
        values = tracked(state, pool)
        weights = np.sqrt(np.clip(values * (1 - values), 0, None)) + 0.05
        keys = rng.gumbel(size=len(pool)) + np.log(weights)
        return sorted(int(i) for i in np.argsort(-keys, kind="stable")[:count])


def tracked(state: AlgoState, problems: Sequence[Problem]) -> np.ndarray:
    """float64[n]: alpha / (alpha + beta), the tracker's estimate of each problem's success."""
    rows = begun(state, problems).table.get([problem.uid for problem in problems])
    return rows["alpha"] / (rows["alpha"] + rows["beta"])


def remembered_samples(samples: Mapping[int, Trajectory]) -> dict[str, np.ndarray]:
    """The last sample of each problem, by its key, as arrays for the method's memory."""
    trajectories = samples.values()
    heats = [np.nan if t.temperature is None else t.temperature for t in trajectories]
    return {
        "sample_keys": np.array(list(samples), np.uint64),
        "sample_ends": np.cumsum([0, *(t.length for t in trajectories)], dtype=np.int64),
        "sample_heats": np.array(heats, np.float64),
        "sample_tokens": np.concatenate([np.zeros(0, np.int32), *(t.tokens for t in trajectories)]),
        "sample_masks": np.concatenate([np.zeros(0, bool), *(t.policy_mask for t in trajectories)]),
        "sample_logprobs": np.concatenate([np.zeros(0, np.float32), *(t.logprobs for t in trajectories)]),
    }


def recalled_samples(state: AlgoState) -> dict[int, Trajectory]:
    """Inverse of `remembered_samples`, without what scoring does not read."""
    if "sample_keys" not in state.memory:
        return {}
    keys, ends, heats, *arrays = (
        state.memory[f"sample_{name}"] for name in ("keys", "ends", "heats", "tokens", "masks", "logprobs")
    )
    out = {}
    for key, heat, (low, high) in zip(keys.tolist(), heats.tolist(), pairwise(ends.tolist()), strict=True):
        tokens, mask, logprobs = (values[low:high] for values in arrays)
        versions, heat = np.zeros(high - low, np.int32), None if np.isnan(heat) else heat
        out[key] = Trajectory(tokens, mask, logprobs, versions, 0, (), "answer", 0, temperature=heat)
    return out
