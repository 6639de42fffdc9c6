"""No setting without effect: each setting of each kind is changed, and something that the method makes must differ.

A setting that is read elsewhere is named in `ELSEWHERE` with the test that sees it. `tests/contrib/methods` does the
same for the kinds of further methods.
"""

import pytest

from grpo_roc_jax.method.weights import WeightsConfig
from grpo_roc_jax.settings.options import fields_of
from tests.helpers.kind_cases import KindCases, settings_of

CASES, SETTINGS = KindCases(), settings_of("method")
ELSEWHERE = {
    ("plan.condition", "reward_tokens", "separation"): "evaluate.check_before_training: tests/test_reward_tokens.py",
    ("plan.condition", "reward_tokens", "evaluate"): "evaluate.prompt_end: tests/test_reward_tokens.py",
}


@pytest.mark.parametrize(("axis", "kind", "setting"), [s for s in SETTINGS if s not in ELSEWHERE])
def test_setting_changes_something(axis, kind, setting):
    assert CASES.changes(axis, kind, setting)


def test_the_observer_is_deterministic():
    assert list(CASES.observed(CASES.made("resample", "roc"))) == CASES.base("resample", "roc")


def test_what_is_seen_elsewhere_exists():
    assert set(ELSEWHERE) <= set(SETTINGS)
    assert {"normalizer", "masks", "factors"} == set(fields_of(WeightsConfig)), "each is an axis here"
