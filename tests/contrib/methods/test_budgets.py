"""Samplers, budgets, reward tokens and schedules of the plan: their formulas against vectors and brute force."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.knapsack import knapsack_counts, knapsack_value
from grpo_roc_jax.contrib.methods.microcoder import AVERAGE, STAGE, Rising, diversity
from grpo_roc_jax.contrib.methods.v_0 import RecordEntry, predicted, recalled_record, remembered_record, similarities
from grpo_roc_jax.contrib.methods.xrpo import half_width, half_width_counts
from grpo_roc_jax.method.compose import next_state
from grpo_roc_jax.method.planning import Wave
from grpo_roc_jax.method.state import AlgoState, ProblemTable
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.types import Problem
from tests.helpers.method_groups import make_group, method


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


def test_success_is_predicted_from_similar_problems():
    """By hand: cosines of 1 and 2/7 to the two entries, (2/7)^4 = 0.006664."""
    record = [RecordEntry("gcd of 12 and 18", 1.0, 0.0), RecordEntry("product of 3 and 4", 0.0, 0.0)]
    close(similarities(["GCD of 45 and 10"], [o.prompt for o in record]), [[1.0, 2 / 7]])
    close(predicted(["gcd of 45 and 10"], record, 20.0, 4.0, 1.0), [1.5 / 2.006664])
    old = [RecordEntry(record[0].prompt, 1.0, 20.0), record[1]]  # of a policy 20 steps ago: counts half
    close(predicted(["gcd of 45 and 10"], old, 20.0, 4.0, 1.0), [0.9 / 1.506664])
    close(predicted(["nothing alike"], record, 20.0, 4.0, 1.0), [0.5])
    close(predicted(["anything"], [], 20.0, 4.0, 1.0), [0.5])


def test_predicted_success_decides_about_problems_that_were_never_seen():
    """The record moves with the policy, outlives a checkpoint, and decides about new problems."""
    config = method(8, plan={"budget": {"kind": "predicted", "remembered": 2, "sharpness": 50.0}}, resample="none")
    budget = config.plan.budget
    groups = [
        dataclasses.replace(make_group([won] * 4, uid=text), problem=Problem(text, text, "1", "t"))
        for text, won in (("lost entry", 0.0), ("gcd of 12 and 18", 1.0), ("product of 3 and 4", 0.0))
    ]
    state = next_state([groups[0]], [], config, AlgoState())
    state = AlgoState.from_tree(next_state(groups[1:], [], config, state).to_tree())
    assert [(o.prompt, o.success) for o in recalled_record(state)] == [
        ("gcd of 12 and 18", 1),
        ("product of 3 and 4", 0),
    ]
    new = [Problem(text, text, "1", "t") for text in ("gcd of 99 and 11", "product of 7 and 9", "sum of 1 and 1000")]
    wave = Wave(new, 8, state, np.random.default_rng(0))
    rates = budget.rates(wave)
    assert rates[2] == pytest.approx(0.5, abs=1e-6) and rates[1] < 0.45 and rates[0] > 0.55
    assert budget.first(wave).tolist() == knapsack_counts(rates, 24, 2, 128).tolist() and budget.first(wave).sum() == 24


@pytest.mark.parametrize("setting", ["half_life", "sharpness", "prior"])
def test_each_setting_of_the_prediction_moves_it(setting):
    record = [RecordEntry("gcd of 12 and 18", 1.0, 3.0), RecordEntry("product of 3 and 4", 0.25, 9.0)]
    wave = Wave([Problem("a", "gcd of 4 and 10", "1", "t")], 8, AlgoState(memory=remembered_record(record, 0)), None)

    def rate(**more):
        return method(plan={"budget": {"kind": "predicted", **more}}, resample="none").plan.budget.rates(wave)[0]

    values = {"half_life": 20.0, "sharpness": 4.0, "prior": 1.0}
    assert rate() == pytest.approx(predicted(["gcd of 4 and 10"], record, **values)[0], abs=1e-12)
    assert abs(rate() - rate(**{setting: values[setting] / 4})) > 1e-3


def test_a_predictor_of_the_users_is_asked():
    budget = method(8, plan={"budget": {"kind": "predicted", "predictor": "asked"}}, resample="none").plan.budget
    problems = [Problem(text, text, "1", "t") for text in "abc"]
    wave = Wave(problems, 8, AlgoState(), np.random.default_rng(0))
    with given({"asked": lambda problems, record: [0.5, 0.1, 0.9]}):
        assert budget.first(wave).tolist() == [7, 15, 2]
    with given({"asked": lambda problems, record: [0.5, 2.0, 0.9]}), pytest.raises(ValueError, match="3 probabilities"):
        budget.first(wave)


def test_hard_and_easy():
    """Solved at most half of the time, lowest first, by turns with those failed once or twice in eight."""
    solved = np.array([0, 4, 35, 40, 24, 12, 32, 0])
    seen = np.array([40, 40, 40, 40, 40, 40, 40, 0])
    uids = list("abcdefgh")
    state = AlgoState(table=ProblemTable().put(uids, {"successes": solved, "visits": seen}))
    pool, sampler = [Problem(uid, "?", "1", "t") for uid in uids], method(plan={"problems": "pairs"}).plan.problems
    assert sampler.choose(pool, 2, state, None) == [1, 2]
    assert sampler.choose(pool, 4, state, None) == [1, 2, 5, 6]


@pytest.mark.parametrize(
    "settings",
    [
        {"condition": {"kind": "hint_level", "levels": 0}},
        {"problems": {"kind": "uncertainty", "pool": 0}},
        {"budget": {"kind": "knapsack", "least": 0}},
        {"budget": {"kind": "knapsack", "least": 9, "most": 8}},
        {"budget": {"kind": "half_width", "pilot": 1}},
        {"budget": {"kind": "half_width", "alpha": 1.0}},
        {"budget": {"kind": "half_width", "bonus": -1.0}},
        {"second": {"kind": "scaffold", "replace": 0}},
        {"second": {"kind": "examples", "count": 0}},
        {"second": {"kind": "explain", "steps": 0}},
        {"second": {"kind": "explain", "weight": -0.1}},
        {"second": {"kind": "serial", "cuts": 0}},
        {"temperature": {"kind": "rising", "temperatures": [1.0, 0.9]}},
        {"temperature": {"kind": "rising", "temperatures": [0.0, 0.9]}},
        {"temperature": {"kind": "rising", "temperatures": []}},
    ],
)
def test_impossible_plans(settings):
    with pytest.raises(ConfigError, match=r"plan\."):
        method(plan=settings)
