"""Requests of each wave and what their results do to the groups."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.expo import Explain
from grpo_roc_jax.contrib.methods.s_grpo import cut_points
from grpo_roc_jax.contrib.methods.sage import WrittenHints
from grpo_roc_jax.contrib.methods.spo import tracked
from grpo_roc_jax.contrib.methods.xrpo import recalled, remembered, similar_examples
from grpo_roc_jax.method.compose import next_state
from grpo_roc_jax.method.planning import choose_problems
from grpo_roc_jax.method.state import AlgoState, ProblemTable
from grpo_roc_jax.types import Problem
from tests.helpers.method_groups import make_group, method
from tests.method.test_planning import asked, failed, first, later, planned, problems, rng

HINTS = {"hints": ["know this", "plan that", "do so"]}

# ---- first waves ---------------------------------------------------------------------------------------------------


def test_knapsack_budget():
    table = ProblemTable().put(["a", "b", "c"], {"successes": np.array([4.0, 0, 8]), "visits": np.array([8.0, 8, 8])})
    plan = planned(budget="knapsack", warmup_steps=2)
    plain, weighted = (
        [request.count for request in first(problems("a", "b", "c"), 8, plan, AlgoState(step, table))]
        for step in (0, 2)
    )
    assert plain == [8, 8, 8] and sum(weighted) == 24 and weighted[1] > weighted[0] > weighted[2]


@pytest.mark.parametrize(
    ("sections", "planned_waves"),
    [
        ({"condition": "hint_level"}, [(0, 8, "hint:1"), (1, 8, "hint:2")]),
        ({"second": {"kind": "serial", "cuts": 7}}, [(0, 1, ""), (1, 1, "")]),
    ],
)
def test_waves_are_plain_while_the_method_warms_up(sections, planned_waves):
    """Hint levels and single rollouts to be cut wait for the end of it too."""
    table = ProblemTable().put(["a", "b"], {"level": np.array([1.0, 2])})
    plan = planned(**sections, warmup_steps=2)
    early, late = (asked(first(problems("a", "b", **HINTS), 8, plan, AlgoState(step, table))) for step in (1, 2))
    assert early == [(0, 8, ""), (1, 8, "")] and late == planned_waves


def test_half_width_budget():
    """A pilot, then the rest of the budget where the rewards spread; groups grow by what comes back."""
    batch = problems("a", "b", **HINTS)
    plan = planned(budget="half_width", second="retry")
    assert [r.count for r in first(batch, 6, plan)] == [4, 4]
    groups = [failed(batch[0]), make_group([1, 0, 0, 1], uid="b")]
    more = later(batch, groups, 1, plan, count=6)
    assert asked(more) == [(1, 4, "")]
    merged = plan.second.merge(groups, more, [make_group([0, 0, 1, 1], uid="b")])
    assert merged[1].rewards.tolist() == [1, 0, 0, 1, 0, 0, 1, 1]
    assert asked(later(batch, merged, 2, plan, count=6)) == [(0, 4, "hint:1")]


def test_hint_levels_by_problem():
    """SAGE light: failing raises a problem's level, solving lowers it, and the next visit starts there."""
    batch = problems("a", "b", **HINTS)
    config = method(plan={"condition": "hint_level"})
    state = next_state([failed(batch[0]), make_group([1, 1, 0, 1], uid="b")], [], config, AlgoState())
    requests = first(batch, 4, config.plan, state)
    assert [str(r.condition) for r in requests] == ["hint:1", ""]
    assert requests[0].suffix == "\nHint: know this"
    state = next_state([make_group([1, 1, 1, 0], uid="a")], [], config, state)
    assert not first(batch, 4, config.plan, state)[0].condition


# ---- second waves --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["scaffold", "guide", "retry"])
def test_rising_hints(kind):
    batch = problems("a", "b", **HINTS)
    plan = planned(second={"kind": kind, "levels": 2}, warmup_steps=5)
    groups, state = [failed(batch[0]), make_group([1, 0, 0, 0], uid="b")], AlgoState(step=5)
    weakest = later(batch, groups, 1, plan, state)
    assert asked(weakest) == [(0, 4, "hint:1")]
    assert weakest[0].suffix == "\nHint: know this"
    for no_hints in ({}, {"hints": None}):
        assert later(problems("a", "b", **no_hints), groups, 1, plan, state) == []
    assert later(batch, groups, 1, plan, AlgoState(step=4)) == []
    still = plan.second.merge(groups, weakest, [failed(batch[0])])
    second = later(batch, still, 2, plan, state)
    assert second[0].suffix == "\nHint: know this\nplan that"
    assert later(batch, still, 3, plan, state) == []
    solved = make_group([0, 1, 1, 0], uid="a", condition=["hint:2"] * 4)
    done = plan.second.merge(still, second, [solved])
    assert later(batch, done, 2, plan, state) == []
    assert plan.second.trains_plain == (kind == "guide")
    if kind == "retry":
        assert done[0] is solved
    else:
        assert done[0].rewards.tolist() == [1, 0, 0, 0]
        assert [str(t.condition) for t in done[0].trajectories] == ["hint:2", "", "", ""]
    assert done[1] is groups[1]


def test_hinted_successes_leave_the_success_table_alone():
    """They count as failures of the plain prompt: hints are requested where every plain rollout failed."""
    group = make_group([1, 0, 0, 1], uid="a", condition=["hint:1", "", "", "hint:1"])
    for plan, counts in (({"second": "scaffold"}, (0, 4)), ({"condition": "hint_level"}, (2, 4))):
        row = next_state([group], [], method(plan=plan), AlgoState()).table.get(["a"])
        assert (row["successes"], row["visits"]) == counts


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
    assert request.suffix == "\n3 * 5 = ?\ntext"
    assert later(batch, groups, 2, plan) == []
    assert plan.second.merge(groups, [request], [failed(batch[0])])[0] is groups[0]
    state = next_state(groups, groups, replace(method(), plan=plan), AlgoState())
    restored = AlgoState.from_tree(state.to_tree())
    (request,) = later(batch[:1], groups[:1], 1, plan, restored)
    assert request.suffix == "\n3 * 5 = ?\ntext", "a solution of an earlier step"
    assert list(recalled(restored)) == ["3 * 5 = ?", "gcd 4 6"]
    forgetful = planned(second={"kind": "examples", "remembered": 1})
    state = next_state(groups[2:], groups[2:], replace(method(), plan=forgetful), state)
    assert list(recalled(state)) == ["gcd 4 6"], "the newest stay"
    assert recalled(AlgoState(memory=remembered({}))) == {}
    assert later(batch[:1], groups[:1], 1, plan, AlgoState()) == []
    solved = {"b x": "1", "b c": "2", "q": "3"}
    assert similar_examples("b c d", solved, 2) == [("b c", "2"), ("b x", "1")]


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


def test_draft_wave():
    """At the temperature of the first."""
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
    assert merged is second
    assert later(batch, [merged], 2, plan) == []


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
    assert merged.rewards.tolist() == [0, 1, 1]
    assert merged.trajectories[2] is full.trajectories[0]
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


def test_a_pool_follows_the_policy():
    """What is known of a problem follows it as it becomes solved always, and again once it fails."""
    state, config = AlgoState(), method(plan={"problems": "uncertainty"})
    for successes, value in (([1, 1, 1, 1], 1.0), ([1, 0, 1, 0], 0.5)):
        for _ in range(30):
            groups = [make_group(successes, uid="a")]
            state = next_state(groups, groups, config, state)
        assert tracked(state, problems("a")) == pytest.approx(value, abs=0.03)
