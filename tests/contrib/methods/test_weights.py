"""Token weights: normalizers, masks, length preference, sampler mismatch."""

from dataclasses import replace

import numpy as np
import pytest
from method_groups import batch_of, call, make_group, make_trajectory, make_verdict
from test_weights import close, seen

from grpo_roc_jax.contrib.methods.drift_mask import Drift
from grpo_roc_jax.contrib.methods.lambda_grpo import _length_bases, exponent_gradient, length_preference
from grpo_roc_jax.contrib.methods.mc_grpo import Pivot
from grpo_roc_jax.contrib.methods.repetition import Repetition
from grpo_roc_jax.contrib.methods.scalerl import PromptMean
from grpo_roc_jax.contrib.methods.simple_tir import VoidTurns
from grpo_roc_jax.contrib.methods.top_entropy import TopEntropy
from grpo_roc_jax.method.weights import TokenMean, Truncated, trained_tokens
from grpo_roc_jax.types import Group, Problem, Trajectory, Turn


def test_nothing_to_train():
    for normalizer in (TokenMean(), PromptMean()):
        assert normalizer(np.zeros(3), [1, 2]).tolist() == [0, 0, 0]
        assert normalizer(np.zeros(0), []).size == 0


def test_prompts_count_equally():
    """The vector of ScaleRL: lengths [[2, 6], [3, 3], [4, 4]] of which the second group is dropped."""
    assert PromptMean()(np.array([2, 6, 4, 4]), [2, 2]).tolist() == [0.0625] * 4
    found = PromptMean()(np.array([1, 0, 0, 0, 2, 6]), [2, 1, 3])
    close(found, [1 / 2, 0, 0, 0, 1 / 16, 1 / 16])
    assert found @ [1, 0, 0, 0, 2, 6] == 1, "groups without a trained token count nowhere"


LENGTHS = np.array([2, 4, 6])


@pytest.mark.parametrize(
    ("exponent", "expected"),
    [(0.0, [1, 1, 1]), (1.0, [0.867408, 0.993856, 1.138737]), (-1.0, [1.148507, 0.981125, 0.870369])],
)
def test_length_preference(exponent, expected):
    close(length_preference(LENGTHS, exponent), expected, 1e-5)
    assert length_preference(LENGTHS, exponent).sum() == pytest.approx(3)


def test_length_bases():
    close(_length_bases(LENGTHS, 1 / 9), [0.863917, 1, 1.136083], 1e-5)
    close(length_preference(np.array([5, 5]), 2.0), [1, 1])


def test_exponent_gradient_follows_what_pays():
    """Long successes push the exponent up, short ones down, by the slope of the objective."""
    advantages = [np.array([-1.0, 0, 1])]
    up = exponent_gradient([LENGTHS], advantages, 0.0)
    assert up > 0 > exponent_gradient([LENGTHS], [-advantages[0]], 0.0)

    def objective(e):
        return length_preference(LENGTHS, e) @ (advantages[0] * LENGTHS) / LENGTHS.sum()

    for at in (-1.0, 0.0, 0.7):
        numeric = (objective(at + 1e-6) - objective(at - 1e-6)) / 2e-6
        assert exponent_gradient([LENGTHS], advantages, at) == pytest.approx(numeric, abs=1e-6)
    assert exponent_gradient([], [], 0.0) == 0.0


def with_turns(*calls_per_turn):
    turns = tuple(Turn(i, i + 1, "t", (call(),) * n) for i, n in enumerate(calls_per_turn))
    n = len(turns)
    return Trajectory(
        np.zeros(n, np.int32), np.ones(n, bool), np.zeros(n, np.float32), np.zeros(n, np.int32), 0, turns, "eos", 0
    )


def trained(trajectory, verdict, *masks):
    """Whether anything of a trajectory trains under these masks."""
    group = Group(Problem("p", "?", "1", "test"), (trajectory,), (verdict,))
    return bool(trained_tokens([group], [group.rewards], masks)[0].any())


def test_void_turns():
    answered, silent = make_verdict(1), replace(make_verdict(0), answer=None)
    assert trained(with_turns(1, 0), answered, VoidTurns())
    assert not trained(with_turns(1, 0), silent, VoidTurns())
    assert trained(with_turns(1, 1), silent, VoidTurns())
    assert not trained(with_turns(0, 1, 0), answered, VoidTurns())
    assert trained(with_turns(1, 0), silent)


