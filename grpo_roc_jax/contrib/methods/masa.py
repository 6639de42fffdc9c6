"""MASA: the policy predicts how well it will do, and its rollouts show whether the prediction was right.

Source: arXiv:2510.03259. Not included are its efficient variant, which skips problems by their predictions, and the
supervised rounds on the best predictions.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import field, replace

import numpy as np

from grpo_roc_jax.method.advantage import Estimator, GroupRelative
from grpo_roc_jax.method.edit import joined, revalued
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.planning import SecondWave, Wave, own_text
from grpo_roc_jax.settings.options import AtLeast1, kind
from grpo_roc_jax.types import Condition, Group, RolloutRequest, condition_kind, traits_of

PREDICTION = condition_kind("prediction", attempt=False)
"""Condition of a prediction of how well the policy will do."""

OUT_OF = 8
"""Attempts that a predicted pass count is out of."""


@kind("predict")
class Predict(SecondWave):
    """Predictions of the notions that a solution needs, of the passes of 8 attempts and of a solution's tokens join the
    group, each scored by the group's rollouts (MASA, arXiv:2510.03259; with `advantage: by_role`)."""

    count: AtLeast1 = 16
    """Predictions requested per problem."""
    ask: str = "Do not solve it. Which notions does it need? Passes of 8? Tokens?"
    """Text after the problem. Of the reply, words of three letters and more are notions, the first number is the
    passes, the second the tokens."""

    @property
    def extra_rows(self) -> int:
        return self.count

    def next(self, wave: Wave) -> list[RolloutRequest]:
        places = [index for index, group in enumerate(wave.groups) if group.size] if wave.number == 1 else []
        condition = Condition(PREDICTION)
        return [RolloutRequest(wave.problems[i], i, self.count, 0, condition, f"\n{self.ask}") for i in places]

    def merged(self, group: Group, request: RolloutRequest, result: Group) -> Group:
        scores = [prediction_score(own_text(result, i), group) for i in range(result.size)]
        pairs = zip(result.verdicts, scores, strict=True)
        verdicts = tuple(revalued(v, score) for v, score in pairs)
        return joined(group, replace(result, verdicts=verdicts))


def prediction_score(text: str, group: Group) -> float:
    """Mean of the three scores of a prediction, given the rollouts that it predicts."""
    words = [notions(own_text(group, i)) for i in range(group.size)]
    correct = group.correct.tolist()
    seen = [
        Counter(w for response_words, c in zip(words, correct, strict=True) if c == side for w in response_words)
        for side in (1, 0)
    ]
    numbers = [min(int(digits), 10**6) for digits in re.findall(r"\d{1,9}", text)[:2]]
    lengths = [int(np.count_nonzero(t.policy_mask)) for t, c in zip(group.trajectories, correct, strict=True) if c]
    passes = pass_score(numbers[0] / OUT_OF, float(group.correct.mean())) if numbers else 0.0
    length = length_score(numbers[1], lengths) if len(numbers) > 1 else 0.0
    return (notion_share(notions(text), *seen) + passes + length) / 3


def notions(text: str) -> set[str]:
    """The words of at least three letters."""
    return set(re.findall(r"[^\W\d_]{3,}", text.lower()))


def notion_share(predicted: set[str], in_correct: Counter, in_wrong: Counter) -> float:
    """Share of the predicted notions that occur more often in correct than in wrong responses."""
    return float(np.mean([in_correct[n] > in_wrong[n] for n in sorted(predicted)])) if predicted else 0.0


def pass_score(predicted: float, actual: float) -> float:
    """0.01^|predicted - actual| for two success rates."""
    return 0.01 ** abs(predicted - actual)


def length_score(predicted: float, correct_lengths: Sequence[int]) -> float:
    """1 strictly between the shortest and the longest correct response, else 0."""
    return float(bool(correct_lengths) and min(correct_lengths) < predicted < max(correct_lengths))


# ---- advantages by role ---------------------------------------------------------------------------------------------
# Advantages within roles: one policy solves problems and writes something else, each with a reward of its own.


@kind("by_role")
class ByRole(Estimator):
    """An estimate for the attempts of a group and one for each kind of other trajectory in it, such as predictions
    (MASA, arXiv:2510.03259) or hints (HiLL, arXiv:2604.00698)."""

    of: GroupRelative = field(default_factory=GroupRelative)
    """The estimate of one role."""

    def estimate(self, batch: MethodBatch) -> list[np.ndarray]:
        roles = [
            np.array(["" if traits_of(c).attempt else c for c in features.conditions]) for features in batch.features
        ]
        out = [np.zeros(features.size) for features in batch.features]
        for role in sorted({role for row in roles for role in row.tolist()}):
            members = [np.flatnonzero(row == role) for row in roles]
            for total, rows, values in zip(out, members, self.of.estimate(batch.only(members)), strict=True):
                total[rows] = values
        return out
