"""The interface: ids, order, waiting, counting, shared results, with an executor that runs nothing and a real one; and
what the policy sees: deterministic, clean, and the same from run to run."""

import asyncio
import importlib
import os
import pkgutil
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_roc_jax import sandbox, tools
from grpo_roc_jax.sandbox.base import percentile
from grpo_roc_jax.sandbox.program import Program
from grpo_roc_jax.sandbox.shared_results import REMEMBERED
from grpo_roc_jax.tools import (
    CodeCall,
    ExecutorFailed,
    ToolsConfig,
    default_registry,
    make_executor,
    malformed_result,
    memory_bound,
    observe,
    sanitize,
)
from grpo_roc_jax.tools.config import PoolInCgroup, RayActors, SandboxFusion, parse_cpus
from grpo_roc_jax.tools.executor import PythonExecutor
from grpo_roc_jax.tools.observation import SOURCE_CHARS
from grpo_roc_jax.types import ToolResult
from tests.helpers.arena import TOOL, drain, of_proc, stat_of, wait_until
from tests.helpers.arena import program_call as call
from tests.helpers.fake_executor import FakeExecutor, area
from tests.helpers.linear import assert_linear

SHARED = ToolsConfig(share_results=True)
SMALL = {"workers": 4, "sessions": 8, "memory_mb": 400, "scratch_mb": 88, "output_kill_mb": 8}


@pytest.fixture(scope="module")
def executor():
    def lookup(name: str) -> str:
        """Look a name up in the trainer."""
        time.sleep(3.0 * (name == "slow"))
        return {"pi": "3.14", "text": "Köln: it's\n{1}\ud800"}[name]

    def json(text: str) -> str:
        """Returns text, under the name of a module."""
        return f"{text}: it's\n{{1}}\ud800"

    registry = default_registry()
    registry.add(area, where="sandbox")
    registry.add(json, where="sandbox")
    registry.add(lookup, where="trainer")
    with PythonExecutor(ToolsConfig(workers=2, roots=1, wall_s=1.0, preload=("numpy",)), registry) as made:
        yield made


def test_results_are_polled_when_they_are_there_unless_their_call_was_cancelled_and_counted() -> None:
    with FakeExecutor(manual=True) as fake:
        for name in "abcd":
            fake.submit(call(name))
        assert fake.poll() == []
        fake.release("d")
        fake.release("b")
        assert [name for name, _ in fake.poll()] == ["d", "b"], "in the order in which they ended"
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
    kinds = iter(["ok", "exception", "sandbox_error", "timeout", "ok"])
    with FakeExecutor(lambda program: ToolResult(next(kinds))) as fake:
        fake.run([call(str(i)) for i in range(5)])
        numbers = fake.stats()
    names = ("calls", "error_rate", "infra_rate", "rate/timeout")
    assert [numbers[f"tools/{name}"] for name in names] == [5, 2 / 4, 1 / 5, 1 / 5], "ratios leave infra out"
    assert [percentile([1, 2, 3, 4], share) for share in (50, 99)] == [2, 4] and percentile([], 50) == 0.0


def test_submit_never_waits(executor) -> None:
    """While the executor process is stopped it accepts no more than its socket holds."""
    calls = [call(f"n{number}", "x = 1 # " + "y" * 20_000) for number in range(60)]
    thread = threading.Thread(target=lambda: [executor.submit(one) for one in calls])
    os.kill(executor.pid, signal.SIGSTOP)
    try:
        thread.start()
        thread.join(60)
        waits = thread.is_alive()
    finally:
        os.kill(executor.pid, signal.SIGCONT)
    assert not waits and all(result.ok for result in drain(executor, 60).values())


def test_asyncio_interface(executor) -> None:
    async def main() -> list[str]:
        results = await asyncio.gather(*(executor.arun(call(f"a{i}", f"print({i})")) for i in range(5)))
        task = asyncio.create_task(executor.arun(call("gone", "while True: pass")))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return [result.stdout for result in results]

    assert asyncio.run(main()) == [f"{i}\n" for i in range(5)]
    assert executor.stats()["tools/in_flight"] == 0


