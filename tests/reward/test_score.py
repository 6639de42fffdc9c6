"""Verdicts of hand-made trajectories, the contract of custom reward functions, and how the pays of several of them
become one verdict: what does not apply, what fails, what is cut short."""

import asyncio
import ctypes
import math
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from docs.methods_table import load_methods
from grpo_roc_jax.config import Config
from grpo_roc_jax.method.advantage import turn_pay
from grpo_roc_jax.method.compose import train_rows
from grpo_roc_jax.method.features import features
from grpo_roc_jax.method.shaping import shape_rewards
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.record.codec import groups_from_tree, groups_to_tree
from grpo_roc_jax.reward.config import FunctionReward, RewardConfig
from grpo_roc_jax.reward.graded import Criteria, SeveralAnswers, rubric_reward
from grpo_roc_jax.reward.score import RewardError, make_scorer
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.settings.cli import ConfigError, load_config
from grpo_roc_jax.types import Problem, ToolCall, ToolResult, Trajectory, Turn
from tests.helpers.method_groups import close, make_group, method, saying

PROBLEM = Problem("p1", "6*7=?", "42", "test")
RIGHT, WRONG = (rf"<answer>\boxed{{{value}}}</answer>" for value in (42, 41))


def trajectory(*texts, results=(), stop="answer", sample=0):
    """Turns with these policy texts; all tool results belong to the first turn."""
    turns = tuple(Turn(i, i + 1, text, (), tuple(results) if i == 0 else ()) for i, text in enumerate(texts))
    n = len(texts)
    return Trajectory(
        np.zeros(n, np.int32), np.ones(n, bool), np.zeros(n, np.float32), np.zeros(n, np.int32), 0, turns, stop, sample
    )


def scored(functions, rollouts, problem=PROBLEM, truncated="fail", **callables):
    """What a scorer makes of these rollouts of one problem; `callables` are the functions of the user's."""
    with given(callables):
        scorer = make_scorer(RewardConfig(functions=functions, truncated=truncated))
    try:
        return scorer.score_all([problem], [rollouts])
    finally:
        scorer.close()


def verdict_of(*texts, functions=("answer",), **kwargs):
    return scored(functions, [trajectory(*texts, **kwargs)]).groups[0].verdicts[0]


def custom(function, **settings):
    """Scores three trajectories with a custom function given in Python."""
    rollouts = [trajectory("x", stop="eos", sample=i) for i in range(3)]
    return scored(({"kind": "function", "path": "mine", "weight": 2.0, **settings},), rollouts, mine=function)


@pytest.mark.parametrize(
    ("texts", "stop", "reward", "status"),
    [
        *(((RIGHT,), "answer", 1.0, "correct"), ((WRONG,), "answer", 0.0, "wrong")),
        *((("nothing",), "eos", 0.0, "no_answer"), ((RIGHT, "more"), "eos", 0.0, "no_answer")),
        *(((RIGHT,), stop, 0.0, "truncated") for stop in ("length", "turns", "deadline")),
        ((r"<answer>\boxed{42}</answer><answer>\boxed{1}</answer>",), "answer", 0.0, "wrong"),
    ],
)
def test_binary_reward(texts, stop, reward, status):
    verdict = verdict_of(*texts, stop=stop)
    assert (verdict.reward, verdict.status, verdict.turns) == (reward, status, len(texts))


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
    with given({"mine": writes}):
        scorer = make_scorer(RewardConfig(functions=(FunctionReward(path="mine"),)))
        scorer.try_functions(given_problem, [rollout])
        group = scorer(given_problem, [rollout])
    assert [v.reward for v in group.verdicts] == [1.0]
    (sample,) = group.trajectories
    assert sample.tokens.tolist() == [0] and sample.policy_mask.tolist() == [True] and sample.logprobs.tolist() == [0.0]
    assert sample.turns[0].calls[0].arguments == {"code": "1"} and column in ([1], given_problem.extra["column"])


def test_tool_output_is_no_answer():
    """A tool that prints an answer block earns nothing, since only the policy's own text is read."""
    printed = ToolResult("ok", stdout=RIGHT, observation=RIGHT)
    assert verdict_of("call", "thanks", results=[printed], stop="eos").reward == 0.0


