"""Token weights: normalizers, masks, length preference, sampler mismatch."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.drift_mask import Drift
from grpo_roc_jax.contrib.methods.lambda_grpo import exponent_gradient, length_bases, length_preference
from grpo_roc_jax.contrib.methods.mc_grpo import Pivot
from grpo_roc_jax.contrib.methods.repetition import Repetition
from grpo_roc_jax.contrib.methods.scalerl import PromptMean
from grpo_roc_jax.contrib.methods.simple_tir import VoidTurns
from grpo_roc_jax.contrib.methods.top_entropy import TopEntropy
from grpo_roc_jax.method.compose import next_state
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.method.weights import TokenMean, Truncated, trained_tokens
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.types import Group, Problem, Trajectory, Turn
from tests.helpers.method_groups import batch_of, call, make_group, make_trajectory, make_verdict, method
from tests.method.test_weights import close


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
    close(length_bases(LENGTHS, 1 / 9), [0.863917, 1, 1.136083], 1e-5)
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


COUNTS = np.array([3, 2, 0])


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [
        ("token_mean", [1 / 5, 1 / 5, 0]),
        ("sequence_mean", [1 / 6, 1 / 4, 0]),
        ("sequence_sum", [1 / 2, 1 / 2, 0]),
        ({"kind": "constant", "length": 100}, [1 / 300, 1 / 300, 0]),
        ("prompt_mean", [1 / 5, 1 / 5, 0]),
    ],
)
def test_normalizers(normalizer, expected):
    close(method(weights={"normalizer": normalizer}).weights.normalizer(COUNTS, [2, 1]), expected)


def test_the_exponent_stays_within_its_bound():
    state = AlgoState(memory={"length_exponent": np.array([1.999])})
    for lr, rewards, expected in [(100.0, [0, 0, 1], 2.0), (1e4, [1, 0, 0], -2.0)]:
        config = method(3, weights={"factors": [{"kind": "learned_length", "lr": lr}]})
        group = make_group(rewards, lengths=[2, 4, 600])
        assert next_state([group], [group], config, state).recall("length_exponent", 0.0) == expected


GAPS = ([0.9, -0.2, 0.1], [-1.2, 0.3])
"""Scored minus recorded log-probabilities of two trajectories: the vector of the specification."""
TOKENS = [[2.459603, 0.818731, 1.105171], [0.301194, 1.349859]]


def mismatched(gaps=GAPS):
    """A batch with these differences; the prompts' entries differ too, and must not count."""
    trajectories = [make_trajectory(len(gap), prompt=1) for gap in gaps]
    scores = [t.logprobs + np.array([9.0, *gap]) for t, gap in zip(trajectories, gaps, strict=True)]
    return seen(trajectories, masks=[t.policy_mask for t in trajectories], first_scores=scores)


def importance(factor, gaps=GAPS):
    """The weights of the trained tokens; at the level of a trajectory it is one number."""
    (part,) = method(weights={"factors": [factor]}, surrogate={"old_logprobs": "scored"}).weights.factors
    batch = mismatched(gaps)
    weights = [w[m].tolist() for w, m in zip(part.importance(batch), batch.masks, strict=True)]
    return weights, {**part.common_metrics(batch), **part.metrics(batch)}


def rows(*values):
    return [[value] * n for value, n in zip(values, (3, 2), strict=True)]


