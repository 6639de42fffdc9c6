"""How the pays of several reward functions become one verdict: what does not apply, what fails, what is cut short."""

import math
import time
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
from grpo_roc_jax.reward.config import RewardConfig
from grpo_roc_jax.reward.score import make_scorer
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.settings.cli import ConfigError, load_config
from grpo_roc_jax.types import Problem, ToolCall, ToolResult, Trajectory, Turn
from tests.helpers.method_groups import method

RIGHT, WRONG = (rf"<answer>\boxed{{{value}}}</answer>" for value in (42, 41))


def rollout(text=RIGHT, *, sample=0, stop="answer", tokens=8, calls=("ok",)):
    """A turn with a call for each of `calls`, then one that says `text`."""
    call, spans = ToolCall("python", {"code": "1"}, "{}"), np.linspace(2, 2 + tokens, len(calls) + 2).astype(int)
    turns = [Turn(*spans[i : i + 2], "go", (call,), (ToolResult(kind),)) for i, kind in enumerate(calls)]
    turns.append(Turn(*spans[len(calls) :][:2], text))
    mask = np.arange(2 + tokens) >= 2
    ids, minus = np.arange(2 + tokens, dtype=np.int32), np.where(mask, -1.0, 0.0).astype(np.float32)
    return Trajectory(ids, mask, minus, np.where(mask, 0, -1).astype(np.int32), 2, tuple(turns), stop, sample)


def scored(functions, rollouts, problem=Problem("p", "6*7=?", "42", "test"), truncated="fail", **callables):  # noqa: B008
    """What a scorer makes of these rollouts of one problem; `callables` are the functions of the user's."""
    with given(callables):
        scorer = make_scorer(RewardConfig(functions=functions, truncated=truncated))
    try:
        return scorer.score_all([problem], [rollouts])
    finally:
        scorer.close()


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


def math_only(problem, trajectories):
    return [float(len(t.turns[-1].text) % 2) if problem.source == "math" else None for t in trajectories]


def code_only(problem, trajectories):
    return [None if problem.source == "math" else 0.5 for _ in trajectories]


def test_functions_for_other_rows_do_not_apply():
    """A reward for mathematics and one for code, each None on the other's rows, lose nothing."""
    for source, rewards in (("math", [2.0, 2.0, 0.0]), ("code", [0.5] * 3)):
        problem = Problem("p", "?", "", source)
        result = scored(
            ({"kind": "function", "path": "maths", "weight": 2.0}, "codes"),
            [rollout("odd", sample=0), rollout("odd", sample=1), rollout("even", sample=2)],
            problem,
            maths=math_only,
            codes=code_only,
        )
        (group,) = result.groups
        assert group.rewards.tolist() == rewards and result.counts.get("not_scored", 0) == 0 and not result.faults
        applies = {"math": "maths", "code": "codes"}[source]
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


@pytest.mark.parametrize(
    "broken",
    [
        lambda p, ts: 1 / 0,
        lambda p, ts: time.sleep(9),
        lambda p, ts: [math.nan] * len(ts),
        lambda p, ts: [[1.0, None]] * len(ts),
    ],
    ids=["raises", "late", "nan", "some turns"],
)
def test_a_function_that_fails_is_not_one_that_does_not_apply(broken):
    """A sum without the part that failed would be another reward."""
    function = {"kind": "function", "path": "broken", "timeout_s": 0.2}
    result = scored(("answer", function), [rollout(sample=i) for i in range(2)], broken=broken)
    assert result.groups[0].size == 0 and result.counts == {"not_scored": 2} and result.unscored == {"broken": 2}


# ---- truncated rollouts --------------------------------------------------------------------------------------------


def brevity(problem, trajectories):
    return [-t.policy_mask.sum() / 100 for t in trajectories]


def length(problem, trajectories):
    return [float(t.policy_mask.sum()) for t in trajectories]


def by_turn(problem, trajectories):
    return [[0.5 for _ in t.turns] for t in trajectories]


