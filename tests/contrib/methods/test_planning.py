"""Requests of each wave and what their results do to the groups."""

from dataclasses import replace

from method_groups import make_group, method
from test_planning import asked, failed, later, planned, problems, rng

from grpo_roc_jax.contrib.methods.expo import Explain
from grpo_roc_jax.contrib.methods.s_grpo import cut_points
from grpo_roc_jax.contrib.methods.sage import WrittenHints
from grpo_roc_jax.contrib.methods.xrpo import recalled, remembered, similar_examples
from grpo_roc_jax.method.compose import next_state
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.types import Problem


def test_hints_that_the_policy_writes():
    """SAGE: a writer sees the solution, then the group runs again under what it wrote, level by level."""
    batch = problems("a", solution="6 * 7 = 42")
    plan = planned(second={"kind": "write", "levels": 2})
    groups = [failed(batch[0])]
    (writer,) = later(batch, groups, 1, plan)
    assert asked([writer]) == [(0, 1, "hint_writer")]
    assert "strength 1 of 2" in writer.suffix
    assert writer.suffix.endswith("6 * 7 = 42")
    written = make_group([0], uid="a")
    notes = WrittenHints().notes([writer], [written])
    assert notes == {0: "text"}
    assert plan.second.merge(groups, [writer], [written]) == groups
    (again,) = later(batch, groups, 2, plan, notes=notes)
    assert (asked([again]), again.suffix) == ([(0, 4, "hint:1")], "\nHint: text")
    assert later(batch, groups, 2, plan, notes={}) == []
    assert "strength 2 of 2" in later(batch, groups, 3, plan)[0].suffix
    assert later(batch, groups, 5, plan) == []
    solved = make_group([0, 1, 0, 0], uid="a")
    assert plan.second.merge(groups, [again], [solved]) == [solved]


def test_examples():
    batch = [
        Problem("a", "3 * 4 = ?", "12", "t"),
        Problem("b", "3 * 5 = ?", "15", "t"),
        Problem("c", "gcd 4 6", "2", "t"),
    ]
    groups = [
        failed(batch[0]),
        replace(make_group([0, 1], uid="b"), problem=batch[1]),
        replace(make_group([1, 1], uid="c"), problem=batch[2]),
    ]
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


def test_explanations():
    batch = problems("a")
    plan = planned(second={"kind": "explain", "count": 2})
    groups = [failed(batch[0])]
    (request,) = later(batch, groups, 1, plan)
    assert asked([request]) == [(0, 2, "explanation")]
    assert plan.second.extra_rows == 2
    assert request.suffix == "\nExplain how to arrive at the answer 1"
    result = make_group([0, 1], uid="a", condition=["explanation"] * 2)
    assert plan.second.merge(groups, [request], [result]) == groups
    (kept,) = Explain().supervised([request], [result])
    assert kept.rewards.tolist() == [1]


def test_cut_points():
    points = cut_points(10, 8, rng())
    assert len(points) == len(set(points.tolist())) == 8
    assert points.min() >= 1
    assert points.max() <= 9
    assert cut_points(3, 8, rng()).tolist() == [1, 2]
    assert cut_points(1, 8, rng()).size == 0
