"""Samplers, budgets, reward tokens and schedules against vectors and brute force."""

import itertools

import numpy as np
import pytest

from grpo_roc_jax.method import plan
from grpo_roc_jax.method.plan_config import PlanConfig


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(actual, expected, atol=atol)


def test_uncertainty_weights():
    close(plan.uncertainty_weights(np.array([0.5, 0.9, 0.2])), [0.55, 0.35, 0.45])


def test_success_posterior():
    close(plan.success_posterior(np.array([0, 4, 8]), np.array([0, 8, 8])), [0.5, 0.5, 8.5 / 9])


def test_hard_and_easy():
    rates = np.array([0.0, 0.1, 0.875, 1.0, 0.6, 0.3, 0.8, np.nan])
    hard, easy = plan.hard_and_easy(rates, 8)
    assert hard.tolist() == [1, 5]
    assert easy.tolist() == [2, 6]


def test_knapsack_vectors():
    rates = np.array([0.5, 0.1, 0.9])
    counts = plan.knapsack_counts(rates, 24)
    assert counts.tolist() == [7, 15, 2]
    assert float(plan.knapsack_value(counts, rates).sum()) == pytest.approx(0.188990, abs=1e-5)
    close(plan.mixed_probability(8, 0.5), 0.992188)
    close(plan.mixed_probability(8, 0.05), 0.336580)
    close(plan.mixed_probability(64, 0.05), 0.962476)


def test_knapsack_is_exact():
    """Against every allocation of small budgets."""
    generator = np.random.default_rng(0)
    for _ in range(10):
        rates = generator.random(3)
        best = max(
            plan.knapsack_value(np.array(c), rates).sum()
            for c in itertools.product(range(2, 9), repeat=3)
            if sum(c) == 13
        )
        counts = plan.knapsack_counts(rates, 13, 2, 8)
        assert counts.sum() == 13
        assert plan.knapsack_value(counts, rates).sum() == pytest.approx(best)


def test_knapsack_limits():
    assert plan.knapsack_counts(np.array([0.0, 1.0]), 10).sum() == 10
    assert plan.knapsack_counts(np.array([0.5, 0.5]), 8, 2, 4).tolist() == [4, 4]
    with pytest.raises(ValueError, match="between 4 and 8 are possible"):
        plan.knapsack_counts(np.array([0.5, 0.5]), 9, 2, 4)


def test_half_width_vectors():
    spread = float(np.std([1, 0, 0, 0], ddof=1))
    close(plan.half_width(4, spread), 0.795612)
    close(plan.half_width(5, spread), 0.620832)
    close(plan.half_width(4, spread) - plan.half_width(5, spread), 0.174780)


def test_half_width_counts():
    counts = plan.half_width_counts(np.array([0.5, 0.0, 0.5]), pilot=4, budget=20)
    assert counts.sum() == 20
    assert counts[1] == 4  # nothing to learn about a problem without spread
    explored = plan.half_width_counts(np.array([0.5, 0.0, 0.5]), pilot=4, budget=20, bonus=1.0)
    assert explored[1] > 4


def test_reward_conditions():
    rng = np.random.default_rng(0)
    fixed = plan.reward_conditions(4, 0.5, "fixed", rng)
    assert sorted(fixed) == ["high_reward", "high_reward", "low_reward", "low_reward"]
    assert plan.reward_conditions(8, 0.01, "fixed", rng).count("high_reward") == 1
    assert plan.reward_conditions(8, 0.99, "fixed", rng).count("low_reward") == 1
    iid = [plan.reward_conditions(5, 0.3, "iid", rng).count("high_reward") for _ in range(2000)]
    assert np.mean(iid) == pytest.approx(1.5, abs=0.1)
    assert {0, 5} & set(iid)  # no fixed split


def test_reward_goal():
    assert plan.reward_goal("high_reward") == "\n[Reward Goal: <|high_reward|>]"
    assert plan.reward_goal("low_reward").endswith("<|low_reward|>]")
    assert plan.reward_goal("") == ""


def test_separation_check():
    plan.check_separation(0.6, 0.2)
    with pytest.raises(ValueError, match=r"0\.300 under the high.*0\.290 under the low"):
        plan.check_separation(0.3, 0.29)


def test_linear_decay():
    assert [plan.linear_decay(s, 0.1, 100) for s in (0, 50, 100, 200)] == [0.1, 0.05, 0.0, 0.0]


def test_temperature_only_rises():
    assert plan.temperature_stage(0.4, (0.8, 1.0, 1.2), 0, 0.5) == 1
    assert plan.temperature_stage(0.9, (0.8, 1.0, 1.2), 1, 0.5) == 1
    assert plan.temperature_stage(0.1, (0.8, 1.0, 1.2), 2, 0.5) == 2


def test_diversity():
    same = [np.arange(6)] * 3
    assert plan.diversity(same) == pytest.approx(1 / 3)
    assert plan.diversity([np.arange(6), np.arange(6) + 10]) == 1.0
    assert plan.diversity([np.arange(2)]) == 1.0
    rows = [np.random.default_rng(i).integers(0, 3, 30) for i in range(5)]
    grams = [tuple(row[i : i + 4]) for row in rows for i in range(27)]
    assert plan.diversity(rows) == len(set(grams)) / len(grams)


@pytest.mark.parametrize(
    "settings",
    [
        {"high_share": 1.0, "reward_tokens": "iid"},
        {"least_rollouts": 0},
        {"least_rollouts": 9, "most_rollouts": 8},
        {"reward_tokens": "iid", "second": "draft"},
        {"warmup_steps": -1},
        {"replace": 0},
    ],
)
def test_impossible_settings(settings):
    with pytest.raises(ValueError, match=r"plan\."):
        PlanConfig(**settings)
