"""Requests of each wave and what their results do to groups; samplers, budgets and schedules; RC-RoC."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from grpo_roc_jax.contrib.methods import v_0, xrpo
from grpo_roc_jax.contrib.methods.expo import Explain
from grpo_roc_jax.contrib.methods.knapsack import knapsack_counts, knapsack_value
from grpo_roc_jax.contrib.methods.microcoder import AVERAGE, STAGE, Rising, diversity
from grpo_roc_jax.contrib.methods.s_grpo import cut_points
from grpo_roc_jax.contrib.methods.sage import WrittenHints
from grpo_roc_jax.contrib.methods.spo import tracked
from grpo_roc_jax.contrib.methods.v_0 import RecordEntry, predicted
from grpo_roc_jax.method.compose import next_state
from grpo_roc_jax.method.planning import Wave, choose_problems
from grpo_roc_jax.method.roc import ResampleOnCorrect
from grpo_roc_jax.method.state import AlgoState, ProblemTable
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.types import Problem
from tests.helpers.method_groups import close, make_group, method
from tests.method import test_roc as core
from tests.method.test_planning import asked, failed, first, later, planned, problems, rng
from tests.method.test_roc import run, selector

HINTS = {"hints": ["know this", "plan that", "do so"]}

# ---- first waves ---------------------------------------------------------------------------------------------------


def test_waves_are_plain_while_the_method_warms_up():
    """Hint levels and single rollouts to be cut wait for the end of it too."""
    table = ProblemTable().put(["a", "b"], {"level": np.array([1.0, 2])})
    for sections, waves in (
        ({"condition": "hint_level"}, [(0, 8, "hint:1"), (1, 8, "hint:2")]),
        ({"second": {"kind": "serial", "cuts": 7}}, [(0, 1, ""), (1, 1, "")]),
    ):
        plan = planned(**sections, warmup_steps=2)
        early, late = (asked(first(problems("a", "b", **HINTS), 8, plan, AlgoState(step, table))) for step in (1, 2))
        assert early == [(0, 8, ""), (1, 8, "")] and late == waves
    table = ProblemTable().put(["a", "b", "c"], {"successes": np.array([4.0, 0, 8]), "visits": np.array([8.0, 8, 8])})
    plan = planned(budget="knapsack", warmup_steps=2)
    plain, weighted = (
        [request.count for request in first(problems("a", "b", "c"), 8, plan, AlgoState(step, table))]
        for step in (0, 2)
    )
    assert plain == [8, 8, 8] and sum(weighted) == 24 and weighted[1] > weighted[0] > weighted[2]


def test_hint_levels_by_problem():
    """SAGE light: failing raises a problem's level, solving lowers it, and the next visit starts there."""
    batch = problems("a", "b", **HINTS)
    config = method(plan={"condition": "hint_level"})
    state = next_state([failed(batch[0]), make_group([1, 1, 0, 1], uid="b")], [], config, AlgoState())
    requests = first(batch, 4, config.plan, state)
    assert [str(r.condition) for r in requests] == ["hint:1", ""] and requests[0].suffix == "\nHint: know this"
    state = next_state([make_group([1, 1, 1, 0], uid="a")], [], config, state)
    assert not first(batch, 4, config.plan, state)[0].condition
    for level, accuracy, moved in ((0, 0, 1), (1, 0.05, 2), (2, 0.2, 2), (2, 0.5, 1), (3, 0, 3), (1, 0.9, 0)):
        table = ProblemTable().put(["a"], {"level": np.array([level]), "accuracy": np.array([accuracy])})
        after = config.plan.condition.next_table(["a", "a"], AlgoState(table=table))
        assert after.table.get(["a"])["level"].tolist() == [moved]
    # They count as failures of the plain prompt: hints are requested where every plain rollout failed.
    group = make_group([1, 0, 0, 1], uid="a", condition=["hint:1", "", "", "hint:1"])
    for plan, counts in (({"second": "scaffold"}, (0, 4)), ({"condition": "hint_level"}, (2, 4))):
        row = next_state([group], [], method(plan=plan), AlgoState()).table.get(["a"])
        assert (row["successes"], row["visits"]) == counts


