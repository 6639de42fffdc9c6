"""ExPO: the answer is shown, the explanation trained on. Source: arXiv:2507.02834."""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.method.edit import take_trajectories
from grpo_roc_jax.method.planning import SecondWave, Wave, failed_places
from grpo_roc_jax.settings.options import AtLeast1, NotNegative, kind
from grpo_roc_jax.types import Condition, Group, RolloutRequest, condition_kind

EXPLANATION = condition_kind("explanation", moves=True)
"""Condition of rollouts that saw the answer."""


@kind("explain")
class Explain(SecondWave):
    """Explanations of the shown answer, trained as supervised rows under the plain prompt (ExPO, arXiv:2507.02834)."""

    intro: str = "Explain how to arrive at the answer "
    """Text before the answer."""
    count: AtLeast1 = 1
    """Explanations requested per problem."""
    weight: NotNegative = 0.1
    """Weight of an explanation's mean log-likelihood at step 0, falling to 0 over `steps`."""
    steps: AtLeast1 = 100
    """Steps over which explanations fade."""

    other_prompts = True

    @property
    def extra_rows(self) -> int:
        return self.count

    def next(self, wave: Wave) -> list[RolloutRequest]:
        if wave.number > 1 or not self.supervised_weight(wave.state.step):
            return []
        problems = {index: wave.problems[index] for index in failed_places(wave)}
        return [
            RolloutRequest(problem, index, self.count, 0, Condition(EXPLANATION), f"\n{self.intro}{problem.answer}")
            for index, problem in problems.items()
        ]

    def supervised_weight(self, step: int) -> float:
        return self.weight * max(0.0, 1 - step / self.steps)

    def supervised(self, requests: Sequence[RolloutRequest], results: Sequence[Group]) -> list[Group]:
        """The successful rollouts of a wave that saw the answer; others would teach errors."""
        pairs = zip(requests, results, strict=True)
        shown = [result for request, result in pairs if request.condition.kind == EXPLANATION and result.correct.any()]
        return [take_trajectories(result, np.flatnonzero(result.correct)) for result in shown]
