"""HiLL: several written hints for each problem that every rollout failed, paid for what rollouts make of them.

Source: arXiv:2604.00698. The paper trains a second model to write. Here the policy writes its own hints, a stand-in for
that model. `run.hint_writer`, as `method.edit_rows`, computes the rewards of the hints, for which it scores the hinted
responses under the plain prompt.
"""

import re
from dataclasses import replace

import numpy as np

from grpo_roc_jax.method.edit import joined, revalued
from grpo_roc_jax.method.planning import SecondWave, Wave, failed_places, own_text
from grpo_roc_jax.settings.options import AtLeast1, kind
from grpo_roc_jax.types import Condition, Group, Problem, RolloutRequest


@kind("rival_hints")
class RivalHints(SecondWave):
    """Hints that the policy writes for failed problems, and rollouts under each (HiLL, arXiv:2604.00698). Both join
    the group; `method.edit_rows grpo_roc_jax.run.hint_writer:rewarded` sets their advantages."""

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

    @property
    def extra_rows(self) -> int:
        return self.count * (1 + self.rollouts)

    def next(self, wave: Wave) -> list[RolloutRequest]:
        if wave.number == 1:
            levels = range(1, self.count + 1)
            return [self._writer(wave.problems[place], place, k) for place in failed_places(wave) for k in levels]
        groups = enumerate(wave.groups if wave.number == 2 else ())
        return [
            RolloutRequest(g.problem, place, self.rollouts, 0, Condition("hint", k), f"\n{self.intro}{text}")
            for place, g in groups
            for k, text in hints_of(g).items()
            if not gives_away(g.problem, text)
        ]

    def _writer(self, problem: Problem, place: int, level: int) -> RolloutRequest:
        solution = problem.extra.get(self.column, problem.answer)
        return RolloutRequest(problem, place, 1, 0, Condition("hint_writer", level), f"\n{self.ask}{solution}")

    def merged(self, group: Group, request: RolloutRequest, result: Group) -> Group:
        if request.condition.kind == "hint_writer":  # its reward is not that of an attempt
            result = replace(result, verdicts=tuple(revalued(v, 0.0) for v in result.verdicts))
        return joined(group, result)


def hints_of(group: Group) -> dict[int, str]:
    """Number -> text of the hints written for a problem."""
    written = [(t.condition.level, i) for i, t in enumerate(group.trajectories) if t.condition.kind == "hint_writer"]
    return {level: own_text(group, i) for level, i in written}


def gives_away(problem: Problem, hint: str) -> bool:
    """Whether a hint is empty or contains the answer as a word."""
    return not hint.strip() or re.search(rf"(?<!\w){re.escape(problem.answer)}(?!\w)", hint) is not None


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