# ---- second waves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["scaffold", "guide", "retry"])
def test_rising_hints(kind):
    batch = problems("a", "b", **HINTS)
    plan = planned(second={"kind": kind, "levels": 2}, warmup_steps=5)
    groups, state = [failed(batch[0]), make_group([1, 0, 0, 0], uid="b")], AlgoState(step=5)
    weakest = later(batch, groups, 1, plan, state)
    assert asked(weakest) == [(0, 4, "hint:1")] and weakest[0].suffix == "\nHint: know this"
    for no_hints in ({}, {"hints": None}):
        assert later(problems("a", "b", **no_hints), groups, 1, plan, state) == []
    assert later(batch, groups, 1, plan, AlgoState(step=4)) == []
    still = plan.second.merge(groups, weakest, [failed(batch[0])])
    second = later(batch, still, 2, plan, state)
    assert second[0].suffix == "\nHint: know this\nplan that" and later(batch, still, 3, plan, state) == []
    solved = make_group([0, 1, 1, 0], uid="a", condition=["hint:2"] * 4)
    done = plan.second.merge(still, second, [solved])
    assert later(batch, done, 2, plan, state) == [] and plan.second.trains_plain == (kind == "guide")
    if kind == "retry":
        assert done[0] is solved
    else:
        assert done[0].rewards.tolist() == [1, 0, 0, 0]
        assert [str(t.condition) for t in done[0].trajectories] == ["hint:2", "", "", ""]
    assert done[1] is groups[1]


def test_hints_that_the_policy_writes():
    """SAGE: a writer sees the solution, then the group runs again under what it wrote, level by level."""
    batch = problems("a", solution="6 * 7 = 42")
    plan = planned(second={"kind": "write", "levels": 2})
    groups = [failed(batch[0])]
    (writer,) = later(batch, groups, 1, plan)
    assert asked([writer]) == [(0, 1, "hint_writer")]
    assert "strength 1 of 2" in writer.suffix and writer.suffix.endswith("6 * 7 = 42")
    (blind,) = later(problems("a", solution=None), groups, 1, plan)
    assert blind.suffix.endswith(batch[0].answer)
    written = make_group([0], uid="a")
    notes = WrittenHints().notes([writer], [written])
    assert notes == {0: "text"} and plan.second.merge(groups, [writer], [written]) == groups
    (again,) = later(batch, groups, 2, plan, notes=notes)
    assert (asked([again]), again.suffix) == ([(0, 4, "hint:1")], "\nHint: text")
    assert later(batch, groups, 2, plan, notes={}) == later(batch, groups, 5, plan) == []
    assert "strength 2 of 2" in later(batch, groups, 3, plan)[0].suffix
    solved = make_group([0, 1, 0, 0], uid="a")
    assert plan.second.merge(groups, [again], [solved]) == [solved]


