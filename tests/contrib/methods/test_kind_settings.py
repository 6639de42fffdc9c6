"""No setting of a further method is without effect: each is changed, and what the method makes must differ. No number
is without bounds, but for a few."""

import pytest

from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.settings.options import default_of, fields_of
from tests.contrib.methods.kinds import CASES
from tests.helpers.kind_cases import AXES, settings_of

SETTINGS = settings_of("contrib")
DEFAULTS = {(axis, kind, name): default_of(fields_of(AXES[axis].kinds[kind])[name]) for axis, kind, name in SETTINGS}
UNBOUNDED = """
skill_bonus.bonus dynamic_length.alpha outcome.negative soft.tau soft.above soft.below unlikeliness.beta beta.low
virtual_max.reward virtual_std.reward rebel.eta refine.below learned_length.strength
""".split()  # noqa: SIM905 (shorter than a list)
FROM_ZERO = "ddof remembered min_positive min_negative".split()  # noqa: SIM905
"""Whole numbers that may be 0, of a kind at least; the others begin at 1."""
ELSEWHERE = {
    **{
        ("plan.problems", kind, "pool"): "run.sample draws the pool: test_rounds.py"
        for kind in ("pairs", "uncertainty", "no_positive_resampling")
    },
    ("plan.problems", "pairs", "group"): "the fixed rates are no bounds of it: test_budgets.py",
    **{
        ("plan.budget", "predicted", name): "the fixed groups have one wording: test_budgets.py"
        for name in ("half_life", "sharpness", "prior")
    },
}


@pytest.mark.parametrize(("axis", "kind", "setting"), [s for s in SETTINGS if s not in ELSEWHERE])
def test_setting_changes_something(axis, kind, setting):
    assert CASES.changes(axis, kind, setting)


@pytest.mark.parametrize(
    ("axis", "kind", "setting"), [s for s, default in DEFAULTS.items() if type(default) in (int, float)]
)
def test_numbers_are_bounded(axis, kind, setting):
    """Negative ones are refused, and 0 where whole numbers begin at 1."""
    if f"{kind}.{setting}" in UNBOUNDED:
        CASES.made(axis, kind, **{setting: -0.1})
        return
    is_int = isinstance(DEFAULTS[axis, kind, setting], int)
    with pytest.raises(ConfigError, match=setting):
        CASES.made(axis, kind, **{setting: (-1 if setting in FROM_ZERO else 0) if is_int else -0.1})


def test_what_is_seen_elsewhere_exists():
    assert set(ELSEWHERE) <= set(SETTINGS)
