"""Job screening: the reward of a structured verdict about an application, criterion by criterion.

Source: arXiv:2511.16073, whose released code has these numbers. Its fourth criterion, the share of the required skills
in the reference evaluation, does not read the reply and so is the same for all rollouts of a problem; it is left out.
"""

import re
from collections.abc import Callable, Sequence

from grpo_roc_jax.reward.config import RewardConfig, RewardFunction
from grpo_roc_jax.reward.graded import GradedReward, final_answers
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.settings.options import kind
from grpo_roc_jax.types import Problem, Trajectory

SELECTS = frozenset({"SELECTED", "APPROVE", "CONSIDER", "STRONGLY_CONSIDER"})
STATUS = re.compile(r"[A-Za-z_]+")
SCORE = re.compile(r"(?<![\d.])-?\d{1,6}")
DECISIONS = {(True, True): 2.0, (False, True): -2.0, (False, False): 0.0, (True, False): -1.0}
"""Reward by (selected, should be selected)."""


@kind("screening")
class Screening(GradedReward):
    """0.4 status + 0.2 score + 0.2 experience of a verdict such as `SELECTED 75` or `{"status": "SELECTED", "score":
    75}`. A reply without a verdict counts as `REJECTED 0` (arXiv:2511.16073)."""

    column: str = "years"
    """Column of the data with the applicant's years of experience, for the stand-in of `judge`."""
    judge: str = ""
    """Function of (problem, score) -> -1..1: whether the score fits the applicant's experience, such as a call of a
    language model. Empty: bands of the years, a stand-in without judgement; 0 for problems without the column."""

    def function(self, config: RewardConfig) -> RewardFunction:
        judge: Callable[[Problem, int], float] = resolve("reward.functions.screening.judge", self.judge) or self.banded

        def pay(problem: Problem, trajectories: Sequence[Trajectory]) -> list[float]:
            expected, right = verdict_in(problem.answer)
            out = []
            for selected, score in map(verdict_in, final_answers(trajectories, config)):
                close = max(-1.0, 1 - abs(score - right) / 50)
                out.append(0.4 * DECISIONS[selected, expected] + 0.2 * close + 0.2 * judge(problem, score))
            return out

        return pay

    def banded(self, problem: Problem, score: int) -> float:
        """The stand-in for a judge: bands of the years of experience."""
        years = problem.extra.get(self.column)
        return 0.0 if years is None else experience(score, float(years))


def verdict_in(text: str) -> tuple[bool, int]:
    """(selected, score) of a verdict; (False, 0) for anything else."""
    score = SCORE.search(text)
    if score is None:
        return False, 0
    return any(word.upper() in SELECTS for word in STATUS.findall(text)), int(score.group())


def experience(score: int, years: float) -> float:
    """1 for a score within the band of these years, -1 for one far outside, else 0."""
    if (years >= 7 and score >= 75) or (3 <= years <= 6 and 50 <= score < 80) or (years <= 2 and score < 50):
        return 1.0
    return -1.0 if (score > 85 and years <= 2) or (score < 40 and years >= 5) else 0.0