def test_truncated_mask():
    cut = make_trajectory(stop="length")
    assert trained(cut, make_verdict(0))
    assert not trained(cut, make_verdict(0), Truncated())
    assert not trained(cut, make_verdict(0), VoidTurns(), Truncated()), "each mask takes out what it takes out"


def test_pivot_reads_the_shaped_rewards():
    group = batch_of([make_group([1, 0, 0])]).groups[0]
    assert Pivot().trains(group, group.rewards).tolist() == [True, False, True]
    assert Pivot().trains(group, np.array([0.5, 1.0, 0.0])).tolist() == [False, True, True]
    five, even = make_group([1, 0, 0.5, 0.2, 0.9]), make_group([1, 0])
    assert np.flatnonzero(~Pivot().trains(five, five.rewards)).tolist() == [2]
    assert Pivot().trains(even, even.rewards).all()


def drifted(shift):
    trajectory = make_trajectory(4, prompt=1, logprobs=-1.0)
    return trajectory, np.where(trajectory.policy_mask, trajectory.logprobs - shift, 0.0)


@pytest.mark.parametrize(
    ("shift", "advantage", "kept"), [(0.3, -1.0, False), (0.1, -1.0, True), (0.3, 1.0, True), (-0.3, -1.0, True)]
)
def test_failures_that_the_policy_left_behind_are_masked(shift, advantage, kept):
    trajectory, now = drifted(shift)
    advantages = [np.full(trajectory.length, advantage, np.float32)]
    (mask,) = Drift(threshold=0.2).tokens([trajectory.policy_mask], advantages, seen([trajectory], scores=[now]))
    assert mask.tolist() == (trajectory.policy_mask & kept).tolist()


def test_the_least_certain_tokens_of_the_batch_are_kept():
    first, second = make_trajectory(4, prompt=1), make_trajectory(4, prompt=1)
    entropies = [np.array([9, 0.1, 0.2, 0.3, 2.0]), np.array([9, 0.1, 1.0, 0.2, 0.3])]
    ones = [np.ones(5)] * 2
    batch = seen([first, second], entropies=entropies)
    masks = TopEntropy(share=0.25).tokens([first.policy_mask] * 2, ones, batch)
    assert [mask.tolist() for mask in masks] == [[False] * 4 + [True], [False, False, True, False, False]]


def test_masks_after_one_another():
    """The entropy that counts is that of the tokens which earlier masks left."""
    first, now = drifted(0.3)
    second = make_trajectory(4, prompt=1)
    batch = seen([first, second], scores=[now, second.logprobs], entropies=[np.full(5, 9.0), np.arange(5.0)])
    masks, advantages = [first.policy_mask, second.policy_mask], [np.full(5, -1.0)] * 2
    for mask in (Drift(threshold=0.2), TopEntropy(share=0.25)):
        masks = mask.tokens(masks, advantages, batch)
    assert [mask.tolist() for mask in masks] == [[False] * 5, [False] * 4 + [True]]


def test_repetitive_successes_count_less():
    """Bigrams of 1 2 1 2 1 2: five, two of them distinct."""
    tokens, turn = np.array([1, 2, 1, 2, 1, 2, 9]), Turn(0, 6, "")
    assert Repetition(n=2).share(tokens, (turn,)) == pytest.approx(0.6)
    assert Repetition(n=2).share(tokens, (Turn(0, 3, ""), Turn(3, 6, ""))) == pytest.approx(0.5)  # 12 21, 21 12
    assert Repetition(n=2).share(tokens, (Turn(5, 7, ""), Turn(6, 7, ""))) == 0
    assert Repetition(n=9).share(tokens, (turn,)) == 0
    group = make_group([1.0, 0.0], lengths=[4, 4], tokens=[[1, 2, 1, 2]] * 2)
    close(Repetition(n=1).trajectories(batch_of([group])), [0.5, 1.0])  # the failure keeps its weight
    close(Repetition(n=1, limit=0.5).trajectories(batch_of([group])), [1.0, 1.0])
