"""Requests of each wave and what their results do to the groups."""

from dataclasses import replace

import numpy as np
import pytest
from method_groups import make_group, method

from grpo_roc_jax.config import Config
from grpo_roc_jax.method.compose import next_state
from grpo_roc_jax.method.planning import Wave, best_text, choose_problems, first_wave, gathered, next_wave, with_suffix
from grpo_roc_jax.method.state import AlgoState, ProblemTable
from grpo_roc_jax.settings.cli import ConfigError, build
from grpo_roc_jax.settings.layers import Layer
from grpo_roc_jax.types import Condition, Problem, RolloutRequest


def problems(*uids, **extra):
    return [Problem(uid, f"question {uid}", "1", "test", extra) for uid in uids]


def rng():
    return np.random.default_rng(0)


def planned(**sections):
    return method(plan=sections).plan


def first(batch, count, plan, state=None):
    """Requests of the first wave."""
    return first_wave(Wave(batch, count, state or AlgoState(), rng()), plan)


def later(batch, groups, number, plan, state=None, *, count=4, **more):
    """Requests of a later wave."""
    return next_wave(Wave(batch, count, state or AlgoState(), rng(), number, groups, **more), plan)


def asked(requests):
    """What requests say, but for their texts."""
    return [(r.place, r.count, str(r.condition)) for r in requests]


def failed(problem, n=4):
    return replace(make_group([0] * n, uid=problem.uid), problem=problem)


SECOND_STAGE = AlgoState(memory={"temperature_stage": np.array([1.0])})
HINTS = {"hints": ["know this", "plan that", "do so"]}


def test_plain_first_wave():
    batch = problems("a", "b")
    requests = first(batch, 8, planned())
    assert requests == [RolloutRequest(batch[0], 0, 8), RolloutRequest(batch[1], 1, 8)]
    assert later(problems("a"), [failed(problems("a")[0])], 1, planned()) == []


def test_reward_tokens():
    plan = planned(condition={"kind": "reward_tokens", "draw": "fixed", "high_share": 0.25})
    requests = first(problems("a", "b"), 8, plan)
    assert asked(requests) == [
        (0, 2, "high_reward"),
        (0, 6, "low_reward"),
        (1, 2, "high_reward"),
        (1, 6, "low_reward"),
    ]
    assert requests[0].suffix == "\n[Reward Goal: <|high_reward|>]"


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


def test_reward_tokens_need_no_warm_up():
    """The policy was fine-tuned on them."""
    plan = planned(condition={"kind": "reward_tokens", "draw": "fixed"}, warmup_steps=2)
    assert [str(r.condition) for r in first(problems("a"), 8, plan)] == ["high_reward", "low_reward"]


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


def test_a_suffix_for_all_prompts():
    """The budget of `shaping budget` ends every prompt; a condition that was there stays."""
    a, b = problems("a", "b")
    requests = [RolloutRequest(a, 0, 4), RolloutRequest(b, 1, 2, condition=Condition("high_reward"), suffix="\ngoal")]
    named = with_suffix(requests, "\n256 tokens")
    assert [(str(r.condition), r.suffix) for r in named] == [
        ("budget", "\n256 tokens"),
        ("high_reward", "\ngoal\n256 tokens"),
    ]
    assert with_suffix(requests, "") == requests


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


def test_gathered():
    batch = problems("a", "b")
    requests = [RolloutRequest(batch[place], place, count) for place, count in ((0, 1), (1, 1), (0, 2))]
    results = [make_group([1], uid="a"), make_group([0], uid="b"), make_group([0, 1], uid="a")]
    one, two = gathered(batch, requests, results)
    assert one.rewards.tolist() == [1, 0, 1]
    assert two.rewards.tolist() == [0]
    assert one.problem is batch[0]


def test_the_best_text_is_the_first_of_the_best():
    group = make_group([0, 1, 1, 0])
    named = [replace(t, turns=(replace(t.turns[0], text=str(i)),)) for i, t in enumerate(group.trajectories)]
    assert best_text(replace(group, trajectories=tuple(named))) == "1"


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
