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
from grpo_roc_jax.types import Group, Problem, Turn
from tests.helpers.method_groups import batch_of, call, close, make_group, make_trajectory, make_verdict, method


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
    close(method(weights={"normalizer": normalizer}).weights.normalizer(np.array([3, 2, 0]), [2, 1]), expected)


def test_prompts_count_equally():
    weights = PromptMean()(np.array([1, 0, 0, 0, 2, 6]), [2, 1, 3])
    close(weights, [1 / 2, 0, 0, 0, 1 / 16, 1 / 16])
    assert weights @ [1, 0, 0, 0, 2, 6] == 1, "groups without a trained token count nowhere"
    for normalizer in (TokenMean(), PromptMean()):
        assert normalizer(np.zeros(3), [1, 2]).tolist() == [0, 0, 0]
        assert normalizer(np.zeros(0), []).size == 0


LENGTHS = np.array([2, 4, 6])


def test_length_bases():
    close(length_bases(LENGTHS, 1 / 9), [0.863917, 1, 1.136083], 1e-5)
    close(length_preference(np.array([5, 5]), 2.0), [1, 1])


def test_exponent_gradient_follows_what_pays():
    """Long successes push the exponent up, by the slope of the objective."""
    advantages = np.array([-1.0, 0, 1])

    def objective(e):
        return length_preference(LENGTHS, e) @ (advantages * LENGTHS) / LENGTHS.sum()

    for at in (-1.0, 0.0, 0.7):
        numeric = (objective(at + 1e-6) - objective(at - 1e-6)) / 2e-6
        assert numeric > 0 and exponent_gradient([LENGTHS], [advantages], at) == pytest.approx(numeric, abs=1e-6)
    assert exponent_gradient([], [], 0.0) == 0.0


def test_the_exponent_stays_within_its_bound():
    state = AlgoState(memory={"length_exponent": np.array([1.999])})
    for lr, rewards, expected in [(100.0, [0, 0, 1], 2.0), (1e4, [1, 0, 0], -2.0)]:
        config = method(3, weights={"factors": [{"kind": "learned_length", "lr": lr}]})
        group = make_group(rewards, lengths=[2, 4, 600])
        assert next_state([group], [group], config, state).recall("length_exponent", 0.0) == expected


@pytest.mark.parametrize(
    ("calls", "stop", "answer", "masks", "trains"),
    [
        ((1, 0), "eos", "1", [VoidTurns()], True),
        ((1, 0), "eos", None, [VoidTurns()], False),
        ((1, 1), "eos", None, [VoidTurns()], True),
        ((0, 1, 0), "eos", "1", [VoidTurns()], False),
        ((1, 0), "eos", None, [], True),
        ((1, 0), "length", "1", [], True),
        ((1, 0), "length", "1", [Truncated()], False),
        ((1, 0), "length", "1", [VoidTurns(), Truncated()], False),  # each mask takes out what it takes out
    ],
)
def test_masks_of_trajectories(calls, stop, answer, masks, trains):
    """Of one trajectory with so many calls in its turns."""
    turns = tuple(Turn(i, i + 1, "t", (call(),) * n) for i, n in enumerate(calls))
    trajectory = replace(make_trajectory(len(turns), prompt=0, stop=stop), turns=turns)
    group = Group(Problem("p", "?", "1", "test"), (trajectory,), (replace(make_verdict(0), answer=answer),))
    assert trained_tokens([group], [group.rewards], masks)[0].any() == trains


def test_pivot_reads_the_shaped_rewards():
    for rewards, pivot in (([1, 0, 0], [1]), ([0.5, 1.0, 0.0], [0]), ([1, 0, 0.5, 0.2, 0.9], [2]), ([1, 0], [])):
        group = make_group([1] + [0] * (len(rewards) - 1))
        assert np.flatnonzero(~Pivot().trains(group, np.array(rewards))).tolist() == pivot


def seen(trajectories, **passes):
    """A batch of one group of these trajectories."""
    problem = Problem("p", "?", "1", "test")
    return batch_of([Group(problem, tuple(trajectories), (make_verdict(0),) * len(trajectories))], **passes)


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
    """Of those that earlier masks left: a second time without the first trajectory, which the policy left behind."""
    first, now = drifted(0.3)
    second = make_trajectory(4, prompt=1)
    entropies = [np.array([9, 0.1, 0.2, 0.3, 2.0]), np.array([9, 0.1, 1.0, 0.2, 0.3])]
    batch = seen([first, second], scores=[now, second.logprobs], entropies=entropies)
    masks, advantages, top = [first.policy_mask, second.policy_mask], [np.full(5, -1.0)] * 2, TopEntropy(share=0.25)
    top_masks = top.tokens(masks, advantages, batch)
    assert [mask.tolist() for mask in top_masks] == [[False] * 4 + [True], [False, False, True, False, False]]
    left = top.tokens(Drift(threshold=0.2).tokens(masks, advantages, batch), advantages, batch)
    assert [mask.tolist() for mask in left] == [[False] * 5, [False, False, True, False, False]]


def test_repetitive_successes_count_less():
    """Bigrams of 1 2 1 2 1 2: five, two of them distinct."""
    tokens = np.array([1, 2, 1, 2, 1, 2, 9])
    for n, ends, share in (
        (2, [(0, 6)], 0.6),
        (2, [(0, 3), (3, 6)], 0.5),  # 12 21, 21 12
        (2, [(5, 7), (6, 7)], 0),
        (9, [(0, 6)], 0),
    ):
        assert Repetition(n=n).share(tokens, [Turn(*pair, "") for pair in ends]) == pytest.approx(share)
    batch = batch_of([make_group([1.0, 0.0], lengths=[4, 4], tokens=[[1, 2, 1, 2]] * 2)])
    close(Repetition(n=1).trajectories(batch), [0.5, 1.0])  # the failure keeps its weight
    close(Repetition(n=1, limit=0.5).trajectories(batch), [1.0, 1.0])


