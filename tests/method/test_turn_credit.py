"""Credit by turn: GiGPO's vectors, which turns share a state, and rewards of single turns from function to token."""

from dataclasses import replace

import numpy as np
import pytest

from examples.plugins.turn_rewards import clean
from grpo_roc_jax.method.advantage import same_state, turn_pay
from grpo_roc_jax.method.compose import train_rows
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.record.codec import groups_from_tree, groups_to_tree
from grpo_roc_jax.reward.config import FunctionReward, RewardConfig
from grpo_roc_jax.reward.score import RewardError, make_scorer
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.types import Condition, Problem, ToolCall, ToolResult, Turn
from tests.helpers.method_groups import make_group, method


def acted(*talks, rewards, pay=None):
    """A group whose trajectories make these (call, answer) pairs, one a turn of two tokens; the last turn has none."""
    group = make_group(rewards, lengths=[2 * len(talk) + 2 for talk in talks], prompt=[2] * len(talks))
    trajectories, verdicts = [], []
    for i, (trajectory, verdict) in enumerate(zip(group.trajectories, group.verdicts, strict=True)):
        turns = []
        for code, kind, answer in talks[i]:
            start, call = 2 + 2 * len(turns), ToolCall("python", {"code": code}, "{}")
            turns.append(Turn(start, start + 2, "x", (call,), (ToolResult(kind, observation=answer),)))
        turns.append(Turn(2 + 2 * len(turns), 4 + 2 * len(turns), "done"))
        trajectories.append(replace(trajectory, turns=tuple(turns)))
        verdicts.append(replace(verdict, turn_rewards=tuple(pay[i]) if pay else ()))
    return replace(group, trajectories=tuple(trajectories), verdicts=tuple(verdicts))


def ok(code, answer):
    return code, "ok", answer


def credit(group, **settings):
    """Advantage of each turn, which all its tokens share."""
    step = {"kind": "turns", **settings}
    rows = train_rows([group], method(group.size, advantage={"scale": "none", "adjust": [step]}), AlgoState())
    out = []
    for row, trajectory in zip(rows, group.trajectories, strict=True):
        spans = [row.advantages[turn.start : turn.end] for turn in trajectory.turns]
        assert all(np.ptp(span) == 0 for span in spans)
        out.append([float(span[0]) for span in spans])
    return out


def paper_group(**more):
    """Observations a, b, c against a, b: the first two states are shared, the third is one trajectory's own."""
    return acted([ok("1", "b"), ok("2", "c")], [ok("1", "b")], rewards=[1, 0], **more)


def test_the_specifications_vector():
    """G = [.9025, .95, 1] and [0, 0]; a turn whose state is unique has the advantage of its trajectory."""
    for settings, expected in [
        ({}, [0.95125, 0.975, 0.5]),
        ({"omega": 2.0}, [1.4025, 1.45, 0.5]),
        ({"omega": 0.0}, [0.5, 0.5, 0.5]),
        ({"gamma": 1.0}, [1.0, 1.0, 0.5]),
    ]:
        first, second = credit(paper_group(), **settings)
        np.testing.assert_allclose(first, expected, atol=1e-6)
        np.testing.assert_allclose(second, [-value for value in expected[:2]], atol=1e-6)
    standardized = 0.5 + 1 / np.sqrt(2)  # of two different values, whatever they are
    np.testing.assert_allclose(credit(paper_group(), standardize=True)[0], [standardized] * 2 + [0.5], atol=1e-5)


def test_rewards_of_turns():
    """r = [.2, 0, 1 - .2] and [0, .5 - .5]: what no turn was paid for itself is the last one's."""
    group = paper_group(pay=[[0.2, 0.0, 0.0], [0.0, 0.0]])
    assert [turn_pay(t, v, 1.0).tolist() for t, v in group.pairs] == [[0.2, 0.0, 0.8], [0.0, 1.0]]
    shared = [0.5 + (0.2 + 0.95**2 * 0.8) / 2, 0.5 + 0.95 * 0.8 / 2]
    values = credit(group)
    np.testing.assert_allclose(values[0], [*shared, 0.5], atol=1e-6)
    np.testing.assert_allclose(values[1], [-value for value in shared], atol=1e-6)


def sizes(state, *talks, **change):
    group = acted(*talks, rewards=[1] * len(talks))
    if change:
        first = replace(group.trajectories[0], **change)
        group = replace(group, trajectories=(first, *group.trajectories[1:]))
    return sorted(len(places) for places in same_state(group, state).values())