@pytest.mark.parametrize(
    ("factor", "expected", "metrics"),
    [
        ("truncated_is", [[2, *TOKENS[0][1:]], TOKENS[1]], {"truncated_is_token_above": 0.2}),
        (
            {"kind": "truncated_is", "low": 0.5},
            [[2, *TOKENS[0][1:]], [0.5, TOKENS[1][1]]],
            {"truncated_is_token_below": 0.2},
        ),
        ({"kind": "truncated_is", "level": "product"}, rows(2, 0.406570), {"truncated_is_product_above": 0.5}),
        ({"kind": "truncated_is", "level": "geometric"}, rows(1.305605, 0.637628), {"truncated_is_geometric_above": 0}),
        ({"kind": "truncated_is", "normalize": True}, [[1.793737, 0.734294, 0.991193], [0.270131, 1.210644]], {}),
        (
            {"kind": "truncated_is", "level": "product", "normalize": True},
            rows(2 / 1.203285, 0.406570 / 1.203285),
            {},
        ),
        ({"kind": "masked_is", "high": 5}, [TOKENS[0], [0, TOKENS[1][1]]], {"masked_is_token_below": 0.2}),
        ("masked_is", [[0, *TOKENS[0][1:]], [0, TOKENS[1][1]]], {"masked_is_token_above": 0.2}),
        ({"kind": "masked_is", "level": "product", "low": 0, "high": 3}, rows(2.225541, 0.406570), {}),
        ({"kind": "rejection", "level": "product"}, rows(0, 0), {"rejection_product_ratio_below": 0.5}),
        ({"kind": "rejection", "high": 1.3}, rows(0, 1), {"rejection_geometric_ratio_above": 0.5}),
        ({"kind": "rejection", "measure": "k3", "low": 0, "high": 0.2}, rows(1, 0), {}),
        ({"kind": "rejection", "measure": "k3", "low": 0, "high": 0.2755}, rows(1, 0), {}),
        ({"kind": "rejection", "measure": "k3", "low": 0, "high": 0.2756}, rows(1, 1), {}),
        ({"kind": "rejection", "measure": "k2", "level": "max", "low": 0, "high": 0.7}, rows(1, 0), {}),
        ({"kind": "rejection", "measure": "k2", "level": "max", "low": 0, "high": 0.404}, rows(0, 0), {}),
        ({"kind": "rejection", "measure": "k2", "level": "token", "low": 0, "high": 0.05}, [[0, 1, 1], [0, 1]], {}),
        ({"kind": "rejection", "measure": "k2", "level": "product", "low": 0, "high": 0.44}, rows(1, 0), {}),
        ({"kind": "rejection", "measure": "error", "high": 1.5954}, rows(1, 0), {}),
        ({"kind": "rejection", "measure": "error", "high": 1.5953}, rows(0, 0), {}),
        ({"kind": "rejection", "level": "max", "low": 0, "high": 1.4}, rows(0, 1), {}),
        ("veto", rows(1, 1), {"veto_vetoed": 0}),
        ({"kind": "veto", "low": 0.302}, rows(1, 0), {"veto_vetoed": 0.5}),
        ({"kind": "veto", "low": 0.301}, rows(1, 1), {}),
    ],
)
def test_mismatch(factor, expected, metrics):
    weights, found = importance(factor)
    for left, right in zip(weights, expected, strict=True):
        close(left, right, 1e-5)
    for name, share in metrics.items():
        assert found[f"mismatch/{name}"] == pytest.approx(share), found


def test_mismatch_is_measured_at_every_level():
    """Against numbers by hand: the ratios of the specification, and k1 and k3 of their logarithms."""
    found = importance("veto")[1]
    for level, logs in [
        ("token", [0.9, -0.2, 0.1, -1.2, 0.3]),
        ("product", [0.8, -0.9]),
        ("geometric", [0.8 / 3, -0.45]),
    ]:
        x = np.exp(logs)
        close(found[f"mismatch/{level}_ratio"], x.mean())
        close(found[f"mismatch/{level}_effective_sample_size"], x.sum() ** 2 / (len(x) * (x**2).sum()))
        close(found[f"mismatch/{level}_kl_k1"], -np.mean(logs))
        close(found[f"mismatch/{level}_kl_k3"], np.mean(x - 1 - logs))
    close(np.exp([0.8, -0.9]), [2.225541, 0.406570])


def test_extreme_differences_stay_finite():
    """Sums are clamped too; a trajectory without trained tokens counts nowhere."""
    for level in ("token", "product", "geometric"):
        weights, found = importance(
            {"kind": "masked_is", "level": level, "high": 1e12}, ([-900.0, 30], [500.0, 500], [])
        )
        assert np.isfinite([*found.values(), *weights[0], *weights[1]]).all() and weights[2] == []
        close(weights[1], np.exp([20.0, 20.0]), 1)
    assert all(value == 0 for value in importance("veto", ([], []))[1].values())


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        ({"kind": "truncated_is", "high": 0.5}, "low = 0, high = 0.5; must be bounds around 1"),
        ({"kind": "masked_is", "low": 1.5}, "low = 1.5, high = 2; must be bounds around 1"),
        ({"kind": "rejection", "measure": "k2"}, "low = 0.5, high = 2; must be bounds around 0"),
        ({"kind": "truncated_is", "level": "sequence"}, "must be 'token', 'product' or 'geometric'"),
        ({"kind": "veto", "low": 0.0}, "low = 0.0: must be above 0"),
    ],
)
def test_bounds_are_around_agreement(factor, said):
    with pytest.raises(ConfigError, match=said):
        importance(factor)


def seen(trajectories, **passes):
    """A batch of one group of these trajectories."""
    problem = Problem("p", "?", "1", "test")
    return batch_of([Group(problem, tuple(trajectories), (make_verdict(0),) * len(trajectories))], **passes)


@pytest.mark.parametrize(
    "weights",
    [
        {"normalizer": {"kind": "constant", "length": 0}},
        {"masks": [{"kind": "drift", "threshold": -0.1}]},
        {"masks": [{"kind": "top_entropy", "share": 0.0}]},
        {"masks": [{"kind": "top_entropy", "share": 1.1}]},
        {"factors": [{"kind": "learned_length", "lr": -1.0}]},
    ],
)
def test_impossible_settings(weights):
    with pytest.raises(ConfigError, match=r"weights"):
        method(weights=weights)