OWN = {"brevity": brevity, "length": length, "by_turn": by_turn}
GROUP = [
    rollout(RIGHT, sample=0),
    rollout(WRONG, sample=1, tokens=12, calls=("exception",)),
    rollout("no answer", sample=2, tokens=6, calls=("exception", "exception")),
    rollout(RIGHT, sample=3, stop="length", tokens=20, calls=("ok", "ok", "ok")),
    rollout("and then", sample=4, stop="turns", tokens=2, calls=()),
]
"""Right, wrong, without an answer; and two that a limit cut, one long and clean, one short."""
SETS = [
    ("answer", {"kind": "format", "weight": 0.25}, {"kind": "clean_tools", "weight": 0.25}),
    ("answer", "length"),
    ("answer", "brevity"),
    ("brevity", "by_turn"),
    ("answer", {"kind": "function", "path": "length", "weight": -0.01}, "by_turn"),
    ("length",),
    ("brevity",),
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


def test_a_channel_that_does_not_apply_to_a_failure_stays_away():
    callables = {"mine": lambda p, ts: [None if t.truncated else 1.0 for t in ts]}
    (group,) = scored(("answer", "mine"), GROUP, **callables).groups
    assert [v.channels for v in group.verdicts[3:]] == [{"answer": 0.0, "mine": None}] * 2


def test_turns_of_a_failure_earn_its_reward():
    (group,) = scored(("by_turn",), GROUP, **OWN).groups
    pays = [turn_pay(t, v, v.reward).sum() for t, v in group.pairs]
    assert pays == [1.0, 1.0, 1.5, 0.0, 0.0]
    (alone,) = scored(SETS[2], GROUP[3:], **OWN).groups
    assert alone.rewards.tolist() == [0.0, 0.0], "a group of truncated rollouts has no signal"


# ---- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_channels_count_as_their_functions_do(weight):
    words = ["toy.yaml", "--resample=none", "--advantage=channels"]
    functions = f"--reward.functions=[answer, {{kind: format, weight: {weight}}}]"
    rollouts = [rollout(RIGHT, sample=0), rollout(RIGHT + RIGHT, sample=1), rollout(WRONG, sample=2)]
    advantages = {}
    for given_weights in ((), (1.0, weight)):
        config = load_config(Config, [*words, functions, f"--advantage.weights={list(given_weights)}"], prog="test")
        (group,) = scored(config.reward.functions, rollouts).groups
        rows = train_rows([group], config, AlgoState())
        advantages[given_weights] = [float(row.advantages[-1]) for row in rows]
    assert advantages[()] == advantages[(1.0, weight)]
    answer, form = (np.array(x, float) for x in ([1, 1, 0], [1, 0, 1]))
    expected = sum(w * (x - x.mean()) / (x.std(ddof=1) + 1e-6) for w, x in ((1, answer), (weight, form)))
    np.testing.assert_allclose(advantages[()], expected, atol=1e-6)


def test_a_channel_has_one_sign():
    """What a truncated rollout gets in a channel is the worst by the weight of its function; with a weight of the other
    sign it would be the best, and such rollouts would come before wrong ones that ended."""
    words = ["toy.yaml", "--resample=none", "--advantage=channels", "--advantage.weights=[1, -1]"]
    with pytest.raises(ConfigError, match="must have the same sign"):
        load_config(Config, [*words, "--reward.functions=[answer, clean_tools]"], prog="test")
    load_config(Config, [*words, "--reward.functions=[answer, {kind: clean_tools, weight: -1}]"], prog="test")
    load_config(Config, [*words, "--reward.functions=[answer, {kind: clean_tools, weight: 0}]"], prog="test")


def test_weights_follow_the_functions_where_some_do_not_apply():
    """The first rollout has no value for the first function; the weights still belong to the functions in order."""
    callables = {"a": lambda p, ts: [None, 1.0, 0.0, 0.0], "b": lambda p, ts: [1.0, 0.0, 0.0, 1.0]}
    functions = "--reward.functions=[{kind: function, path: a, weight: 3}, {kind: function, path: b, weight: 0}]"
    words = ["toy.yaml", "--resample=none", "--advantage=channels", functions]
    config = load_config(Config, words, prog="test")
    (group,) = scored(config.reward.functions, [rollout(sample=i) for i in range(4)], **callables).groups
    advantages = [float(row.advantages[-1]) for row in train_rows([group], config, AlgoState())]
    a = np.array([1.0, 0, 0])
    np.testing.assert_allclose(advantages, [0, *(3 * (a - a.mean()) / (a.std(ddof=1) + 1e-6))], atol=1e-6)
