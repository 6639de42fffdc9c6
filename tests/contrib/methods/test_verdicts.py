"""Success is what the verdict says, for the kinds of further methods too."""

import dataclasses

import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.xrpo import solutions
from grpo_roc_jax.method.planning import best_text
from grpo_roc_jax.types import Turn
from tests.contrib.methods.kinds import CASES as SETTINGS_CASES
from tests.helpers.kind_cases import kinds_of
from tests.helpers.method_groups import shaped
from tests.helpers.verdict_groups import changes_with_the_sign, knows_success, wrongly_paid

CASES = dataclasses.replace(
    SETTINGS_CASES,
    context=SETTINGS_CASES.context
    | {
        ("advantage.scale", "beta"): {"low": -1.0, "high": 2.0},
        ("plan.problems", "no_positive_resampling"): {"solved": 0.8},
    },
)
BY_VERDICT = {
    "plan.problems": {"pairs", "uncertainty", "no_positive_resampling"},
    "plan.budget": {"knapsack", "predicted"},
    "plan.condition": {"hint_level"},
    "plan.second": {"retry", "scaffold", "guide", "explain", "draft", "examples", "feedback", "value", "refine"}
    | {"write", "rival_hints", "predict"},
    "resample": {"rc_roc"},
    "shaping": {"dynamic_length", "outcome", "posterior", "quality", "serial", "skill_bonus", "staged", "budget"}
    | {"unlikeliness", "win_rate"},
    "advantage": {"disco", "drpo", "m_grpo"},
    "advantage.baseline": {"tracker", "shrunk"},
    "advantage.adjust": {"focal", "novelty", "truncation_mask"},
    "weights.factors": {"repetition"},
}
"""Kinds that tell successes from failures. The others know rewards only."""


@pytest.mark.parametrize(("axis", "kind"), kinds_of("contrib"))
def test_a_success_is_what_the_verdict_says(axis, kind):
    """With the same pay, other verdicts change what the kinds do that know of success, and nothing that others do."""
    assert knows_success(CASES, CASES.made(axis, kind)) == (kind in BY_VERDICT.get(axis, ()))


@pytest.mark.parametrize(("axis", "kind"), kinds_of("contrib"))
def test_no_kind_goes_by_the_sign_of_a_reward(axis, kind):
    """Next to 0 a little more or less pay changes little: no threshold lies there."""
    assert not changes_with_the_sign(CASES, CASES.made(axis, kind))


def test_what_is_listed_exists():
    assert {(axis, kind) for axis, kinds in BY_VERDICT.items() for kind in kinds} <= set(kinds_of("contrib"))


def test_quality_and_likelihood_pay_for_successes_only():
    quality = wrongly_paid(channels={"quality": [0.5, 1.0, 1.0, 1.0]})
    np.testing.assert_allclose(shaped(quality, "quality", weight=0.3), [0.15, 0.25, 1.0, 0.0])
    likely = wrongly_paid(logprobs=[-3.0, -1.0, -2.0, -4.0])
    np.testing.assert_allclose(shaped(likely, "unlikeliness", beta=0.25), [0, 0.25, 1 - 0.25 * 2 / 4, 0])


def test_what_is_shown_as_a_solution_is_right():
    """A wrong rollout that earned more than the right one is no example, and no draft."""
    group = wrongly_paid()
    verdicts = tuple(dataclasses.replace(v, reward=r) for v, r in zip(group.verdicts, (0, 0.5, 0.25, 0), strict=True))
    texts = [dataclasses.replace(t, turns=(Turn(2, 5, f"text {t.sample}"),)) for t in group.trajectories]
    group = dataclasses.replace(group, verdicts=verdicts, trajectories=tuple(texts))
    assert best_text(group) == "text 2"
    assert solutions([group]) == {group.problem.prompt: "text 2"}
