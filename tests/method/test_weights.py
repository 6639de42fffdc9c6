"""Token weights: normalizers, masks, length preference, sampler mismatch."""

import numpy as np
import pytest
from method_groups import batch_of, make_group, make_trajectory, make_verdict, method

from grpo_roc_jax.method.compose import next_state
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.method.weights import ratio_segments
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.types import Group, Problem, Trajectory, Turn


def close(actual, expected, atol=1e-6):
    np.testing.assert_allclose(actual, expected, atol=atol)


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


RECORDED = np.array([0.0, -1.0, -1.0, -1.0])
MASK = np.array([False, True, True, True])
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


def test_bounds_belong_to_what_is_kept():
    (part,) = method(weights={"factors": ["masked_is"]}, surrogate={"old_logprobs": "scored"}).weights.factors
    close(part.weight(np.array([0.49, 0.5, 2.0, 2.01])), [0, 0.5, 2, 0])


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


def test_ratio_segments():
    turns = (Turn(2, 4, "a"), Turn(6, 9, "b"))
    trajectory = Trajectory(
        np.zeros(9, np.int32), np.ones(9, bool), np.zeros(9, np.float32), np.zeros(9, np.int32), 2, turns, "eos", 0
    )
    assert ratio_segments(trajectory, "token").tolist() == list(range(9))
    assert ratio_segments(trajectory, "sequence").tolist() == [0] * 9
    assert ratio_segments(trajectory, "turn")[2:4].tolist() == [0, 0]
    assert ratio_segments(trajectory, "turn")[6:].tolist() == [1, 1, 1]


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
