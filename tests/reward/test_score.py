"""Verdicts of hand-made trajectories, the contract of custom reward functions, and how the pays of several of them
become one verdict: what does not apply, what fails, what is cut short."""

import ctypes
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax import Config, train_rows
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.reward.config import FunctionReward, RewardConfig
from grpo_roc_jax.reward.graded import Criteria, SeveralAnswers, rubric_reward
from grpo_roc_jax.reward.score import RewardError, make_scorer
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.settings.cli import ConfigError, load_config
from grpo_roc_jax.types import Problem, ToolCall, ToolResult, Trajectory, Turn
from tests.helpers.method_groups import close, make_group, saying

PROBLEM = Problem("p1", "6*7=?", "42", "test")
RIGHT, WRONG = (rf"<answer>\boxed{{{value}}}</answer>" for value in (42, 41))


def rollout(*texts, sample=0, stop="answer", tokens=8, calls=(), results=()):
    """A turn with a call for each of `calls`, then those that say `texts`; the first has `results`."""
    call = ToolCall("python", {"code": "1"}, "{}")
    said = [("go", (call,), (ToolResult(kind),)) for kind in calls]
    said += [(text, (), tuple(results) * (i == 0)) for i, text in enumerate(texts)]
    spans, mask = np.linspace(2, 2 + tokens, len(said) + 1).astype(int), np.arange(2 + tokens) >= 2
    turns = tuple(Turn(*spans[i : i + 2], *what) for i, what in enumerate(said))
    zeros = np.zeros(2 + tokens, np.int32)
    return Trajectory(zeros, mask, zeros.astype(np.float32), zeros + 0, 2, turns, stop, sample)


def scored(functions, rollouts, problem=PROBLEM, truncated="fail", **callables):
    """What a scorer makes of these rollouts of one problem; `callables` are the functions of the user's."""
    config = RewardConfig(functions=functions, truncated=truncated)
    with given(callables), closing(make_scorer(config)) as scorer:
        return scorer.score_all([problem], [rollouts])


def custom(function, **settings):
    """Scores three trajectories with a custom function given in Python."""
    rollouts = [rollout("x", stop="eos", sample=i) for i in range(3)]
    return scored(({"kind": "function", "path": "mine", "weight": 2.0, **settings},), rollouts, mine=function)


def test_binary_reward():
    for texts, stop, reward, status in [
        *(((RIGHT,), "answer", 1.0, "correct"), ((WRONG,), "answer", 0.0, "wrong")),
        *((("nothing",), "eos", 0.0, "no_answer"), ((RIGHT, "more"), "eos", 0.0, "no_answer")),
        *(((RIGHT,), stop, 0.0, "truncated") for stop in ("length", "turns", "deadline")),
        ((RIGHT + WRONG,), "answer", 0.0, "wrong"),
    ]:
        ((verdict,),) = (group.verdicts for group in scored(("answer",), [rollout(*texts, stop=stop)]).groups)
        assert (verdict.reward, verdict.status, verdict.turns) == (reward, status, len(texts))


def test_tool_output_is_no_answer():
    """A tool that prints an answer block earns nothing, since only the policy's own text is read."""
    printed = ToolResult("ok", stdout=RIGHT, observation=RIGHT)
    (group,) = scored(("answer",), [rollout("call", "thanks", results=[printed], stop="eos")]).groups
    assert group.rewards.tolist() == [0.0]


def test_infrastructure_never_counts_against_the_policy():
    """A group with infrastructure failures equals the group without those trajectories."""
    results = [ToolResult(kind) for kind in ("ok", "timeout", "malformed_call", "sandbox_error", "queue_timeout")]
    good, bad = rollout("call", RIGHT, results=results), rollout("no", stop="eos", sample=2)
    dead, cancelled = (rollout(RIGHT, stop=stop, sample=1) for stop in ("infrastructure", "cancelled"))
    scorer = make_scorer(RewardConfig())
    scored = scorer.score_all(iter([PROBLEM]), (iter([good, dead, bad, cancelled]) for _ in range(1)))  # read once
    assert [t.sample for t in scored.groups[0].trajectories] == [0, 2]
    assert scored.groups[0].verdicts == scorer(PROBLEM, iter([good, bad])).verdicts
    assert (scored.groups[0].verdicts[0].tool_calls, scored.groups[0].verdicts[0].tool_errors) == (3, 2)
    assert scored.counts == {"infrastructure": 1, "cancelled": 1, "correct": 1, "no_answer": 1}
    with pytest.raises(TypeError, match="takes a list of problems and a list of"):
        scorer.score_all([PROBLEM], [good])
    with pytest.raises(ValueError, match="2 problems and 1 lists"):
        scorer.score_all([PROBLEM] * 2, [[good]])
    with pytest.raises(TypeError, match="must be a RewardConfig"):
        make_scorer(Config())


