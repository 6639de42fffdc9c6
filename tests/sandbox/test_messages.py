"""Messages between the processes of the executor, and which thread reads them; what is observed, and the kind of result
that it is; programs, which end as in a plain interpreter. What the policy causes is no infrastructure failure."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from types import SimpleNamespace

import pytest

from grpo_roc_jax.process.points import listening
from grpo_roc_jax.sandbox import Executor, Supervision, _start, _wire, isolation
from grpo_roc_jax.sandbox import _messages as m
from grpo_roc_jax.sandbox._calls import NOTE_CHARS, ProgramOutcome, decide, parse_record
from grpo_roc_jax.sandbox._loop import TOGETHER_S
from grpo_roc_jax.sandbox._supervisor import Supervisor
from grpo_roc_jax.sandbox.result import ERROR_KINDS, INFRA_KINDS
from grpo_roc_jax.tools import CodeCall, ToolsConfig, default_registry, make_executor
from grpo_roc_jax.tools.executor import PythonExecutor, settings_of
from grpo_roc_jax.types import ToolResult
from tests.helpers.arena import drain, wait_until
from tests.helpers.arena import program_call as call
from tests.helpers.labelled import LABELLED

SETTINGS = settings_of(ToolsConfig(cpus="0-1", preload=("numpy",)))
PLAN = isolation.make_plan(SETTINGS, "L1", [], "/base")
LIMITS = settings_of(ToolsConfig()).limits
NONCE = b"0123456789abcdef0123456789abcdef"
MIB = 1 << 20


def test_messages_arrive_whole() -> None:
    for message, kinds in (
        (m.CancelCalls(["a"]), m.TO_EXECUTOR),
        (m.CallResult("a", 4, {"kind": "ok"}), m.TO_TRAINER),
        (m.Failed("why"), m.FROM_ROOT),
        (m.RunCode(7, 1), m.TO_WORKER),
        (m.CallDone(7, 9, "wall", "", 100, 1.5, 0.5), m.FROM_WORKER),
        (SETTINGS, m.TO_EXECUTOR),
        (PLAN, m.TO_ROOT),
        (m.Capabilities("L2", ("x",), workers=3), m.TO_TRAINER),
    ):
        sender, receiver = _wire.pair()
        with sender, receiver:
            m.send(sender, message)
            assert m.receive(receiver, kinds) == (message, [])
    changed = m.RunCode(7, 1, cell=True)
    assert m.encode(changed) == {"op": "RunCode", "n": 7, "seed": 1, "cell": True}, "no value that is so by default"
    assert m.decode(m.encode(changed), m.TO_WORKER) == changed


OUT = {
    "number above 0": [{"wall_s": "2"}, {"wall_s": 0}, {"cpu_s": float("nan")}, {"cpu_s": float("inf")}],
    "whole number of at least 1": [{"memory_mb": -5}, {"memory_mb": 256.0}, {"threads": True}],
    "whole number of at least 16": [{"descriptors": 8}],
    "whole number of at least 0 and at most 2048": [{"output_kb": 4096}],
    "tuple of texts": [{"preload": "json"}],
    "tuple of whole numbers": [{"cpu_list": ("1",)}],
    "one of best, L0": [{"level": "L9"}],
    "one of L0": [{"min_level": "best"}],
    "of type ProgramLimits": [{"limits": {"wall_s": 2.0}}],
    "of type bool": [{"bare_root": 1}],
}


def test_settings_that_no_process_could_use_are_refused_where_they_are_made():
    for words, refused in OUT.items():
        for [(name, value)] in map(dict.items, refused):
            make = m.ProgramLimits if hasattr(LIMITS, name) else m.ExecutorSettings
            said = re.escape(f"{make.__name__}.{name} = {value!r}")
            with pytest.raises(ValueError, match=f"{said}.*; must be .*{words}"):
                make(**{name: value})
    with pytest.raises(TypeError, match=r"Executor got ProgramLimits; must be ExecutorSettings, such as"):
        Executor(m.ProgramLimits(wall_s=1.0))
    assert Executor(m.ExecutorSettings(preload=["json"])).settings.preload == ["json"]


def test_headers_that_are_no_message_of_a_worker() -> None:
    for header in ({}, {"op": "CallDone"}, {"op": "x"}, {"op": ["CallDone"]}, {"op": "WorkerBorn", "pid": 1, "x": 2}):
        with pytest.raises(_wire.BadFrame):
            m.decode(header, m.FROM_WORKER)


def test_outcomes_leave_out_what_the_trainer_fills_in() -> None:
    defaults = {field.name: field.default for field in fields(ToolResult)}
    sent = {field.name: field.default for field in fields(ProgramOutcome) if field.name not in ("kind", "suspicious")}
    assert sent.items() <= defaults.items()
    outcome = ProgramOutcome("ok", stdout="out", stdout_bytes=3, exit_code=0, wall_ms=1.23456, suspicious=True)
    assert outcome.changed_fields() == {"kind": "ok", "stdout_bytes": 3, "exit_code": 0, "wall_ms": 1.235}


def test_processes_of_the_executor_import_the_standard_library_alone() -> None:
    """An interpreter without site packages finds nothing else."""
    folder = os.path.dirname(_start.__file__)
    for module in ("_supervisor", "_warm_interpreter"):
        box = f"import importlib, sys, types\nbox = types.ModuleType('box')\nbox.__path__ = [{folder!r}]\n"
        code = f"{box}sys.modules['box'] = box\nimportlib.import_module('box.{module}')"
        subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def done(status: int = 0, why: str = "", fault: str = "", cpu: float = 0.01) -> m.CallDone:
    return m.CallDone(1, status, why, fault, rss=1, wall=0.1, cpu=cpu)


def report(kind: str = "ok", **more: object) -> dict:
    return {"kind": kind, "error_type": "", "error_message": "", "traceback": "", "echo": "", **more}


KINDS = [  # kind, then what was done, the record, and further fields of each
    ("ok", (done(), report(), {"exit_code": 0})),
    ("exception", (done(), report("exception", error_type="ValueError"), {"error_type": "ValueError"})),
    (
        "exception",
        (done(), None, {"error_type": "EarlyExit", "exit_code": 0}),
        (done(98 << 8), None, {"exit_code": 98}),
    ),
    ("exception", (done(1 << 8), report(), {"suspicious": True})),
    ("exception", (done(signal.SIGKILL, "scratch"), None, {"limit_hit": "scratch"})),
    ("exception", (done(signal.SIGKILL, "protocol"), None, {"error_type": "ProtocolViolation"})),
    ("exception", (done(signal.SIGKILL, "threads"), None, {"limit_hit": "threads"})),
    ("syntax_error", (done(), report("syntax_error"), {})),
    ("memory_limit", (done(), report("memory_limit"), {"limit_hit": "memory"})),
    ("output_limit", (done(), report("output_limit"), {"limit_hit": "output"}), (done(9, "output"), None, {})),
    ("crash", (done(signal.SIGSEGV), None, {"signal": 11}), (done(signal.SIGABRT), report(), {"suspicious": True})),
    ("timeout", (done(9, cpu=6.0), None, {"limit_hit": "cpu"}), (done(9, "cpu"), None, {"limit_hit": "cpu"})),
    ("timeout", (done(signal.SIGXCPU, cpu=5.0), None, {"limit_hit": "cpu"})),
    ("timeout", (done(9, "wall"), None, {"limit_hit": "wall"}), (done(9, "wall"), report(), {})),
    ("sandbox_error", (done(fault="seccomp: EINVAL"), None, {})),
]


def test_kinds() -> None:
    for kind, *observed in KINDS:
        for ended, record, more in observed:
            outcome = decide(ended, None if record is None else ProgramOutcome(**record), (0, 0, 0), LIMITS)
            assert outcome.kind == kind and (kind in INFRA_KINDS) == bool(ended.fault)
            assert {name: getattr(outcome, name) for name in more} == more
    for sizes, record in (((9, 0, 0), report()), ((0, 9, 0), report("exception")), ((0, 0, 9), None)):
        outcome = ProgramOutcome(**record) if record else None
        assert decide(done(), outcome, tuple(size * MIB for size in sizes), LIMITS).kind == "output_limit"


def record_bytes(text: bytes, nonce: bytes = NONCE) -> bytes:
    return NONCE + nonce + b"%08d" % len(text) + text


def test_records_that_are_not_believed() -> None:
    reports = [report("sandbox_error"), report("ok", echo=5), [], {"kind": "ok"}]
    texts = [*(json.dumps(wrong).encode() for wrong in reports), b"not json", b"[" * 100_000]
    other = record_bytes(json.dumps(report()).encode(), nonce=b"f" * 32)
    for data in (*map(record_bytes, texts), other, b"", NONCE, NONCE + NONCE + b"99999999" + b"{"):
        assert parse_record(data, NONCE, 64) is None, data[:200]


def test_the_texts_of_a_record_are_cut_and_its_fields_are_forced_into_type() -> None:
    texts = dict.fromkeys(("error_type", "error_message", "traceback", "echo"), "x" * 100_000)
    record = parse_record(record_bytes(json.dumps(report("exception") | texts).encode()), NONCE, keep=1000)
    lengths = [len(getattr(record, name)) for name in texts]
    assert lengths == [200, 500, 8000, 1000 + NOTE_CHARS]
    assert record.truncated
    record = parse_record(record_bytes(json.dumps(report("exception", error_line="x", denied=1)).encode()), NONCE, 64)
    outcome = decide(done(), record, (0, 0, 0), LIMITS)
    assert outcome.policy_denied is True and outcome.error_line is None


SUM = "+".join(["1"] * 1500)
ELIF = "x = 1199\nif x == 0: print(0)\n" + "".join(f"elif x == {i}: print({i})\n" for i in range(1, 1200))
FREED = """
class A:
    def __init__(self, name): self.name = name
    def __del__(self): print("freed", self.name, LAST)