def test_infrastructure_never_counts_against_the_policy():
    results = [ToolResult(kind) for kind in ("ok", "timeout", "malformed_call", "sandbox_error", "queue_timeout")]
    verdict = verdict_of("call", RIGHT, results=results)
    assert (verdict.tool_calls, verdict.tool_errors) == (3, 2)


def test_infrastructure_leaves_the_group():
    """A group with infrastructure failures equals the group without those trajectories."""
    good, bad = trajectory(RIGHT, sample=0), trajectory("no", stop="eos", sample=2)
    dead = trajectory(RIGHT, stop="infrastructure", sample=1)
    cancelled = trajectory("half", stop="cancelled", sample=3)
    scorer = make_scorer(RewardConfig())
    scored = scorer.score_all(iter([PROBLEM]), (iter([good, dead, bad, cancelled]) for _ in range(1)))  # read once
    assert [t.sample for t in scored.groups[0].trajectories] == [0, 2]
    assert scored.groups[0].verdicts == scorer(PROBLEM, iter([good, bad])).verdicts
    assert scored.counts == {"infrastructure": 1, "cancelled": 1, "correct": 1, "no_answer": 1}


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda scorer, row: make_scorer(Config()), TypeError, "got Config; must be a RewardConfig, such as config"),
        (lambda scorer, row: make_scorer({"functions": ["answer"]}), TypeError, "make_scorer got dict"),
        (lambda scorer, row: scorer.score_all([PROBLEM], [row]), TypeError, "takes a list of problems and a list of"),
        (lambda scorer, row: scorer.score_all(PROBLEM, [row]), TypeError, "for one problem call scorer"),
        (lambda scorer, row: scorer.score_all([PROBLEM] * 2, [[row]]), ValueError, "2 problems and 1 lists"),
    ],
)
def test_what_is_no_list_for_each_problem_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call(make_scorer(RewardConfig()), trajectory(RIGHT))


async def paid_in_an_array(problem, trajectories):
    return np.arange(len(trajectories), dtype=np.float32)


@pytest.mark.parametrize("function", [lambda problem, ts: [float(t.sample) for t in ts], paid_in_an_array])
def test_custom_rewards_may_be_awaitable_and_arrays(function):
    (group,) = custom(function).groups
    assert group.rewards.tolist() == [0.0, 2.0, 4.0]
    assert [v.status for v in group.verdicts] == ["wrong", "correct", "correct"]


SaysThree = type("SaysThree", (list,), {"__len__": lambda self: 3})
"""A sequence whose length is not that of its items."""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(([1.0], "returned 1 values for 3"), (1.0, "returned float; must be a sequence of 3")),
        *((None, "returned NoneType"), ("abc", "returned str"), ([1.0, "1.0", 0.0], "value 1 is '1.0'")),
        *(([1.0, [1.0, 2.0], 0.0], "value 1 is"), ([1.0, np.ones(2), 0.0], "value 1 is")),
        *(({0.0, 1.0, 2.0}, "returned set"), ({"a": 1.0, "b": 0.0, "c": 0.0}, "returned dict")),
        *((bytearray(3), "returned bytearray"), (np.array(1.0), "returned ndarray, which cannot be read")),
        *((list, "returned type, which cannot be read"), ((x for x in (1.0, 0.0, 0.0)), "returned generator")),
        *((SaysThree([1.0]), "returned 1 values for 3"), (SaysThree([1.0] * 9), "returned 4 values for 3")),
        *(([1.0, 10**5000, 0.0], "value 1 is unreadable (int)"), ([1.0, 1j, 0.0], "value 1 is 1j (complex)")),
        (np.zeros((3, 2, 2)), "value 0 is"),
    ],
)
def test_broken_contract_names_the_function(values, message):
    with pytest.raises(RewardError, match="mine") as error:
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


