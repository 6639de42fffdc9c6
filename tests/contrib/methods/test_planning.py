"""Requests of each wave and what their results do to the groups."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.contrib.methods.expo import Explain
from grpo_roc_jax.contrib.methods.s_grpo import cut_points
from grpo_roc_jax.contrib.methods.sage import WrittenHints
from grpo_roc_jax.contrib.methods.xrpo import recalled, remembered, similar_examples
from grpo_roc_jax.method.compose import next_state
from grpo_roc_jax.method.planning import choose_problems
from grpo_roc_jax.method.state import AlgoState, ProblemTable
from grpo_roc_jax.settings.cli import ConfigError, build
from grpo_roc_jax.settings.layers import Layer
from grpo_roc_jax.types import Problem
from tests.helpers.method_groups import make_group, method
from tests.method.test_planning import asked, failed, first, later, planned, problems, rng


def test_hints_that_the_policy_writes():
    """SAGE: a writer sees the solution, then the group runs again under what it wrote, level by level."""
    batch = problems("a", solution="6 * 7 = 42")
    plan = planned(second={"kind": "write", "levels": 2})
    groups = [failed(batch[0])]
    (writer,) = later(batch, groups, 1, plan)
    assert asked([writer]) == [(0, 1, "hint_writer")]
    assert "strength 1 of 2" in writer.suffix
    assert writer.suffix.endswith("6 * 7 = 42")
    (blind,) = later(problems("a", solution=None), groups, 1, plan)
    assert blind.suffix.endswith(batch[0].answer)
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


SECOND_STAGE = AlgoState(memory={"temperature_stage": np.array([1.0])})
HINTS = {"hints": ["know this", "plan that", "do so"]}


def test_knapsack_budget():
    table = ProblemTable().put(["a", "b", "c"], {"successes": np.array([4.0, 0, 8]), "visits": np.array([8.0, 8, 8])})
    plan = planned(budget="knapsack", warmup_steps=2)

    def counts(step):
        return [r.count for r in first(problems("a", "b", "c"), 8, plan, AlgoState(step, table))]

    assert counts(0) == [8, 8, 8]
    weighted = counts(2)
    assert sum(weighted) == 24
    assert weighted[1] > weighted[0] > weighted[2]


@pytest.mark.parametrize("sections", [{"condition": "hint_level"}, {"second": {"kind": "serial", "cuts": 7}}])
def test_waves_are_plain_while_the_method_warms_up(sections):
    """Hint levels and single rollouts to be cut wait for the end of it too."""
    batch = problems("a", "b", **HINTS)
    table = ProblemTable().put(["a", "b"], {"level": np.array([1.0, 2])})
    plan = planned(**sections, warmup_steps=2)
    early, late = (asked(first(batch, 8, plan, AlgoState(step, table))) for step in (1, 2))
    assert early == [(0, 8, ""), (1, 8, "")]
    assert late == ([(0, 8, "hint:1"), (1, 8, "hint:2")] if "condition" in sections else [(0, 1, ""), (1, 1, "")])


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


def test_later_waves_keep_the_temperature():
    plan = planned(second="draft", temperature={"kind": "rising", "temperatures": [0.8, 1.2]})
    group = make_group([0, 1], uid="a")
    (request,) = later(problems("a"), [group], 1, plan, SECOND_STAGE)
    assert request.temperature == 1.2


def test_explanations_fade_out():
    batch, plan = problems("a"), planned(second={"kind": "explain", "steps": 10})
    weights = [plan.second.supervised_weight(step) for step in (0, 5, 10, 20)]
    assert weights == pytest.approx([0.1, 0.05, 0, 0])
    assert later(batch, [failed(batch[0])], 1, plan, AlgoState(step=9))
    assert later(batch, [failed(batch[0])], 1, plan, AlgoState(step=10)) == []
    assert planned(second="draft").second.supervised_weight(0) == 0


def test_hinted_successes_leave_the_success_table_alone():
    """They count as failures of the plain prompt: hints are requested where every plain rollout failed."""
    group = make_group([1, 0, 0, 1], uid="a", condition=["hint:1", "", "", "hint:1"])

    def counts(**plan):
        found = next_state([group], [], method(plan=plan), AlgoState()).table.get(["a"])
        return found["successes"], found["visits"]

    assert counts(second="scaffold") == (0, 4)
    assert counts(condition="hint_level") == (2, 4)


def test_temperatures():
    plan = planned(temperature={"kind": "rising", "temperatures": [0.8, 1.2]})
    assert [first(problems("a"), 2, plan, state)[0].temperature for state in (None, SECOND_STAGE)] == [0.8, 1.2]
    assert (plan.temperature.all, planned().temperature.all) == ((0.8, 1.2), ())


@pytest.mark.parametrize("kind", ["scaffold", "guide", "retry"])
def test_rising_hints(kind):
    batch = problems("a", "b", **HINTS)
    plan = planned(second={"kind": kind, "levels": 2})
    groups = [failed(batch[0]), make_group([1, 0, 0, 0], uid="b")]
    weakest = later(batch, groups, 1, plan)
    assert asked(weakest) == [(0, 4, "hint:1")]
    assert weakest[0].suffix == "\nHint: know this"
    assert later(problems("a", "b", hints=None), groups, 1, plan) == []
    still = plan.second.merge(groups, weakest, [failed(batch[0])])
    second = later(batch, still, 2, plan)
    assert second[0].suffix == "\nHint: know this\nplan that"
    assert later(batch, still, 3, plan) == []
    solved = make_group([0, 1, 1, 0], uid="a", condition=["hint:2"] * 4)
    done = plan.second.merge(still, second, [solved])
    assert later(batch, done, 3, plan) == []
    assert plan.second.trains_plain == (kind == "guide")
    if kind == "retry":
        assert done[0] is solved
    else:
        assert done[0].rewards.tolist() == [1, 0, 0, 0]
        assert [str(t.condition) for t in done[0].trajectories] == ["hint:2", "", "", ""]
    assert done[1] is groups[1]


def test_hints_wait_for_the_warm_up():
    batch = problems("a", **HINTS)
    plan = planned(second="scaffold", warmup_steps=5)
    assert later(batch, [failed(batch[0])], 1, plan, AlgoState(step=4)) == []
    assert later(batch, [failed(batch[0])], 1, plan, AlgoState(step=5))


def test_problems_without_hints_are_left_alone():
    batch = problems("a")
    assert later(batch, [failed(batch[0])], 1, planned(second="scaffold")) == []


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


def test_draft_wave():
    batch = problems("a")
    drafts = make_group([0, 1, 1, 0], uid="a")
    plan = planned(second="draft")
    (request,) = later(batch, [drafts], 1, plan)
    assert asked([request]) == [(0, 4, "draft")]
    assert request.suffix == "\nAn earlier attempt:\ntext"
    second = make_group([1, 1, 0, 1], uid="a", condition=["draft"] * 4)
    (merged,) = plan.second.merge([drafts], [request], [second])
    assert merged is second
    assert later(batch, [merged], 2, plan) == []


def test_serial_cuts():
    """S-GRPO: cuts of one thought, continued once each, before the full one."""
    batch = problems("a")
    plan = planned(second={"kind": "serial", "cuts": 2, "stop": "stop"})
    assert [r.count for r in first(batch, 9, plan)] == [1]
    full = make_group([1], uid="a", lengths=[9])
    requests = later(batch, [full], 1, plan)
    assert [len(r.prefix) for r in requests] == sorted(len(r.prefix) for r in requests)
    assert len(requests) == 2
    thought = full.trajectories[0].tokens[2:11].tolist()
    assert all(list(r.prefix) == thought[: len(r.prefix)] and r.prefix_text == "stop" for r in requests)
    short = later(batch, [full], 1, plan, thought=lambda trajectory: 3)
    assert [len(r.prefix) for r in short] == [1, 2]
    whole = planned(second={"kind": "serial", "cuts": 9, "cut": "turn"})
    assert len(later(batch, [full], 1, whole, thought=lambda trajectory: 3)) == 8, "a turn of nine has eight places"
    results = [make_group([0], uid="a", condition=["cut"]), make_group([1], uid="a", condition=["cut"])]
    (merged,) = plan.second.merge([full], requests, results)
    assert merged.rewards.tolist() == [0, 1, 1]
    assert merged.trajectories[2] is full.trajectories[0]
    assert later(batch, [merged], 2, plan) == []


def test_choose_problems():
    pool = problems(*"abcdef")
    assert choose_problems(pool, 3, planned(), AlgoState(), rng()) == [0, 1, 2]
    table = ProblemTable().put(
        list("abcdef"),
        {
            "alpha": np.array([9.0, 5, 9, 5, 9, 5]) * 1e6,
            "beta": np.array([0.0, 5, 0, 5, 0, 5]) * 1e6,
            "successes": np.array([1.0, 7, 4, 0, 8, 4]),
            "visits": np.full(6, 8.0),
        },
    )
    state = AlgoState(table=table)
    drawn = np.zeros(6)
    generator = rng()
    for _ in range(2000):
        drawn[choose_problems(pool, 1, planned(problems="uncertainty"), state, generator)[0]] += 1
    np.testing.assert_allclose(drawn / 2000, np.array([0.05, 0.55] * 3) / 1.8, atol=0.03)
    pairs = choose_problems(pool, 2, planned(problems="pairs"), state, rng())
    assert pairs == [0, 1]  # solved once in eight, and seven times
    assert len(choose_problems(pool, 5, planned(problems="pairs"), state, rng())) == 5


def test_a_pool_follows_the_policy():
    """A problem that becomes solved always is drawn less often from then on, and more often once it fails again."""
    pool, plan, generator = problems(*"abc"), planned(problems="uncertainty"), rng()
    state = AlgoState()

    def share(uid):
        drawn = [choose_problems(pool, 1, plan, state, generator)[0] for _ in range(800)]
        return np.mean([pool[i].uid == uid for i in drawn])

    shares = [share("a")]
    for successes in ([1, 1, 1, 1], [1, 0, 1, 0]):
        for _ in range(30):
            groups = [make_group(successes, uid="a"), *(make_group([1, 0, 0, 1], uid=uid) for uid in "bc")]
            state = next_state(groups, groups, method(plan={"problems": "uncertainty"}), state)
        shares.append(share("a"))
    np.testing.assert_allclose(shares[0], 1 / 3, atol=0.06)
    assert shares[1] < 0.2 and abs(shares[2] - 1 / 3) < 0.08


def test_temperature_rises_with_falling_diversity():
    config = method(plan={"temperature": {"kind": "rising", "temperatures": [0.8, 1.0, 1.2]}})
    same = make_group([1, 0, 0, 1], lengths=[8] * 4)  # equal tokens: diversity 1/4
    state = next_state([same], [], config, AlgoState())
    assert state.recall("temperature_stage", 0) == 1
    assert state.recall("diversity", 0) == -1
    varied = make_group([1, 0], lengths=[8, 8], tokens=[np.arange(8), np.arange(8) + 50])
    state = next_state([varied], [], config, state)
    assert (state.recall("temperature_stage", 0), state.recall("diversity", 0)) == (1, 1.0)
    last = AlgoState(memory={"temperature_stage": np.array([2.0])})
    assert next_state([same], [], config, last).recall("temperature_stage", 0) == 2


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"plan": {"condition": "reward_tokens", "second": "draft"}}, "a rollout has one condition"),
        ({"plan": {"budget": "knapsack", "second": "serial"}}, "cuts of one"),
        ({"plan": {"second": {"kind": "serial", "cuts": 3}}}, r"cuts \+ 1 = 4 trajectories per problem but 32"),
        ({"plan": {"budget": {"kind": "half_width", "pilot": 32}}}, "leaves nothing to allocate"),
        ({"plan": {"condition": "reward_tokens"}, "data": {"eval_problems": 0}}, "plan.condition.separation 0"),
        ({"plan": {"condition": "reward_tokens"}, "sft": {"reward_tokens": "text"}}, "set both alike"),
        (
            {"plan": {"second": "draft"}, "rollout": {"step_limit": {"kind": "partial", "seconds": 9.0}}},
            "use one of the two",
        ),
        ({"resample": "rc_roc"}, "nothing to tell apart"),
    ],
)
def test_plans_that_contradict_the_rest_are_refused(sections, said):
    with pytest.raises(ConfigError, match=said):
        build(Config, [Layer("test", sections)])