def test_the_text_of_a_result_is_made_without_the_lock(monkeypatch) -> None:
    """Another thread cancels meanwhile."""
    registry, free = default_registry(), []
    registry.add(area, where="trainer")

    def cancel_elsewhere(*given: object) -> str:
        thread = threading.Thread(target=fake.cancel, args=([],))
        thread.start()
        thread.join(2)
        free.append(not thread.is_alive())
        return ""

    with FakeExecutor(registry=registry) as fake:
        monkeypatch.setattr(fake, "observation_text", cancel_elsewhere)
        fake.run([call("free"), CodeCall("t0", "area", {"width": 2}, None), CodeCall("u0", "nope", {}, None)])
    assert free == [True] * 3


def test_result_fields_of_calls_that_fail_are_denied_long_late_or_seeded(executor) -> None:
    draws = "import random, numpy as np\nprint(random.random(), np.random.rand(), hash('text'), {'a', 'b', 'c'})"
    programs = [
        "import sys\nprint('out'); print('err', file=sys.stderr)\ndef g():\n    1/0\ng()",
        "import socket\nsocket.socket()",
        "open('none')",
        "print('a' * 200_000 + 'z' * 200_000)",
        "print('before')\nwhile True: pass",
        *[draws] * 3,
    ]
    calls = [CodeCall(f"f{i}", TOOL, {"code": code}, None, seed=i // 7) for i, code in enumerate(programs)]
    failed, denied, plain, long, late, *drawn = executor.run(calls)
    assert (failed.kind, failed.error_type, failed.error_line) == ("exception", "ZeroDivisionError", 4)
    assert (failed.stdout, failed.stderr, failed.stdout_bytes) == ("out\n", "err\n", 4)
    assert 'File "<program>", line 4, in g' in failed.traceback and "grpo" not in failed.traceback
    assert failed.wall_ms > 0 and failed.max_rss_kb > 0 and failed.worker_id is not None and failed.attempt == 1
    assert failed.observation.endswith("[exception] ZeroDivisionError: division by zero (line 4: 1/0)")
    assert failed.isolation == executor.capabilities.level
    assert denied.kind == plain.kind == "exception" and denied.policy_denied and not plain.policy_denied
    assert long.kind == "ok" and long.truncated and long.stdout_bytes == 400_001
    assert long.stdout.startswith("aaa") and long.stdout.endswith("zzz\n") and "bytes omitted" in long.stdout
    assert (late.kind, late.limit_hit, late.stdout) == ("timeout", "wall", "before\n") and late.wall_ms > 900
    assert drawn[0].observation == drawn[1].observation != drawn[2].observation


def test_own_tools_in_sandbox_and_trainer(executor) -> None:
    given = [("area", {"width": 2.0, "height": 4.0}), ("json", {"text": "Köln"})]
    given += [("lookup", {"name": name}) for name in ("pi", "e", "slow", "text")]
    calls = [CodeCall(f"o{i}", name, arguments, None) for i, (name, arguments) in enumerate(given)]
    inside, sandboxed, looked_up, failed, late, trusted = executor.run(calls)
    assert (inside.echo, looked_up.echo) == ("8.0 cm", "3.14")
    assert sandboxed.observation == trusted.observation == "Köln: it's\n{1}\\ud800"
    assert (failed.kind, failed.error_type, late.kind) == ("exception", "KeyError", "timeout")


def test_wrong_calls_become_results(executor) -> None:
    unknown, bad = executor.run([CodeCall("u", "nope", {}, None), CodeCall("b", TOOL, {"code": 1}, None)])
    assert (unknown.kind, bad.kind) == ("unknown_tool", "bad_arguments")
    assert unknown.observation.startswith("[unknown_tool]")


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


def test_results_of_trainer_side_tools_are_cut_or_an_error_at_once() -> None:
    def long(count: int) -> str:
        """Returns long text."""
        return "x" * count

    def wrong(count: int):
        """Returns a result whose text is none."""
        return ToolResult("ok", echo=count)

    registry = default_registry()
    for function in (long, wrong):
        registry.add(function, where="trainer")
    with FakeExecutor(config=ToolsConfig(wall_s=60.0), registry=registry) as fake:
        cut, error = fake.run([CodeCall(name, name, {"count": 10_000_000}, None) for name in ("long", "wrong")])
    assert cut.ok and cut.truncated and len(cut.echo) < 70_000 and "characters omitted" in cut.observation
    assert (error.kind, error.error_type) == ("exception", "TypeError")


def test_a_program_that_cannot_be_sent_is_refused_where_it_is_made() -> None:
    for wrong in ({"code": b"1"}, {"code": None}, {"stdin": 3}, {"session": 7}, {"seed": 1.5}):
        [(name, value)] = wrong.items()
        kind = "a whole number" if name == "seed" else "text"
        with pytest.raises(TypeError, match=f"Program.{name} is {value} .*must be {kind}"):
            Program("again", **{"code": "1"} | wrong)
    for wrong in ({"code": "é" * (9 << 20)}, {"session": "s" * (9 << 20), "code": ""}):
        with pytest.raises(ValueError, match=r"has (18874428|113246268) bytes of code, input and names; must be"):
            Program("again", **wrong)
    assert Program("n", "1", seed=np.int64(-3)).seed == -3


def test_the_id_of_a_call_that_could_not_be_started_stays_free_and_what_a_refused_run_began_is_cancelled() -> None:
    def failing(program: Program) -> ToolResult:
        raise KeyboardInterrupt

    for share_results in (False, True):
        with FakeExecutor(failing, config=ToolsConfig(share_results=share_results)) as fake:
            for begin in (fake.submit, fake.submit, lambda again, fake=fake: fake.run([again])):
                with pytest.raises(KeyboardInterrupt):
                    begin(call("again"))
                assert not fake.in_flight
    with FakeExecutor() as fake:
        assert len(fake.run(call(str(i)) for i in range(3))) == 3
    fake = FakeExecutor(manual=True)
    with pytest.raises(ExecutorFailed, match="start"):
        fake.submit(call("there"))
    with fake:
        fake.submit(call("there"))
        with pytest.raises(ValueError, match="unique"):
            fake.submit(call("there"))
        for names, words in (("a b a", "call id 'a' is there 2 times"), ("a there", "'there' is in flight already")):
            with pytest.raises(ValueError, match=words):
                fake.run([call(name) for name in names.split()])
            assert fake.in_flight == fake.held == ["there"]


def test_start_and_config_checks(executor) -> None:
    assert executor.start() is executor.capabilities and executor.capabilities.versions["numpy"]
    numbers = executor.stats()
    assert numbers["tools/workers_alive"] >= 1 and numbers["tools/level"] == int(executor.capabilities.level[1])
    with pytest.raises(ExecutorFailed, match="no_such_module"):
        make_executor(ToolsConfig(workers=1, preload=("no_such_module",))).start()
    for wrong, word in ((lambda: ToolsConfig(level="L0"), "min_level"), (lambda: ToolsConfig(wall_s=0), "wall_s")):
        with pytest.raises(ValueError, match=word):
            wrong()
    with pytest.raises(ValueError, match="cpus"):
        parse_cpus("a-b")
    assert parse_cpus("0-2,5") == {0, 1, 2, 5} and ToolsConfig(workers=8).root_count == 2


FORK = "import os\npid=os.fork()\nif not pid:\n os._exit(3)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid,0)[1]))"
BOMB = "import os,time\nfor i in range(500):\n if not os.fork():\n  time.sleep(30)\n  os._exit(0)"
POOL = """
from multiprocessing import Pool
from multiprocessing.pool import ThreadPool
def square(n): return n * n
with Pool(1) as pool, ThreadPool(2) as threads: print(pool.map(square, [1, 2]), threads.map(abs, [-1, 2]))
"""
ORPHAN = "import os,time\nif not os.fork():\n os.setsid()\n time.sleep(77)\nprint('left')"


def test_programs_fork_only_where_allowed_and_leave_no_process(executor) -> None:
    denied = executor.run([call("fork denied", FORK)])[0]
    assert (denied.kind, denied.error_type, denied.policy_denied) == ("exception", "PermissionError", True)
    before = orphans()
    with make_executor(ToolsConfig(workers=1, roots=1, processes=2, threads=16, preload=())) as forking:
        programs = [FORK, BOMB, ORPHAN, "print(5)", POOL]
        forked, bomb, orphan, after, pool = forking.run([call(str(i), code) for i, code in enumerate(programs)])
        assert [(result.kind, result.stdout) for result in (forked, orphan, after)] == [
            *(("ok", "3\n"), ("ok", "left\n"), ("ok", "5\n")),
        ]
        assert forking.capabilities.level not in ("L3", "L4") or pool.stdout == "[1, 4] [1, 2]\n", pool
        if forking.capabilities.level == "L4":  # a user of its own, so the limit counts this call's tasks alone
            assert (bomb.kind, bomb.error_type) == ("exception", "BlockingIOError")
        assert wait_until(lambda: not orphans() - before)


def orphans() -> set[int]:
    """Processes of executors on this host whose parent is gone; a fork keeps the command line of its parent."""
    parentless = {int(path.name) for path in Path("/proc").glob("[0-9]*") if stat_of(int(path.name))[1] == "1"}
    return {pid for pid in parentless if "grpo_tools_box" in of_proc(pid, "cmdline")}


def manual(answer=None) -> FakeExecutor:
    return FakeExecutor(answer, manual=True, config=SHARED)


def delivered(fake: FakeExecutor) -> dict[str, str]:
    return {call_id: result.kind for call_id, result in fake.poll()}


@pytest.mark.parametrize("kind", ["ok", "exception", "syntax_error"])
def test_calls_of_one_program_take_one_run(kind):
    with manual(lambda program: ToolResult(kind, stdout=program.code)) as fake:
        for name, code in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "x")):
            fake.submit(call(name, code))
        assert fake.held == ["a", "c"] and fake.in_flight == ["a", "b", "c", "d"]
        fake.release("a")
        results = dict(fake.poll())
        assert list(results) == ["a", "b", "d"] and {result.stdout for result in results.values()} == {"x"}
        fake.submit(call("e", "x"))
        assert dict(fake.poll())["e"].observation == results["a"].observation and fake.held == ["c"]
        assert fake.stats()["tools/shared"] == 3 and fake.stats()["tools/calls"] == 4
    with manual() as fake:
        for name in "ab":
            fake.submit(call(name, "x", input=name))
        for name in "cd":
            fake.submit(CodeCall(name, "jupyter_code", {"code": "x"}, "session"))
        assert fake.held == ["a", "b", "c", "d"], "other input and sessions run themselves"


