"""The world of function calls: solvable tasks, an exact verifier, demonstrations with true labels."""

from collections import Counter

import numpy as np
import pytest

from grpo_roc_jax.data.config import DataConfig, DemonstrationConfig
from grpo_roc_jax.data.pipeline import eval_problems, make_problem_stream, make_trace_stream
from grpo_roc_jax.text.calls import call_blocks, parse_call
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.executor import make_executor
from grpo_roc_jax.tools.interface import CodeCall
from grpo_roc_jax.tools.registry import Registry
from grpo_roc_jax.types import ToolCall, ToolResult, Trajectory, Turn
from grpo_roc_jax.worlds import functions as fn
from grpo_roc_jax.worlds.demonstrations import demonstrate, with_hints
from grpo_roc_jax.worlds.worlds import HELD_OUT_START, parse_world, world_problem

KINDS = ("clean", "repair", "wrong", "guess")


def task(index=0, level=2):
    return world_problem("functions", level, 0, index)


def gold(problem):
    return [(name, dict(arguments)) for name, arguments in problem.extra["calls"]]


def only(kind):
    return DemonstrationConfig(**{name: float(name == kind) for name in KINDS})


def made(calls, kinds=None):
    """A trajectory with these calls, all successful unless `kinds` says otherwise."""
    kinds = kinds or ["ok"] * len(calls)
    turns = tuple(
        Turn(2 + i, 3 + i, "", (ToolCall(name, arguments, "{}"),), (ToolResult(kind),))
        for i, ((name, arguments), kind) in enumerate(zip(calls, kinds, strict=True))
    )
    n = 2 + len(calls)
    zeros = np.zeros(n, np.float32)
    return Trajectory(np.arange(n, dtype=np.int32), zeros > 0, zeros, zeros.astype(np.int32), 2, turns, "eos", 0)


@pytest.mark.parametrize("level", [1, 2, 4])
def test_every_task_can_be_done_and_accepts_its_gold_calls(level):
    for index in range(200):
        problem = task(index, level)
        assert len(gold(problem)) == level + 1 == problem.prompt.count(":")
        assert fn.succeeds(problem, gold(problem))
        assert min(fn.replayed(gold(problem)).values()) >= 0


def test_addressed_like_the_other_worlds():
    assert parse_world("world:functions:3") == ("functions", 3)
    assert task(5) == task(5)
    assert task(5).prompt != task(6).prompt
    held_out = world_problem("functions", 2, 0, HELD_OUT_START)
    assert held_out.prompt not in {task(i).prompt for i in range(300)}
    config = DataConfig(sources=("world:functions:1", "world:gcd:1"), eval_problems=4)
    assert {p.source for p in eval_problems(config)} == set(config.sources)
    assert len(next(make_problem_stream(config, problems=4, seed=0))) == 4
    with pytest.raises(ValueError, match="functions"):
        parse_world("world:function:1")


def test_state_and_recall():
    """R = [final state equals] * [every gold call was made]; extra calls and other orders are allowed."""
    problem = task()
    calls = gold(problem)
    look = ("look", {"box": "a"})
    spare = [("put", {"box": "a", "n": 7}), ("take", {"box": "a", "n": 7})]
    paid = {
        "gold": (calls, None),
        "looked first": ([look, *calls], None),
        "there and back": ([*spare, *calls], None),
        "another tool besides": ([("python", {"code": "1"}), *calls], None),
        "a failed call besides": ([("take", {"box": "a", "n": 99}), *calls], ["exception"] + ["ok"] * len(calls)),
    }
    unpaid = {
        "nothing": ([], None),
        "one missing": (calls[:-1], None),
        "one failed": (calls, ["ok"] * (len(calls) - 1) + ["timeout"]),
        "once too often": ([*calls, ("put", {"box": "b", "n": 1})], None),
    }
    for name, (some, kinds) in paid.items():
        assert fn.state_and_recall(problem, [made(some, kinds)]) == [1.0], name
    for name, (some, kinds) in unpaid.items():
        assert fn.state_and_recall(problem, [made(some, kinds)]) == [0.0], name


def test_the_same_state_by_other_calls_earns_nothing():
    problem = task()
    calls = gold(problem)
    place = next(i for i, (name, _) in enumerate(calls) if name != "move")
    name, arguments = calls[place]
    more, one = arguments | {"n": arguments["n"] + 1}, arguments | {"n": 1}
    split = [("put", more), ("take", one)] if name == "put" else [("put", one), ("take", more)]
    other = [*calls[:place], *split, *calls[place + 1 :]]
    assert fn.replayed(other) == fn.replayed(calls)
    assert not fn.succeeds(problem, other)


@pytest.mark.parametrize("kind", KINDS)
def test_demonstrations_are_labeled_with_their_outcome(kind):
    lengths = Counter()
    for index in range(60):
        trace = demonstrate(task(index), only(kind), 0)
        assert trace.problem.extra["success"] == (kind in ("clean", "repair"))
        lengths[len(trace.turns)] += 1
        for turn, (observation,) in zip(trace.turns, trace.observations, strict=False):
            blocks, unfinished = call_blocks(turn)
            assert len(blocks) == 1
            assert unfinished is None
            assert observation
    assert set(lengths) <= {"clean": {4}, "repair": {5}, "wrong": {3, 4}, "guess": {1}}[kind]


def test_traces_flow_through_the_stream():
    config = DataConfig(sources=("world:functions:1",))
    traces = next(make_trace_stream(config, traces=32, seed=0))
    assert {trace.problem.extra["success"] for trace in traces} == {True, False}
    assert with_hints(task()).extra["hints"][0] == "call the functions"


def test_the_sandbox_prints_what_the_demonstrator_shows():
    """Observations of the traces equal the executor's, and its sessions do not share boxes."""
    traces = [demonstrate(task(index), only("repair"), 0) for index in range(6)]
    with make_executor(ToolsConfig(workers=2, preload=(), min_level="L0"), Registry(fn.function_tools())) as executor:
        for number, trace in enumerate(traces):
            for place, (turn, (observation,)) in enumerate(zip(trace.turns, trace.observations, strict=False)):
                call = parse_call(call_blocks(turn)[0][0])
                if call.fault is not None:
                    continue
                coded = CodeCall(f"{number}/{place}", call.name, call.arguments, session=str(number))
                (result,) = executor.run([coded])
                assert result.observation == observation
            executor.close_session(str(number))
