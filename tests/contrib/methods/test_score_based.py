"""Score-based objectives: vectors, and every coefficient against finite differences of its objective."""

from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.score_based import live_rows
from grpo_roc_jax.method.advantage import z_score
from grpo_roc_jax.method.features import features
from tests.contrib.methods.objectives import OBJECTIVES
from tests.helpers.method_groups import make_group, method

SCORES = np.array([-0.5, -0.7, -0.4, -0.9])
CORRECT = np.array([True, True, False, False])
LENGTHS = np.array([2000, 6000, 3000, 3000])


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(actual, expected, atol=atol)


def coefficients(kind, scores=SCORES, rewards=CORRECT, lengths=LENGTHS, **settings):
    """dJ/ds of one group, by the kind."""
    rewards = np.asarray(rewards, float)
    found = features(make_group(rewards, lengths=lengths))
    return method(advantage={"kind": kind, **settings}).advantage.coefficients(np.asarray(scores), rewards, found)


def objective(kind, scores=SCORES, rewards=CORRECT, lengths=LENGTHS, **settings):
    """J of one group, as published."""
    return OBJECTIVES[kind](np.asarray(scores), np.asarray(rewards, float), np.asarray(lengths), **settings)


def gradient(function, scores, step=1e-5):
    out = np.zeros(len(scores))
    for i in range(len(scores)):
        nudge = np.zeros(len(scores))
        nudge[i] = step
        out[i] = (function(scores + nudge) - function(scores - nudge)) / (2 * step)
    return out


@pytest.mark.parametrize(("masks", "rows"), [([[0, 1], [0, 0], [1, 1]], 2), ([[0, 0], [1, 0]], 1), ([[0, 0]], 1)])
def test_rows_with_a_token_that_trains(masks, rows):
    assert live_rows(SimpleNamespace(masks=[np.array(mask, bool) for mask in masks])) == rows


def test_disco_vectors():
    for tau, expected in ((10.0, 0.046875), (1.0, 0.019070), (np.inf, 0.05)):
        assert objective("disco", tau=tau) == pytest.approx(expected, abs=1e-5)
    close(-coefficients("disco")[2:], [0.512497, 0.487503])
    close(coefficients("disco", tau=1.0), [0.5, 0.5, -0.622459, -0.377541])
    close(coefficients("disco", tau=np.inf), [0.5, 0.5, -0.5, -0.5])


def test_drpo_vectors():
    assert objective("drpo") == pytest.approx(0.145372, abs=1e-5)
    close(coefficients("drpo"), [0.992481, 0.007519, -0.512497, -0.487503])
    close(coefficients("drpo", tau=1.0)[2:], [-0.622459, -0.377541])


def test_rebel_vectors():
    pair = {"scores": [0.3, -0.1], "rewards": [1, 0], "lengths": [3, 3]}
    assert objective("rebel", **pair) == pytest.approx(-0.36)
    close(coefficients("rebel", **pair), [1.2, -1.2])


def test_reg_vectors():
    group = {"scores": [0.2, -0.1, 0, -0.1], "rewards": [1, 0, 0, 0], "floor": 0.01}
    assert objective("reg", **group) == pytest.approx(-0.085786, abs=1e-5)
    close(coefficients("reg", **group), [0.589256, 0.589256, -1.767767, 0.589256], 2e-5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *(("disco", {"tau": tau}) for tau in (0.5, 1.0, 10.0)),
        *(("drpo", {"tau": tau, "max_length": 1000}) for tau in (0.5, 1.0, 10.0)),
        ("rebel", {"eta": 0.7}),
        ("reg", {}),
        ("reg", {"floor": 0.01}),
    ],
)
def test_coefficients_are_gradients(seed, kind, settings):
    generator = np.random.default_rng(seed)
    scores, rewards, lengths = generator.normal(size=6), [1, 1, 0, 0, 1, 0], generator.integers(100, 900, 6)
    slope = gradient(lambda s: objective(kind, s, rewards, lengths, **settings), scores)
    close(coefficients(kind, scores, rewards, lengths, **settings), slope, 1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_reg_under_the_floor_of_its_deviation(seed):
    """No gradient goes through the deviation there."""
    scores, rewards = 0.1 * np.random.default_rng(seed).normal(size=4), [1, 0, 0, 1]
    slope = gradient(lambda s: objective("reg", s, rewards), scores)
    close(coefficients("reg", scores, rewards), slope, 1e-6)


@pytest.mark.parametrize("floor", [1.0, 0.5])
def test_reg_right_after_sampling_is_a_bounded_policy_gradient(floor):
    """All log-ratios are 0: the coefficients are 2 / floor times the advantages over G, not a hundred times."""
    result = coefficients("reg", np.zeros(4), [1, 0, 0, 1], floor=floor)
    close(result, 2 / floor * z_score(np.array([1.0, 0, 0, 1])) / 4)


@pytest.mark.parametrize("score", ["disco", "drpo", "reg", "rebel"])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_flat_groups(score, reward):
    assert not coefficients(score, np.zeros(3), np.full(3, reward), [5] * 3).any()
