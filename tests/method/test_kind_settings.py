"""Each setting of each kind matters, numbers have bounds, and success is what the verdict says."""

import pytest

from grpo_roc_jax.settings.cli import ConfigError
from tests.helpers.kind_cases import KindCases, kinds_of, settings_of

CASES, SETTINGS, KINDS = KindCases(), settings_of("method"), kinds_of("method")
ELSEWHERE = {("plan.condition", "reward_tokens", name) for name in ("separation", "evaluate")}
"""Read in evaluation: tests/test_reward_tokens.py."""
UNBOUNDED = ["tool_errors.coef"]
FROM_ZERO = ["ddof", "min_positive", "min_negative", "sync_every"]
"""Whole numbers that may be 0; the others begin at 1."""
BY_VERDICT = {("resample", "roc"), ("advantage", "pass_at_k"), ("advantage.adjust", "self_teacher")}
"""Kinds that tell successes from failures. The others know rewards only."""
assert set(SETTINGS) >= ELSEWHERE and set(KINDS) >= BY_VERDICT


@pytest.mark.parametrize(("axis", "kind", "setting"), [s for s in SETTINGS if s not in ELSEWHERE])
def test_setting_changes_something(axis, kind, setting):
    assert CASES.changes(axis, kind, setting)


def test_the_observer_is_deterministic():
    assert list(CASES.observed(CASES.made("resample", "roc"))) == CASES.base("resample", "roc")


@pytest.mark.parametrize("setting", [s for s, default in SETTINGS.items() if type(default) in (int, float)], ids=str)
def test_numbers_are_bounded(setting, settings=SETTINGS, cases=CASES, unbounded=UNBOUNDED, from_zero=FROM_ZERO):
    """Negative ones are refused, and 0 where whole numbers begin at 1."""
    axis, kind, name = setting
    if f"{kind}.{name}" in unbounded:
        cases.made(axis, kind, **{name: -0.1})
        return
    is_int = isinstance(settings[setting], int)
    with pytest.raises(ConfigError, match=name):
        cases.made(axis, kind, **{name: (-1 if name in from_zero else 0) if is_int else -0.1})


@pytest.mark.parametrize(("axis", "kind"), KINDS)
def test_a_success_is_what_the_verdict_says(axis, kind):
    """With the same pay, verdicts matter to kinds that know of success alone; next to 0 no threshold lies."""
    more = {"shows": "success"} if kind == "self_teacher" else {}
    assert CASES.reads(axis, kind, **more) == ((axis, kind) in BY_VERDICT, False)
