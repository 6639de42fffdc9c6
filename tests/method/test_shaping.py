"""Reward maps against the vectors of the family's specification, and the chain of the config."""

import pytest

from grpo_roc_jax.method.features import features
from grpo_roc_jax.method.shaping import shape_rewards
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import given
from tests.helpers.method_groups import close, make_group, method


def shaped(groups, *steps, state=None):
    return shape_rewards([features(group) for group in groups], method(shaping=steps).shaping, state or AlgoState())


def rewards_of(rewards, kind, *, settings=None, **group):
    """Rewards of one group after one step; further keywords make the group."""
    return shaped([make_group(rewards, **group)], {"kind": kind, **(settings or {})})[0]


def test_overlong():
    close(rewards_of([0] * 5, "overlong", lengths=[1000, 16384, 18432, 20480, 20481]), [0, 0, -0.5, -1, -1])


def test_custom_map_and_its_contract():
    group = make_group([1, 0.5])
    custom = {"kind": "custom", "function": "mine"}
    close(shaped([group])[0], [1, 0.5])
    with given({"mine": lambda rewards, features, state: rewards + features.lengths}):
        close(shaped([group], custom)[0], [4, 3.5])
    with (
        given({"mine": lambda rewards, features, state: 1.0}),
        pytest.raises(ValueError, match=r"shaping custom returned shape \(\)"),
    ):
        shaped([group], custom)