@pytest.mark.parametrize("kind", ["timeout", "memory_limit", "output_limit", "crash", "sandbox_error"])
def test_a_result_that_the_program_alone_did_not_decide_is_not_shared(kind):
    """Those that waited run at once, beside each other; so do later calls of it."""
    with manual(lambda program: ToolResult(kind if program.id == "a" else "ok")) as fake:
        for name in "abc":
            fake.submit(call(name))
        fake.release("a")
        assert delivered(fake) == {"a": kind} and fake.held == ["b", "c"]
        fake.submit(call("d"))
        assert fake.held == ["b", "c", "d"]
        fake.release("c")
        assert delivered(fake) == {"c": "ok"} and fake.held == ["b", "d"]


def test_the_next_call_runs_when_the_one_that_ran_is_cancelled_or_cannot_be_started():
    with manual() as fake:
        for name in "abcd":
            fake.submit(call(name))
        fake.cancel(["c"])
        assert fake.held == ["a"], "one that waits leaves no trace"
        fake.cancel(["a", "b"])
        assert fake.held == ["d"]
        fake.release("d")
        assert delivered(fake) == {"d": "ok"}
    with manual() as fake:  # one that cannot be started ends with an error, and the one after it is begun all the same
        fake.refused = {"b", "d"}
        for name in "abcd":
            fake.submit(call(name))
        fake.cancel(["a"])
        results = dict(fake.poll())
        assert fake.held == ["c"] and {result.kind for result in results.values()} == {"sandbox_error"}
        assert [results[name].error_message.partition(": ")[2] for name in "bd"] == ["b is refused", "d is refused"]


