"""`tools.share_results`: which calls run, and what the others get."""

from dataclasses import replace

import pytest

from grpo_roc_jax.sandbox.shared_results import REMEMBERED
from grpo_roc_jax.tools import CodeCall, ToolsConfig, make_executor
from grpo_roc_jax.types import ToolResult
from tests.helpers.fake_executor import FakeExecutor

TOOL = "python_code_with_standard_io"
SHARED = ToolsConfig(share_results=True)


def call(name: str, code: str = "print(1)", **more: str) -> CodeCall:
    return CodeCall(name, TOOL, {"code": code, **more}, None)


def manual(answer=None) -> FakeExecutor:
    executor = FakeExecutor(answer, manual=True, config=SHARED)
    executor.start()
    return executor


def delivered(executor: FakeExecutor) -> dict[str, str]:
    return {call_id: result.kind for call_id, result in executor.poll()}


def test_calls_of_one_program_take_one_run():
    with manual() as executor:
        for name, code in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "x")):
            executor.submit(call(name, code))
        assert executor.held == ["a", "c"] and executor.in_flight == ["a", "b", "c", "d"]
        executor.release("a")
        results = dict(executor.poll())
        assert list(results) == ["a", "b", "d"] and {result.stdout for result in results.values()} == {"x"}
        executor.submit(call("e", "x"))
        assert dict(executor.poll())["e"].observation == results["a"].observation and executor.held == ["c"]
        assert executor.stats()["tools/shared"] == 3 and executor.stats()["tools/calls"] == 4


def test_other_input_and_sessions_run_themselves():
    with manual() as executor:
        executor.submit(call("a", "x", input="1"))
        executor.submit(call("b", "x", input="2"))
        for name in ("c", "d"):
            executor.submit(CodeCall(name, "jupyter_code", {"code": "x"}, "session"))
        assert executor.held == ["a", "b", "c", "d"]


@pytest.mark.parametrize("kind", ["timeout", "memory_limit", "output_limit", "crash", "sandbox_error"])
def test_a_result_that_the_program_alone_did_not_decide_is_not_shared(kind):
    """Those that waited run at once, beside each other; so do later calls of it."""
    with manual(lambda program: ToolResult(kind if program.id == "a" else "ok")) as executor:
        for name in "abc":
            executor.submit(call(name))
        executor.release("a")
        assert delivered(executor) == {"a": kind} and executor.held == ["b", "c"]
        executor.submit(call("d"))
        assert executor.held == ["b", "c", "d"]
        executor.release("c")
        assert delivered(executor) == {"c": "ok"} and executor.held == ["b", "d"]


def test_the_next_call_runs_when_the_one_that_ran_is_cancelled():
    with manual() as executor:
        for name in "abcd":
            executor.submit(call(name))
        executor.cancel(["c"])
        assert executor.held == ["a"], "one that waits leaves no trace"
        executor.cancel(["a", "b"])
        assert executor.held == ["d"]
        executor.release("d")
        assert delivered(executor) == {"d": "ok"}


def test_a_call_that_waited_and_cannot_be_started_ends_with_an_error():
    """Its submitter has returned: only a result reaches it. The one after it is begun all the same."""
    with manual() as executor:
        executor.refused = {"b", "d"}
        for name in "abcd":
            executor.submit(call(name))
        executor.cancel(["a"])
        results = dict(executor.poll())
        assert executor.held == ["c"] and {result.kind for result in results.values()} == {"sandbox_error"}
        assert [results[name].error_message.partition(": ")[2] for name in "bd"] == ["b is refused", "d is refused"]


def test_the_result_that_was_not_used_for_longest_is_forgotten():
    others = [f"other {i}" for i in range(REMEMBERED - 1)]
    ran: list[str] = []
    with FakeExecutor(lambda program: ran.append(program.code) or ToolResult("ok"), config=SHARED) as executor:
        for i, code in enumerate(["x", "y", "x", *others, "x", "y"]):
            executor.submit(call(str(i), code))
    assert ran == ["x", "y", *others, "y"]


def test_real_programs_show_the_same_with_it_and_without():
    codes = ["print(3)", "1/0", "print(", "import random\nprint(random.random())"]
    limits = ToolsConfig(workers=4, roots=1, preload=(), min_level="L0")
    outcomes = {}
    for share in (False, True):
        calls = [CodeCall(f"{i}", TOOL, {"code": code}, None, seed=i) for i, code in enumerate(codes * 3)]
        with make_executor(replace(limits, share_results=True) if share else limits) as executor:
            outcomes[share] = [(result.kind, result.observation) for result in executor.run(calls)]
            assert executor.stats().get("tools/shared", 0) == (8 if share else 0)
    deterministic = [i for i in range(12) if i % 4 != 3]
    assert [outcomes[True][i] for i in deterministic] == [outcomes[False][i] for i in deterministic]
    assert len({outcomes[False][i] for i in (3, 7, 11)}) == 3, "each call has a seed of its own"
    assert len({outcomes[True][i] for i in (3, 7, 11)}) == 1, "as the setting says"