def test_examples():
    prompts = {"a": "3 * 4 = ?", "b": "3 * 5 = ?", "c": "gcd 4 6"}
    batch = [Problem(uid, prompt, "1", "t") for uid, prompt in prompts.items()]
    rewards = ([0] * 4, [0, 1], [1, 1])
    groups = [replace(make_group(r, uid=p.uid), problem=p) for r, p in zip(rewards, batch, strict=True)]
    plan = planned(second={"kind": "examples", "count": 1})
    (request,) = later(batch, groups, 1, plan)
    assert request.suffix == "\n3 * 5 = ?\ntext" and later(batch, groups, 2, plan) == []
    assert plan.second.merge(groups, [request], [failed(batch[0])])[0] is groups[0]
    state = next_state(groups, groups, replace(method(), plan=plan), AlgoState())
    restored = AlgoState.from_tree(state.to_tree())
    (request,) = later(batch[:1], groups[:1], 1, plan, restored)
    assert request.suffix == "\n3 * 5 = ?\ntext", "a solution of an earlier step"
    assert list(xrpo.recalled(restored)) == ["3 * 5 = ?", "gcd 4 6"]
    forgetful = planned(second={"kind": "examples", "remembered": 1})
    state = next_state(groups[2:], groups[2:], replace(method(), plan=forgetful), state)
    assert list(xrpo.recalled(state)) == ["gcd 4 6"], "the newest stay"
    assert xrpo.recalled(AlgoState(memory=xrpo.remembered({}))) == {}
    assert later(batch[:1], groups[:1], 1, plan, AlgoState()) == []
    solved = {"b x": "1", "b c": "2", "q": "3"}
    assert xrpo.similar_examples("b c d", solved, 2) == [("b c", "2"), ("b x", "1")]


def test_explanations_fade_out():
    batch, plan = problems("a"), planned(second={"kind": "explain", "count": 2, "steps": 10})
    groups = [failed(batch[0])]
    (request,) = later(batch, groups, 1, plan, AlgoState(step=9))
    assert (asked([request]), plan.second.extra_rows) == ([(0, 2, "explanation")], 2)
    assert request.suffix == "\nExplain how to arrive at the answer 1"
    assert later(batch, groups, 1, plan, AlgoState(step=10)) == []
    result = make_group([0, 1], uid="a", condition=["explanation"] * 2)
    assert plan.second.merge(groups, [request], [result]) == groups
    (supervised,) = Explain().supervised([request], [result])
    assert supervised.rewards.tolist() == [1]
    assert [plan.second.supervised_weight(step) for step in (0, 5, 10, 20)] == pytest.approx([0.1, 0.05, 0, 0])
    assert planned(second="draft").second.supervised_weight(0) == 0
    # At the temperature of the first.
    batch, drafts = problems("a"), make_group([0, 1, 1, 0], uid="a")
    plan = planned(second="draft", temperature={"kind": "rising", "temperatures": [0.8, 1.2]})
    state = AlgoState(memory={"temperature_stage": np.array([1.0])})
    assert [first(batch, 2, plan, some)[0].temperature for some in (None, state)] == [0.8, 1.2]
    assert (plan.temperature.all, planned().temperature.all) == ((0.8, 1.2), ())
    (request,) = later(batch, [drafts], 1, plan, state)
    assert (asked([request]), request.temperature) == ([(0, 4, "draft")], 1.2)
    assert request.suffix == "\nAn earlier attempt:\ntext"
    second = make_group([1, 1, 0, 1], uid="a", condition=["draft"] * 4)
    (merged,) = plan.second.merge([drafts], [request], [second])
    assert merged is second and later(batch, [merged], 2, plan) == []


def test_serial_cuts():
    """S-GRPO: cuts of one thought, continued once each, before the full one."""
    batch = problems("a")
    plan = planned(second={"kind": "serial", "cuts": 2, "stop": "stop"})
    full = make_group([1], uid="a", lengths=[9])
    requests = later(batch, [full], 1, plan)
    thought, lengths = full.trajectories[0].tokens[2:11].tolist(), [len(r.prefix) for r in requests]
    assert len(lengths) == 2 and lengths == sorted(lengths)
    assert all(list(r.prefix) == thought[: len(r.prefix)] and r.prefix_text == "stop" for r in requests)
    short = later(batch, [full], 1, plan, thought=lambda trajectory: 3)
    assert [len(r.prefix) for r in short] == [1, 2]
    turns = planned(second={"kind": "serial", "cuts": 9, "cut": "turn"})
    assert len(later(batch, [full], 1, turns, thought=lambda trajectory: 3)) == 8, "a turn of nine has eight places"
    results = [make_group([0], uid="a", condition=["cut"]), make_group([1], uid="a", condition=["cut"])]
    (merged,) = plan.second.merge([full], requests, results)
    assert merged.rewards.tolist() == [0, 1, 1] and merged.trajectories[2] is full.trajectories[0]
    assert later(batch, [merged], 2, plan) == []
    points = cut_points(10, 8, rng()).tolist()
    assert len(points) == len(set(points)) == 8 and min(points) >= 1 and max(points) <= 9
    assert cut_points(1, 8, rng()).size == 0


