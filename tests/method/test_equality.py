"""Rewards are equal or not whatever their unit: rounding is no signal, a small difference of small rewards is one."""

import numpy as np
import pytest

from grpo_roc_jax.method.advantage import flat
from grpo_roc_jax.method.compose import resample_group, train_rows
from grpo_roc_jax.method.features import features
from grpo_roc_jax.method.roc import MaxVariance
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.run.statistics import selection_metrics
from tests.helpers.method_groups import make_group, method
from tests.method.test_advantage import CENTERED

PARTS = np.array([81.3, 0.013, 17.77, 0.5, 9.01, 3.1, 0.7, 8.397], np.float32)
"""They sum to 120.79 in float32, up to the order in which they are added."""


def sums(orders=32, parts=PARTS):
    """float64[orders]: the parts added in float32, each time in another order."""
    rng = np.random.default_rng(0)
    return np.array([np.add.accumulate(rng.permutation(parts), dtype=np.float32)[-1] for _ in range(orders)], float)


def brevity(lengths):
    return 1.0 / np.asarray(lengths, np.float64)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 120.79, 1e6])
def test_equality_does_not_depend_on_the_unit(scale):
    assert np.ptp(sums()) > 1e-6, "otherwise this shows nothing"
    assert flat(scale * sums()) and flat(-scale * sums())
    assert not flat(scale * brevity([8000, 8001]))
    rng = np.random.default_rng(1)
    for _ in range(50):
        rewards = rng.normal(size=6) * rng.choice([1e-7, 1e-5, 1.0]) * rng.choice([1e-2, 1.0], 6)
        rewards += rng.choice([0.0, 1.0, -3.0])
        assert flat(scale * rewards) == flat(rewards)


def test_what_cancels_is_nothing():
    assert flat(np.array([0.1 + 0.2 - 0.3, 0.0, 0.3 - 0.2 - 0.1])) and flat(np.zeros(3)) and flat(np.zeros(0))


def advantages(rewards, advantage, **sections):
    sections = {"resample": {"kind": "none", "drop": "none"}, "advantage": advantage} | sections
    groups = [make_group(rewards, uid="a"), make_group(rewards, uid="b")]
    rows = train_rows(groups, method(len(rewards), **sections), AlgoState(), rng=np.random.default_rng(0))
    return np.array([row.advantages[-1] for row in rows])


TURNS = [{"adjust": ["turns"]}, {"adjust": [{"kind": "turns", "standardize": True}]}]


@pytest.mark.parametrize("advantage", [s for s in CENTERED if "kind" not in s] + TURNS, ids=str)
def test_rounding_gives_no_advantage(advantage):
    rewards = sums(8)
    assert not advantages(rewards, advantage).any()
    assert advantages(np.append(rewards[1:], rewards[0] + 0.1), advantage).any()


def test_a_small_difference_of_small_rewards_is_one():
    values = advantages(brevity([8000, 8050, 8200, 7600]), {"kind": "group", "scale": {"kind": "std", "eps": 0.0}})
    lengths = np.array([8000, 8050, 8200, 7600] * 2)
    assert (np.argsort(values[:4]) == np.argsort(-lengths[:4])).all() and values[:4].std(ddof=1) == pytest.approx(1)


@pytest.mark.parametrize(
    ("rewards", "left"),
    [(sums(4), "equal_rewards"), (brevity([8000, 8001, 8002, 8003]), "kept"), ([0.0] * 4, "equal_rewards")],
)
def test_groups_without_signal_leave(rewards, left):
    group = make_group(rewards)
    selection = resample_group(group, method(4, resample="none"), np.random.default_rng(0))
    assert set(selection.reasons) == {left}
    counted = selection_metrics([group], [selection])
    assert counted["roc/all_correct"] + counted["roc/all_wrong"] == (left == "equal_rewards")


@pytest.mark.parametrize("scale", [1e-9, 1e-4, 1.0, 1e5])
def test_the_subset_of_largest_variance_does_not_depend_on_the_unit(scale):
    rewards = np.array([0.1, 0.9, 0.5, 0.45, 0.2, 1.0, 0.8, 0.15])
    choose = [
        MaxVariance().choose(features(make_group(unit * rewards)), np.zeros(8), 4, np.random.default_rng(0))
        for unit in (1.0, scale)
    ]
    assert choose[0].tolist() == choose[1].tolist() == [0, 1, 5, 7]
