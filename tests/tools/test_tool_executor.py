"""The interface: ids, order, waiting, counting, shared results, with an executor that runs nothing and a real one; and
what the policy sees: deterministic, clean, and the same from run to run."""

import asyncio
import contextlib
import importlib
import itertools
import re
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import iter_modules
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_roc_jax import sandbox, tools
from grpo_roc_jax.sandbox import _calls
from grpo_roc_jax.sandbox.base import percentile
from grpo_roc_jax.sandbox.program import Program
from grpo_roc_jax.tools import CodeCall, ExecutorFailed, ToolsConfig, default_registry, make_executor, observe
from grpo_roc_jax.tools.config import parse_cpus
from grpo_roc_jax.tools.executor import PythonExecutor
from grpo_roc_jax.tools.observation import SOURCE_CHARS
from grpo_roc_jax.types import ToolResult
from tests.helpers.arena import TOOL, of_proc, stat_of, wait_until
from tests.helpers.arena import program_call as call
from tests.helpers.fake_executor import FakeExecutor, area
from tests.helpers.linear import assert_linear


@pytest.fixture(scope="module")
def executor():
    def lookup(name: str) -> str:
        """Look a name up in the trainer."""
        time.sleep(3.0 * (name == "slow"))
        return {"pi": "3.14", "text": "Köln: it's\n{1}\ud800", "long": "x" * 10_000_000}[name]

    def json(text: str) -> str:
        """Returns text, under the name of a module."""
        return f"{text}: it's\n{{1}}\ud800"

    registry = default_registry()
    for function in (area, json, lookup):
        registry.add(function, where="trainer" if function is lookup else "sandbox")
    with PythonExecutor(ToolsConfig(workers=2, roots=1, wall_s=1.0, preload=("numpy",)), registry) as made:
        yield made


def test_results_are_polled_when_they_are_there_unless_their_call_was_cancelled_and_counted() -> None:
    with FakeExecutor(manual=True) as fake:
        for name in "abcde":
            fake.submit(call(name))
        assert fake.poll() == []
        for name in "dbe":
            fake.release(name)
        fake.cancel(["a", "e"])
        assert [name for name, _ in fake.poll()] == ["d", "b"], "in the order in which they ended"
        threading.Timer(0.1, fake.release, ("c",)).start()
        assert [name for name, _ in fake.poll(60.0)] == ["c"], "waits for the first result only"
        assert fake.poll(0.1) == []
    kinds = iter(["ok", "exception", "sandbox_error", "timeout", "ok"])
    with FakeExecutor(lambda program: ToolResult(next(kinds))) as fake:
        fake.run([call(str(i)) for i in range(5)])
        numbers = fake.stats()
    rates = [numbers[f"tools/{name}"] for name in ("calls", "error_rate", "infra_rate", "rate/timeout")]
    assert rates == [5, 2 / 4, 1 / 5, 1 / 5], "ratios leave infra out"
    assert [percentile([1, 2, 3, 4], share) for share in (50, 99)] == [2, 4] and percentile([], 50) == 0.0


def test_asyncio_interface(executor) -> None:
    async def main() -> list[str]:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(executor.arun(call("gone", "while True: pass")), 0.1)
        results = await asyncio.gather(*(executor.arun(call(f"a{i}", f"print({i})")) for i in range(5)))
        return [result.stdout for result in results]

    assert asyncio.run(main()) == [f"{i}\n" for i in range(5)]
    assert executor.stats()["tools/in_flight"] == 0


