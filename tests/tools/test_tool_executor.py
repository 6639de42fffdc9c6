"""The interface: ids, order, waiting, counting; with an executor that runs nothing, and with the real one."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from grpo_roc_jax.sandbox.base import percentile
from grpo_roc_jax.sandbox.program import Program
from grpo_roc_jax.tools import (
    CodeCall,
    ExecutorFailed,
    IsolationUnavailable,
    ToolsConfig,
    default_registry,
    make_executor,
)
from grpo_roc_jax.tools.config import parse_cpus
from grpo_roc_jax.tools.executor import BaseExecutor, PythonExecutor
from grpo_roc_jax.types import ToolResult
from tests.helpers.arena import wait_until
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.sample_tools import area

TOOL = "python_code_with_standard_io"


def call(name: str, code: str = "1", **more: object) -> CodeCall:
    return CodeCall(name, TOOL, {"code": code, **more}, None)


class Watched(PythonExecutor):
    """Calls a function of the test while it writes the text of a result."""

    watch: Callable[[], None] | None = None

    def observation_text(self, result: ToolResult, code: str) -> str:
        if self.watch is not None:
            self.watch()
        return super().observation_text(result, code)


@pytest.fixture(scope="module")
def executor() -> Iterator[Watched]:
    registry = default_registry()
    registry.add(area, where="sandbox")

    def lookup(name: str) -> str:
        """Look a name up in the trainer."""
        return {"pi": "3.14"}[name]

    def sleepy(seconds: float) -> None:
        """Sleeps."""
        time.sleep(seconds)

    def json(text: str) -> str:
        """Returns text, under the name of a module."""
        return f"{text}: it's\n{{1}}\ud800"

    def trusted(text: str) -> str:
        """The same in the trainer."""
        return f"{text}: it's\n{{1}}\ud800"

    registry.add(json, where="sandbox")
    registry.add(trusted, where="trainer")
    registry.add(lookup, where="trainer")
    registry.add(sleepy, where="trainer")
    with Watched(ToolsConfig(workers=2, roots=1, wall_s=1.0, preload=("numpy",)), registry) as made:
        yield made


def test_results_are_polled_when_they_are_there_unless_their_call_was_cancelled() -> None:
    with FakeExecutor(manual=True) as fake:
        for name in ("a", "b", "c"):
            fake.submit(call(name))
        assert fake.poll() == []
        fake.release("b")
        assert [name for name, _ in fake.poll()] == ["b"]
        fake.cancel(["a"])
        threading.Timer(0.1, fake.release, ("c",)).start()
        assert [name for name, _ in fake.poll(60.0)] == ["c"], "waits for the first result only"
        assert fake.poll(0.1) == []
        fake.close_session("t")
        assert (fake.closed_sessions, fake.cancelled) == (["t"], ["a"])
    with FakeExecutor() as fake:
        fake.submit(call("a"))
        fake.cancel(["a"])
        assert fake.poll() == [], "even if finished"


def test_ids_in_flight_are_unique_and_start_comes_first() -> None:
    fake = FakeExecutor(manual=True)
    with pytest.raises(ExecutorFailed, match="start"):
        fake.submit(call("a"))
    with fake:
        fake.submit(call("a"))
        with pytest.raises(ValueError, match="unique"):
            fake.submit(call("a"))


def test_ratio_counts_leave_infra_out() -> None:
    kinds = iter(["ok", "exception", "sandbox_error", "timeout", "ok"])
    with FakeExecutor(lambda program: ToolResult(next(kinds))) as fake:
        fake.run([call(str(i)) for i in range(5)])
        numbers = fake.stats()
    assert numbers["tools/calls"] == 5
    assert numbers["tools/error_rate"] == 2 / 4
    assert numbers["tools/infra_rate"] == 1 / 5
    assert numbers["tools/rate/timeout"] == 1 / 5


def test_percentile() -> None:
    assert [percentile([1, 2, 3, 4], share) for share in (50, 99)] == [2, 4]
    assert percentile([], 50) == 0.0


def test_run_keeps_the_order_of_calls_and_poll_that_of_completion(executor: BaseExecutor) -> None:
    calls = [call("slow", "import time; time.sleep(0.4); print('slow')"), call("quick", "print('quick')")]
    assert [result.stdout for result in executor.run(calls)] == ["slow\n", "quick\n"]
    for request in calls:
        executor.submit(request)
    names: list[str] = []
    while len(names) < 2:
        names += [name for name, _ in executor.poll(2.0)]
    assert names == ["quick", "slow"]


def test_submit_never_waits(executor: BaseExecutor) -> None:
    """While the executor process is stopped it accepts no more than its socket holds."""

    def submit() -> None:
        for number in range(60):
            executor.submit(call(f"n{number}", "x = 1 # " + "y" * 20_000))

    os.kill(executor.pid, signal.SIGSTOP)
    try:
        thread = threading.Thread(target=submit)
        thread.start()
        thread.join(60)
        waits = thread.is_alive()
    finally:
        os.kill(executor.pid, signal.SIGCONT)
    assert not waits
    done: list = []
    while len(done) < 60:
        done += executor.poll(5.0)
    assert all(result.ok for _, result in done)


def test_asyncio_interface(executor: BaseExecutor) -> None:
    async def main() -> list[str]:
        results = await asyncio.gather(*(executor.arun(call(f"a{i}", f"print({i})")) for i in range(5)))
        task = asyncio.create_task(executor.arun(call("gone", "while True: pass")))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [result.stdout for result in results]

    assert asyncio.run(main()) == [f"{i}\n" for i in range(5)]
    assert executor.stats()["tools/in_flight"] == 0


def test_the_text_of_a_result_is_made_without_the_lock(executor: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread cancels meanwhile."""
    free = []

    def cancel_elsewhere() -> None:
        thread = threading.Thread(target=executor.cancel, args=([],))
        thread.start()
        thread.join(2)
        free.append(not thread.is_alive())

    monkeypatch.setattr(executor, "watch", cancel_elsewhere)
    calls = [call("free"), CodeCall("t0", "lookup", {"name": "pi"}, None), CodeCall("u0", "nope", {}, None)]
    assert len(executor.run(calls)) == 3
    assert free == [True] * 3