# ---- problems ------------------------------------------------------------------------------------------------------


def test_problems_of_middling_success_are_drawn_more_often():
    counts = {"alpha": np.array([9.0, 5] * 3) * 1e6, "beta": np.array([0.0, 5] * 3) * 1e6}
    state, generator = AlgoState(table=ProblemTable().put(list("abcdef"), counts)), rng()
    plan = planned(problems="uncertainty")
    drawn = [choose_problems(problems(*"abcdef"), 1, plan, state, generator)[0] for _ in range(2000)]
    np.testing.assert_allclose(np.bincount(drawn) / 2000, np.array([0.05, 0.55] * 3) / 1.8, atol=0.03)
    assert choose_problems(problems(*"abcdef"), 3, planned(), AlgoState(), rng()) == [0, 1, 2]
    # What is known of a problem follows it as it becomes solved always, and again once it fails.
    state, config = AlgoState(), method(plan={"problems": "uncertainty"})
    for successes, value in (([1, 1, 1, 1], 1.0), ([1, 0, 1, 0], 0.5)):
        for _ in range(30):
            groups = [make_group(successes, uid="a")]
            state = next_state(groups, groups, config, state)
        assert tracked(state, problems("a")) == pytest.approx(value, abs=0.03)
    # Solved at most half of the time, lowest first, by turns with those failed once or twice in eight.
    counts = {"successes": np.array([0, 4, 35, 40, 20, 12, 32, 31, 0]), "visits": np.array([40] * 8 + [0])}
    uids = list("abcdefghi")
    state = AlgoState(table=ProblemTable().put(uids, counts))
    pool, sampler = [Problem(uid, "?", "1", "t") for uid in uids], method(plan={"problems": "pairs"}).plan.problems
    for count, chosen in ((2, [1, 2]), (4, [1, 2, 5, 6]), (6, [1, 2, 4, 5, 6, 7]), (7, [0, 1, 2, 4, 5, 6, 7])):
        assert sampler.choose(pool, count, state, None) == chosen


# ---- budgets and schedules ------------------------------------------------------------------------------------------