def test_result_fields_of_calls_that_fail_are_denied_long_late_or_seeded(executor) -> None:
    draws = "import random, numpy as np\nprint(random.random(), np.random.rand(), hash('text'), {'a', 'b', 'c'})"
    programs = [
        "import sys\nprint('out'); print('err', file=sys.stderr)\ndef g():\n    1/0\ng()",
        *("import socket\nsocket.socket()", "open('none')", "print('é' * 200_000)"),
        *("print('before')\nwhile True: pass", draws, draws, draws),
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
    assert re.fullmatch(r"é+\n\[... \d+ bytes omitted ...]\né+\n", long.stdout), "no part of a letter is left"
    assert (late.kind, late.limit_hit, late.stdout) == ("timeout", "wall", "before\n") and late.wall_ms > 900
    assert drawn[0].observation == drawn[1].observation != drawn[2].observation


def test_own_tools_in_sandbox_and_trainer_whose_results_are_cut(executor) -> None:
    given = [("area", {"width": 2.0, "height": 4.0}), ("json", {"text": "Köln"})]
    given += [("lookup", {"name": name}) for name in ("pi", "e", "slow", "text", "long")]
    calls = [CodeCall(f"o{i}", name, arguments, None) for i, (name, arguments) in enumerate(given)]
    inside, sandboxed, looked_up, failed, late, trusted, cut = executor.run(calls)
    assert (inside.echo, looked_up.echo) == ("8.0 cm", "3.14")
    assert sandboxed.observation == trusted.observation == "Köln: it's\n{1}\\ud800"
    assert (failed.kind, failed.error_type, late.kind) == ("exception", "KeyError", "timeout")
    assert cut.ok and cut.truncated and len(cut.echo) < 70_000 and "characters omitted" in cut.observation


def test_wrong_calls_become_results(executor) -> None:
    results = executor.run([CodeCall("u", "nope", {}, None), CodeCall("b", TOOL, {"code": 1}, None)])
    assert [result.kind for result in results] == ["unknown_tool", "bad_arguments"]
    result = tools.malformed_result("Expecting ','")
    assert result.counts_as_error and result.observation == "[malformed_call] MalformedCall: Expecting ','"


def test_the_id_of_a_call_that_could_not_be_started_stays_free_and_what_a_refused_run_began_is_cancelled() -> None:
    for share_results in (False, True):
        with FakeExecutor(Mock(side_effect=KeyboardInterrupt), config=ToolsConfig(share_results=share_results)) as fake:
            for begin in (fake.submit, fake.submit, lambda again, fake=fake: fake.run([again])):
                with pytest.raises(KeyboardInterrupt):
                    begin(call("again"))
                assert not fake.in_flight
    fake = FakeExecutor(manual=True)
    with pytest.raises(ExecutorFailed, match="start"):
        fake.submit(call("there"))
    with fake:
        fake.submit(call("there"))
        for names, words in (("a b a", "call id 'a' is there 2 times"), ("a there", "'there' is in flight already")):
            with pytest.raises(ValueError, match=words):
                fake.run([call(name) for name in names.split()])
            assert fake.in_flight == fake.held == ["there"]


def test_start_and_config_checks_and_programs_that_cannot_be_sent(executor) -> None:
    assert executor.start() is executor.capabilities and executor.capabilities.versions["numpy"]
    numbers = executor.stats()
    assert numbers["tools/workers_alive"] >= 1 and numbers["tools/level"] == int(executor.capabilities.level[1])
    with pytest.raises(ExecutorFailed, match="no_such_module"):
        make_executor(ToolsConfig(workers=1, preload=("no_such_module",))).start()
    with pytest.raises(ValueError, match="min_level"):
        ToolsConfig(level="L0")
    assert parse_cpus("0-2,5") == {0, 1, 2, 5} and ToolsConfig(workers=8).root_count == 2
    for name, value, kind in (("code", b"1", "text"), ("seed", 1.5, "a whole number")):
        with pytest.raises(TypeError, match=f"Program.{name} is {value} .*must be {kind}"):
            Program("again", **{"code": "1"} | {name: value})
    with pytest.raises(ValueError, match=r"has 18874428 bytes of code, input and names; must be"):
        Program("again", code="é" * (9 << 20))


FORK = "import os\npid=os.fork()\nif not pid:\n os._exit(3)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid,0)[1]))"
BOMB = "import os,time\nfor i in range(500):\n if not os.fork():\n  time.sleep(30)\n  os._exit(0)"
ORPHAN = "import os,time\nif not os.fork():\n os.setsid()\n time.sleep(77)\nprint('left')"


def test_programs_fork_only_where_allowed_and_leave_no_process(executor) -> None:
    denied = executor.run([call("fork denied", FORK)])[0]
    assert (denied.kind, denied.error_type, denied.policy_denied) == ("exception", "PermissionError", True)
    before = orphans()
    with make_executor(ToolsConfig(workers=1, roots=1, processes=2, preload=())) as forking:
        bomb, *others = forking.run([call(code, code) for code in (BOMB, FORK, ORPHAN, "print(5)")])
        assert [result.kind + result.stdout for result in others] == ["ok3\n", "okleft\n", "ok5\n"]
        if forking.capabilities.level == "L4":  # a user of its own, so the limit counts this call's tasks alone
            assert (bomb.kind, bomb.error_type) == ("exception", "BlockingIOError")
        assert wait_until(lambda: not orphans() - before)


def orphans() -> set[int]:
    """Processes of executors on this host whose parent is gone; a fork keeps the command line of its parent."""
    parentless = {int(path.name) for path in Path("/proc").glob("[0-9]*") if stat_of(int(path.name))[1] == "1"}
    return {pid for pid in parentless if "grpo_tools_box" in of_proc(pid, "cmdline")}


manual = partial(FakeExecutor, manual=True, config=ToolsConfig(share_results=True))


def test_calls_of_one_program_take_one_run():
    with manual(lambda program: ToolResult("exception", stdout=program.code)) as fake:
        for name, code in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "x")):
            fake.submit(call(name, code))
        assert fake.held == ["a", "c"] and fake.in_flight == ["a", "b", "c", "d"]
        fake.release("a")
        results = dict(fake.poll())
        assert list(results) == ["a", "b", "d"] and {result.stdout for result in results.values()} == {"x"}
        fake.submit(call("e", "x"))
        assert dict(fake.poll())["e"].observation == results["a"].observation and fake.held == ["c"]
        assert fake.stats()["tools/shared"] == 3 and fake.stats()["tools/calls"] == 4
        for name in "fg":
            fake.submit(call(name, "x", input=name))
            fake.submit(CodeCall(f"cell {name}", "jupyter_code", {"code": "x"}, "session"))
        assert len(fake.held) == 5, "other input and sessions run themselves"