def test_result_fields(executor: BaseExecutor) -> None:
    result = executor.run(
        [call("f", "import sys\nprint('out'); print('err', file=sys.stderr)\ndef g():\n    1/0\ng()")]
    )[0]
    assert (result.kind, result.error_type, result.error_line) == ("exception", "ZeroDivisionError", 4)
    assert (result.stdout, result.stderr, result.stdout_bytes) == ("out\n", "err\n", 4)
    assert 'File "<program>", line 4, in g' in result.traceback
    assert "grpo" not in result.traceback
    assert result.isolation == executor.capabilities.level
    assert result.wall_ms > 0 and result.max_rss_kb > 0 and result.worker_id is not None and result.attempt == 1
    assert result.observation.endswith("[exception] ZeroDivisionError: division by zero (line 4: 1/0)")


def test_results_of_calls_that_are_denied_long_or_late(executor: BaseExecutor) -> None:
    programs = {
        "denied": "import socket\nsocket.socket()",
        "plain": "open('none')",
        "long": "print('a' * 200_000 + 'z' * 200_000)",
        "late": "print('before')\nwhile True: pass",
    }
    denied, plain, long, late = executor.run([call(name, code) for name, code in programs.items()])
    assert denied.kind == plain.kind == "exception" and denied.policy_denied and not plain.policy_denied
    assert long.kind == "ok" and long.truncated and long.stdout_bytes == 400_001
    assert long.stdout.startswith("aaa") and long.stdout.endswith("zzz\n") and "bytes omitted" in long.stdout
    assert (late.kind, late.limit_hit, late.stdout) == ("timeout", "wall", "before\n") and late.wall_ms > 900


def test_equal_seeds_give_equal_draws(executor: BaseExecutor) -> None:
    code = "import random, numpy as np\nprint(random.random(), np.random.rand(), hash('text'), {'a', 'b', 'c'})"
    seeds = (7, 7, 8)
    calls = [CodeCall(f"s{i}", TOOL, {"code": code}, None, seed=seed) for i, seed in enumerate(seeds)]
    first, second, third = (result.observation for result in executor.run(calls))
    assert first == second != third


def test_wrong_calls_become_results(executor: BaseExecutor) -> None:
    unknown, bad = executor.run([CodeCall("u", "nope", {}, None), CodeCall("b", TOOL, {"code": 1}, None)])
    assert (unknown.kind, bad.kind) == ("unknown_tool", "bad_arguments")
    assert unknown.observation.startswith("[unknown_tool]")


