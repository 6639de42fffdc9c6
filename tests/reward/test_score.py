"""Verdicts of hand-made trajectories, and the contract of custom reward functions."""

import asyncio
import ctypes
import sys
import threading
import time
import types
from dataclasses import replace

import numpy as np
import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.reward.config import (
    AnswerReward,
    CleanToolsReward,
    FormatReward,
    FunctionReward,
    RewardConfig,
)
from grpo_roc_jax.reward.score import RewardError, make_scorer
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.types import Problem, ToolCall, ToolResult, Trajectory, Turn

PROBLEM = Problem("p1", "6*7=?", "42", "test")
RIGHT = r"<answer>\boxed{42}</answer>"


def trajectory(*texts, results=(), stop="answer", sample=0):
    """Turns with these policy texts; all tool results belong to the first turn."""
    turns = tuple(Turn(i, i + 1, text, (), tuple(results) if i == 0 else ()) for i, text in enumerate(texts))
    n = len(texts)
    return Trajectory(
        np.zeros(n, np.int32), np.ones(n, bool), np.zeros(n, np.float32), np.zeros(n, np.int32), 0, turns, stop, sample
    )


def verdict_of(config=RewardConfig(), **kwargs):  # noqa: B008
    texts = kwargs.pop("texts", (RIGHT,))
    return make_scorer(config)(PROBLEM, [trajectory(*texts, **kwargs)]).verdicts[0]


@pytest.mark.parametrize(
    ("texts", "stop", "reward", "status"),
    [
        ((RIGHT,), "answer", 1.0, "correct"),
        ((r"<answer>\boxed{41}</answer>",), "answer", 0.0, "wrong"),
        (("nothing",), "eos", 0.0, "no_answer"),
        ((RIGHT, "more"), "eos", 0.0, "no_answer"),
        ((RIGHT,), "length", 0.0, "truncated"),
        ((RIGHT,), "turns", 0.0, "truncated"),
        ((RIGHT,), "deadline", 0.0, "truncated"),
        ((r"<answer>\boxed{42}</answer><answer>\boxed{1}</answer>",), "answer", 0.0, "wrong"),
    ],
)
def test_binary_reward(texts, stop, reward, status):
    verdict = verdict_of(texts=texts, stop=stop)
    assert (verdict.reward, verdict.status) == (reward, status)
    assert verdict.turns == len(texts)


@pytest.mark.parametrize("column", [[1], threading.Lock()], ids=["copied", "not copied"])
def test_what_a_function_writes_changes_nothing(column):
    """Through flags, the base of an array, its memory as other libraries take it, and what a dictionary holds."""

    def writes(problem, trajectories):
        for t in trajectories:
            ctypes.memset(t.tokens.ctypes.data, 7, t.tokens.nbytes)
            for name in ("tokens", "policy_mask", "logprobs", "versions"):
                array = getattr(t, name)
                array = array if array.base is None else array.base
                array.setflags(write=True)
                array[...] = 1
            t.turns[0].calls[0].arguments["code"] = "other"
        if isinstance(problem.extra["column"], list):
            problem.extra["column"].append(2)
        return [1.0 for _ in trajectories]

    given_problem = Problem("p1", "6*7=?", "42", "test", extra={"column": column})
    one_turn = Turn(0, 1, RIGHT, (ToolCall("run", {"code": "1"}, ""),), ())
    rollout = replace(trajectory(RIGHT), turns=(one_turn,))
    with given({"mine:reward": writes}):
        scorer = make_scorer(RewardConfig(functions=(FunctionReward(path="mine:reward"),)))
        scorer.try_functions(given_problem, [rollout])
        group = scorer(given_problem, [rollout])
    assert [v.reward for v in group.verdicts] == [1.0]
    (sample,) = group.trajectories
    assert sample.tokens.tolist() == [0] and sample.policy_mask.tolist() == [True] and sample.logprobs.tolist() == [0.0]
    assert sample.turns[0].calls[0].arguments == {"code": "1"} and column in ([1], given_problem.extra["column"])


def test_tool_output_is_no_answer():
    """A tool that prints an answer block earns nothing, since only the policy's own text is read."""
    printed = ToolResult("ok", stdout=RIGHT, observation=RIGHT)
    assert verdict_of(texts=("call", "thanks"), results=[printed], stop="eos").reward == 0.0