def test_the_result_that_was_not_used_for_longest_is_forgotten():
    others = [f"other {i}" for i in range(REMEMBERED - 1)]
    ran: list[str] = []
    with FakeExecutor(lambda program: ran.append(program.code) or ToolResult("ok"), config=SHARED) as fake:
        for i, code in enumerate(["x", "y", "x", *others, "x", "y"]):
            fake.submit(call(str(i), code))
    assert ran == ["x", "y", *others, "y"]


def test_the_sum_is_said_with_what_limits_it() -> None:
    for executor, settings, host_gib, words in (
        # 400 + 88 + 3 x 8 MiB is half a GiB.
        ({}, {}, 16, "4 calls at a time may take 2.0 GiB of memory, and 8 sessions 4.0 GiB; this host has 16.0 GiB"),
        ({}, {}, 5, "8 sessions 4.0 GiB; this host has 5.0 GiB; tools.executor cgroup would limit the sum"),
        ({}, {"processes": 2}, 64, "4 calls at a time may take 4.0 GiB of memory, and 8 sessions 8.0 GiB"),
        ({"executor": PoolInCgroup(memory_mb=3072)}, {}, 2, "programs share 3.0 GiB of memory"),
        ({"executor": RayActors()}, {}, 16, "may take 2.0 GiB of memory in each actor"),
    ):
        assert words in memory_bound.describe_memory(ToolsConfig(**executor, **SMALL | settings), host_gib << 30)


