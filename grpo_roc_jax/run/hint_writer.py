"""HiLL's advantages: hints against the other hints of a problem, and rollouts under the best of them.

Source: arXiv:2604.00698. `method.edit_rows grpo_roc_jax.run.hint_writer:rewarded` goes with `plan.second rival_hints`.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.method.advantage import z_score
from grpo_roc_jax.method.edit import with_plain_prompts
from grpo_roc_jax.method.family.hill import hint_reward
from grpo_roc_jax.types import Group, TrainRow

GATE = -1.0
"""Reward of a hint that gives the answer away, and so has no rollouts."""


def rewarded(rows: Sequence[TrainRow], groups: Sequence[Group], policy) -> list[TrainRow]:
    """The rows, in groups with written hints, with the advantages of hints and of rollouts under the best of them; the
    other rollouts of these groups get 0. One scoring pass under plain prompts per step."""
    out: list[TrainRow] = []
    prompts = {g.problem.uid: np.asarray(policy.prompt_ids(g.problem), np.int32) for g in groups}
    plain, first = with_plain_prompts(groups, prompts), 0
    scores = policy.score(policy.trained, plain)
    for group, moved in zip(groups, plain, strict=True):
        own, now = rows[first : first + group.size], scores[first : first + group.size]
        first += group.size
        # The same response after another prompt: its tokens keep their order.
        spans = zip(own, group.trajectories, moved.trajectories, now, strict=True)
        gaps = [float((s[m.policy_mask] - r.logprobs_old[t.policy_mask]).mean()) for r, t, m, s in spans]
        values = hint_advantages(group, np.array(gaps))
        for row, value in zip(own, values if values is not None else [None] * len(own), strict=True):
            filled = row.advantages if value is None else np.full(row.length, value, np.float32)
            out.append(dataclasses.replace(row, advantages=filled))
    return out


def hint_advantages(group: Group, gaps: np.ndarray) -> np.ndarray | None:
    """float64[G]; None for a group without written hints.

    Args:
        group: With conditions `hint_writer:k` and `hint:k`.
        gaps: Of each trajectory, the mean of log p(y | q) - log p(y | q, its prompt).
    """
    kinds = np.array([t.condition.kind for t in group.trajectories], object)
    levels = np.array([t.condition.level for t in group.trajectories])
    writers = np.flatnonzero(kinds == "hint_writer")
    if not len(writers):
        return None
    unhinted = float(group.correct[kinds == ""].mean()) if (kinds == "").any() else 0.0
    tried = [np.flatnonzero((kinds == "hint") & (levels == levels[i])) for i in writers]
    paid = np.array([_paid(group.correct[rows], gaps[rows], unhinted) for rows in tried])
    out, best = np.zeros(group.size), tried[int(paid.argmax())]
    out[writers] = z_score(paid)
    if paid.max() > 0:
        out[best] = z_score(group.rewards[best])
    return out


def _paid(correct: np.ndarray, gaps: np.ndarray, unhinted: float) -> float:
    if not len(correct):
        return GATE
    reliance = float(gaps[correct].mean()) if correct.any() else 0.0
    return hint_reward(float(correct.mean()), len(correct), reliance, unhinted=unhinted)