def test_budgets_and_temperatures_by_hand():
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
        assert counts.sum() == 13 and knapsack_value(counts, rates).sum() == pytest.approx(best)
    assert knapsack_counts(np.array([0.0, 1.0]), 10, 2, 128).sum() == 10
    assert knapsack_counts(np.array([0.5, 0.5]), 8, 2, 4).tolist() == [4, 4]
    with pytest.raises(ValueError, match="between 4 and 8 are possible"):
        knapsack_counts(np.array([0.5, 0.5]), 9, 2, 4)
    close([xrpo.half_width(n, 0.5) for n in (4, 5)], [0.795612, 0.620832])
    counts = xrpo.half_width_counts(np.array([0.5, 0.0, 0.5]), pilot=4, budget=20)
    assert counts.sum() == 20
    assert counts[1] == 4  # nothing to learn about a problem without spread
    assert xrpo.half_width_counts(np.array([0.5, 0.0, 0.5]), pilot=4, budget=20, bonus=1.0)[1] > 4
    # A pilot, then the rest of the budget where the rewards spread; groups grow by what comes back.
    batch = problems("a", "b", **HINTS)
    plan = planned(budget="half_width", second="retry")
    assert [r.count for r in first(batch, 6, plan)] == [4, 4]
    groups = [failed(batch[0]), make_group([1, 0, 0, 1], uid="b")]
    more = later(batch, groups, 1, plan, count=6)
    assert asked(more) == [(1, 4, "")]
    merged = plan.second.merge(groups, more, [make_group([0, 0, 1, 1], uid="b")])
    assert merged[1].rewards.tolist() == [1, 0, 0, 1, 0, 0, 1, 1]
    assert asked(later(batch, merged, 2, plan, count=6)) == [(0, 4, "hint:1")]
    # Three equal responses have a diversity of a third, which is a tenth of the average: the target is a half.
    assert diversity([np.arange(2)]) == 1.0
    rows = [np.random.default_rng(i).integers(0, 3, 30) for i in range(5)]
    grams = [tuple(row[i : i + 4]) for row in rows for i in range(27)]
    assert diversity(rows) == len(set(grams)) / len(grams)
    for before, stage, average, after in (
        (-1.0, 0, -1.0, 1),  # the first step; a new stage starts its own average
        (0.6, 1, 0.54 + 0.1 / 3, 1),
        (0.5, 1, -1.0, 2),
        (0.5, 2, 0.45 + 0.1 / 3, 2),
    ):
        state = AlgoState(memory={AVERAGE: np.array([before]), STAGE: np.array([float(stage)])})
        moved = Rising().next_memory([make_group([1, 0, 0], lengths=[6] * 3)], [], None, state)
        assert (moved[AVERAGE][0], moved[STAGE][0]) == (pytest.approx(average), after)
        assert Rising().now(state) == (0.9, 1.0, 1.1)[stage] and Rising().all == (0.9, 1.0, 1.1)


def test_success_is_predicted_from_similar_problems():
    """By hand: cosines of 1 and 2/7 to the two entries, (2/7)^4 = 0.006664."""
    record = [RecordEntry("gcd of 12 and 18", 1.0, 0.0), RecordEntry("product of 3 and 4", 0.0, 0.0)]
    close(v_0.similarities(["GCD of 45 and 10"], [o.prompt for o in record]), [[1.0, 2 / 7]])
    old = [RecordEntry(record[0].prompt, 1.0, 20.0), record[1]]  # of a policy 20 steps ago: counts half
    for prompt, known, success in (
        ("gcd of 45 and 10", record, 1.5 / 2.006664),
        ("gcd of 45 and 10", old, 0.9 / 1.506664),
        ("nothing alike", record, 0.5),
        ("anything", [], 0.5),
    ):
        close(predicted([prompt], known, 20.0, 4.0, 1.0), [success])
    # The record moves with the policy, outlives a checkpoint, and decides about new problems.
    config = method(8, plan={"budget": {"kind": "predicted", "remembered": 2, "sharpness": 50.0}}, resample="none")
    lost, won, other = (
        replace(make_group([reward] * 4, uid=text), problem=Problem(text, text, "1", "t"))
        for text, reward in (("lost entry", 0.0), ("gcd of 12 and 18", 1.0), ("product of 3 and 4", 0.0))
    )
    state = next_state([lost], [], config, AlgoState())
    state = AlgoState.from_tree(next_state([won, other], [], config, state).to_tree())
    newest = [(won.problem.prompt, 1), (other.problem.prompt, 0)]
    assert [(o.prompt, o.success) for o in v_0.recalled_record(state)] == newest
    new = [Problem(text, text, "1", "t") for text in ("gcd of 99 and 11", "product of 7 and 9", "sum of 1 and 1000")]
    wave = Wave(new, 8, state, np.random.default_rng(0))
    rates, counts = config.plan.budget.rates(wave), config.plan.budget.first(wave)
    assert rates[2] == pytest.approx(0.5, abs=1e-6) and rates[1] < 0.45 and rates[0] > 0.55
    assert counts.tolist() == knapsack_counts(rates, 24, 2, 128).tolist() and counts.sum() == 24
    # And a predictor of the user's is asked.
    record = [RecordEntry("gcd of 12 and 18", 1.0, 3.0), RecordEntry("product of 3 and 4", 0.25, 9.0)]

    def budget(**more):
        return method(8, plan={"budget": {"kind": "predicted", **more}}, resample="none").plan.budget

    def rate(**more):
        state = AlgoState(memory=v_0.remembered_record(record, 0))
        return budget(**more).rates(Wave([Problem("a", "gcd of 4 and 10", "1", "t")], 8, state, None))[0]

    values = {"half_life": 20.0, "sharpness": 4.0, "prior": 1.0}
    assert rate() == pytest.approx(predicted(["gcd of 4 and 10"], record, **values)[0], abs=1e-12)
    assert all(abs(rate() - rate(**{setting: value / 4})) > 1e-3 for setting, value in values.items())
    wave = Wave(problems(*"abc"), 8, AlgoState(), rng())
    with given({"asked": lambda problems, record: [0.5, 0.1, 0.9]}):
        assert budget(predictor="asked").first(wave).tolist() == [7, 15, 2]
    refused = pytest.raises(ValueError, match="3 probabilities")
    with given({"asked": lambda problems, record: [0.5, 2.0, 0.9]}), refused:
        budget(predictor="asked").first(wave)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 14, 23, 31, 38, 54])
