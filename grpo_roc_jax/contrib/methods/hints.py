"""Code that the methods with hints share: hints from the data, and a second wave for problems that every rollout
failed."""

from grpo_roc_jax.method.planning import SecondWave, Wave, failed_places
from grpo_roc_jax.settings.options import AtLeast1, kind, settings
from grpo_roc_jax.types import Condition, Group, Problem, RolloutRequest, condition_kind

HINT = condition_kind("hint", helped=True, moves=True, optional=True)
"""Condition of rollouts under a hint; the level is its number."""

WRITER = condition_kind("hint_writer", attempt=False)
"""Condition of a request to write a hint, from the solution."""


@settings
class DataHints:
    """Hints from a column of the data, weakest first."""

    column: str = "hints"
    """Column of the data with a problem's hints, cumulative, as a list of strings."""
    levels: AtLeast1 = 3
    """Highest hint level used."""
    intro: str = "Hint: "
    """Text before the hints."""

    def hints(self, problem: Problem) -> list[str]:
        """All hints that the problem offers."""
        return problem.listed(self.column)

    def text(self, problem: Problem, level: int) -> str:
        """The hints 1..level of the problem, joined; empty without any."""
        text = "\n".join(map(str, self.hints(problem)[:level]))
        return f"\n{self.intro}{text}" if text else ""


@settings
class Hinted(DataHints, SecondWave):
    """Problems that every rollout failed again, under the hints up to the wave's number."""

    def next(self, wave: Wave) -> list[RolloutRequest]:
        requests = []
        for index in failed_places(wave):
            problem = wave.problems[index]
            if wave.number <= min(len(self.hints(problem)), self.levels):
                condition, text = Condition(HINT, wave.number), self.text(problem, wave.number)
                requests.append(RolloutRequest(problem, index, wave.groups[index].size, 0, condition, text))
        return requests


@kind("retry")
class Retry(Hinted):
    """The whole group again under rising hints until a rollout succeeds: a variant of SAGE (arXiv:2602.03143) with the
    hints of the data."""

    def merged(self, group: Group, request: RolloutRequest, result: Group) -> Group:
        return result if result.correct.any() else group
