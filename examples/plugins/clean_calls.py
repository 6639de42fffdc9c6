"""CLEANER's repair of failed calls in place (arXiv:2601.15141): what trains shows the call that worked instead.

`--plan.edit examples.plugins.clean_calls:purify --loss.old_logprobs scored`: the repaired text was sampled behind other
tokens, so its old log-probabilities come from a scoring pass.
"""

import dataclasses
from difflib import SequenceMatcher

import numpy as np

from grpo_roc_jax.types import Group, Trajectory, Turn, Verdict


def purify(group: Group) -> Group:
    """The group with every success repaired as far as its own later calls allow."""
    pairs = [
        repaired(t, v) if v.reward > 0 else (t, v) for t, v in zip(group.trajectories, group.verdicts, strict=True)
    ]
    return Group(group.problem, tuple(t for t, _ in pairs), tuple(v for _, v in pairs))


def repaired(trajectory: Trajectory, verdict: Verdict, alike: float = 0.5) -> tuple[Trajectory, Verdict]:
    """The trajectory without failed calls that the next turn makes good, latest first.

    A call makes good what it resembles (ratio of equal characters at least `alike`): another attempt, not another idea.
    """
    for k in reversed(range(len(trajectory.turns) - 1)):
        failed, next_one = trajectory.turns[k], trajectory.turns[k + 1]
        if failing(failed) and next_one.results and not failing(next_one) and similarity(failed, next_one) >= alike:
            trajectory = without_turn(trajectory, k)
            calls, errors = verdict.tool_calls - len(failed.results), verdict.tool_errors - len(failed.results)
            verdict = dataclasses.replace(verdict, tool_calls=calls, tool_errors=errors, turns=verdict.turns - 1)
    return trajectory, verdict


def failing(turn: Turn) -> bool:
    """Whether it made calls and all of them failed."""
    return bool(turn.results) and all(result.counts_as_error for result in turn.results)


def similarity(first: Turn, second: Turn) -> float:
    """Share of equal characters of the two turns' calls."""
    texts = ["\n".join(call.raw for call in turn.calls) for turn in (first, second)]
    return SequenceMatcher(None, *texts, autojunk=False).ratio()


def without_turn(trajectory: Trajectory, k: int) -> Trajectory:
    """The trajectory with turn k and its observation cut out: turn k + 1 stands where turn k began."""
    low, high = trajectory.turns[k].start, trajectory.turns[k + 1].start
    left = {name: np.delete(getattr(trajectory, name), slice(low, high)) for name in ARRAYS}
    moved = [
        dataclasses.replace(t, start=t.start - high + low, end=t.end - high + low) for t in trajectory.turns[k + 1 :]
    ]
    return dataclasses.replace(trajectory, **left, turns=(*trajectory.turns[:k], *moved))


ARRAYS = ("tokens", "policy_mask", "logprobs", "versions")