@pytest.mark.parametrize("column", [[1], threading.Lock()], ids=["copied", "not copied"])
def test_what_a_function_writes_changes_nothing(column):
    """Through flags, the base of an array, its memory as other libraries take it, and what a dictionary holds."""

    def writes(problem, trajectories):
        for t in trajectories:
            ctypes.memset(t.tokens.ctypes.data, 7, t.tokens.nbytes)
            for array in (t.policy_mask, t.logprobs, t.versions):
                array = array if array.base is None else array.base
                array.setflags(write=True)
                array[...] = 1
            t.turns[0].calls[0].arguments["code"] = "other"
        if isinstance(problem.extra["column"], list):
            problem.extra["column"].append(2)
        return [1.0 for _ in trajectories]

    given_problem = replace(PROBLEM, extra={"column": column})
    (group,) = scored(("mine",), [rollout(RIGHT, calls=["ok"])], given_problem, mine=writes).groups
    (sample,) = group.trajectories
    assert not sample.tokens.any() and not sample.policy_mask[:2].any() and not sample.logprobs.any()
    assert sample.turns[0].calls[0].arguments == {"code": "1"} and column in ([1], given_problem.extra["column"])


def test_custom_rewards_may_be_awaitable_and_arrays():
    async def paid(problem, trajectories):
        return np.arange(len(trajectories), dtype=np.float32)

    (group,) = custom(paid).groups
    assert group.rewards.tolist() == [0.0, 2.0, 4.0]
    assert [v.status for v in group.verdicts] == ["wrong", "correct", "correct"]


def test_broken_contract_names_the_function():
    for values, message in [
        *(([1.0], "returned 1 values for 3"), (1.0, "returned float; must be a sequence of 3")),
        *(("abc", "returned str"), ([1.0, "1.0", 0.0], "value 1 is '1.0'"), ({0.0, 1.0, 2.0}, "returned set")),
        *(([1.0, [1.0, 2.0], 0.0], "value 1 is"), (np.array(1.0), "returned ndarray, which cannot be read")),
        *(([1.0, 10**5000, 0.0], "value 1 is unreadable (int)"), (np.zeros((3, 2, 2)), "value 0 is")),
    ]:
        with pytest.raises(RewardError, match="mine") as error:
            custom(lambda problem, trajectories, values=values: values)
        assert message in str(error.value)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_unscored_rows_leave_the_group(value):
    scored = custom(lambda problem, trajectories: [1.0, value, 0.0])
    assert [t.sample for t in scored.groups[0].trajectories] == [0, 2]
    assert scored.counts["not_scored"] == 1 and bool(scored.faults) == (value is not None)


def test_exception_and_deadline_leave_the_group_unscored():
    for function, timeout_s, message in [
        (lambda problem, trajectories: {}["answer"], 5.0, "mine raised KeyError: 'answer' (test_score.py, line "),
        (lambda problem, trajectories: exit(1), 5.0, "SystemExit(1)"),
        (lambda problem, trajectories: time.sleep(10), 0.05, "longer than 0.05 s"),
    ]:
        scored = custom(function, timeout_s=timeout_s)
        assert scored.groups[0].size == 0 and scored.counts == {"not_scored": 3} and message in scored.faults[0]
        config = RewardConfig(functions=(FunctionReward(path="mine", timeout_s=timeout_s),))
        with given({"mine": function}):
            (line,) = make_scorer(config).try_functions(PROBLEM, [rollout("x")])
        assert message in line


def test_dotted_path(monkeypatch):
    half, wrong = lambda problem, trajectories: [0.5] * len(trajectories), lambda problem: 0.0
    monkeypatch.setitem(sys.modules, "scores", SimpleNamespace(__name__="scores", half=half, wrong=wrong))
    scorer = make_scorer(RewardConfig(functions=("scores:half",)))
    assert scorer(PROBLEM, [rollout("x")]).rewards.tolist() == [0.5]
    missing, near = "scores has no 'missing'; it has half, wrong", "did you mean 'answer'"
    for path, message in (("scores:wrong", "must accept"), ("scores:missing", missing), ("answr", near)):
        with pytest.raises(RewardError, match=message):
            make_scorer(RewardConfig(functions=(path,)))
    for functions, message in (((), "has no function"), (("answer", "answer"), "repeats a name: answer")):
        with pytest.raises(ValueError, match=message):
            RewardConfig(functions=functions)
    with pytest.raises(ValueError, match=r"reward\.answer_tag"):
        RewardConfig(answer_tag="<answer>")


