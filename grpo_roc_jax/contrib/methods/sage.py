"""SAGE: hints at a level that each problem carries from visit to visit, or written by the policy from the solution.

Source: arXiv:2602.03143.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_roc_jax.contrib.methods.hints import HINT, WRITER, DataHints
from grpo_roc_jax.method.planning import Conditioning, SecondWave, Wave, failed_places, own_text, problem_rates
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import AtLeast1, kind
from grpo_roc_jax.types import PLAIN, Condition, Group, Problem, RolloutRequest


@kind("hint_level")
class HintLevel(DataHints, Conditioning):
    """A hint level that each problem carries from visit to visit (SAGE light, arXiv:2602.03143)."""

    resumable = helps = False

    def requests(self, index: int, count: int, wave: Wave) -> list[RolloutRequest]:
        problem, level = wave.problems[index], int(problem_rates(wave)["level"][index])
        text = self.text(problem, level)
        return [RolloutRequest(problem, index, count, 0, Condition(HINT, level) if text else PLAIN, text)]

    def next_table(self, uids: Sequence[str], state: AlgoState) -> AlgoState:
        """One level up where the accuracy of the last visit is at most 0.1, one down where it exceeds 0.35."""
        uids = list(dict.fromkeys(uids))
        rows = state.table.get(uids)
        level, accuracy = rows["level"], rows["accuracy"]
        lower = np.where(accuracy > 0.35, np.maximum(level - 1, 0), level)
        moved = np.where(accuracy <= 0.1, np.minimum(level + 1, self.levels), lower)
        return replace(state, table=state.table.put(uids, {"level": moved}))


@kind("write")
class WrittenHints(SecondWave):
    """The whole group again under rising hints that the policy writes from the solution (SAGE, arXiv:2602.03143)."""

    levels: AtLeast1 = 3
    """Highest hint level used."""
    intro: str = "Hint: "
    """Text before the hint."""
    writer_intro: str = "Write a hint of strength {level} of {levels}, without the result, from this solution: "
    """Text before the solution."""
    solution_column: str = "solution"
    """Column of the data with the solution that hints are written from; the answer where it is missing."""

    def next(self, wave: Wave) -> list[RolloutRequest]:
        """Odd waves ask the policy for a hint of the next level, even ones roll out under it."""
        level = (wave.number + 1) // 2
        places = failed_places(wave) if level <= self.levels else []
        if wave.number % 2:
            return [self._writer(wave.problems[index], index, level) for index in places]
        texts = {index: f"\n{self.intro}{wave.notes[index]}" for index in places if index in wave.notes}
        return [
            RolloutRequest(wave.problems[index], index, wave.groups[index].size, 0, Condition(HINT, level), text)
            for index, text in texts.items()
        ]

    def _writer(self, problem: Problem, index: int, level: int) -> RolloutRequest:
        solution = problem.column(self.solution_column, problem.answer)
        intro = self.writer_intro.replace("{level}", str(level)).replace("{levels}", str(self.levels))
        return RolloutRequest(problem, index, 1, 0, Condition(WRITER), f"\n{intro}{solution}")

    def merged(self, group: Group, request: RolloutRequest, result: Group) -> Group:
        return result if request.condition.kind != WRITER and result.correct.any() else group

    def notes(self, requests: Sequence[RolloutRequest], results: Sequence[Group]) -> dict[int, str]:
        """The hints that the policy wrote in a wave."""
        return {
            request.place: own_text(result, 0)
            for request, result in zip(requests, results, strict=True)
            if request.condition.kind == WRITER and result.size
        }
