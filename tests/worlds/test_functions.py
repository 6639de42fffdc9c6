"""The world of function calls: solvable tasks, an exact verifier, demonstrations with true labels."""

from collections import Counter

import numpy as np
import pytest

from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.pipeline import make_problem_stream, make_trace_stream
from grpo_roc_jax.text.calls import call_blocks, parse_call
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.executor import make_executor
from grpo_roc_jax.tools.interface import CodeCall
from grpo_roc_jax.tools.registry import Registry
from grpo_roc_jax.types import ToolCall, ToolResult, Trajectory, Turn
from grpo_roc_jax.worlds import functions as fn
from grpo_roc_jax.worlds.demonstrations import with_hints
from grpo_roc_jax.worlds.worlds import world_problem
from tests.helpers.demonstrations import KINDS, traces


def task(index=0, level=2):
    return world_problem("functions", level, 0, index)


def gold(problem):
    return [(name, dict(arguments)) for name, arguments in problem.extra["calls"]]


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
    for pay, cases in ((1.0, paid), (0.0, unpaid)):
        for name, (some, kinds) in cases.items():
            assert fn.state_and_recall(problem, [made(some, kinds)]) == [pay], name


@pytest.mark.parametrize("n", [-100, -1, 10**6])
def test_a_call_that_fails_changes_no_box(n):
    shelf = fn.Shelf()
    shelf.put("a", 5)
    shelf.put("b", 5)
    before = dict(shelf.boxes)
    for change in (lambda: shelf.move("a", "b", n if n > 0 else -100), lambda: shelf.take("a", 10**6)):
        with pytest.raises(ValueError, match="holds"):
            change()
        assert shelf.boxes == before


def test_the_same_state_by_other_calls_earns_nothing():
    problem = task()
    calls = gold(problem)
    index = next(i for i, (name, _) in enumerate(calls) if name != "move")
    name, arguments = calls[index]
    more, single = arguments | {"n": arguments["n"] + 1}, arguments | {"n": 1}
    split = [("put", more), ("take", single)] if name == "put" else [("put", single), ("take", more)]
    other = [*calls[:index], *split, *calls[index + 1 :]]
    assert fn.replayed(other) == fn.replayed(calls)
    assert not fn.succeeds(problem, other)


@pytest.mark.parametrize("kind", KINDS)
def test_demonstrations_are_labeled_with_their_outcome(kind):
    lengths = Counter()
    for trace in traces(kind, "functions", 60, 2):
        assert trace.problem.extra["success"] == (kind in ("clean", "repair"))
        lengths[len(trace.turns)] += 1
        for turn, (observation,) in zip(trace.turns, trace.observations, strict=False):
            blocks, unfinished = call_blocks(turn)
            assert len(blocks) == 1
            assert unfinished is None
            assert observation
    assert set(lengths) <= {"clean": {4}, "repair": {5}, "wrong": {3, 4}, "guess": {1}}[kind]


def test_problems_and_traces_flow_through_the_streams():
    config = DataConfig(sources=("world:functions:1", "world:gcd:1"))
    assert len(next(make_problem_stream(config, problems=4, seed=0))) == 4
    batch = next(make_trace_stream(DataConfig(sources=config.sources[:1]), traces=32, seed=0))
    assert {trace.problem.extra["success"] for trace in batch} == {True, False}
    assert with_hints(task()).extra["hints"][0] == "call the functions"


def test_the_sandbox_prints_what_the_demonstrator_shows():
    """Observations of the traces equal the executor's, and its sessions do not share boxes."""
    with make_executor(ToolsConfig(workers=2, preload=(), min_level="L0"), Registry(fn.function_tools())) as executor:
        for number, trace in enumerate(traces("repair", "functions", 6, 2)):
            for index, (turn, (observation,)) in enumerate(zip(trace.turns, trace.observations, strict=False)):
                call = parse_call(call_blocks(turn)[0][0])
                if call.fault is not None:
                    continue
                coded = CodeCall(f"{number}/{index}", call.name, call.arguments, session=str(number))
                (result,) = executor.run([coded])
                assert result.observation == observation
            executor.close_session(str(number))