@pytest.mark.parametrize(("weight", "values"), [(1.0, (1e308, 1e308)), (1e10, (1e300,)), (0.0, ((1e308, 1e308), 1.0))])
def test_rewards_without_a_finite_sum_leave_their_trajectory_unscored(weight, values):
    """An infinite reward makes the advantages of its whole group NaN."""
    functions = ({"kind": "function", "path": "a", "weight": weight}, "b")[: len(values)]
    callables = {name: lambda p, ts, value=value: [value, 1.0, 0.0] for name, value in zip("ab", values, strict=False)}
    result = scored(functions, [rollout("go", RIGHT, sample=i) for i in range(3)], **callables)
    assert [t.sample for t in result.groups[0].trajectories] == [1, 2] and np.isfinite(result.groups[0].rewards).all()
    assert result.counts["not_scored"] == 1 and dict(result.unscored) == dict.fromkeys(callables, 1)


def test_a_trajectory_leaves_only_if_nothing_applies_to_it():
    pays = {"a": [1.0, None, None, 3.0], "b": [None, None, 2.0, 4.0]}
    callables = {name: lambda p, ts, values=values: values for name, values in pays.items()}
    result = scored(("a", "b"), [rollout(RIGHT, sample=i) for i in range(4)], **callables)
    assert [t.sample for t in result.groups[0].trajectories] == [0, 2, 3]
    assert result.groups[0].rewards.tolist() == [1.0, 2.0, 7.0]
    assert result.counts["not_scored"] == 1 and result.unscored == {"a": 1, "b": 1}
    assert list(result.groups[0].verdicts[1].channels.items()) == [("a", None), ("b", 2.0)], "in their order"
    beside = scored(("answer", "a"), [rollout(RIGHT, sample=i) for i in range(4)], a=callables["a"])
    assert beside.groups[0].rewards.tolist() == [2.0, 1.0, 1.0, 4.0] and not beside.unscored
    # A function that fails is not one that does not apply: a sum without its part would be another reward.
    result = scored(("answer", "fails"), [rollout("go", RIGHT)] * 2, fails=lambda p, ts: [[1.0, None]] * len(ts))
    assert result.groups[0].size == 0 and result.counts == {"not_scored": 2} and result.unscored == {"fails": 2}


OWN = {
    "brevity": lambda p, ts: [-t.policy_mask.sum() / 100 for t in ts],
    "length": lambda p, ts: [float(t.policy_mask.sum()) for t in ts],
    "by_turn": lambda p, ts: [[0.5 for _ in t.turns] for t in ts],
}
GROUP = [
    rollout(RIGHT, sample=0, calls=("ok",)),
    rollout(WRONG, sample=1, tokens=12, calls=("exception",)),
    rollout("no answer", sample=2, tokens=6, calls=("exception", "exception")),
    rollout(RIGHT, sample=3, stop="length", tokens=20, calls=("ok", "ok", "ok")),
    rollout("and then", sample=4, stop="turns", tokens=2, calls=()),
]
"""Right, wrong, without an answer; and two that a limit cut, one long and clean, one short."""
SETS = [
    *(("answer", {"kind": "format", "weight": 0.25}, {"kind": "clean_tools", "weight": 0.25}), ("brevity", "by_turn")),
    *(("answer", {"kind": "function", "path": "length", "weight": -0.01}, "by_turn"), ("length",)),
]


def test_no_truncated_rollout_is_better_than_one_that_ended_and_a_reward_of_its_own_is_that_of_every_channel():
    for functions in SETS:
        (group,) = scored(functions, GROUP, **OWN).groups
        weights = RewardConfig(functions=functions).weights
        ended, cut = group.verdicts[:3], group.verdicts[3:]
        assert [v.status for v in cut] == ["truncated"] * 2 and cut[0].reward == cut[1].reward
        assert all(v.reward <= min(0.0, *(other.reward for other in ended)) for v in cut)
        for verdict in cut:
            assert verdict.turn_rewards == ()
            for name, value in verdict.channels.items():
                others = [other.channels[name] * weights[name] for other in ended]
                assert value * weights[name] <= min(0.0, *others), (functions, name)
    (group,) = scored(SETS[0], GROUP, truncated={"kind": "fixed", "reward": -0.5}).groups
    assert [(v.reward, set(v.channels.values())) for v in group.verdicts[3:]] == [(-0.5, {-0.5})] * 2
    (group,) = scored(SETS[0], GROUP, truncated="score").groups
    assert [(v.status, v.reward) for v in group.verdicts[3:]] == [("correct", 1.5), ("no_answer", 0.25)]