async def awaited_judge_is_late(problem, trajectories):
    await asyncio.wait_for(asyncio.sleep(9), 0.01)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (broken, "mine raised KeyError: 'answer' (test_score.py, line "),
        (lambda problem, trajectories: exit(1), "SystemExit(1)"),
        (lambda problem, trajectories: time.sleep(10), "longer than 0.05 s"),
        (awaited_judge_is_late, "mine raised TimeoutError: "),
    ],
)
def test_exception_and_deadline_leave_the_group_unscored(function, message):
    timeout_s = 0.05 if "0.05" in message else 5.0
    scored = custom(function, timeout_s=timeout_s)
    assert scored.groups[0].size == 0 and scored.counts == {"not_scored": 3}
    assert message in scored.faults[0]
    config = RewardConfig(functions=(FunctionReward(path="mine", timeout_s=timeout_s),))
    with given({"mine": function}):
        (line,) = make_scorer(config).try_functions(PROBLEM, [trajectory("x")])
    assert message in line


def test_the_first_failure_of_a_function_is_shown_at_once(caplog):
    config = RewardConfig(functions=(FunctionReward(path="mine"),))
    with given({"mine": broken}):
        scorer = make_scorer(config)
    scored = [scorer.score_all([PROBLEM], [[trajectory("x")]]) for _ in range(3)]
    for result in scored:
        assert "problem 'p1': reward mine raised KeyError: 'answer' (test_score.py, line " in result.faults[0]
    assert [record.message.count("mine raised KeyError") for record in caplog.records] == [1]
    assert scorer.failed == {"mine": 3}


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
        *(({"functions": ()}, "reward.functions has no function"), ({"functions": ("",)}, "one without a path")),
        ({"functions": ("answer", "answer")}, "repeats a name: answer"),
        ({"functions": ({"kind": "answer", "workers": 0},)}, "workers"),
        ({"functions": ({"kind": "answer", "timeout_s": 0.0},)}, "timeout_s"),
        ({"answer_tag": "<answer>"}, "reward.answer_tag"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**settings)


# ---- several functions ---------------------------------------------------------------------------------------------


def rollout(text=RIGHT, *, sample=0, stop="answer", tokens=8, calls=("ok",)):
    """A turn with a call for each of `calls`, then one that says `text`."""
    call, spans = ToolCall("python", {"code": "1"}, "{}"), np.linspace(2, 2 + tokens, len(calls) + 2).astype(int)
    turns = [Turn(*spans[i : i + 2], "go", (call,), (ToolResult(kind),)) for i, kind in enumerate(calls)]
    turns.append(Turn(*spans[len(calls) :][:2], text))
    mask = np.arange(2 + tokens) >= 2
    ids, minus = np.arange(2 + tokens, dtype=np.int32), np.where(mask, -1.0, 0.0).astype(np.float32)
    return Trajectory(ids, mask, minus, np.where(mask, 0, -1).astype(np.int32), 2, tuple(turns), stop, sample)


@pytest.mark.parametrize(
    ("functions", "values"),
    [
        (("a", "b"), (1e308, 1e308)),
        (({"kind": "function", "path": "a", "weight": 1e10},), (1e300,)),
        (({"kind": "function", "path": "a", "weight": 1e10}, {"kind": "function", "path": "b", "weight": -1e10}),
         (1e300, 1e300)),
        (("a",), ((1e308, 1e308),)),
        (({"kind": "function", "path": "a", "weight": 0.0}, "b"), ((1e308, 1e308), 1.0)),
    ],
)  # fmt: skip
def test_rewards_without_a_finite_sum_leave_their_trajectory_unscored(functions, values):
    """An infinite reward makes the advantages of its whole group NaN."""
    names = "ab"[: len(values)]
    callables = {name: lambda p, ts, value=value: [value, 1.0, 0.0] for name, value in zip(names, values, strict=True)}
    result = scored(functions, [rollout(sample=i) for i in range(3)], **callables)
    assert [t.sample for t in result.groups[0].trajectories] == [1, 2] and np.isfinite(result.groups[0].rewards).all()
    assert result.counts["not_scored"] == 1 and dict(result.unscored) == dict.fromkeys(names, 1)


# ---- what does not apply -------------------------------------------------------------------------------------------