GAPS = ([0.9, -0.2, 0.1], [-1.2, 0.3])
"""Scored minus recorded log-probabilities of two trajectories: the vector of the specification."""
FIRST, SECOND = [2.459603, 0.818731, 1.105171], [0.301194, 1.349859]
"""The ratios of their tokens."""


def importance(factor, gaps=GAPS):
    """(weights of the trained tokens, metrics) of a batch; the entries of prompts differ too, and must not count."""
    trajectories = [make_trajectory(len(gap), prompt=1) for gap in gaps]
    scores = [t.logprobs + np.array([9.0, *gap]) for t, gap in zip(trajectories, gaps, strict=True)]
    batch = seen(trajectories, masks=[t.policy_mask for t in trajectories], first_scores=scores)
    (part,) = method(weights={"factors": [factor]}, surrogate={"old_logprobs": "scored"}).weights.factors
    weights = [w[m].tolist() for w, m in zip(part.importance(batch), batch.masks, strict=True)]
    return weights, {**part.common_metrics(batch), **part.metrics(batch)}


@pytest.mark.parametrize(
    ("kind", "settings", "expected", "metrics"),
    [
        ("truncated_is", {}, [[2, *FIRST[1:]], SECOND], {"token_above": 0.2}),
        ("truncated_is", {"low": 0.5}, [[2, *FIRST[1:]], [0.5, SECOND[1]]], {"token_below": 0.2}),
        ("truncated_is", {"level": "product"}, [2, 0.406570], {"product_above": 0.5}),
        ("truncated_is", {"level": "geometric"}, [1.305605, 0.637628], {"geometric_above": 0}),
        ("truncated_is", {"normalize": True}, [[1.793737, 0.734294, 0.991193], [0.270131, 1.210644]], {}),
        ("truncated_is", {"level": "product", "normalize": True}, [2 / 1.203285, 0.406570 / 1.203285], {}),
        ("masked_is", {"high": 5}, [FIRST, [0, SECOND[1]]], {"token_below": 0.2}),
        ("masked_is", {}, [[0, *FIRST[1:]], [0, SECOND[1]]], {"token_above": 0.2}),
        ("masked_is", {"level": "product", "low": 0, "high": 3}, [2.225541, 0.406570], {}),
        ("rejection", {"level": "product"}, [0, 0], {"product_ratio_below": 0.5}),
        ("rejection", {"high": 1.3}, [0, 1], {"geometric_ratio_above": 0.5}),
        ("rejection", {"measure": "k3", "low": 0, "high": 0.2755}, [1, 0], {}),
        ("rejection", {"measure": "k3", "low": 0, "high": 0.2756}, [1, 1], {}),
        ("rejection", {"measure": "k2", "level": "max", "low": 0, "high": 0.7}, [1, 0], {}),
        ("rejection", {"measure": "k2", "level": "max", "low": 0, "high": 0.404}, [0, 0], {}),
        ("rejection", {"measure": "k2", "level": "token", "low": 0, "high": 0.05}, [[0, 1, 1], [0, 1]], {}),
        ("rejection", {"measure": "k2", "level": "product", "low": 0, "high": 0.44}, [1, 0], {}),
        ("rejection", {"measure": "error", "high": 1.5954}, [1, 0], {}),
        ("rejection", {"measure": "error", "high": 1.5953}, [0, 0], {}),
        ("rejection", {"level": "max", "low": 0, "high": 1.4}, [0, 1], {}),
        ("veto", {}, [1, 1], {"vetoed": 0}),
        ("veto", {"low": 0.302}, [1, 0], {"vetoed": 0.5}),
        ("veto", {"low": 0.301}, [1, 1], {}),
    ],
)
def test_mismatch(kind, settings, expected, metrics):
    """A number stands for all tokens of a trajectory."""
    weights, measured = importance({"kind": kind, **settings})
    for left, right in zip(weights, expected, strict=True):
        close(left, np.full(len(left), right))
    for name, share in metrics.items():
        assert measured[f"mismatch/{kind}_{name}"] == pytest.approx(share), measured


def test_mismatch_is_measured_at_every_level():
    """Against numbers by hand: the ratios of the specification, and k1 and k3 of their logarithms."""
    metrics = importance("veto")[1]
    for level, logs in [
        ("token", [0.9, -0.2, 0.1, -1.2, 0.3]),
        ("product", [0.8, -0.9]),
        ("geometric", [0.8 / 3, -0.45]),
    ]:
        x = np.exp(logs)
        close(metrics[f"mismatch/{level}_ratio"], x.mean())
        close(metrics[f"mismatch/{level}_effective_sample_size"], x.sum() ** 2 / (len(x) * (x**2).sum()))
        close(metrics[f"mismatch/{level}_kl_k1"], -np.mean(logs))
        close(metrics[f"mismatch/{level}_kl_k3"], np.mean(x - 1 - logs))


def test_extreme_differences_stay_finite():
    """Sums are clamped too; a trajectory without trained tokens counts nowhere."""
    for level in ("token", "product", "geometric"):
        factor = {"kind": "masked_is", "level": level, "high": 1e12}
        weights, metrics = importance(factor, ([-900.0, 30], [500.0, 500], []))
        assert np.isfinite([*metrics.values(), *weights[0], *weights[1]]).all() and weights[2] == []
        close(weights[1], np.exp([20.0, 20.0]), 1)
    assert all(value == 0 for value in importance("veto", ([], []))[1].values())