def left():
    try: yield 1
    finally: print("left", LAST)
a, b = A("a"), A("b"); print(next(steps := left())); LAST = 3
"""
STATUS = "import enum, sys\nclass Status(enum.IntEnum): OK, BAD = 0, 2\n"
KEPT = """
import logging, logging.handlers, sys
logging.getLogger().addHandler(logging.handlers.MemoryHandler(9, target=logging.StreamHandler(sys.stdout)))
logging.warning("kept")
"""
HOOK = "import sys\nsys.excepthook = lambda kind, error, trace: print(kind, error, trace.tb_lineno)\n"
INTERRUPT = "try:\n    {}\n    for _ in range(10**6): pass\nexcept KeyboardInterrupt: print('interrupted')"

AS_PLAIN = {
    "deep expression": f"print({SUM})",
    "deep statement": ELIF,
    "chain of calls": "print('a'" + ".replace('a', 'b')" * 600 + ")",
    "freed at the end": FREED + "b.itself = b",
    "freed after an exception": FREED + "1/0",
    "freed after an exit": FREED + "import sys\nsys.exit(1)",
    "freed though a handler keeps the names": FREED + "import signal; signal.signal(14, lambda *_: 0)",
    "exit by an enum": STATUS + "sys.exit(Status.OK)",
    "exit by an enum of failure": STATUS + "sys.exit(Status.BAD)",
    "exit by a number that is too large": "import sys\nsys.exit(2**64)",
    "exit by a float": "import sys\nsys.exit(0.0)",
    "flushed logs": KEPT,
    "finalizer": "import weakref\nclass A: pass\na = A(); weakref.finalize(a, print, 'final')\n",
    "interrupt_main": INTERRUPT.format("import _thread; _thread.interrupt_main()"),
    "raise_signal": INTERRUPT.format("import signal; signal.raise_signal(signal.SIGINT)"),
    "source of a function": "import inspect\nx = '\x0c\u2028'\n\x0c\ndef f():\n    x\nprint(inspect.getsource(f))",
    "source of a class": "import inspect\nclass A:\n    x = 1\nprint(inspect.getsource(A))",
    "hook": HOOK + "raise ValueError('x')",
    "hook that fails": HOOK.replace("print", "missing") + "raise ValueError('x')",
}
FIELDS = {
    f"y = 1; {SUM}  # end": {"echo": "1500"},
    f"(\n{SUM.replace('+', '+ # é' + chr(10))}\n)": {"echo": "1500"},
    f"{ELIF}x": {"echo": "1199", "stdout": "1199\n"},
    f"x = 'é'; ({SUM}\n+ zz)": {"error_line": 2, "error_message": "name 'zz' is not defined"},
    "x = 'a\u2028b'\n\x0c\n1/0": {"traceback": '  File "<program>", line 3, in <module>\n    1/0'},
    "raise ExceptionGroup('g', [ValueError('a'), ExceptionGroup('h', [KeyError(), OSError('b'), OSError('c')])])": {
        "error_message": "g (2 sub-exceptions): ValueError: a; KeyError; OSError: b"
    },
    "error = ValueError('a'); error.add_note('b'); error.add_note('c')\nraise error": {"error_message": "a\nb\nc"},
    "import traceback\ntraceback.print_stack()": {
        "observation": '[stderr]\n  File "<program>", line 2, in <module>\n    traceback.print_stack()'
    },
    "import warnings\nwarnings.warn('w', stacklevel=2)": {"observation": "[stderr]\nsys:1: UserWarning: w"},
    "'\U0001f600' * 100_000": {"echo": repr("\U0001f600" * 100_000), "truncated": False},
    "'a' * 1_500_000": {"echo": repr("a" * 1_500_000), "truncated": False},
    "import os\nfor fd in 1, 2: os.write(fd, bytes([255]) * (3 << 20))\n'\U0001f600' * 2_000_000": {
        "kind": "ok", "truncated": True, "stdout_bytes": 3 << 20,
    },
    f"class {'A' * 300_000}(Exception): pass\nraise {'A' * 300_000}": {"kind": "exception", "error_type": "A" * 200},
}  # fmt: skip
NUMPY = "import numpy\nnumpy.random.random()"


@pytest.fixture(scope="module")
def programs():
    with make_executor(ToolsConfig(workers=4, roots=1, preload=(), wall_s=30.0, cpu_s=10.0, output_kb=2048)) as made:
        yield made


def run(executor, *codes: str, seed: int = 0) -> list[ToolResult]:
    return executor.run(
        [CodeCall(str(i), "python_code_with_standard_io", {"code": code}, None, seed) for i, code in enumerate(codes)]
    )


def test_output_and_status_are_those_of_a_plain_interpreter(programs, tmp_path) -> None:
    def plain(name: str) -> tuple[str, bool]:
        file = tmp_path / f"{name}.py"
        file.write_text(AS_PLAIN[name], encoding="utf-8")
        # A test run in the background may ignore SIGINT, and would pass that on.
        default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        done = subprocess.run([sys.executable, file], capture_output=True, encoding="utf-8", preexec_fn=default)
        return done.stdout, done.returncode == 0

    with ThreadPoolExecutor(2) as threads:
        expected = dict(zip(AS_PLAIN, threads.map(plain, AS_PLAIN), strict=True))
    results = run(programs, *AS_PLAIN.values())
    assert {name: (r.stdout, r.kind == "ok") for name, r in zip(AS_PLAIN, results, strict=True)} == expected
    assert [result.stderr for result in results if result.kind == "ok" and result.stderr] == []


def test_what_a_plain_interpreter_does_not_show_and_how_numpy_is_seeded(programs) -> None:
    results = run(programs, *FIELDS)
    seen = [{name: getattr(r, name) for name in some} for some, r in zip(FIELDS.values(), results, strict=True)]
    assert seen == list(FIELDS.values())
    first, again = run(programs, NUMPY, NUMPY, seed=1)
    [other] = run(programs, NUMPY, seed=2)
    assert first.echo == again.echo != other.echo


def test_every_kind_is_right() -> None:
    with make_executor(ToolsConfig(workers=4, roots=1, wall_s=2.0, cpu_s=2.0)) as executor:
        results = run(executor, *(code for _, code in LABELLED))
    wrong = [(code, kind, r.kind) for (kind, code), r in zip(LABELLED, results, strict=True) if r.kind != kind]
    assert wrong == [] and not any(result.infra for result in results)
    assert [result.counts_as_error for result in results] == [kind in ERROR_KINDS for kind, _ in LABELLED]


IN_FLIGHT = 8


@pytest.fixture(scope="module")
def executor():
    registry = default_registry()

    def nap(seconds: float) -> None:
        """Sleeps in the trainer."""
        time.sleep(seconds)

    registry.add(nap, where="trainer")
    config = ToolsConfig(workers=4, roots=1, preload=())
    with PythonExecutor(config, registry, supervision=Supervision(in_flight=IN_FLIGHT)) as made:
        yield made


def test_threads_that_wait_at_once_each_get_their_results(executor) -> None:
    seen: dict[int, list[str]] = {}

    def work(number: int) -> None:
        calls = [call(f"t{number}/{i}", f"print({number}, {i})") for i in range(15)]
        seen[number] = [result.stdout for code_call in calls for result in executor.run([code_call])]

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert seen == {number: [f"{number} {i}\n" for i in range(15)] for number in range(6)}


def test_a_thread_that_reads_on_keeps_nobody_waiting(executor) -> None:
    """The first thread reads for the others; when it leaves, the next one reads for itself."""
    first = threading.Thread(target=lambda: executor.poll(600.0, ids=("enough",)))
    first.start()
    assert wait_until(lambda: executor.reading_thread == first.ident)
    assert executor.run([call("follower")])[0].ok
    second = threading.Thread(target=lambda: executor.run([call("next", "import time; time.sleep(0.5)")]))
    second.start()
    assert wait_until(lambda: executor.waiting_threads)
    assert first.is_alive() and executor.reading_thread == first.ident
    executor.submit(call("enough"))
    assert wait_until(lambda: not first.is_alive() and not second.is_alive())


def test_what_ends_in_the_trainer_wakes_the_thread_that_reads(executor) -> None:
    executor.submit(call("slow", "while True: pass"))
    executor.submit(CodeCall("nap", "nap", {"seconds": 0.2}, None))
    assert [name for name, _ in executor.poll(60.0)] == ["nap"]
    executor.cancel(["slow"])


def test_held_calls_go_on_while_nobody_polls(executor) -> None:
    """More calls than may be in flight, each with more text than the socket accepts at once."""
    for number in range(60):
        executor.submit(call(f"h{number}", f"x = {number} # " + "y" * 30_000))
    assert wait_until(lambda: len(executor.in_flight) <= IN_FLIGHT)
    assert all(result.ok for result in drain(executor, 60).values())


def test_submit_does_not_wait_for_the_replacement(executor) -> None:
    """The replacement starts only after all calls have been submitted and polled for."""
    restarting, submitted = threading.Event(), threading.Event()

    def start_later(point: str) -> None:
        if point == "tool.restart":
            restarting.set()
            assert submitted.wait(60)

    with listening(start_later):
        os.kill(executor.pid, signal.SIGKILL)
        for number in range(20):
            executor.submit(call(f"r{number}"))
            assert executor.poll() == []
            assert number or restarting.wait(60)
        submitted.set()
        assert all(result.ok for result in drain(executor, 20).values())


@pytest.mark.parametrize("waiting", [("run",), ("poll",), ("run", "poll")])
def test_closing_frees_threads_that_wait(waiting: tuple[str, ...]) -> None:
    # The thread that closes waits for the one that reads: without a time limit, so that it must be notified.
    supervision, seen = Supervision(leave_s=threading.TIMEOUT_MAX), []
    executor = PythonExecutor(ToolsConfig(workers=1, roots=1, preload=(), bare_root=False), supervision=supervision)
    executor.start()
    actions = {
        "run": lambda: seen.append(executor.run([call("w", "while True: pass")])[0].kind),
        "poll": lambda: seen.append(executor.poll(60.0)),
    }
    threads = [threading.Thread(target=actions[name]) for name in waiting]
    for thread in threads:
        thread.start()
    assert wait_until(lambda: executor.reading_thread and executor.waiting_threads == len(waiting) - 1)
    threads.append(threading.Thread(target=executor.close))
    threads[-1].start()
    assert wait_until(lambda: not any(thread.is_alive() for thread in threads))
    assert sorted(map(str, seen)) == [{"run": "sandbox_error", "poll": "[]"}[name] for name in sorted(waiting)]


def test_frames_in_pieces_larger_than_the_buffer_that_are_none_or_too_large() -> None:
    here, there = socket.socketpair()
    frames = [({"n": n}, bytes([n]) * size) for n, size in enumerate((0, 10, _wire.ROOM * 3, 5, _wire.ROOM - 20, 1))]
    data = b"".join(_wire.pack_frame(header, payload) for header, payload in frames)

    def send() -> None:
        with there:
            for start in range(0, len(data), 70_001):
                there.sendall(data[start : start + 70_001])
            there.sendall(b"\1")

    threading.Thread(target=send).start()
    reader, got = _wire.FrameReader(), []
    with here, pytest.raises(EOFError):
        while True:
            got += reader.read(here)
    assert got == frames
    for size, more in ((_wire.ROOM, True), (_wire.ROOM - 1, False)):  # a read that fills the buffer may not be the last
        reader, frame = _wire.FrameReader(), _wire.pack_frame({}, bytes(size - len(_wire.pack_frame({}))))
        waiting = SimpleNamespace(recv_into=lambda view, n=size, f=frame: view.__setitem__(slice(n), f) or n)
        ((header, payload),) = reader.read(waiting)
        assert (header, len(payload), reader.more) == ({}, len(frame) - 10, more)
    lengths = ((_wire.MAX_FRAME + 1, 2), (5, 2), (6, 2), (6, 2), (8, 4), (6, 2))
    for prefix, text in zip(lengths, (b"{}", b"{}", b"[]", b"{x", b"{}{}", b"\xff\xff"), strict=True):
        here, there = socket.socketpair()
        with here, there:
            there.sendall(_wire.PREFIX.pack(*prefix) + text)
            with pytest.raises(_wire.BadFrame):
                _wire.FrameReader().read(here)
    room = (16 << 20) - 4 - len("{}")
    assert len(_wire.pack_frame({}, bytes(room))) == (16 << 20) + 4
    with pytest.raises(_wire.BadFrame, match="a frame of 16777217 bytes; must be at most 16777216"):
        _wire.pack_frame({}, bytes(room + 1))


def test_the_frame_of_a_call_is_what_the_encoder_would_write() -> None:
    for name, session in (("a/1", None), ('q"\\\u00e9\ud800', "s\n")):
        frame = _wire.pack_call(name, session, 2**64 - 1, 2, b"code", b"in")
        header = {"op": "SubmitCall", "id": name, "session": session, "seed": 2**64 - 1, "code": 4, "attempt": 2}
        assert frame == _wire.pack_frame(header, b"code", b"in")
        assert header == m.encode(m.SubmitCall(name, session, 2**64 - 1, 4, 2))


def test_results_travel_together_while_calls_wait_for_workers():
    """Results are held until one timer at most, and sent at once if no call waits."""
    there, here = socket.socketpair()
    here.setblocking(False)
    reader, supervisor = _wire.FrameReader(), Supervisor(there)
    supervisor.pools["full"] = pool = SimpleNamespace(pending=deque(["a call"]))

    def arrived() -> list[int]:
        return [header["n"] for header, _ in reader.read(here)]

    for n in (1, 2):
        supervisor.link.send_soon(m.ExecutorStats(n, {}))
        supervisor.send_results()
    with pytest.raises(BlockingIOError):
        arrived()
    [(due, _, act)] = supervisor.loop.timers
    assert due <= time.monotonic() + TOGETHER_S
    act()
    assert arrived() == [1, 2]
    supervisor.link.send_soon(m.ExecutorStats(3, {}))
    pool.pending.clear()
    supervisor.send_results()
    assert arrived() == [3]
    supervisor.link.send_soon(m.ExecutorStats(4, {}))
    supervisor.link.send(m.ExecutorStats(5, {}))
    assert arrived() == [4, 5]
    there.close()
    here.close()
