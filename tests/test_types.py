"""Values made by hand: lists are read as arrays, and what no stage could use is refused where it is made."""

import pickle
from dataclasses import replace as changed

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.types import ARRAYS, TRAIN_ROW_FIELDS, Group, Problem, TrainRow, Trajectory, Turn, Verdict

TRAJECTORY = Trajectory([7, 8, 9], [False, True, True], [0, -0.5, -1], [-1, 3, 3], 1, (), "answer", 0)
ROW = TrainRow([7, 8, 9], [0, 1, 1], [0, -0.5, -1], [0, 1, 1], [0, 0.5, 0.5], [0, 0, 0], [0.0] * 3)
VERDICT = Verdict(1.0, "correct", "1", 1, 0, 1, True, 1)


def paid(turn_rewards):
    """A group of a trajectory of two turns, with rewards by turn."""
    row = changed(TRAJECTORY, turns=(Turn(1, 3, "said"),) * 2)
    return Group(Problem("p", "?", "1", "mine"), (row,), (changed(VERDICT, turn_rewards=turn_rewards),))


def test_lists_and_arrays_of_other_types_become_arrays_of_the_declared_types():
    for value in (pickle.loads(pickle.dumps(TRAJECTORY)), TRAJECTORY, ROW):
        dtypes = TRAIN_ROW_FIELDS if value is ROW else ARRAYS
        arrays = {name: array for name in dtypes if (array := getattr(value, name)) is not None}
        assert {name: array.dtype for name, array in arrays.items()} == {name: dtypes[name] for name in arrays}
        assert value.policy_mask.tolist() == [False, True, True] and value.length == 3
    assert changed(TRAJECTORY, tokens=TRAJECTORY.tokens.astype(np.int64)).tokens.dtype == np.int32
    routed = changed(TRAJECTORY, routes=np.zeros((3, 1, 2), int))
    assert TRAJECTORY.routes is None and routed.routes.dtype == np.int16 and not routed.routes.flags.writeable
    narrow = np.array([0, -0.5, -1], ml_dtypes.bfloat16)
    assert changed(TRAJECTORY, logprobs=narrow).logprobs.tolist() == [0, -0.5, -1]


def test_every_finite_number_is_a_reward_every_whole_one_a_count_and_off_the_mask_nothing_is_read():
    for reward in (1, True, 0.5, np.float32(0.5), np.int64(2), np.bool_(True), np.array(0.5)):
        assert changed(VERDICT, reward=reward).reward == reward
    for reward in (None, np.nan, np.inf, "1.0", np.array([1.0]), 10**400, 1j):
        with pytest.raises((ValueError, TypeError), match=r"Verdict.reward = .*; must be a finite number"):
            changed(VERDICT, reward=reward)
    for count in (1, np.int64(1), np.array(1), jnp.int32(1)):
        assert changed(TRAJECTORY, prompt_length=count, parts=np.array([1, 2])).prompt_length == 1
    assert paid(np.array([0.5, 0.5])).verdicts[0].turn_rewards == (0.5, 0.5)
    assert changed(ROW, weights=[-1, 0, 1]).weights[0] == -1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: g.make_executor(g.RewardConfig()), "config is of type RewardConfig; must be a ToolsConfig"),
        (lambda: changed(TRAJECTORY, tokens=[7, 8, 0.5]), r"Trajectory.tokens has 0.5; .* of int32"),
        (lambda: changed(TRAJECTORY, stop="banana"), "Trajectory.stop = 'banana'; must be one of answer"),
        (lambda: changed(VERDICT, status="right"), "Verdict.status = 'right'; must be one of correct"),
        (lambda: Problem("p", "?", "1", "mine", None), "Problem.extra is None .* must be a mapping, such as"),
        (lambda: changed(TRAJECTORY, tokens=[[7, 8, 9]]), r"Trajectory.tokens is of shape \(1, 3\); must be an array"),
        (lambda: changed(TRAJECTORY, parts=(1, 1)), r"parts = \(1, 1\); must be lengths that add up to the 3 tokens"),
        (lambda: changed(ROW, policy_mask=[0, 1, 1], parts=(2, 1)), "holds a first token, which has no log-prob"),
        (lambda: paid([0.5]), "'p': turn_rewards of verdict 0 has 1 numbers for 2 turns"),
        (lambda: changed(ROW, weights=[0, -0.5, 0]), "TrainRow.weights has -0.5 at token 1"),
        (lambda: paid([0.5, np.nan]), r"Verdict.turn_rewards\[1\] = nan; must be a finite number"),
    ],
)
def test_what_no_stage_could_use_is_refused(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()
