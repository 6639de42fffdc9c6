"""What the methods with hints share: hints of the data, and what problems failed by every rollout get."""

from grpo_roc_jax.method.planning import SecondWave, Wave, failed_places
from grpo_roc_jax.settings.options import AtLeast1, kind, settings
from grpo_roc_jax.types import Condition, Group, Problem, RolloutRequest


@settings
class Hinted(SecondWave):
    """Hints from a column of the data, weakest first."""

    column: str = "hints"
    """Column of the data with a problem's hints, cumulative, as a list of strings."""
    levels: AtLeast1 = 3
    """Highest hint level used."""
    intro: str = "Hint: "
    """Text before the hints."""

    def next(self, wave: Wave) -> list[RolloutRequest]:
        """Problems that every rollout failed again, under the hints up to the wave's number."""
        requests = []
        for place in failed_places(wave):
            problem = wave.problems[place]
            if wave.number <= min(hint_count(problem, self.column), self.levels):
                text = hint_text(problem, wave.number, self.column, self.intro)
                condition = Condition("hint", wave.number)
                requests.append(RolloutRequest(problem, place, wave.groups[place].size, 0, condition, text))
        return requests

    def merged(self, group: Group, request: RolloutRequest, result: Group) -> Group:
        return result if result.correct.any() else group


@kind("retry")
class Retry(Hinted):
    """The whole group again under rising hints until a rollout succeeds."""


def hint_text(problem: Problem, level: int, column: str, intro: str) -> str:
    """The hints 1..level of the problem, joined."""
    hints = problem.extra.get(column, ())
    hints = [hints] if isinstance(hints, str) else list(hints)
    text = "\n".join(str(h) for h in hints[:level])
    return f"\n{intro}{text}" if text else ""


def hint_count(problem: Problem, column: str) -> int:
    """Number of hints that the problem offers."""
    hints = problem.extra.get(column, ())
    return 1 if isinstance(hints, str) else len(hints)