def test_a_run_names_the_limit_of_a_call_and_no_sum() -> None:
    """`doctor` compares the sum with the host; the default recipe exceeds small hosts and does not complain of it."""
    service, shared = ToolsConfig(executor=SandboxFusion()), ToolsConfig(executor=PoolInCgroup(memory_mb=3072), **SMALL)
    assert memory_bound.describe_memory(service) == memory_bound.describe_call(service) == ""
    assert memory_bound.describe_call(ToolsConfig(**SMALL)) == "a call may take 0.5 GiB of memory, 4 run at a time"
    assert memory_bound.describe_call(shared) == memory_bound.describe_memory(shared)


PLAIN, PEERS = ToolsConfig(), ToolsConfig(observation="rstar2")
FAILED = ToolResult("exception", error_type="E", error_message="m", error_line=1)
ROLLED_BACK = ToolResult("timeout", limit_hit="wall", session_id="s", signal=9, rolled_back=True)
FRAMES = '  File "<string>", line 5, in <module>\n  File "<sandbox>", line 8, in main\n  File "<program>", line 1, in f'
SHOWN = '  File "<program>", line 1, in f\nsys:1: UserWarning: x'
STDERR = (
    'Traceback:\n  File "/home/me/venv/lib/python3.11/site-packages/numpy/core.py", line 3, in f\n'
    "/usr/lib/python3.12/warnings.py:5: UserWarning: x\nno file '/tmp/grpo-tools-ab12_xyz/w3-417-2f00deadbeef/a.txt'"
)
STDERR_SHOWN = (
    '[stderr]\nTraceback:\n  File "numpy/core.py", line 3, in f\n'
    "warnings.py:5: UserWarning: x\nno file '/scratch/a.txt'"
)
NAME = "grpo-tools-ab12_xyz/w3-417-2f00deadbeef"
SCRATCH = {  # hidden from the first slash on
    "/grpo-tools-": "/grpo-tools-",
    f"{NAME} /x": f"{NAME} /x",
    f"=/a/{NAME}/b/grpo-tools-ab12_xyz/w3-417-3/c:/d": "=/scratch/scratch/c:/d",
    "/a b/grpo-tools-ab12_xyz/w3-417-2x": "/a b/scratchx",
}


def test_plain_wording() -> None:
    for result, code, text in (
        (ToolResult("ok", stdout="3\n"), "", "3"),
        (ToolResult("ok", stdout="a", echo="7"), "", "a\n7"),
        (ToolResult("ok"), "", "[no output]"),
        (ToolResult("ok", stdout="a\n", stderr="b\n"), "", "a\n[stderr]\nb"),
        (replace(FAILED, error_line=2), "x = 1\nf(x)\n", "[exception] E: m (line 2: f(x))"),
        (ToolResult("timeout", limit_hit="wall", stdout="so far"), "", "so far\n[timeout] stopped after 5 s"),
        (ToolResult("timeout", limit_hit="cpu"), "", "[timeout] stopped after 5 s of CPU time"),
        (ToolResult("crash", signal=11), "", "[crash] the process was ended by signal 11"),
        (ToolResult("memory_limit", error_type="M", error_line=1), "[0]*9", "[memory_limit] M (line 1: [0]*9)"),
        (ROLLED_BACK, "", "[timeout] stopped after 5 s\n[session] it was rolled back to the state before this cell"),
        (FAILED, "x" * SOURCE_CHARS, f"[exception] E: m (line 1: {'x' * SOURCE_CHARS})"),
        (FAILED, "x" * SOURCE_CHARS + "y", f"[exception] E: m (line 1: {'x' * SOURCE_CHARS}...)"),
        (ToolResult("ok", stdout="<o at 0x7f12ab34cd56> 0x7f12ab34cd56"), "", "<o at 0x0> 0x7f12ab34cd56"),
        (ToolResult("ok", stderr=f"Stack:\n{FRAMES}\n<sandbox>:9: UserWarning: x"), "", f"[stderr]\nStack:\n{SHOWN}"),
        (ToolResult("ok", stderr=STDERR), "", STDERR_SHOWN),
        *((ToolResult("ok", stdout=text), "", shown) for text, shown in SCRATCH.items()),
    ):
        assert observe(result, code, PLAIN) == text


