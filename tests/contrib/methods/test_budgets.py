"""Samplers, budgets, reward tokens and schedules of the plan: their formulas against vectors and brute force."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.knapsack import knapsack_counts, knapsack_value
from grpo_roc_jax.contrib.methods.microcoder import AVERAGE, STAGE, Rising, diversity
from grpo_roc_jax.contrib.methods.xrpo import half_width, half_width_counts
from grpo_roc_jax.method.state import AlgoState


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(actual, expected, atol=atol)


def test_knapsack_vectors():
    rates = np.array([0.5, 0.1, 0.9])
    counts = knapsack_counts(rates, 24, 2, 128)
    assert counts.tolist() == [7, 15, 2]
    assert float(knapsack_value(counts, rates).sum()) == pytest.approx(0.188990, abs=1e-5)
    for count, rate, mixed in ((8, 0.5, 0.992188), (8, 0.05, 0.336580), (64, 0.05, 0.962476)):
        close(knapsack_value(count, rate) / (rate * (1 - rate) ** 2), mixed)


def test_knapsack_is_exact():
    """Against every allocation of small budgets."""
    generator = np.random.default_rng(0)
    for _ in range(10):
        rates = generator.random(3)
        best = max(
            knapsack_value(np.array(c), rates).sum() for c in itertools.product(range(2, 9), repeat=3) if sum(c) == 13
        )
        counts = knapsack_counts(rates, 13, 2, 8)
        assert counts.sum() == 13
        assert knapsack_value(counts, rates).sum() == pytest.approx(best)


def test_knapsack_limits():
    assert knapsack_counts(np.array([0.0, 1.0]), 10, 2, 128).sum() == 10
    assert knapsack_counts(np.array([0.5, 0.5]), 8, 2, 4).tolist() == [4, 4]
    with pytest.raises(ValueError, match="between 4 and 8 are possible"):
        knapsack_counts(np.array([0.5, 0.5]), 9, 2, 4)


def test_half_width_vectors():
    spread = float(np.std([1, 0, 0, 0], ddof=1))
    close(half_width(4, spread), 0.795612)
    close(half_width(5, spread), 0.620832)
    close(half_width(4, spread) - half_width(5, spread), 0.174780)


def test_half_width_counts():
    counts = half_width_counts(np.array([0.5, 0.0, 0.5]), pilot=4, budget=20)
    assert counts.sum() == 20
    assert counts[1] == 4  # nothing to learn about a problem without spread
    explored = half_width_counts(np.array([0.5, 0.0, 0.5]), pilot=4, budget=20, bonus=1.0)
    assert explored[1] > 4


def test_diversity():
    same = [np.arange(6)] * 3
    assert diversity(same) == pytest.approx(1 / 3)
    assert diversity([np.arange(6), np.arange(6) + 10]) == 1.0
    assert diversity([np.arange(2)]) == 1.0
    rows = [np.random.default_rng(i).integers(0, 3, 30) for i in range(5)]
    grams = [tuple(row[i : i + 4]) for row in rows for i in range(27)]
    assert diversity(rows) == len(set(grams)) / len(grams)


def test_the_diversity_of_a_step_is_a_tenth_of_the_average():
    """Three equal responses have a third: 0.9 * 0.5 + 0.1 / 3 is below 0.5, 0.9 * 0.6 + 0.1 / 3 is not."""
    rising = Rising(temperatures=(0.9, 1.0, 1.1), diversity_target=0.5)
    row = SimpleNamespace(tokens=np.arange(6), policy_mask=np.ones(6, bool))
    group = SimpleNamespace(size=3, trajectories=[row] * 3)

    def after(**memory):
        found = rising.next_memory([group], [], None, AlgoState(memory={k: np.array([v]) for k, v in memory.items()}))
        return float(found[AVERAGE][0]), float(found[STAGE][0])

    assert after(**{AVERAGE: 0.6, STAGE: 1.0}) == (pytest.approx(0.54 + 0.1 / 3), 1.0)
    assert after(**{AVERAGE: 0.5, STAGE: 1.0}) == (-1.0, 2.0)
    assert after(**{AVERAGE: 0.5, STAGE: 2.0}) == (pytest.approx(0.45 + 0.1 / 3), 2.0)
