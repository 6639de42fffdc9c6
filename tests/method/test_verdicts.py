"""Success is what the verdict says: every kind of a method gets wrong rollouts that were paid and right ones that were
not, and must treat them by their verdicts. `tests/contrib/methods` does the same for the kinds of further methods."""

import pytest

from tests.helpers.kind_cases import CONTEXT, KindCases, kinds_of
from tests.helpers.verdict_groups import changes_with_the_sign, knows_success

CASES = KindCases(context=CONTEXT | {("advantage.adjust", "self_teacher"): {"shows": "success"}})
BY_VERDICT = {
    ("resample", "roc"),
    ("advantage", "pass_at_k"),
    ("advantage.adjust", "self_teacher"),
}
"""Kinds that tell successes from failures. The others know rewards only."""


@pytest.mark.parametrize(("axis", "kind"), kinds_of("method"))
def test_a_success_is_what_the_verdict_says(axis, kind):
    """With the same pay, other verdicts change what the kinds do that know of success, and nothing that others do."""
    assert knows_success(CASES, CASES.made(axis, kind)) == ((axis, kind) in BY_VERDICT)


@pytest.mark.parametrize(("axis", "kind"), kinds_of("method"))
def test_no_kind_goes_by_the_sign_of_a_reward(axis, kind):
    """Next to 0 a little more or less pay changes little: no threshold lies there."""
    assert not changes_with_the_sign(CASES, CASES.made(axis, kind))


def test_what_is_listed_exists():
    assert set(kinds_of("method")) >= BY_VERDICT