@pytest.mark.parametrize("kind", ["timeout", "memory_limit", "output_limit", "crash", "sandbox_error"])
def test_a_result_that_the_program_alone_did_not_decide_is_not_shared(kind):
    """Those that waited run at once, beside each other; so do later calls of it."""
    with manual(lambda program: ToolResult(kind if program.id == "a" else "ok")) as fake:
        for name in "abc":
            fake.submit(call(name))
        fake.release("a")
        assert [(name, result.kind) for name, result in fake.poll()] == [("a", kind)] and fake.held == ["b", "c"]
        fake.submit(call("d"))
        assert fake.held == ["b", "c", "d"]


def test_the_next_call_runs_when_the_one_that_ran_is_cancelled_or_cannot_be_started():
    with manual() as fake:  # one that cannot be started ends with an error, and the one after it is begun all the same
        fake.refused = {"b", "d"}
        for name in "abcde":
            fake.submit(call(name))
        fake.cancel(["a", "e"])
        results = dict(fake.poll())
        assert fake.held == ["c"] and {result.kind for result in results.values()} == {"sandbox_error"}
        assert [results[name].error_message.partition(": ")[2] for name in "bd"] == ["b is refused", "d is refused"]


PLAIN, PEERS = ToolsConfig(), ToolsConfig(observation="rstar2")
FAILED = ToolResult("exception", error_type="E", error_message="m", error_line=1)
ROLLED_BACK = ToolResult("timeout", limit_hit="wall", session_id="s", signal=9, rolled_back=True)
FRAMES = '  File "<string>", line 5, in <module>\n  File "<sandbox>", line 8, in main\n  File "<program>", line 1, in f'
SHOWN = '  File "<program>", line 1, in f\nsys:1: UserWarning: x'
STDERR = (
    'Traceback:\n  File "/home/me/venv/lib/python3.11/site-packages/numpy/core.py", line 3, in f\n'
    "/usr/lib/python3.12/warnings.py:5: UserWarning: x\nno file /tmp/grpo-tools-ab12_xyz/w3-417-2f00deadbeef/a.txt"
)
STDERR_SHOWN = 'Traceback:\n  File "numpy/core.py", line 3, in f\nwarnings.py:5: UserWarning: x\nno file /scratch/a.txt'
NAME = "grpo-tools-ab12_xyz/w3-417-2f00deadbeef"