def test_functions_for_other_rows_do_not_apply():
    """A reward for mathematics and one for code, each None on the other's rows, lose nothing."""
    callables = {
        "maths": lambda p, ts: [float(len(t.turns[-1].text) % 2) if p.source == "math" else None for t in ts],
        "codes": lambda p, ts: [None if p.source == "math" else 0.5 for _ in ts],
    }
    functions, rollouts = ({"kind": "function", "path": "maths", "weight": 2.0}, "codes"), ("odd", "odd", "even")
    for source, applies, rewards in (("math", "maths", [2.0, 2.0, 0.0]), ("code", "codes", [0.5] * 3)):
        rows = [rollout(text, sample=i) for i, text in enumerate(rollouts)]
        result = scored(functions, rows, Problem("p", "?", "", source), **callables)
        (group,) = result.groups
        assert group.rewards.tolist() == rewards and result.counts.get("not_scored", 0) == 0 and not result.faults
        assert [name for name, value in group.verdicts[0].channels.items() if value is not None] == [applies]
        assert list(group.verdicts[0].channels) == ["maths", "codes"], "in the order of the functions, on every row"
        assert groups_from_tree(groups_to_tree([group]))[0].verdicts == group.verdicts, "a checkpoint keeps them"


def test_a_trajectory_leaves_only_if_nothing_applies_to_it():
    pays = {"a": [1.0, None, None, 3.0], "b": [None, None, 2.0, 4.0]}
    callables = {name: lambda p, ts, values=values: values for name, values in pays.items()}
    result = scored(("a", "b"), [rollout(sample=i) for i in range(4)], **callables)
    assert [t.sample for t in result.groups[0].trajectories] == [0, 2, 3]
    assert result.groups[0].rewards.tolist() == [1.0, 2.0, 7.0]
    assert result.counts["not_scored"] == 1 and result.unscored == {"a": 1, "b": 1}
    beside = scored(("answer", "a"), [rollout(sample=i) for i in range(4)], a=callables["a"])
    assert beside.groups[0].rewards.tolist() == [2.0, 1.0, 1.0, 4.0] and not beside.unscored


@pytest.mark.parametrize("broken", [lambda p, ts: [math.nan] * len(ts), lambda p, ts: [[1.0, None]] * len(ts)])
def test_a_function_that_fails_is_not_one_that_does_not_apply(broken):
    """A sum without the part that failed would be another reward."""
    result = scored(("answer", "broken"), [rollout(sample=i) for i in range(2)], broken=broken)
    assert result.groups[0].size == 0 and result.counts == {"not_scored": 2} and result.unscored == {"broken": 2}


# ---- truncated rollouts --------------------------------------------------------------------------------------------


OWN = {
    "brevity": lambda p, ts: [-t.policy_mask.sum() / 100 for t in ts],
    "length": lambda p, ts: [float(t.policy_mask.sum()) for t in ts],
    "by_turn": lambda p, ts: [[0.5 for _ in t.turns] for t in ts],
}
GROUP = [
    rollout(RIGHT, sample=0),
    rollout(WRONG, sample=1, tokens=12, calls=("exception",)),
    rollout("no answer", sample=2, tokens=6, calls=("exception", "exception")),
    rollout(RIGHT, sample=3, stop="length", tokens=20, calls=("ok", "ok", "ok")),
    rollout("and then", sample=4, stop="turns", tokens=2, calls=()),
]
"""Right, wrong, without an answer; and two that a limit cut, one long and clean, one short."""
SETS = [
    *(("answer", {"kind": "format", "weight": 0.25}, {"kind": "clean_tools", "weight": 0.25}), ("answer", "length")),
    *(("answer", "brevity"), ("brevity", "by_turn")),
    *(("answer", {"kind": "function", "path": "length", "weight": -0.01}, "by_turn"), ("length",), ("brevity",)),
]