def test_addresses_may_be_shown_and_no_timing_enters_the_text() -> None:
    shown = observe(ToolResult("ok", stdout="<object object at 0x7f12ab34cd56>"), "", ToolsConfig(hide_addresses=False))
    assert "at 0x7f12ab34cd56" in shown
    slow = ToolResult("timeout", limit_hit="wall", wall_ms=5123.4, cpu_ms=777, queue_ms=9, worker_id=3, max_rss_kb=999)
    fast = ToolResult("timeout", limit_hit="wall", wall_ms=5001.0)
    assert observe(slow, "", PLAIN) == observe(fast, "", PLAIN)
    # The wording of the official release.
    assert observe(ToolResult("ok", stdout="3\n"), "", PEERS) == "Tool call success\nstdout: 3\n"
    assert observe(FAILED, "x", PEERS) == "Tool call failure\nreason: \nstderr: E at line 1: m\n  x"
    late = observe(ToolResult("timeout", limit_hit="wall"), "", PEERS)
    assert late == "Tool call failure\nreason: worker_timeout\nstderr: Suicide from timeout."


def test_the_quoted_line_is_the_one_that_python_counts() -> None:
    codes = [f"x = 'a{mark}b'\ny = 1\n1/0" for mark in "\u2028\x0c\x1c\x85"]
    for code in (*codes, "x = 1\r\ny = 1\r\n1/0", "x = 1\ry = 1\r1/0"):
        assert "(line 3: 1/0)" in observe(replace(FAILED, error_line=3), code, PLAIN), code


UNITS = (
    "/", "/a", "a", "0", " ", "\t", "_", "__a", ";", ":", ": ", "\\\n", "\n", "\n/", '"', "grpo-tools-",
    "/grpo-tools-ab12_xyz/w1", "/grpo-tools-ab12_xyz/w1-2-3", "/lib/python3.1", 'File "/', 'File "/lib/python3.',
    "\x1b[", "\x1b[0", "\x1b[ ", "\x1b]", "at 0x", "at 0xabcdef", "from ", "from a", "from a ", "import ", "import a,",
    "exec", "\r\n", "\x00", "\ud800",
)  # fmt: skip
"""Texts that programs may repeat to make a pattern try many matches."""


def patterns() -> dict[str, re.Pattern]:
    """Every pattern of the modules of `tools` and `sandbox`."""
    by_name = {}
    folders = ((package, info) for package in (tools, sandbox) for info in pkgutil.iter_modules(package.__path__))
    for package, info in folders:
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        members = {name: value for name, value in vars(module).items() if isinstance(value, re.Pattern)}
        by_name |= {f"{info.name}.{name}": value for name, value in members.items()}
    return by_name


def assert_linear_in_units(action: Callable[[str], object]) -> None:
    for unit in UNITS:
        for lead in ("", "/", "x"):
            assert_linear(action, unit, 2_000, lead=lead)


def test_patterns_take_linear_time() -> None:
    by_name = patterns()
    assert {"observation.LIBRARY_PATHS", "_calls.INEXACT"} <= set(by_name)
    for pattern in by_name.values():
        if isinstance(pattern.pattern, bytes):
            assert_linear_in_units(lambda text, p=pattern: p.findall(text.encode("utf-8", "surrogatepass")))
        else:
            assert_linear_in_units(pattern.findall)


@pytest.mark.parametrize("config", [PLAIN, PEERS], ids=["plain", "rstar2"])
def test_observing_takes_linear_time(config: ToolsConfig) -> None:
    assert_linear_in_units(lambda text: observe(ToolResult("exception", stdout=text, error_message=text), text, config))


def test_a_malformed_call_is_readable_and_counts() -> None:
    result = malformed_result("Expecting ','")
    assert result.counts_as_error and result.observation == "[malformed_call] MalformedCall: Expecting ','"


@given(st.text(st.characters(codec=None), max_size=200))
def test_sanitized_text_can_be_encoded_and_shows_no_control_characters(text: str) -> None:
    clean = sanitize(text)
    clean.encode("utf-8")
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in clean)
    assert sanitize("\x1b[31mred\x1b[0m\x07 \x00done\r\n") == "red done\n"
