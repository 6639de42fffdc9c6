"""The example plug-ins: vectors of the family's specification."""

import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.method.advantage import z_score
from grpo_roc_jax.method.compose import train_rows
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.types import Group, Problem, ToolCall, ToolResult, Trajectory, Turn, Verdict
from tests.helpers.method_groups import make_group, method

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "plugins"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_consistency():
    m = load("consistency")
    rewards = m.consistency_rewards(np.array([1.0, 1, 0, 1]), np.array([0.9, 0.5, 0.95, 0.7]))
    assert rewards.tolist() == [1.5, 1, 0, 1.5]
    assert m.consistency_rewards(np.zeros(2), np.ones(2)).tolist() == [0, 0]
    likelihoods = m.answer_likelihoods([np.log([0.5, 0.9, 0.9])] * 2, [np.array([0, 1, 1], bool), np.zeros(3, bool)])
    np.testing.assert_allclose(likelihoods, [0.9, 0])
    group = make_group([1, 1, 0, 1], lengths=[1] * 4)
    scores = [np.log([0.5, 0.5, q]).astype(np.float32) for q in (0.9, 0.5, 0.95, 0.7)]
    policy = SimpleNamespace(trained={"w": jnp.zeros(1)}, score=lambda params, groups: scores)
    rows = m.Consistency()(train_rows([group], method(), AlgoState()), [group], policy)
    expected = z_score(np.array([1.5, 1, 0, 1.5]))
    np.testing.assert_allclose([row.advantages[-1] for row in rows], expected, atol=1e-6)
    slow = m.averaged({"w": jnp.ones(2)}, {"w": jnp.zeros(2)})
    np.testing.assert_allclose(slow["w"], 0.995)


CLEAN = load("clean_calls")


def attempts(*kinds):
    """A trajectory of 20 prompt tokens and one turn a kind (thought, tag, call; then 4 observed), then an answer."""
    tokens, mask, turns = list(range(20)), [False] * 20, []
    for index, kind in enumerate((*kinds, None)):
        start = len(tokens)
        call = ToolCall("python", {}, f"print({index})")
        tokens += [100 + index, CLEAN.CALL_ID, 200 + index]
        mask += [True] * 3
        calls = () if kind is None else (call,)
        results = () if kind is None else (ToolResult(kind),)
        turns.append(Turn(start, start + 3, f"t{index}{CLEAN.CALL}c{index}", calls, results))
        if kind is not None:
            tokens += [300 + index] * 4
            mask += [False] * 4
    n, mask = len(tokens), np.array(mask)
    values = np.where(mask, -1.0, 0.0).astype(np.float32)
    versions = np.where(mask, 0, -1).astype(np.int32)
    trajectory = Trajectory(np.array(tokens, np.int32), mask, values, versions, 20, tuple(turns), "answer", 0)
    errors = sum(kind != "ok" for kind in kinds)
    assert n == 20 + 7 * len(kinds) + 3
    return trajectory, Verdict(1.0, "correct", "1", len(kinds), errors, 1, True, len(turns))


def test_clean_calls_keeps_the_thought_between_calls_alike_or_replaces_the_turn():
    for settings, thought in [({}, 0), ({"alike": 1.1}, 1)]:
        clean, after = CLEAN.repaired(*attempts("exception", "ok"), **settings)
        tag, call = CLEAN.CALL_ID, CLEAN.CALL
        assert clean.tokens[20:].tolist() == [100 + thought, tag, 201, *[301] * 4, 102, tag, 202]
        assert clean.policy_mask[20:].tolist() == [True] * 3 + [False] * 4 + [True] * 3
        turns = [(t.start, t.end, t.text) for t in clean.turns]
        assert turns == [(20, 23, f"t{thought}{call}c1"), (27, 30, f"t2{call}c2")]
        assert (after.tool_calls, after.tool_errors, after.turns) == (1, 0, 2)


def test_clean_calls_mends_several_tries_and_nothing_else():
    clean, after = CLEAN.repaired(*attempts("exception", "timeout", "ok"))
    assert len(clean.turns) == 2
    assert clean.tokens[20:23].tolist() == [100, CLEAN.CALL_ID, 202]
    assert (after.tool_calls, after.tool_errors) == (1, 0)
    trajectory, verdict = attempts("ok", "exception")
    assert CLEAN.repaired(trajectory, verdict) == (trajectory, verdict), "a failure without a retry stays"
    trajectory, verdict = attempts("exception", "ok")
    lost = Group(Problem("p", "?", "1", "t"), (trajectory,), (dataclasses.replace(verdict, status="wrong"),))
    assert CLEAN.purify(lost).trajectories[0] is trajectory, "failures train as they were"
