"""Samplers, budgets, reward tokens and schedules of the plan: their formulas against vectors and brute force."""

import itertools
from dataclasses import replace

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
from grpo_roc_jax.types import Problem
from tests.helpers.method_groups import close, make_group, method


def test_knapsack():
    """Gains by hand; counts against every allocation of small budgets; their limits."""
    for count, rate, mixed in ((8, 0.5, 0.992188), (8, 0.05, 0.336580), (64, 0.05, 0.962476)):
        close(knapsack_value(count, rate), mixed * rate * (1 - rate) ** 2)
    generator = np.random.default_rng(0)
    for _ in range(10):
        rates = generator.random(3)
        best = max(
            knapsack_value(np.array(c), rates).sum() for c in itertools.product(range(2, 9), repeat=3) if sum(c) == 13
        )
        counts = knapsack_counts(rates, 13, 2, 8)
        assert counts.sum() == 13
        assert knapsack_value(counts, rates).sum() == pytest.approx(best)
    assert knapsack_counts(np.array([0.0, 1.0]), 10, 2, 128).sum() == 10
    assert knapsack_counts(np.array([0.5, 0.5]), 8, 2, 4).tolist() == [4, 4]
    with pytest.raises(ValueError, match="between 4 and 8 are possible"):
        knapsack_counts(np.array([0.5, 0.5]), 9, 2, 4)


def test_half_width():
    close([half_width(n, 0.5) for n in (4, 5)], [0.795612, 0.620832])
    counts = half_width_counts(np.array([0.5, 0.0, 0.5]), pilot=4, budget=20)
    assert counts.sum() == 20
    assert counts[1] == 4  # nothing to learn about a problem without spread
    assert half_width_counts(np.array([0.5, 0.0, 0.5]), pilot=4, budget=20, bonus=1.0)[1] > 4


def test_diversity():
    assert diversity([np.arange(2)]) == 1.0
    rows = [np.random.default_rng(i).integers(0, 3, 30) for i in range(5)]
    grams = [tuple(row[i : i + 4]) for row in rows for i in range(27)]
    assert diversity(rows) == len(set(grams)) / len(grams)


@pytest.mark.parametrize(
    ("before", "stage", "after"),
    [
        (-1.0, 0.0, (-1.0, 1.0)),  # the first step; a new stage starts its own average
        (0.6, 1.0, (0.54 + 0.1 / 3, 1.0)),
        (0.5, 1.0, (-1.0, 2.0)),
        (0.5, 2.0, (0.45 + 0.1 / 3, 2.0)),
    ],
)
def test_the_temperature_rises_with_falling_diversity(before, stage, after):
    """Three equal responses have a diversity of a third, which is a tenth of the average: the target is a half."""
    group = make_group([1, 0, 0], lengths=[6] * 3)
    state = AlgoState(memory={AVERAGE: np.array([before]), STAGE: np.array([stage])})
    moved = Rising().next_memory([group], [], None, state)
    assert (moved[AVERAGE][0], moved[STAGE][0]) == (pytest.approx(after[0]), after[1])
    assert Rising().now(state) == (0.9, 1.0, 1.1)[int(stage)] and Rising().all == (0.9, 1.0, 1.1)


def test_success_is_predicted_from_similar_problems():
    """By hand: cosines of 1 and 2/7 to the two entries, (2/7)^4 = 0.006664."""
    record = [RecordEntry("gcd of 12 and 18", 1.0, 0.0), RecordEntry("product of 3 and 4", 0.0, 0.0)]
    close(similarities(["GCD of 45 and 10"], [o.prompt for o in record]), [[1.0, 2 / 7]])
    old = [RecordEntry(record[0].prompt, 1.0, 20.0), record[1]]  # of a policy 20 steps ago: counts half
    for prompt, known, success in (
        ("gcd of 45 and 10", record, 1.5 / 2.006664),
        ("gcd of 45 and 10", old, 0.9 / 1.506664),
        ("nothing alike", record, 0.5),
        ("anything", [], 0.5),
    ):
        close(predicted([prompt], known, 20.0, 4.0, 1.0), [success])