def test_no_problem_is_chosen_twice_and_two_failures_in_a_group_are_easy(group):
    """Of groups up to four a rate of 1/2 meets both bounds; of others two failures meet theirs in any rounding."""
    won = [group // 2, max(group - 2, 0), group - 1, 1]
    state = AlgoState(table=ProblemTable().put(list("abcd"), {"successes": np.array(won), "visits": np.full(4, group)}))
    pool = [Problem(uid, "?", "1", "t") for uid in "abcd"]
    sampler = method(plan={"problems": {"kind": "pairs", "group": group}}).plan.problems
    assert all(len(set(sampler.choose(pool, count, state, None))) == count for count in (2, 4))
    if group > 4:
        assert sampler.choose(pool, 4, state, None) == [0, 1, 2, 3]
        assert set(sampler.choose(pool[:2], 2, state, None)) == {0, 1}
        easy = sampler.choose([pool[1], pool[3], pool[3]], 2, state, None)
        assert easy == [0, 1], "two failures are nearly always solved, and one success is rare"


# ---- RC-RoC: selection under reward tokens --------------------------------------------------------------------------

LOW, HIGH = "low_reward", "high_reward"


def test_conditions():
    """Successes under the low reward token: ranked with the others, after them, or with places of their own."""
    group = make_group([1] * 4 + [0] * 4, errors=[0, 0, 1, 1, 0, 0, 0, 0], condition=[LOW, LOW, HIGH, HIGH] * 2)
    for settings, expected in (
        ({"kind": "roc"}, {0, 1}),
        ({"kind": "rc_roc"}, {2, 3}),
        ({"kind": "rc_roc", "conditions": "stratify"}, {0, 2}),
    ):
        assert set(run(group, 4, **settings).indices.tolist()) & {0, 1, 2, 3} == expected
    # Two places for five and one: shares of 1.67 and 0.33, and the larger remainder gets the second place.
    group = make_group([1] * 6 + [0] * 2, condition=[LOW] * 5 + [HIGH] + [LOW] * 2)
    assert run(group, 4, kind="rc_roc", conditions="stratify").indices.tolist() == [0, 1, 6, 7]
    core.test_short_and_full_groups("rc_roc")
    assert selector(kind="rc_roc").quota_decided(16, 15, 1, 16) == ResampleOnCorrect().quota_decided(16, 15, 1, 16)
    assert not selector(kind="rc_roc", conditions="stratify").quota_decided(16, 16, 1, 16)
