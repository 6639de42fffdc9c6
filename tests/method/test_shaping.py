"""Reward maps against the vectors of the family's specification, and the chain of the config."""

import numpy as np
import pytest

from grpo_roc_jax.method.features import features
from grpo_roc_jax.method.shaping import prompt_suffix, shape_rewards
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import given
from tests.helpers.method_groups import make_group, method


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(actual, expected, atol=atol)


def shaped(groups, *steps, state=None):
    return shape_rewards([features(group) for group in groups], method(shaping=steps).shaping, state or AlgoState())


def one(rewards, kind, *, settings=None, **group):
    """Rewards of one group after one step; further keywords make the group."""
    return shaped([make_group(rewards, **group)], {"kind": kind, **(settings or {})})[0]


def test_overlong():
    close(one([0] * 5, "overlong", lengths=[1000, 16384, 18432, 20480, 20481]), [0, 0, -0.5, -1, -1])


def test_surrogate_length():
    """Without an answer the length term counts where it is below 0."""
    lengths, channels = [0, 25, 50, 75, 100, 50, 100], {"format": [0, 0, 0.5, 0, 0, 0, 0]}
    answers = [1] * 5 + [0] * 2
    paid = one([0] * 7, "surrogate", settings={"length": 100}, lengths=lengths, channels=channels, answers=answers)
    close(paid, [0, 0.75, 1.5, 0.5, -1, 0, -1])


def test_budget():
    step = method(shaping=["budget"]).shaping[0]
    assert [int(step.tokens(s)) for s in (0, 49, 50, 100, 400)] == [256, 256, 217, 184, 69]
    assert step.tokens(10**6) == 1.0
    near = {"start": 200, "weights": [0, 1, 0]}
    close(one([0] * 6, "budget", settings=near, lengths=[0, 100, 200, 300, 400, 500]), [0, 0.5, 1, 0.5, 0, 0])


# --- the chain -------------------------------------------------------------------------------------------------------


def test_no_step_changes_nothing():
    close(shaped([make_group([1, 0.5])])[0], [1, 0.5])


def test_budget_step_reads_the_training_step():
    group = make_group([1, 0], lengths=[4, 4])
    budget = {"kind": "budget", "start": 4, "decay": 0.5, "every": 1}
    early, late = (shaped([group], budget, state=AlgoState(step=step))[0] for step in (0, 1))
    close(early, [1.0, 0.4])
    close(late, [0.7, 0.1])


def test_the_prompt_names_the_budget():
    """Train Long, Think Short: the prompt names the budget that the reward is about to use."""
    steps = method(shaping=["overlong", {"kind": "budget", "tell": "{budget} tokens"}]).shaping
    assert [prompt_suffix(steps, step) for step in (0, 50)] == ["\n256 tokens", "\n217 tokens"]
    assert prompt_suffix(method(shaping=["budget"]).shaping, 0) == ""


def test_custom_map_and_its_contract():
    group = make_group([1, 0])
    custom = {"kind": "custom", "function": "mine"}
    with given({"mine": lambda rewards, features, state: rewards + features.lengths}):
        close(shaped([group], custom)[0], [4, 3])
    with (
        given({"mine": lambda rewards, features, state: 1.0}),
        pytest.raises(ValueError, match=r"shaping custom returned shape \(\)"),
    ):
        shaped([group], custom)
