"""No setting of a further method is without effect: each is changed, and what the method makes must differ."""

import pytest

from tests.contrib.methods.kinds import CASES
from tests.helpers.kind_cases import settings_of

SETTINGS = settings_of("contrib")
ELSEWHERE = {
    **{
        ("plan.problems", kind, "pool"): "run.sample draws the pool: test_rounds.py"
        for kind in ("pairs", "uncertainty", "no_positive_resampling")
    },
    **{
        ("plan.budget", "predicted", name): "the fixed groups have one wording: test_budgets.py"
        for name in ("half_life", "sharpness", "prior")
    },
}


@pytest.mark.parametrize(("axis", "kind", "setting"), [s for s in SETTINGS if s not in ELSEWHERE])
def test_setting_changes_something(axis, kind, setting):
    assert CASES.changes(axis, kind, setting)


def test_what_is_seen_elsewhere_exists():
    assert set(ELSEWHERE) <= set(SETTINGS)
