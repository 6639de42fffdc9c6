"""M-GRPO: a main policy and the second one that it calls learn from one group, the second one by aligned calls.

Source: arXiv:2511.13288. The paper trains two models. Here one policy has both roles, a stand-in for the second model:
the turns with a tool call are those of the second policy, the other turns those of the main one.
"""

import zlib
from collections.abc import Callable

import numpy as np

from grpo_roc_jax.method.advantage import Advantage, z_score
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.options import AtLeast1, kind
from grpo_roc_jax.types import Group, Problem, Trajectory, Turn


@kind("m_grpo")
class AlignedCalls(Advantage):
    """Main turns: z(0.1 + 0.9 correct, 0 if malformed) over the group. Calls: z(0.1 well-formed + 0.4 correct + 0.5
    expert) over as many calls of each rollout, drawn or repeated at random (M-GRPO, arXiv:2511.13288). Rewards are not
    read."""

    calls: AtLeast1 = 8
    """Calls of each rollout that count; 99% of the rollouts should have no more."""
    expert: str = ""
    """Function of (problem, turn) -> 0..1 that judges a call, such as a call of a language model. Empty: whether it ran
    without an error, a stand-in."""

    reads_rewards = False

    def tokens(self, batch: MethodBatch) -> list[np.ndarray]:
        out = []
        for group, features in zip(batch.groups, batch.features, strict=True):
            main = z_score(np.where(features.well_formed, 0.1 + 0.9 * features.correct, 0.0), ddof=0)
            for trajectory, value, calls in zip(group.trajectories, main, self.of_calls(group, batch), strict=True):
                out.append(np.full(trajectory.length, value, np.float32))
                for turn, credit in zip(calling(trajectory), calls, strict=True):
                    out[-1][turn.start : turn.end] = credit
        return out

    def of_calls(self, group: Group, batch: MethodBatch) -> list[np.ndarray]:
        """float64[calls] of each trajectory: the advantage of a call, as often as it was drawn."""
        judge: Callable[[Problem, Turn], float] = resolve("advantage.expert", self.expert) or ran
        pays, picks = [], []
        for trajectory, right in zip(group.trajectories, group.correct.tolist(), strict=True):
            turns, address = calling(trajectory), [batch.state.step, zlib.crc32(group.problem.uid.encode())]
            judged = [second_reward(formed(turn), right, judge(group.problem, turn)) for turn in turns]
            pays.append(np.array(judged, np.float64))
            picks.append(aligned(len(turns), self.calls, np.random.default_rng([*address, trajectory.sample])))
        values = iter(z_score(np.concatenate([p[i] for p, i in zip(pays, picks, strict=True)]), ddof=0).tolist())
        return [np.bincount(i, [next(values) for _ in i], len(p)) for p, i in zip(pays, picks, strict=True)]


def second_reward(well_formed: bool, main_correct: bool, expert: float) -> float:
    """0.1 format + 0.4 correctness of the main policy + 0.5 expert judgement."""
    return 0.1 * well_formed + 0.4 * main_correct + 0.5 * expert


def aligned(calls: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """int64[count] into the calls of a rollout: all of them and random repeats, or a random subset in order; empty for
    a rollout without calls."""
    if calls >= count:
        return np.sort(rng.permutation(calls)[:count])
    return np.concatenate([np.arange(calls), rng.integers(0, calls, count - calls)]) if calls else np.arange(0)


def calling(trajectory: Trajectory) -> list[Turn]:
    """The turns with a call."""
    return [turn for turn in trajectory.turns if turn.calls]


def formed(turn: Turn) -> bool:
    return all(call.fault is None for call in turn.calls)


def ran(problem: Problem, turn: Turn) -> float:
    """A stand-in for an expert: 1 where a result came back and none is an error."""
    return float(bool(turn.results) and not any(result.counts_as_error for result in turn.results))
