"""Token weights: normalisers, masks, length preference, sampler mismatch."""

import numpy as np
import pytest
from method_groups import call, make_trajectory, make_verdict

from grpo_roc_jax.method import weights as w
from grpo_roc_jax.method.config import LossConfig
from grpo_roc_jax.types import Trajectory, Turn


def close(actual, expected, atol=1e-6):
    np.testing.assert_allclose(actual, expected, atol=atol)


COUNTS = np.array([3, 2, 0])


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [
        ("token_mean", [1 / 5, 1 / 5, 0]),
        ("sequence_mean", [1 / 6, 1 / 4, 0]),
        ("sequence_sum", [1 / 2, 1 / 2, 0]),
        ("constant", [1 / 200, 1 / 200, 0]),
    ],
)
def test_normalisers(normalizer, expected):
    close(w.normalisers(COUNTS, LossConfig(normalizer=normalizer, constant_length=100)), expected)


def test_nothing_to_train():
    assert w.normalisers(np.zeros(3), LossConfig()).tolist() == [0, 0, 0]
    assert w.normalisers(np.zeros(0), LossConfig()).size == 0


LENGTHS = np.array([2, 4, 6])


@pytest.mark.parametrize(
    ("exponent", "expected"),
    [(0.0, [1, 1, 1]), (1.0, [0.867408, 0.993856, 1.138737]), (-1.0, [1.148507, 0.981125, 0.870369])],
)
def test_length_preference(exponent, expected):
    close(w.length_preference(LENGTHS, exponent), expected, 1e-5)
    assert w.length_preference(LENGTHS, exponent).sum() == pytest.approx(3)


def test_length_bases():
    close(w._length_bases(LENGTHS, 1 / 9), [0.863917, 1, 1.136083], 1e-5)
    close(w.length_preference(np.array([5, 5]), 2.0), [1, 1])


@pytest.mark.parametrize("exponent", [-1.0, 0.0, 0.7])
def test_length_slope_by_finite_differences(exponent):
    step = 1e-6
    numeric = (w.length_preference(LENGTHS, exponent + step) - w.length_preference(LENGTHS, exponent - step)) / (
        2 * step
    )
    close(w.length_preference_slope(LENGTHS, exponent), numeric)


def test_exponent_gradient_follows_what_pays():
    """Long successes push the exponent up, short ones down."""
    advantages = [np.array([-1.0, 0, 1])]
    up = w.exponent_gradient([LENGTHS], advantages, 0.0)
    assert up > 0 > w.exponent_gradient([LENGTHS], [-advantages[0]], 0.0)
    step = 1e-6
    objective = lambda e: w.length_preference(LENGTHS, e) @ (advantages[0] * LENGTHS) / LENGTHS.sum()  # noqa: E731
    assert up == pytest.approx((objective(step) - objective(-step)) / (2 * step), abs=1e-6)
    assert w.exponent_gradient([], [], 0.0) == 0.0


RECORDED = np.array([0.0, -1.0, -1.0, -1.0])
MASK = np.array([False, True, True, True])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"mismatch": "truncate"}, [1, 2, 1, 0.25]),
        ({"mismatch": "mask"}, [1, 0, 1, 0]),
        ({"mismatch": "truncate", "mismatch_cap": 8.0}, [1, 4, 1, 0.25]),
        ({"mismatch": "truncate", "mismatch_level": "sequence"}, [1, 1, 1, 1]),
        ({"mismatch": "mask", "mismatch_cap": 5.0}, [1, 4, 1, 0.25]),
    ],
)
def test_mismatch(settings, expected):
    scored = RECORDED + np.array([99.0, np.log(4), 0.0, -np.log(4)])
    close(w.mismatch_weights(RECORDED, scored, MASK, LossConfig(old_logprobs="scored", **settings)), expected)


def test_mismatch_over_a_trajectory():
    config = LossConfig(old_logprobs="scored", mismatch="mask", mismatch_level="sequence")
    assert w.mismatch_weights(RECORDED, RECORDED + 0.5, MASK, config)[1] == pytest.approx(np.exp(0.5))
    assert w.mismatch_weights(RECORDED, RECORDED + 1.0, MASK, config)[1] == 0


def with_turns(*calls_per_turn):
    turns = tuple(Turn(i, i + 1, "t", (call(),) * n) for i, n in enumerate(calls_per_turn))
    n = len(turns)
    return Trajectory(
        np.zeros(n, np.int32), np.ones(n, bool), np.zeros(n, np.float32), np.zeros(n, np.int32), 0, turns, "eos", 0
    )


def test_void_turns():
    from dataclasses import replace

    answered, silent = make_verdict(1), replace(make_verdict(0), answer=None)
    assert not w.has_void_turn(with_turns(1, 0), answered)
    assert w.has_void_turn(with_turns(1, 0), silent)
    assert not w.has_void_turn(with_turns(1, 1), silent)
    assert w.has_void_turn(with_turns(0, 1, 0), answered)
    assert not w.trained(with_turns(1, 0), silent, LossConfig(mask_void_turns=True))
    assert w.trained(with_turns(1, 0), silent, LossConfig())


def test_truncated_mask():
    cut = make_trajectory(stop="length")
    assert w.trained(cut, make_verdict(0), LossConfig())
    assert not w.trained(cut, make_verdict(0), LossConfig(mask_truncated=True))


def test_ratio_segments():
    turns = (Turn(2, 4, "a"), Turn(6, 9, "b"))
    trajectory = Trajectory(
        np.zeros(9, np.int32), np.ones(9, bool), np.zeros(9, np.float32), np.zeros(9, np.int32), 2, turns, "eos", 0
    )
    assert w.ratio_segments(trajectory, "token").tolist() == list(range(9))
    assert w.ratio_segments(trajectory, "sequence").tolist() == [0] * 9
    assert w.ratio_segments(trajectory, "turn")[2:4].tolist() == [0, 0]
    assert w.ratio_segments(trajectory, "turn")[6:].tolist() == [1, 1, 1]


def drifted(shift):
    trajectory = make_trajectory(4, prompt=1, logprobs=-1.0)
    return trajectory, np.where(trajectory.policy_mask, trajectory.logprobs - shift, 0.0)


@pytest.mark.parametrize(
    ("shift", "advantage", "kept"), [(0.3, -1.0, False), (0.1, -1.0, True), (0.3, 1.0, True), (-0.3, -1.0, True)]
)
def test_failures_that_the_policy_left_behind_are_masked(shift, advantage, kept):
    trajectory, now = drifted(shift)
    config = LossConfig(mask_drift=0.2)
    advantages = [np.full(trajectory.length, advantage, np.float32)]
    (mask,) = w.kept_tokens([trajectory], [trajectory.policy_mask], advantages, [now], None, config)
    assert mask.tolist() == (trajectory.policy_mask & kept).tolist()


def test_the_least_certain_tokens_of_the_batch_are_kept():
    first, second = make_trajectory(4, prompt=1), make_trajectory(4, prompt=1)
    entropies = [np.array([9, 0.1, 0.2, 0.3, 2.0]), np.array([9, 0.1, 1.0, 0.2, 0.3])]
    ones = [np.ones(5)] * 2
    config = LossConfig(top_entropy=0.25)
    masks = w.kept_tokens([first, second], [first.policy_mask] * 2, ones, ones, entropies, config)
    assert [mask.tolist() for mask in masks] == [[False] * 4 + [True], [False, False, True, False, False]]