def test_infrastructure_never_counts_against_the_policy():
    results = [ToolResult(kind) for kind in ("ok", "timeout", "malformed_call", "sandbox_error", "queue_timeout")]
    verdict = verdict_of(texts=("call", RIGHT), results=results)
    assert (verdict.tool_calls, verdict.tool_errors) == (3, 2)


def test_infrastructure_leaves_the_group():
    """A group with infrastructure failures equals the group without those trajectories."""
    good, bad = trajectory(RIGHT, sample=0), trajectory("no", stop="eos", sample=2)
    dead = trajectory(RIGHT, stop="infrastructure", sample=1)
    cancelled = trajectory("half", stop="cancelled", sample=3)
    scorer = make_scorer(RewardConfig())
    scored = scorer.score_all([PROBLEM], [[good, dead, bad, cancelled]])
    assert [t.sample for t in scored.groups[0].trajectories] == [0, 2]
    assert scored.groups[0].verdicts == scorer(PROBLEM, [good, bad]).verdicts
    assert scored.counts == {"infrastructure": 1, "cancelled": 1, "correct": 1, "no_answer": 1}


def test_trajectories_may_come_from_generators():
    scorer, dead = make_scorer(RewardConfig()), trajectory(RIGHT, stop="infrastructure", sample=1)
    scored = scorer.score_all(iter([PROBLEM]), (iter([trajectory(RIGHT), dead]) for _ in range(1)))
    assert [group.size for group in scored.groups] == [1]
    assert scored.counts == {"infrastructure": 1, "correct": 1}
    assert scorer(PROBLEM, iter([trajectory(RIGHT)])).rewards.tolist() == [1.0]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda scorer, row: make_scorer(Config()), TypeError, "got Config; must be a RewardConfig, such as config"),
        (lambda scorer, row: make_scorer({"functions": ["answer"]}), TypeError, "make_scorer got dict"),
        (lambda scorer, row: scorer.score_all([PROBLEM], [row]), TypeError, "takes a list of problems and a list of"),
        (lambda scorer, row: scorer.score_all(PROBLEM, [row]), TypeError, "takes a list of problems and a list of"),
        (lambda scorer, row: scorer(PROBLEM, row), TypeError, "for one problem call scorer"),
        (lambda scorer, row: scorer.score_all([PROBLEM] * 2, [[row]]), ValueError, "2 problems and 1 lists"),
    ],
)
def test_what_is_no_list_for_each_problem_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call(make_scorer(RewardConfig()), trajectory(RIGHT))


def test_channels():
    config = RewardConfig(functions=(AnswerReward(), FormatReward(weight=0.5), CleanToolsReward(weight=0.25)))
    verdict = verdict_of(config, results=[ToolResult("exception")])
    assert verdict.channels == {"answer": 1.0, "format": 1.0, "clean_tools": 0.0}
    assert verdict.reward == 1.5
    assert verdict_of(config).reward == 1.75


def custom(function, count=3, **settings):
    """Scores `count` trajectories with a custom function given in Python."""
    config = RewardConfig(functions=(FunctionReward(path="mine:reward", weight=2.0, **settings),))
    with given({"mine:reward": function}):
        scorer = make_scorer(config)
    return scorer.score_all([PROBLEM], [[trajectory("x", stop="eos", sample=i) for i in range(count)]])


async def paid_in_an_array(problem, trajectories):
    return np.arange(len(trajectories), dtype=np.float32)


@pytest.mark.parametrize("function", [lambda problem, ts: [float(t.sample) for t in ts], paid_in_an_array])
def test_custom_rewards_may_be_awaitable_and_arrays(function):
    (group,) = custom(function).groups
    assert group.rewards.tolist() == [0.0, 2.0, 4.0]
    assert [v.status for v in group.verdicts] == ["wrong", "correct", "correct"]