def test_own_tools_in_sandbox_and_trainer(executor: BaseExecutor) -> None:
    inside, looked_up, failed, late, sandboxed, trusted = executor.run(
        [
            CodeCall("i", "area", {"width": 2.0, "height": 4.0}, None),
            CodeCall("t", "lookup", {"name": "pi"}, None),
            CodeCall("x", "lookup", {"name": "e"}, None),
            CodeCall("z", "sleepy", {"seconds": 3.0}, None),
            CodeCall("j", "json", {"text": "Köln"}, None),
            CodeCall("k", "trusted", {"text": "Köln"}, None),
        ]
    )
    assert (inside.echo, looked_up.echo) == ("8.0 cm", "3.14")
    assert sandboxed.observation == trusted.observation == "Köln: it's\n{1}\\ud800"
    assert (failed.kind, failed.error_type, late.kind) == ("exception", "KeyError", "timeout")


def test_long_results_of_trainer_side_tools_are_cut() -> None:
    def long(count: int) -> str:
        """Returns long text."""
        return "x" * count

    registry = default_registry()
    registry.add(long, where="trainer")
    with FakeExecutor(registry=registry) as fake:
        [result] = fake.run([CodeCall("l", "long", {"count": 10_000_000}, None)])
    assert result.ok and result.truncated
    assert len(result.echo) < 70_000 and "characters omitted" in result.observation


def test_what_differs_from_run_to_run_is_not_shown() -> None:
    """The name of the scratch directory, where programs see it, and bytes at the ends of a long output."""
    codes = ["import os\nprint(os.getcwd())", "print('\\ufffd' * 40000)", "print('é' * 40000)"]
    config = ToolsConfig(workers=1, roots=1, level="L0", min_level="L0", preload=(), wall_s=10.0)
    with PythonExecutor(config, default_registry()) as made:
        where, odd, long = made.run([call(f"s{i}", code) for i, code in enumerate(codes)])
    assert where.observation.strip() == "/scratch"
    for result, mark in ((odd, "\ufffd"), (long, "é")):
        head, _, tail = result.stdout.partition("\n[... ")
        assert set(head) == {mark} and set(tail.partition("]\n")[2].strip()) == {mark}
    assert (
        made.registry.prepare(TOOL, {"code": "1" * (8 << 20), "input": "1" * (8 << 20)}, None).kind == "bad_arguments"
    )