def test_wording_which_no_timing_enters_and_the_quoted_line_is_the_one_that_python_counts() -> None:
    for result, code, text in (
        (ToolResult("ok", stdout="3\n"), "", "3"),
        (ToolResult("ok"), "", "[no output]"),
        (ToolResult("ok", stdout="a\n", stderr="b\n"), "", "a\n[stderr]\nb"),
        (replace(FAILED, error_line=2), "x = 1\nf(x)\n", "[exception] E: m (line 2: f(x))"),
        (ToolResult("timeout", limit_hit="wall", stdout="so far"), "", "so far\n[timeout] stopped after 5 s"),
        (ToolResult("timeout", limit_hit="cpu"), "", "[timeout] stopped after 5 s of CPU time"),
        (ToolResult("crash", signal=11), "", "[crash] the process was ended by signal 11"),
        (ROLLED_BACK, "", "[timeout] stopped after 5 s\n[session] it was rolled back to the state before this cell"),
        (FAILED, "x" * SOURCE_CHARS, f"[exception] E: m (line 1: {'x' * SOURCE_CHARS})"),
        (FAILED, "x" * SOURCE_CHARS + "y", f"[exception] E: m (line 1: {'x' * SOURCE_CHARS}...)"),
        (ToolResult("ok", stdout="<o at 0x7f12ab34cd56> 0x7f12ab34cd56"), "", "<o at 0x0> 0x7f12ab34cd56"),
        (ToolResult("ok", stderr=f"Stack:\n{FRAMES}\n<sandbox>:9: UserWarning: x"), "", f"[stderr]\nStack:\n{SHOWN}"),
        (ToolResult("ok", stderr=STDERR), "", "[stderr]\n" + STDERR_SHOWN),
        (ToolResult("ok", stdout=f"{NAME} /x"), "", f"{NAME} /x"),  # hidden from the first slash on
        (ToolResult("ok", stdout=f"=/a/{NAME}/b/grpo-tools-ab12_xyz/w3-417-3/c:/d"), "", "=/scratch/scratch/c:/d"),
    ):
        assert observe(result, code, PLAIN) == text
    slow = ToolResult("timeout", limit_hit="wall", wall_ms=5123.4, cpu_ms=777, queue_ms=9, worker_id=3, max_rss_kb=999)
    fast = ToolResult("timeout", limit_hit="wall", wall_ms=5001.0)
    assert observe(slow, "", PLAIN) == observe(fast, "", PLAIN)
    # The wording of the official release.
    assert observe(ToolResult("ok", stdout="3\n"), "", PEERS) == "Tool call success\nstdout: 3\n"
    assert observe(FAILED, "x", PEERS) == "Tool call failure\nreason: \nstderr: E at line 1: m\n  x"
    assert observe(fast, "", PEERS) == "Tool call failure\nreason: worker_timeout\nstderr: Suicide from timeout."
    for code in ("x = 'a\u2028b\x0c\x85'\ny = 1\n1/0", "x = 1\r\ny = 1\r\n1/0", "x = 1\ry = 1\r1/0"):
        assert "(line 3: 1/0)" in observe(replace(FAILED, error_line=3), code, PLAIN), code


UNITS = (
    "/", "/a", "a", "0", " ", "\t", "_", "__a", ";", ":", ": ", "\\\n", "\n", "\n/", '"', "grpo-tools-",
    "/grpo-tools-ab12_xyz/w1", "/grpo-tools-ab12_xyz/w1-2-3", "/lib/python3.1", 'File "/', 'File "/lib/python3.',
    "\x1b[", "\x1b[0", "\x1b[ ", "\x1b]", "at 0x", "at 0xabcdef", "from ", "from a", "from a ", "import ", "import a,",
    "exec", "\r\n", "\x00", "\ud800",
)  # fmt: skip
"""Texts that programs may repeat to make a pattern try many matches."""


def test_patterns_and_what_is_observed_take_linear_time() -> None:
    """Every pattern of the modules of `tools` and `sandbox`."""
    names = [f"{folder.__name__}.{info.name}" for folder in (tools, sandbox) for info in iter_modules(folder.__path__)]
    members = [value for name in names for value in vars(importlib.import_module(name)).values()]
    patterns = [value for value in members if isinstance(value, re.Pattern)]
    assert {tools.observation.LIBRARY_PATHS, _calls.INEXACT} <= set(patterns)
    actions = [lambda text: observe(ToolResult("exception", stdout=text, error_message=text), text, PLAIN)]
    for found, of_text in ((pattern.findall, isinstance(pattern.pattern, str)) for pattern in patterns):
        actions.append(found if of_text else lambda text, f=found: f(text.encode("utf-8", "surrogatepass")))
    for action, unit, lead in itertools.product(actions, UNITS, ("", "/", "x")):
        assert_linear(action, unit, 2_000, lead=lead)


@given(st.text(st.characters(codec=None), max_size=200))
def test_sanitized_text_can_be_encoded_and_shows_no_control_characters(text: str) -> None:
    clean = tools.sanitize(text)
    clean.encode("utf-8")
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in clean)
    assert tools.sanitize("\x1b[31mred\x1b[0m\x07 \x00done\r\n") == "red done\n"
