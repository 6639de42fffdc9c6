"""SAGE: hints at a level that each problem carries from visit to visit, or written by the policy from the solution.

Source: arXiv:2602.03143.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_roc_jax.method.family.hints import Hinted, hint_text
from grpo_roc_jax.method.planning import Conditioning, Wave, failed_places, own_text, problem_rates
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import AtLeast1, kind
from grpo_roc_jax.types import PLAIN, Condition, Group, Problem, RolloutRequest


@kind("hint_level")
class HintLevel(Conditioning):
    """A hint level that each problem carries from visit to visit (SAGE light, arXiv:2602.03143)."""

    column: str = "hints"
    """Column of the data with a problem's hints, weakest first, cumulative."""
    levels: AtLeast1 = 3
    """Highest hint level used."""
    intro: str = "Hint: "
    """Text before the hints."""

    def requests(self, place: int, count: int, wave: Wave) -> list[RolloutRequest]:
        problem, level = wave.problems[place], int(problem_rates(wave)["level"][place])
        text = hint_text(problem, level, self.column, self.intro) if level > 0 else ""
        condition = Condition("hint", level) if text else PLAIN
        return [RolloutRequest(problem, place, count, 0, condition, text)]

    def next_table(self, uids: Sequence[str], state: AlgoState) -> AlgoState:
        """Levels one up or down by the accuracy of the last visit."""
        uids = list(dict.fromkeys(uids))
        rows = state.table.get(uids)
        pairs = zip(rows["level"], rows["accuracy"], strict=True)
        moved = [hint_level_step(int(level), accuracy, levels=self.levels) for level, accuracy in pairs]
        return replace(state, table=state.table.put(uids, {"level": np.array(moved, np.float64)}))


@kind("write")
class WrittenHints(Hinted):
    """The whole group again under rising hints that the policy writes from the solution (SAGE, arXiv:2602.03143)."""

    writer_intro: str = "Write a hint of strength {level} of {levels}, without the result, from this solution: "
    """Text before the solution."""
    solution_column: str = "solution"
    """Column of the data with the solution that hints are written from; the answer where it is missing."""

    def next(self, wave: Wave) -> list[RolloutRequest]:
        """Odd waves ask the policy for a hint of the next level, even ones roll out under it."""
        level = (wave.number + 1) // 2
        places = failed_places(wave) if level <= self.levels else []
        if wave.number % 2:
            return [self._writer(wave.problems[place], place, level) for place in places]
        condition = Condition("hint", level)
        return [
            RolloutRequest(
                wave.problems[place], place, wave.groups[place].size, 0, condition, f"\n{self.intro}{wave.notes[place]}"
            )
            for place in places
            if place in wave.notes
        ]

    def _writer(self, problem: Problem, place: int, level: int) -> RolloutRequest:
        solution = problem.extra.get(self.solution_column, problem.answer)
        intro = self.writer_intro.replace("{level}", str(level)).replace("{levels}", str(self.levels))
        return RolloutRequest(problem, place, 1, 0, Condition("hint_writer"), f"\n{intro}{solution}")

    def merged(self, group: Group, request: RolloutRequest, result: Group) -> Group:
        return group if request.condition.kind == "hint_writer" else super().merged(group, request, result)


def written_hints(requests: Sequence[RolloutRequest], results: Sequence[Group]) -> dict[int, str]:
    """Place -> the hint that the policy wrote for its problem in this wave."""
    return {
        request.place: own_text(result, 0)
        for request, result in zip(requests, results, strict=True)
        if request.condition.kind == "hint_writer" and result.size
    }


def hint_level_step(level: int, accuracy: float, low: float = 0.1, high: float = 0.35, levels: int = 3) -> int:
    """One level up where accuracy <= low, one down where it exceeds high, within 0 (no hint) .. levels (SAGE).

    Source: arXiv:2602.03143, light variant.
    """
    if accuracy <= low:
        return min(level + 1, levels)
    return max(level - 1, 0) if accuracy > high else level