class SaysThree(list):
    """A sequence whose length is not that of its items."""

    def __len__(self):
        return 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "returned 1 values for 3"),
        (1.0, "returned float; must be a sequence of 3"),
        (None, "returned NoneType"),
        ("abc", "returned str"),
        ([1.0, "1.0", 0.0], "value 1 is '1.0'"),
        ([1.0, [1.0, 2.0], 0.0], "value 1 is"),
        ([1.0, np.ones(2), 0.0], "value 1 is"),
        ({0.0, 1.0, 2.0}, "returned set"),
        ({"a": 1.0, "b": 0.0, "c": 0.0}, "returned dict"),
        (bytearray(3), "returned bytearray"),
        (np.array(1.0), "returned ndarray, which cannot be read"),
        (list, "returned type, which cannot be read"),
        ((x for x in (1.0, 0.0, 0.0)), "returned generator"),
        (SaysThree([1.0]), "returned 1 values for 3"),
        (SaysThree([1.0] * 9), "returned 4 values for 3"),
        ([1.0, 10**5000, 0.0], "value 1 is unreadable (int)"),
        ([1.0, 1j, 0.0], "value 1 is 1j (complex)"),
        (np.zeros((3, 2, 2)), "value 0 is"),
    ],
)
def test_broken_contract_names_the_function(values, message):
    with pytest.raises(RewardError, match="mine:reward") as error:
        custom(lambda problem, trajectories: values)
    assert message in str(error.value)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_unscored_rows_leave_the_group(value):
    scored = custom(lambda problem, trajectories: [1.0, value, 0.0])
    assert [t.sample for t in scored.groups[0].trajectories] == [0, 2]
    assert scored.counts["not_scored"] == 1
    assert bool(scored.faults) == (value is not None)


def broken(problem, trajectories):
    raise KeyError("answer")


def judge_is_late(problem, trajectories):
    raise TimeoutError("no answer of the judge")


async def awaited_judge_is_late(problem, trajectories):
    await asyncio.wait_for(asyncio.sleep(9), 0.01)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (broken, "mine:reward raised KeyError"),
        (lambda problem, trajectories: exit(1), "SystemExit(1)"),
        (lambda problem, trajectories: time.sleep(10), "longer than 0.05 s"),
        (judge_is_late, "mine:reward raised TimeoutError: no answer of the judge (test_score.py, line "),
        (awaited_judge_is_late, "mine:reward raised TimeoutError: "),
    ],
)
def test_exception_and_deadline_leave_the_group_unscored(function, message):
    timeout_s = 0.05 if "0.05" in message else 5.0
    scored = custom(function, timeout_s=timeout_s)
    assert scored.groups[0].size == 0 and scored.counts == {"not_scored": 3}
    assert message in scored.faults[0]
    config = RewardConfig(functions=(FunctionReward(path="mine:reward", timeout_s=timeout_s),))
    with given({"mine:reward": function}):
        (line,) = make_scorer(config).try_functions(PROBLEM, [trajectory("x")])
    assert message in line


def test_the_first_failure_of_a_function_is_shown_at_once(caplog):
    config = RewardConfig(functions=(FunctionReward(path="mine:reward"),))
    with given({"mine:reward": broken}):
        scorer = make_scorer(config)
    scored = [scorer.score_all([PROBLEM], [[trajectory("x")]]) for _ in range(3)]
    for result in scored:
        assert "problem 'p1': reward mine:reward raised KeyError: 'answer' (test_score.py, line " in result.faults[0]
    assert [record.message.count("mine:reward raised KeyError") for record in caplog.records] == [1]
    assert scorer.failed == {"mine:reward": 3}


def test_dotted_path(monkeypatch):
    module = types.ModuleType("user_rewards")
    module.half = lambda problem, trajectories: [0.5] * len(trajectories)
    module.wrong = lambda problem: 0.0
    module.number = 3
    monkeypatch.setitem(sys.modules, "user_rewards", module)
    scorer = make_scorer(RewardConfig(functions=("user_rewards:half",)))
    assert scorer(PROBLEM, [trajectory("x")]).rewards.tolist() == [0.5]
    for path, message in [
        ("user_rewards:wrong", "must accept"),
        ("user_rewards:number", "is not a function"),
        ("user_rewards:missing", "user_rewards has no 'missing'; it has half, wrong"),
        ("no_such_module:f", "no_such_module"),
    ]:
        with pytest.raises(RewardError, match=message):
            make_scorer(RewardConfig(functions=(path,)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"functions": ()}, "reward.functions has no function"),
        ({"functions": ("",)}, "one without a path"),
        ({"functions": ("answer", "answer")}, "repeats a name: answer"),
        ({"functions": ({"kind": "answer", "workers": 0},)}, "workers"),
        ({"functions": ({"kind": "answer", "timeout_s": 0.0},)}, "timeout_s"),
        ({"answer_tag": "<answer>"}, "reward.answer_tag"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**settings)
