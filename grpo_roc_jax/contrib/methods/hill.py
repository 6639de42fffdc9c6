"""HiLL: several written hints for each problem that every rollout failed, rewarded by their effect on rollouts.

Source: arXiv:2604.00698. The paper trains a second model to write. Here the policy writes its own hints, a stand-in for
that model. `rewarded`, as `method.edit_rows`, computes the rewards of the hints, for which it scores the hinted
responses under the plain prompt.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_roc_jax.contrib.methods.hints import HINT, WRITER
from grpo_roc_jax.method.advantage import z_score
from grpo_roc_jax.method.edit import joined, revalued, with_plain_prompts
from grpo_roc_jax.method.planning import SecondWave, Wave, failed_places, own_text
from grpo_roc_jax.settings.options import AtLeast1, kind
from grpo_roc_jax.types import Condition, Group, Problem, RolloutRequest, TrainRow


@kind("rival_hints")
class RivalHints(SecondWave):
    """Hints that the policy writes for failed problems, and rollouts under each (HiLL, arXiv:2604.00698). Both join
    the group; `method.edit_rows grpo_roc_jax.contrib.methods.hill:rewarded` sets their advantages."""

    count: AtLeast1 = 4
    """Hints per problem."""
    rollouts: AtLeast1 = 4
    """Rollouts under each hint."""
    ask: str = "Write a hint without the result for: "
    """Text before the solution that hints are written from."""
    column: str = "solution"
    """Column of the data with the solution; the answer where it is missing."""
    intro: str = "Hint: "
    """Text before a hint."""

    other_prompts = True

    @property
    def extra_rows(self) -> int:
        return self.count * (1 + self.rollouts)

    def next(self, wave: Wave) -> list[RolloutRequest]:
        if wave.number == 1:
            levels = range(1, self.count + 1)
            return [self._writer(wave.problems[index], index, k) for index in failed_places(wave) for k in levels]
        groups = enumerate(wave.groups if wave.number == 2 else ())
        return [
            RolloutRequest(g.problem, index, self.rollouts, 0, Condition(HINT, k), f"\n{self.intro}{text}")
            for index, g in groups
            for k, text in hints_of(g).items()
            if not gives_away(g.problem, text)
        ]

    def _writer(self, problem: Problem, index: int, level: int) -> RolloutRequest:
        solution = problem.column(self.column, problem.answer)
        return RolloutRequest(problem, index, 1, 0, Condition(WRITER, level), f"\n{self.ask}{solution}")

    def merged(self, group: Group, request: RolloutRequest, result: Group) -> Group:
        if request.condition.kind == WRITER:  # its reward is not that of an attempt
            result = replace(result, verdicts=tuple(revalued(v, 0.0) for v in result.verdicts))
        return joined(group, result)


def hints_of(group: Group) -> dict[int, str]:
    """Number -> text of the hints written for a problem."""
    written = [(t.condition.level, i) for i, t in enumerate(group.trajectories) if t.condition.kind == WRITER]
    return {level: own_text(group, i) for level, i in written}


def gives_away(problem: Problem, hint: str) -> bool:
    """Whether a hint is empty or contains the answer as a word; a problem may have no answer to contain."""
    answer = problem.answer.strip()
    named = bool(answer) and re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", hint) is not None
    return named or not hint.strip()


def mixed_probability(rate: float, size: int) -> float:
    """1 - p^G - (1 - p)^G."""
    return 1 - rate**size - (1 - rate) ** size


def hint_reward(rate: float, size: int, reliance: float, *, unhinted: float = 0.0, temperature: float = 0.3) -> float:
    """mixed probability * exp(min(reliance, 0) / temperature); 0 where the hint makes a mixed group no likelier.

    Args:
        rate: Success rate under the hint.
        size: Group size.
        reliance: Mean over correct rollouts of log p(y | q) - log p(y | q, hint), a token's mean; negative when the
            rollout needs the hint.
        unhinted: Success rate without the hint.
        temperature: How fast reliance costs.
    """
    chance = mixed_probability(rate, size)
    known = chance > mixed_probability(unhinted, size)
    return chance * float(np.exp(min(reliance, 0.0) / temperature)) if known else 0.0


# ---- advantages of hints --------------------------------------------------------------------------------------------
# HiLL's advantages: hints against the other hints of a problem, and rollouts under the best of them.
# Source: arXiv:2604.00698. `method.edit_rows grpo_roc_jax.contrib.methods.hill:rewarded` goes with `plan.second
# rival_hints`.


GATE = -1.0
"""Reward of a hint that gives the answer away, and so has no rollouts. A hint whose rollouts were lost gets 0."""


def rewarded(rows: Sequence[TrainRow], groups: Sequence[Group], policy) -> list[TrainRow]:
    """The rows, in groups with written hints, with the advantages of hints and of rollouts under the best of them; the
    other rollouts of these groups get 0. One scoring pass under plain prompts per step."""
    out: list[TrainRow] = []
    plain, first = with_plain_prompts(groups, policy.prompt_ids), 0
    scores = policy.score(policy.trained, plain)
    for group, moved in zip(groups, plain, strict=True):
        group_rows, now = rows[first : first + group.size], scores[first : first + group.size]
        first += group.size
        # The same response after another prompt: its tokens keep their order.
        spans = zip(group_rows, group.trajectories, moved.trajectories, now, strict=True)
        gaps = [float((s[m.policy_mask] - r.logprobs_old[t.policy_mask]).mean()) for r, t, m, s in spans]
        values = hint_advantages(group, np.array(gaps))
        for row, value in zip(group_rows, values if values is not None else [None] * len(group_rows), strict=True):
            filled = row.advantages if value is None else np.full(row.length, value, np.float32)
            out.append(dataclasses.replace(row, advantages=filled))
    return out


def hint_advantages(group: Group, gaps: np.ndarray) -> np.ndarray | None:
    """float64[G]; None for a group without written hints.

    Args:
        group: A group with the conditions `hint_writer:k` and `hint:k`.
        gaps: For each trajectory, the mean of log p(y | q) - log p(y | q, its prompt).
    """
    kinds = np.array([t.condition.kind for t in group.trajectories], object)
    levels = np.array([t.condition.level for t in group.trajectories])
    writers = np.flatnonzero(kinds == WRITER)
    if not len(writers):
        return None
    unhinted = float(group.correct[kinds == ""].mean()) if (kinds == "").any() else 0.0
    tried = [np.flatnonzero((kinds == HINT) & (levels == levels[i])) for i in writers]
    untried = [GATE if gives_away(group.problem, own_text(group, i)) else 0.0 for i in writers]
    pairs = zip(tried, untried, strict=True)
    paid = np.array([_paid(group.correct[r], gaps[r], unhinted) if len(r) else other for r, other in pairs])
    out, best = np.zeros(group.size), tried[int(paid.argmax())]
    out[writers] = z_score(paid)
    if paid.max() > 0:
        out[best] = z_score(group.rewards[best])
    return out


def _paid(correct: np.ndarray, gaps: np.ndarray, unhinted: float) -> float:
    reliance = float(gaps[correct].mean()) if correct.any() else 0.0
    return hint_reward(float(correct.mean()), len(correct), reliance, unhinted=unhinted)
