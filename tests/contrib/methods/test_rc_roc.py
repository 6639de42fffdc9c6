"""RC-RoC: selection under reward tokens."""

from grpo_roc_jax.method.roc import ResampleOnCorrect
from tests.helpers.method_groups import make_group
from tests.method import test_roc as core
from tests.method.test_roc import run, selector

LOW, HIGH = "low_reward", "high_reward"


def test_conditions():
    """Successes under the low reward token: ranked with the others, after them, or with places of their own."""
    group = make_group([1] * 4 + [0] * 4, errors=[0, 0, 1, 1, 0, 0, 0, 0], condition=[LOW, LOW, HIGH, HIGH] * 2)
    for settings, expected in (
        ({"kind": "roc"}, {0, 1}),
        ({"kind": "rc_roc"}, {2, 3}),
        ({"kind": "rc_roc", "conditions": "stratify"}, {0, 2}),
    ):
        assert set(run(group, 4, **settings).indices.tolist()) & {0, 1, 2, 3} == expected
    # Two places for five and one: shares of 1.67 and 0.33, and the larger remainder gets the second place.
    group = make_group([1] * 6 + [0] * 2, condition=[LOW] * 5 + [HIGH] + [LOW] * 2)
    assert run(group, 4, kind="rc_roc", conditions="stratify").indices.tolist() == [0, 1, 6, 7]


def test_the_quota_is_decided_as_in_roc_unless_conditions_have_places_of_their_own():
    assert selector(kind="rc_roc").quota_decided(16, 15, 1, 16) == ResampleOnCorrect().quota_decided(16, 15, 1, 16)
    assert not selector(kind="rc_roc", conditions="stratify").quota_decided(16, 16, 1, 16)


def test_short_and_full_groups():
    core.test_short_and_full_groups("rc_roc")
