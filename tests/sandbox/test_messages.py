"""Messages between the processes of the executor, and which thread reads them; what is observed, and the kind of result
that it is; programs, which end as in a plain interpreter. What the policy causes is no infrastructure failure."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_roc_jax.sandbox import Supervision, _start, _wire, isolation
from grpo_roc_jax.sandbox import _messages as m
from grpo_roc_jax.sandbox._calls import ProgramOutcome, decide, parse_record
from grpo_roc_jax.sandbox.result import ERROR_KINDS, INFRA_KINDS
from grpo_roc_jax.tools import ToolsConfig, make_executor
from grpo_roc_jax.tools.executor import PythonExecutor, settings_of
from grpo_roc_jax.types import ToolResult
from tests.helpers.arena import program_call as call
from tests.helpers.arena import wait_until
from tests.helpers.labelled import LABELLED

SETTINGS = settings_of(ToolsConfig())
NONCE = b"0123456789abcdef0123456789abcdef"


def test_messages_arrive_whole() -> None:
    for message, kinds in (
        (m.CallResult("a", 4, {"kind": "ok"}), m.TO_TRAINER),
        (m.RunCode(7, 1), m.TO_WORKER),
        (settings_of(ToolsConfig(cpus="0-1", preload=("numpy",))), m.TO_EXECUTOR),
        (isolation.make_plan(SETTINGS, "L1", [], "/base"), m.TO_ROOT),
        (m.Capabilities("L2", ("x",), workers=3), m.TO_TRAINER),
    ):
        sender, receiver = _wire.pair()
        with sender, receiver:
            m.send(sender, message)
            assert m.receive(receiver, kinds) == (message, [])
    changed = m.RunCode(7, 1, cell=True)
    assert m.encode(changed) == {"op": "RunCode", "n": 7, "seed": 1, "cell": True}, "no value that is so by default"


def test_headers_that_are_no_message_of_a_worker() -> None:
    for header in ({}, {"op": "CallDone"}, {"op": "x"}, {"op": ["CallDone"]}, {"op": "WorkerBorn", "pid": 1, "x": 2}):
        with pytest.raises(_wire.BadFrame):
            m.decode(header, m.FROM_WORKER)


def test_processes_of_the_executor_import_the_standard_library_alone() -> None:
    """An interpreter without site packages finds nothing else."""
    box = f"import sys, types\nbox = types.ModuleType('box')\nbox.__path__ = [{os.path.dirname(_start.__file__)!r}]\n"
    code = box + "sys.modules['box'] = box\nimport box._supervisor, box._warm_interpreter"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def done(status: int = 0, why: str = "", fault: str = "", cpu: float = 0.01) -> m.CallDone:
    return m.CallDone(1, status, why, fault, rss=1, wall=0.1, cpu=cpu)


def report(kind: str = "ok", **more: object) -> dict:
    return {"kind": kind, "error_type": "", "error_message": "", "traceback": "", "echo": "", **more}


def test_kinds() -> None:
    for kind, ended, record, more in (
        ("exception", done(98 << 8), None, {"error_type": "EarlyExit", "exit_code": 98}),
        ("exception", done(1 << 8), report(), {"suspicious": True}),
        ("exception", done(signal.SIGKILL, "scratch"), None, {"limit_hit": "scratch"}),
        ("exception", done(signal.SIGKILL, "protocol"), None, {"error_type": "ProtocolViolation"}),
        ("exception", done(signal.SIGKILL, "threads"), None, {"limit_hit": "threads"}),
        ("memory_limit", done(), report("memory_limit"), {"limit_hit": "memory"}),
        ("output_limit", done(9, "output"), None, {}),
        ("crash", done(signal.SIGABRT), report(), {"suspicious": True, "signal": 6}),
        ("timeout", done(9, cpu=6.0), None, {"limit_hit": "cpu"}),
        ("timeout", done(signal.SIGXCPU, cpu=5.0), None, {"limit_hit": "cpu"}),
        ("timeout", done(9, "wall"), report(), {"limit_hit": "wall"}),
        ("sandbox_error", done(fault="seccomp: EINVAL"), None, {}),
    ):
        outcome = decide(ended, record and ProgramOutcome(**record), (0, 0, 0), SETTINGS.limits)
        assert outcome.kind == kind and (kind in INFRA_KINDS) == bool(ended.fault)
        assert {name: getattr(outcome, name) for name in more} == more
    for sizes in ((9, 0, 0), (0, 9, 0), (0, 0, 9)):
        too_long = decide(done(), ProgramOutcome(**report()), tuple(size << 20 for size in sizes), SETTINGS.limits)
        assert too_long.kind == "output_limit"


def test_records_that_are_not_believed() -> None:
    def record_bytes(text: bytes, nonce: bytes = NONCE) -> bytes:
        return NONCE + nonce + b"%08d" % len(text) + text

    reports = [report("sandbox_error"), report("ok", echo=5), [], {"kind": "ok"}]
    texts = [*(json.dumps(wrong).encode() for wrong in reports), b"not json", b"[" * 100_000]
    other = record_bytes(json.dumps(report()).encode(), nonce=b"f" * 32)
    for data in (*map(record_bytes, texts), other, b"", NONCE, NONCE + NONCE + b"99999999" + b"{"):
        assert parse_record(data, NONCE, 64) is None, data[:200]


AS_PLAIN = [
    f"print({'+'.join(['1'] * 1500)})",
    "class A:\n    def __del__(self): print(LAST)\na, LAST = A(), 3\nraise SystemExit(1)",
    "import enum, sys\nclass Status(enum.IntEnum): OK, BAD = 0, 2\nsys.exit(Status.OK)",
    "import sys\nsys.exit(2**64)",
    "import inspect\nx = '\x0c\u2028'\n\x0c\ndef f():\n    x\nprint(inspect.getsource(f))",
    "import sys\nsys.excepthook = lambda *raised: print(raised[1], raised[2].tb_lineno)\nraise ValueError('x')",
]


def run(executor, *codes: str) -> list[ToolResult]:
    return executor.run([call(str(i), code) for i, code in enumerate(codes)])


def test_output_and_status_are_those_of_a_plain_interpreter(executor, tmp_path) -> None:
    for code, result in zip(AS_PLAIN, run(executor, *AS_PLAIN), strict=True):
        (tmp_path / "it.py").write_text(code, encoding="utf-8")
        plain = subprocess.run([sys.executable, tmp_path / "it.py"], capture_output=True, encoding="utf-8")
        assert (result.stdout, result.kind == "ok") == (plain.stdout, plain.returncode == 0), code
        assert result.kind != "ok" or not result.stderr


def test_every_kind_is_right() -> None:
    with make_executor(ToolsConfig(workers=4, roots=1, wall_s=2.0, cpu_s=2.0)) as executor:
        results = run(executor, *(code for _, code in LABELLED))
    wrong = [(code, kind, r.kind) for (kind, code), r in zip(LABELLED, results, strict=True) if r.kind != kind]
    assert wrong == [] and not any(result.infra for result in results)
    assert [result.counts_as_error for result in results] == [kind in ERROR_KINDS for kind, _ in LABELLED]


@pytest.fixture(scope="module")
def executor():
    with make_executor(ToolsConfig(workers=4, roots=1, preload=())) as made:
        yield made


def test_a_thread_that_reads_on_keeps_nobody_waiting(executor) -> None:
    """The first thread reads for the others; when it leaves, the next one reads for itself."""
    with ThreadPoolExecutor() as threads:
        first = threads.submit(executor.poll, 600.0, ids=("enough",))
        reads = wait_until(lambda: executor.reading_thread)
        assert executor.run([call("follower")])[0].ok
        second = threads.submit(executor.run, [call("next", "import time; time.sleep(0.5)")])
        assert wait_until(lambda: executor.waiting_threads)
        assert not first.done() and executor.reading_thread == reads
        executor.submit(call("enough"))
        assert first.result(60) and second.result(60)


def test_closing_frees_threads_that_wait() -> None:
    # The thread that closes waits for the one that reads: without a time limit, so that it must be notified.
    supervision = Supervision(leave_s=threading.TIMEOUT_MAX)
    executor = PythonExecutor(ToolsConfig(workers=1, roots=1, preload=(), bare_root=False), supervision=supervision)
    executor.start()
    with ThreadPoolExecutor(3) as threads:
        run_all = threads.submit(executor.run, [call("w", "while True: pass")])
        polled = threads.submit(executor.poll, 60.0)
        assert wait_until(lambda: executor.reading_thread and executor.waiting_threads == 1)
        threads.submit(executor.close).result(60)
        assert run_all.result(60)[0].kind == "sandbox_error" and polled.result(60) == []


def test_frames_in_pieces_larger_than_the_buffer_that_are_none_or_too_large() -> None:
    here, there = socket.socketpair()
    frames = [({"n": n}, bytes([n]) * size) for n, size in enumerate((0, 10, _wire.ROOM * 3, 5, _wire.ROOM - 20, 1))]
    data = b"".join(_wire.pack_frame(header, payload) for header, payload in frames)
    reader, got = _wire.FrameReader(), []
    with here, there, ThreadPoolExecutor(1) as threads:
        for start in range(0, len(data), 70_001):
            threads.submit(there.sendall, data[start : start + 70_001])
        while len(got) < len(frames):
            got += reader.read(here)
    assert got == frames
    for length, size, text in ((1 << 30, 2, b"{}"), (5, 2, b"{}"), (6, 2, b"[]"), (6, 2, b"{x"), (6, 2, b"\xff}")):
        here, there = socket.socketpair()
        with here, there:
            there.sendall(_wire.PREFIX.pack(length, size) + text)
            with pytest.raises(_wire.BadFrame):
                _wire.FrameReader().read(here)
    room = (16 << 20) - 4 - len("{}")
    assert len(_wire.pack_frame({}, bytes(room))) == (16 << 20) + 4
    with pytest.raises(_wire.BadFrame, match="a frame of 16777217 bytes; must be at most 16777216"):
        _wire.pack_frame({}, bytes(room + 1))