@pytest.mark.parametrize("functions", SETS, ids=str)
def test_no_truncated_rollout_is_better_than_one_that_ended(functions):
    (group,) = scored(functions, GROUP, **OWN).groups
    weights = RewardConfig(functions=functions).weights
    ended, cut = group.verdicts[:3], group.verdicts[3:]
    assert [v.status for v in cut] == ["truncated"] * 2 and cut[0].reward == cut[1].reward
    assert all(v.reward <= min(0.0, *(other.reward for other in ended)) for v in cut)
    assert all(v.turn_rewards == () for v in cut)
    for verdict in cut:
        for name, value in verdict.channels.items():
            others = [other.channels[name] * weights[name] for other in ended]
            assert value * weights[name] <= min(0.0, *others)
    if all(v.reward >= 0 for v in ended):
        assert cut[0].reward == 0.0


@pytest.mark.parametrize("functions", [functions for functions in SETS if len(functions) > 1], ids=str)
@pytest.mark.parametrize("standardize", [False, True])
def test_advantages_by_channel_put_truncated_rollouts_last(functions, standardize):
    """MO-GRPO and GDPO."""
    (group,) = scored(functions, GROUP, **OWN).groups
    sections = vars(method(5, advantage={"kind": "channels", "standardize": standardize}))
    config = SimpleNamespace(**sections, reward=RewardConfig(functions=functions))
    advantages = [row.advantages[-1] for row in train_rows([group], config, AlgoState())]
    assert max(advantages[3:]) <= min(advantages[:3]) + 1e-6


@pytest.mark.parametrize("name", sorted(load_methods()))
def test_no_recipe_pays_a_truncated_rollout_more_than_one_that_ended(name):
    """Also where a step of shaping makes the reward from the trajectory."""
    config = load_config(Config, [str(load_methods()[name].path)], prog="test")
    (group,) = scored(config.reward.functions, GROUP).groups
    if {step.kind for step in config.shaping} & {"kl", "tool_errors"}:
        return  # divergence and failed calls cost everybody the same
    (rewards,) = shape_rewards([features(group)], config.shaping, AlgoState())
    assert max(rewards[3:]) <= min(rewards[:3])


def test_a_reward_of_its_own_is_that_of_every_channel():
    fixed = {"kind": "fixed", "reward": -0.5}
    (group,) = scored(SETS[0], GROUP, truncated=fixed).groups
    assert [v.reward for v in group.verdicts[3:]] == [-0.5] * 2
    assert all(set(v.channels.values()) == {-0.5} for v in group.verdicts[3:])
    (group,) = scored(SETS[0], GROUP, truncated="score").groups
    assert [v.status for v in group.verdicts[3:]] == ["correct", "no_answer"]
    assert [v.reward for v in group.verdicts[3:]] == [1.5, 0.25]
    (group,) = scored(("answer", "mine"), GROUP, mine=lambda p, ts: [None if t.truncated else 1.0 for t in ts]).groups
    assert [v.channels for v in group.verdicts[3:]] == [{"answer": 0.0, "mine": None}] * 2, "what does not apply"


def test_turns_of_a_failure_earn_its_reward():
    (group,) = scored(("by_turn",), GROUP, **OWN).groups
    pays = [turn_pay(t, v, v.reward).sum() for t, v in group.pairs]
    assert pays == [1.0, 1.0, 1.5, 0.0, 0.0]
    (alone,) = scored(SETS[2], GROUP[3:], **OWN).groups
    assert alone.rewards.tolist() == [0.0, 0.0], "a group of truncated rollouts has no signal"


# ---- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def by_channel(config, rollouts, **callables):
    """The advantages of these rollouts of one problem."""
    (group,) = scored(config.reward.functions, rollouts, **callables).groups
    return [float(row.advantages[-1]) for row in train_rows([group], config, AlgoState())]


def configured(functions, *words):
    words = ["toy.yaml", "--resample=none", "--advantage=channels", f"--reward.functions={functions}", *words]
    return load_config(Config, words, prog="test")


def standardized(x):
    return (x - np.mean(x)) / (np.std(x, ddof=1) + 1e-6)


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_channels_count_as_their_functions_do(weight):
    functions = f"[answer, {{kind: format, weight: {weight}}}]"
    rollouts = [rollout(RIGHT, sample=0), rollout(RIGHT + RIGHT, sample=1), rollout(WRONG, sample=2)]
    advantages = by_channel(configured(functions), rollouts)
    assert advantages == by_channel(configured(functions, f"--advantage.weights=[1.0, {weight}]"), rollouts)
    expected = standardized([1, 1, 0]) + weight * standardized([1, 0, 1])
    np.testing.assert_allclose(advantages, expected, atol=1e-6)


