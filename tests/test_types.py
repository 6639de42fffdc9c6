"""Values made by hand: lists are read as arrays, and what no stage could use is refused where it is made."""

import dataclasses
import pickle

import numpy as np
import pytest

from grpo_roc_jax.engine.protocol import RunOptions
from grpo_roc_jax.types import ARRAYS, TRAIN_ROW_FIELDS, Problem, ToolResult, TrainRow, Trajectory, Verdict

TRAJECTORY = Trajectory([7, 8, 9], [False, True, True], [0, -0.5, -1], [-1, 3, 3], 1, (), "answer", 0)
ROW = TrainRow([7, 8, 9], [0, 1, 1], [0, -0.5, -1], [0, 1, 1], [0, 0.5, 0.5], [0, 0, 0], [0.0] * 3)
VERDICT = Verdict(1.0, "correct", "1", 1, 0, 1, True, 1)


def test_lists_and_arrays_of_other_types_become_arrays_of_the_declared_types():
    copied = pickle.loads(pickle.dumps(TRAJECTORY))
    for value, dtypes in ((TRAJECTORY, ARRAYS), (copied, ARRAYS), (ROW, TRAIN_ROW_FIELDS)):
        arrays = {name: array for name in dtypes if (array := getattr(value, name)) is not None}
        assert {name: array.dtype for name, array in arrays.items()} == {name: dtypes[name] for name in arrays}
        assert value.policy_mask.tolist() == [False, True, True] and value.length == 3
    assert dataclasses.replace(TRAJECTORY, tokens=TRAJECTORY.tokens.astype(np.int64)).tokens.dtype == np.int32
    routed = dataclasses.replace(TRAJECTORY, routes=np.zeros((3, 1, 2), int))
    assert TRAJECTORY.routes is None and routed.routes.dtype == np.int16 and not routed.routes.flags.writeable
    tokens = np.arange(3, dtype=np.int32)
    assert dataclasses.replace(ROW, tokens=tokens).tokens is tokens, "what is right already is not copied"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dataclasses.replace(TRAJECTORY, tokens=[7, 8, 0.5]), r"Trajectory.tokens has 0.5; .* of int32"),
        (lambda: dataclasses.replace(TRAJECTORY, policy_mask=[0, 1, 2]), r"Trajectory.policy_mask has 2; .* of bool"),
        (lambda: dataclasses.replace(ROW, ratio_segments=[0, 0, 0.5]), r"TrainRow.ratio_segments has 0.5"),
        (lambda: dataclasses.replace(TRAJECTORY, stop="banana"), "Trajectory.stop = 'banana'; must be one of answer"),
        (lambda: dataclasses.replace(VERDICT, status="right"), "Verdict.status = 'right'; must be one of correct"),
        (lambda: ToolResult("error"), "ToolResult.kind = 'error'; must be one of ok, exception"),
        (lambda: RunOptions(0, "eval"), "RunOptions.purpose = 'eval'; must be one of train, evaluate, chat"),
        (lambda: Problem("p", "?", "1", "mine", None), "Problem.extra is None .* must be a mapping, such as"),
    ],
)
def test_what_no_stage_could_use_is_refused(make, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make()