@pytest.mark.parametrize(
    ("other", "calls", "observations", "turn"),
    [
        ([ok("x = 1", "[no output]")], [2, 2], [2, 2], [2, 2]),
        ([ok("y = 2", "[no output]")], [1, 1, 2], [2, 2], [2, 2]),  # the interpreters differ, which nothing shows
        ([ok("x = 1", "7")], [1, 1, 2], [1, 1, 2], [2, 2]),
        ([], [1, 2], [1, 2], [1, 2]),
    ],
)
def test_what_makes_states_equal(other, calls, observations, turn):
    talk = [ok("x = 1", "[no output]")]
    assert sizes("calls", talk, other) == calls
    assert sizes("observations", talk, other) == observations
    assert sizes("turn", talk, other) == turn


def test_what_a_user_answered_is_part_of_the_state():
    group = acted([], [], rewards=[1, 1])
    first, second = (
        replace(t, turns=(replace(t.turns[0], reply=reply), t.turns[0]))
        for t, reply in zip(group.trajectories, ("up", "low"), strict=True)
    )
    for others, states in (((first, first), [2, 2]), ((first, second), [1, 1, 2])):
        played = replace(group, trajectories=others)
        assert [sorted(map(len, same_state(played, s).values())) for s in ("calls", "observations")] == [states] * 2


def test_a_state_is_its_whole_history_and_prompt():
    """The same last answer after another history is another state, and so is the same history under a hint."""
    long, short = [ok("a", "1"), ok("b", "2")], [ok("b", "2")]
    assert sizes("observations", long, short) == [1, 1, 1, 2]
    talk = [ok("a", "1")]
    assert sizes("calls", talk, talk, condition=Condition("hint", 1)) == [1, 1, 1, 1]


def test_problems_do_not_share_states():
    groups = [paper_group(), replace(paper_group(), problem=Problem("q", "?", "1", "test"))]
    step = method(2, advantage={"scale": "none", "adjust": ["turns"]}).advantage.adjust[0]
    alone = [acted([ok("1", "2")], rewards=[1])]
    for some, expected in ((groups, 5 / 3), (alone, 1.0), ([], 0.0)):
        batch = MethodBatch(some, (), (), (), AlgoState(), None)
        assert step.metrics(batch) == {"method/turns_per_state": expected}


def paid(function, *talks, weight=1.0, more=(), **change):
    """The group of trajectories with these talks, and with the change, under a function of rewards."""
    group = acted(*talks, rewards=[0] * len(talks))
    functions = (FunctionReward(path="mine:pay", weight=weight), *more)
    with given({"mine:pay": function}):
        scorer = make_scorer(RewardConfig(functions=functions))
    return scorer(group.problem, tuple(replace(trajectory, **change) for trajectory in group.trajectories))


def test_a_reward_function_may_pay_by_turn():
    talks = [[ok("1", "1"), ("2", "exception", "no")], []]
    group = paid(clean, *talks, weight=2.0)
    assert [v.reward for v in group.verdicts] == pytest.approx([0.2, 0.0])
    assert group.verdicts[0].turn_rewards == pytest.approx((0.2, 0.0, 0.0))
    assert group.verdicts[1].turn_rewards == (0.0,)
    mixed = paid(lambda p, ts: [np.array([1.0, 2.0, 3.0]), 4], *talks, more=("clean_tools",))
    assert [v.reward for v in mixed.verdicts] == [6.0, 5.0]
    assert mixed.verdicts[0].channels == {"mine:pay": 6.0, "clean_tools": 0.0}
    assert [v.turn_rewards for v in mixed.verdicts] == [(1.0, 2.0, 3.0), ()]
    assert groups_from_tree(groups_to_tree([mixed]))[0].verdicts == mixed.verdicts, "a checkpoint keeps them"


def test_turns_that_are_not_scored_take_their_trajectory_out():
    talks = [[ok("1", "1")], []]
    assert [v.reward for v in paid(lambda p, ts: [[1.0, None], [2.0]], *talks).verdicts] == [2.0]
    assert [v.reward for v in paid(lambda p, ts: [[1.0, 0.5], [float("nan")]], *talks).verdicts] == [1.5]
    for values, message in [([[1.0], [2.0]], "value 0 is 1 numbers for 2 turns"), ([[1.0, "2"], 0], "value 0 is '2'")]:
        with pytest.raises(RewardError, match=message):
            paid(lambda p, ts, values=values: values, *talks)


def test_a_truncated_trajectory_gets_the_reward_of_truncation():
    (verdict,) = paid(lambda p, ts: [[1.0, 1.0]], [ok("1", "1")], stop="length").verdicts
    assert (verdict.reward, verdict.turn_rewards) == (0.0, ())