def test_a_channel_has_one_sign():
    """What a truncated rollout gets in a channel is the worst by the weight of its function; with a weight of the other
    sign it would be the best, and such rollouts would come before wrong ones that ended."""
    with pytest.raises(ConfigError, match="must have the same sign"):
        configured("[answer, clean_tools]", "--advantage.weights=[1, -1]")
    for weight in (-1, 0):
        configured(f"[answer, {{kind: clean_tools, weight: {weight}}}]", "--advantage.weights=[1, -1]")


def test_weights_follow_the_functions_where_some_do_not_apply():
    """The first rollout has no value for the first function; the weights still belong to the functions in order."""
    callables = {"a": lambda p, ts: [None, 1.0, 0.0, 0.0], "b": lambda p, ts: [1.0, 0.0, 0.0, 1.0]}
    config = configured("[{kind: function, path: a, weight: 3}, {kind: function, path: b, weight: 0}]")
    advantages = by_channel(config, [rollout(sample=i) for i in range(4)], **callables)
    np.testing.assert_allclose(advantages, [0, *3 * standardized([1, 0, 0])], atol=1e-6)


# ---- several answers, criteria -------------------------------------------------------------------------------------


def test_several_answers():
    """Some of the right answers pay in part, a wrong one among them pays nothing (TW-GRPO)."""
    pay = SeveralAnswers().function(RewardConfig())
    answers = ["b,a , C", "a", "a,d", "", "none"]
    replies = [f"</reason><answer>\\boxed{{{text}}}</answer>" for text in answers]
    group = saying(make_group([0] * 5), *replies)
    close(pay(Problem("p", "?", "A,B,C", "t"), group.trajectories), [1, 1 / 3, 0, 0, 0])


def test_names_of_rewards_are_known_without_the_configuration_of_a_run():
    code = "import grpo_roc_jax as g; print(*map(type, g.RewardConfig(functions=['criteria', 'mine']).functions))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Criteria" in done.stdout and "FunctionReward" in done.stdout


def test_criteria():
    """The vector of RGR-GRPO's rubric, rules of weight 1, and a judge of the user's."""
    close(rubric_reward([3, 2, 1], [1, 0, 1]), 0.666667)
    items = [{"text": "short", "weight": 3}, {"text": "polite", "weight": 2}, "Sums"]
    problem = Problem("p", "?", "1", "t", {"rubric": items})
    group = saying(make_group([0, 0]), "a SHORT one with sums", "no")
    close(Criteria().function(RewardConfig())(problem, group.trajectories), [0.666667, 0])
    both = Criteria(rules=("one",)).function(RewardConfig())
    close(both(problem, group.trajectories), [5 / 7, 0])
    for extra, paid in (({}, [0, 0]), ({"rubric": None}, [0, 0]), ({"rubric": "short"}, [1, 0])):
        assert Criteria().function(RewardConfig())(replace(problem, extra=extra), group.trajectories) == paid
    nulls = [{"text": "short", "weight": None}, None, {"text": "polite", "weight": 1}]  # as parquet fills them in
    assert Criteria().criteria(replace(problem, extra={"rubric": nulls})) == (["short", "polite"], [1.0, 1.0])
    for wrong, message in (
        ([{"weight": 1}], "criterion 0 of 'p' is .*must have a `text`"),
        ([{"text": "a", "weight": 1}, {"text": "b", "weight": -1}], "sum must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Criteria().criteria(replace(problem, extra={"rubric": wrong}))
    with given({"long": lambda criterion, problem, reply: float(len(reply) > 3)}):
        assert Criteria(judge="long").function(RewardConfig())(problem, group.trajectories) == [1, 0]
    with pytest.raises(ValueError, match=r"judge = 'nowhere' is not a function"):
        make_scorer(RewardConfig(functions=(Criteria(judge="nowhere"),)))