def by_channel(functions, rollouts, *words, **callables):
    """The advantages of these rollouts of one problem."""
    words = ["toy.yaml", "--resample=none", "--advantage=channels", f"--reward.functions={functions}", *words]
    config = load_config(Config, words, prog="test")
    (group,) = scored(config.reward.functions, rollouts, **callables).groups
    return [float(row.advantages[-1]) for row in train_rows([group], config, AlgoState())]


def test_channels_count_as_their_functions_do():
    first, second, alone = ((x - np.mean(x)) / (np.std(x, ddof=1) + 1e-6) for x in ([1, 1, 0], [1, 0, 1], [1, 0, 0]))
    functions = "[answer, {kind: format, weight: 0.5}]"
    rollouts = [rollout(RIGHT, sample=0), rollout(RIGHT + RIGHT, sample=1), rollout(WRONG, sample=2)]
    advantages = by_channel(functions, rollouts)
    assert advantages == by_channel(functions, rollouts, "--advantage.weights=[1.0, 0.5]")
    np.testing.assert_allclose(advantages, first + 0.5 * second, atol=1e-6)
    with pytest.raises(ConfigError, match="must have the same sign"):  # else what a limit cut would be the best
        by_channel("[answer, clean_tools]", rollouts, "--advantage.weights=[1, -1]")
    # The first rollout has no value for the first function; the weights still belong to the functions in order.
    callables = {"a": lambda p, ts: [None, 1.0, 0.0, 0.0], "b": lambda p, ts: [1.0, 0.0, 0.0, 1.0]}
    functions = "[{kind: function, path: a, weight: 3}, {kind: function, path: b, weight: 0}]"
    advantages = by_channel(functions, [rollout("x", sample=i) for i in range(4)], **callables)
    np.testing.assert_allclose(advantages, [0, *3 * alone], atol=1e-6)


def test_several_answers_and_criteria():
    """Some of the right answers pay in part, a wrong one among them pays nothing (TW-GRPO); the vector of RGR-GRPO's
    rubric, rules of weight 1, and a judge of the user's."""
    pay = SeveralAnswers().function(RewardConfig())
    answers = ("b,a , C", "a", "a,d", "", "none")
    group = saying(make_group([0] * 5), *(f"</reason><answer>\\boxed{{{text}}}</answer>" for text in answers))
    close(pay(Problem("p", "?", "A,B,C", "t"), group.trajectories), [1, 1 / 3, 0, 0, 0])
    close(rubric_reward([3, 2, 1], [1, 0, 1]), 0.666667)
    items = [{"text": "short", "weight": 3}, {"text": "polite", "weight": 2}, "Sums"]
    problem = Problem("p", "?", "1", "t", {"rubric": items})
    group = saying(make_group([0, 0]), "a SHORT one with sums", "no")
    close(Criteria().function(RewardConfig())(problem, group.trajectories), [0.666667, 0])
    close(Criteria(rules=("one",)).function(RewardConfig())(problem, group.trajectories), [5 / 7, 0])
    plain = replace(problem, extra={"rubric": "short"})
    assert Criteria().function(RewardConfig())(plain, group.trajectories) == [1, 0]
    nulls = [{"text": "short", "weight": None}, None, {"text": "polite", "weight": 1}]  # as parquet fills them in
    assert Criteria().criteria(replace(problem, extra={"rubric": nulls})) == (["short", "polite"], [1.0, 1.0])
    for wrong, message in (({"text": "a", "weight": -1}, "sum must be above 0"), ({"weight": 1}, "must have a `text`")):
        with pytest.raises(ValueError, match=message):
            Criteria().criteria(replace(problem, extra={"rubric": [wrong]}))
    with given({"long": lambda criterion, problem, reply: float(len(reply) > 3)}):
        assert Criteria(judge="long").function(RewardConfig())(problem, group.trajectories) == [1, 0]