def test_predicted_success_decides_about_problems_that_were_never_seen():
    """The record moves with the policy, outlives a checkpoint, and decides about new problems."""
    config = method(8, plan={"budget": {"kind": "predicted", "remembered": 2, "sharpness": 50.0}}, resample="none")
    lost, won, other = (
        replace(make_group([reward] * 4, uid=text), problem=Problem(text, text, "1", "t"))
        for text, reward in (("lost entry", 0.0), ("gcd of 12 and 18", 1.0), ("product of 3 and 4", 0.0))
    )
    state = next_state([lost], [], config, AlgoState())
    state = AlgoState.from_tree(next_state([won, other], [], config, state).to_tree())
    newest = [(won.problem.prompt, 1), (other.problem.prompt, 0)]
    assert [(o.prompt, o.success) for o in recalled_record(state)] == newest
    new = [Problem(text, text, "1", "t") for text in ("gcd of 99 and 11", "product of 7 and 9", "sum of 1 and 1000")]
    wave = Wave(new, 8, state, np.random.default_rng(0))
    rates, counts = config.plan.budget.rates(wave), config.plan.budget.first(wave)
    assert rates[2] == pytest.approx(0.5, abs=1e-6) and rates[1] < 0.45 and rates[0] > 0.55
    assert counts.tolist() == knapsack_counts(rates, 24, 2, 128).tolist() and counts.sum() == 24


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
    wave = Wave([Problem(text, text, "1", "t") for text in "abc"], 8, AlgoState(), np.random.default_rng(0))
    with given({"asked": lambda problems, record: [0.5, 0.1, 0.9]}):
        assert budget.first(wave).tolist() == [7, 15, 2]
    with given({"asked": lambda problems, record: [0.5, 2.0, 0.9]}), pytest.raises(ValueError, match="3 probabilities"):
        budget.first(wave)


def test_hard_and_easy():
    """Solved at most half of the time, lowest first, by turns with those failed once or twice in eight."""
    counts = {"successes": np.array([0, 4, 35, 40, 20, 12, 32, 31, 0]), "visits": np.array([40] * 8 + [0])}
    uids = list("abcdefghi")
    state = AlgoState(table=ProblemTable().put(uids, counts))
    pool, sampler = [Problem(uid, "?", "1", "t") for uid in uids], method(plan={"problems": "pairs"}).plan.problems
    for count, chosen in ((2, [1, 2]), (4, [1, 2, 5, 6]), (6, [1, 2, 4, 5, 6, 7]), (7, [0, 1, 2, 4, 5, 6, 7])):
        assert sampler.choose(pool, count, state, None) == chosen


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 14, 23, 31, 38, 54])
def test_no_problem_is_chosen_twice_and_two_failures_in_a_group_are_easy(group):
    """Of groups up to four a rate of 1/2 meets both bounds; of others two failures meet theirs in any rounding."""
    won = [group // 2, max(group - 2, 0), group - 1, 1]
    state = AlgoState(table=ProblemTable().put(list("abcd"), {"successes": np.array(won), "visits": np.full(4, group)}))
    pool = [Problem(uid, "?", "1", "t") for uid in "abcd"]
    sampler = method(plan={"problems": {"kind": "pairs", "group": group}}).plan.problems
    for count in (2, 4):
        chosen = sampler.choose(pool, count, state, None)
        assert len(set(chosen)) == count
    if group > 4:
        assert sampler.choose(pool, 4, state, None) == [0, 1, 2, 3]
        assert set(sampler.choose(pool[:2], 2, state, None)) == {0, 1}
        easy = sampler.choose([pool[1], pool[3], pool[3]], 2, state, None)
        assert easy == [0, 1], "two failures are nearly always solved, and one success is rare"


@pytest.mark.parametrize(
    ("level", "accuracy", "moved"), [(0, 0, 1), (1, 0.05, 2), (2, 0.2, 2), (2, 0.5, 1), (3, 0, 3), (1, 0.9, 0)]
)
def test_hint_level_vector(level, accuracy, moved):
    table = ProblemTable().put(["a"], {"level": np.array([level]), "accuracy": np.array([accuracy])})
    condition = method(plan={"condition": "hint_level"}).plan.condition
    after = condition.next_table(["a", "a"], AlgoState(table=table))
    assert after.table.get(["a"])["level"].tolist() == [moved]