def test_what_no_result_can_hold_is_an_error_of_the_tool_at_once() -> None:
    def wrong(count: int) -> ToolResult:
        """Returns a result whose text is none."""
        return ToolResult("ok", echo=count)

    registry = default_registry()
    registry.add(wrong, where="trainer")
    with FakeExecutor(config=ToolsConfig(wall_s=60.0), registry=registry) as fake:
        [result] = fake.run([CodeCall("w", "wrong", {"count": 1}, None)])
    assert (result.kind, result.error_type) == ("exception", "TypeError")


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"code": b"1"}, TypeError, "Program.code is b'1' .*must be text"),
        ({"code": None}, TypeError, "Program.code is None .*must be text"),
        ({"stdin": 3}, TypeError, "Program.stdin is 3 .*must be text"),
        ({"session": 7}, TypeError, "Program.session is 7 .*must be text"),
        ({"seed": 1.5}, TypeError, "Program.seed is 1.5 .*must be a whole number"),
        ({"code": "é" * (9 << 20)}, ValueError, "has 18874428 bytes of code, input and names; must be at most"),
        ({"session": "s" * (9 << 20)}, ValueError, "bytes of code, input and names; must be at most"),
    ],
)
def test_a_program_that_cannot_be_sent_is_refused_where_it_is_made(wrong: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        Program("again", **{"code": "1"} | wrong)
    assert Program("n", "1", seed=np.int64(-3)).seed == -3


@pytest.mark.parametrize("share_results", [False, True])
def test_the_id_of_a_call_that_could_not_be_started_stays_free(share_results: bool) -> None:
    def failing(program: Program) -> ToolResult:
        raise KeyboardInterrupt

    with FakeExecutor(failing, config=ToolsConfig(share_results=share_results)) as fake:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                fake.submit(call("again"))
            assert not fake.in_flight


def test_programs_may_come_from_a_generator_and_what_a_refused_run_began_is_cancelled() -> None:
    def interrupted(program: Program) -> ToolResult:
        raise KeyboardInterrupt

    with FakeExecutor() as fake:
        assert len(fake.run(call(str(i)) for i in range(3))) == 3
    with FakeExecutor(manual=True) as fake:
        fake.submit(call("there"))
        for names, words in (("a b a", "call id 'a' is there 2 times"), ("a there", "'there' is in flight already")):
            with pytest.raises(ValueError, match=words):
                fake.run([call(name) for name in names.split()])
            assert fake.in_flight == fake.held == ["there"]
    with FakeExecutor(interrupted) as fake:
        with pytest.raises(KeyboardInterrupt):
            fake.run([call("a")])
        assert not fake.in_flight


def test_start_twice_and_numbers(executor: BaseExecutor) -> None:
    assert executor.start() is executor.capabilities
    assert executor.capabilities.versions["numpy"]
    numbers = executor.stats()
    assert numbers["tools/workers_alive"] >= 1 and numbers["tools/level"] == int(executor.capabilities.level[1])


def test_a_module_that_cannot_be_imported_is_said_at_start() -> None:
    with pytest.raises(ExecutorFailed, match="no_such_module"):
        make_executor(ToolsConfig(workers=1, preload=("no_such_module",))).start()


def test_unreachable_level_is_refused_with_the_table() -> None:
    from grpo_roc_jax.sandbox import _probing, isolation

    layers = [_probing.ProbedLayer(name, name in ("limits", "seccomp"), "EPERM") for name in isolation.LAYERS]
    with pytest.raises(LookupError, match="landlock") as caught:
        _probing.choose(_probing.Probe(tuple(layers)), "best", "L2")
    assert "remedy" in str(caught.value) and "min_level" in str(caught.value)
    assert _probing.choose(_probing.Probe(tuple(layers)), "best", "L1") == "L1"
    assert issubclass(IsolationUnavailable, RuntimeError)


def test_config_checks() -> None:
    with pytest.raises(ValueError, match="min_level"):
        ToolsConfig(level="L0")
    with pytest.raises(ValueError, match="wall_s"):
        ToolsConfig(wall_s=0)
    with pytest.raises(ValueError, match="cpus"):
        parse_cpus("a-b")
    assert parse_cpus("0-2,5") == {0, 1, 2, 5}
    assert ToolsConfig(workers=8).root_count == 2


FORK = "import os\npid=os.fork()\nif not pid:\n os._exit(3)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid,0)[1]))"
BOMB = "import os,time\nfor i in range(500):\n if not os.fork():\n  time.sleep(30)\n  os._exit(0)"
POOL = """
from multiprocessing import Pool
from multiprocessing.pool import ThreadPool
def square(n): return n * n
with Pool(1) as pool, ThreadPool(2) as threads: print(pool.map(square, [1, 2]), threads.map(abs, [-1, 2]))
"""
ORPHAN = "import os,time\nif not os.fork():\n os.setsid()\n time.sleep(77)\nprint('left')"


def test_programs_fork_only_where_allowed_and_leave_no_process(executor: BaseExecutor) -> None:
    denied = executor.run([call("fork denied", FORK)])[0]
    assert (denied.kind, denied.error_type, denied.policy_denied) == ("exception", "PermissionError", True)
    before = orphans()
    with make_executor(ToolsConfig(workers=1, roots=1, processes=2, threads=16, preload=())) as forking:
        forked, bomb, orphan, after = forking.run(
            [call(name, code) for name, code in (("a", FORK), ("b", BOMB), ("c", ORPHAN), ("d", "print(5)"))]
        )
        if forking.capabilities.level in ("L3", "L4"):
            [pool] = forking.run([call("e", POOL)])
            assert pool.stdout == "[1, 4] [1, 2]\n", pool
        assert (forked.kind, forked.stdout) == ("ok", "3\n")
        if forking.capabilities.level == "L4":  # a user of its own, so the limit counts this call's tasks alone
            assert (bomb.kind, bomb.error_type) == ("exception", "BlockingIOError")
        assert (orphan.kind, orphan.stdout) == ("ok", "left\n")
        assert (after.kind, after.stdout) == ("ok", "5\n")
        assert wait_until(lambda: not orphans() - before)


def orphans() -> set[str]:
    """Processes of executors on this host whose parent is gone; a fork keeps the command line of its parent."""
    pids = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = (path / "stat").read_text().rsplit(")", 1)[1].split()[1]
            if parent == "1" and "grpo_tools_box" in (path / "cmdline").read_text():
                pids.add(path.name)
        except OSError:
            continue
    return pids
