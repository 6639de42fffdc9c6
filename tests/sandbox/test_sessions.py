"""Live sessions: state is kept, cells are transactional, sessions never meet."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest

from grpo_roc_jax.sandbox import _session, _supervisor
from tests.helpers.arena import alive, descendants, notebook_at, of_proc, spent, stat_of, wait_until

SLOW = [pytest.param(level, marks=pytest.mark.slow) for level in ("L0", "L1", "L3")]


@pytest.fixture(scope="module", params=["best", "L2", *SLOW])
def notebook(request):
    # Seconds of CPU, which other processes on the host do not use up.
    yield from notebook_at(request.param, workers=2, wall_s=30.0, cpu_s=0.7, preload=("numpy",), sessions=4)


TRACE = '  File "<cell 4>", line 3, in <module>\n    g()\n  File "<cell 3>", line 3, in g\n    return 1 / 0'
CELLS = {  # cell after cell, and what is seen of its result
    "what is kept": [
        ("from __future__ import annotations\nimport math\nx = 3\ndef f(y: Unknown): return x + y", {}),
        ("f(4), math.pi > 3", {"kind": "ok", "echo": "(7, True)", "cell": 2, "session_id": "what is kept"}),
        ("x = 1\ndef g():\n    return 1 / 0", {}),
        ("x = 2\n\ng()", {"kind": "exception", "error_line": 3, "exit_code": None, "traceback": TRACE}),
        ("x", {"echo": "2"}),
        ("x =", {"kind": "syntax_error"}),
        ("x = 5\nexit()", {"kind": "ok"}),
        ("import sys\nsys.exit(2)", {"kind": "exception"}),
        ("x", {"echo": "5"}),
        ("import sys, os\nsys.stdout.write('no newline'); os.write(1, b'raw')", {}),
        ("print('second')", {"stdout": "second\n"}),
    ],
    "cheap cells are run again silently and in order": [
        *((code, {}) for code in ("log = []", "log.append(1); print('loud')", "1/0", "log.append(2)")),
        ("log.append(3)\nwhile True: pass", {"rolled_back": True, "stdout": ""}),
        ("log", {"echo": "[1, 2]", "stdout": "", "cell": 5}),
    ],
    "expensive cells are not run again": [
        ("total = sum(range(4_000_000))", {}),
        ("total += 1", {}),
        ("import os; os.abort()", {"rolled_back": True}),
        ("total", {"echo": "7999998000001"}),
    ],
    "a seed holds for later cells, also after one that was ended": [
        ("import random\nrandom.seed(1)", {}),
        ("random.random()", {"echo": "0.13436424411240122"}),
        ("random.random()\nwhile True: pass", {"rolled_back": True}),
        ("random.random()", {"echo": "0.8474337369372327"}),
    ],
    "a first cell that is ended leaves an empty session": [
        ("x = 1\nwhile True: pass", {"kind": "timeout", "rolled_back": True}),
        ("x", {"error_type": "NameError"}),
        ("1 + 1", {"echo": "2"}),
    ],
}
ENDS = {
    "timeout": "while True: pass",
    "exception": "import os; os._exit(0)",
    "crash": "import os; os.abort()",
    "output_limit": "while True: print('y' * 1_000_000)",
}
for kind, end in ENDS.items():
    ended = (f"x += 1\n{end}", {"kind": kind, "rolled_back": True})
    CELLS[f"{kind} is rolled back"] = [
        ("x = 10; y = [1, 2]", {}),
        ("y.append(3)", {}),
        ended,
        ("x, y", {"echo": "(10, [1, 2, 3])"}),
        ended,
        ("x", {"echo": "10"}),
    ]


@pytest.mark.parametrize("name", CELLS)
def test_cells_follow_each_other(notebook, name: str) -> None:
    for code, expected in CELLS[name]:
        result = notebook.cell(name, code)
        assert {field: getattr(result, field) for field in expected} == expected, result
        assert not result.rolled_back or "rolled back" in result.observation
    notebook.executor.close_session(name)


def test_rolling_back_also_of_a_cancelled_cell_gives_the_very_state_of_clock_and_chance(notebook) -> None:
    notebook.cell("exact", "import random, time\na = random.random()", seed=3)
    notebook.cell("exact", "b = time.time_ns(); c = object(); d = id(c)")
    notebook.cell("exact", "e = random.random()", seed=4)
    before = notebook.cell("exact", "a, b, d, e").echo
    assert notebook.cell("exact", "a = 0\nwhile True: pass").rolled_back
    assert notebook.cell("exact", "a, b, d, e").echo == before
    call = notebook.call("exact", "a = 2\nwhile True: pass")
    notebook.executor.submit(call)
    time.sleep(0.2)
    notebook.executor.cancel([call.id])
    assert notebook.cell("exact", "a, b, d, e").echo == before and notebook.executor.poll() == []
    notebook.executor.close_session("exact")


FORKING = """
import os, threading, time
hits = []
def spin(turns):
    for _ in range(turns):
        try:
            if os.fork() == 0: os._exit(0)
            hits.append(1)
        except OSError: pass
for _ in range(3): threading.Thread(target=spin, args=(10**9,), daemon=True).start()
spin(50)
"""


def test_parallel_cells_run_in_order_sessions_share_nothing_and_equal_seeds_give_equal_draws(notebook) -> None:
    notebook.cell("order", "log = []")
    calls = [notebook.call("order", f"log.append({i}); log") for i in range(10)]
    assert notebook.executor.run(calls)[9].echo == str(list(range(10)))
    code = "import random, numpy\nrandom.random(), float(numpy.random.rand())"
    assert notebook.cell("s1", f"a = 1\n{code}", 5).echo == notebook.cell("s2", code, 5).echo
    assert notebook.cell("s2", "'a' in globals()").echo == "False" and notebook.cells("s1", "a")[0].echo == "1"
    notebook.executor.close_session("s2")


def test_least_recently_used_session_goes_and_says_so(notebook) -> None:
    for number in range(6):
        notebook.cell(f"lru{number}", "x = 1")
    lost = notebook.cell("lru0", "x")
    assert (lost.kind, lost.infra) == ("sandbox_error", True)
    assert notebook.cell("lru5", "x").echo == "1"
    assert notebook.executor.stats()["tools/sessions_evicted"] >= 1


def test_a_program_that_writes_to_its_sessions_connection_made_the_error(notebook) -> None:
    for code in (
        "os.write(4, b'D')\nwhile True: pass",
        "os.write(4, b'junk')\nwhile True: pass",
        "[os.write(4, b'D') for _ in range(3)]",
        "import threading, time\nthreading.Timer(0.1, os.write, (4, b'D')).start(); time.sleep(0.3)",
        "import socket\nsocket.socket(fileno=4).shutdown(socket.SHUT_RDWR)",
    ):
        _, *results, last = notebook.cells("protocol", "import os\nx = 1", code, "x", "x")
        assert not any(result.infra for result in results)
        [wrong] = [result for result in results if not result.ok]
        assert wrong.counts_as_error and (wrong.error_type == "ProtocolViolation" or "shutdown" in code)
        assert last.echo == ("1" if wrong.rolled_back else "")


def test_a_session_cannot_pass_itself_off_as_its_copy(notebook) -> None:
    forge = """import os
def hook():
    for fd in range(3, 64):
        try: os.write(fd, b"R")
        except OSError: pass
def spin():
    while True: pass
os.register_at_fork(after_in_parent=hook, after_in_child=spin)
x = 1"""
    codes = ["x, os.getpid() > 0", "os._exit(3)", "os.abort()", "os.getpid() > 0 and 1 + 1", "2 + 2"]
    results = notebook.cells("forge", forge, *codes)
    assert not any(result.infra for result in results), [(result.kind, result.error_message) for result in results]


PARK = """import array, os, socket
a, b = socket.socketpair()
sent = 0
for fd in range(4, 128):
    try:
        if fd not in (4, a.fileno(), b.fileno()): os.dup2(a.fileno(), fd)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
        socket.socket(fileno=os.dup(fd) if fd == 4 else fd).sendmsg([b"x"], rights)
        sent += 1
    except OSError: pass
sent"""


def test_programs_can_neither_fork_in_a_session_nor_leave_open_files_in_a_socket(notebook) -> None:
    """Neither a cell nor threads that it leaves, which try while the session is copied."""
    if notebook.executor.capabilities.level == "L0":
        pytest.skip("nothing forbids it at L0")
    assert [result.echo for result in notebook.cells("fork", FORKING, *["len(hits)"] * 4)[1:]] == ["0"] * 4
    assert notebook.cells("park", PARK)[0].echo == "0"


HOOKS = {
    "spin": "def hook():\n    while True: pass",
    "thread": "def hook(): threading.Thread(target=spin, daemon=True).start()",
    "memory": "def hook(): kept.append(bytearray(b'x') * (200 << 20))",
}


@pytest.mark.parametrize("hook", HOOKS)
def test_code_that_runs_in_the_copy_is_limited_too(notebook, hook: str) -> None:
    """Today's copy is the only process beside the session, and it stands still."""
    name = f"hook-{hook}"
    before = set(filter(alive, descendants(notebook.executor.pid)))
    setup = f"import os, threading\nkept = []\ndef spin():\n    while True: pass\n{HOOKS[hook]}\n"
    notebook.cell(name, setup + "os.register_at_fork(after_in_child=hook)\nx = 0")
    for _ in range(4):
        assert notebook.cell(name, "x += 1; os.getpid() > 0").echo == "True"
    assert notebook.cell(name, "x").echo == "4"
    assert wait_until(lambda: spent(notebook.executor.pid, 0.5) <= 0.2)
    # The session, its copy, and the worker that took the place of the one which serves the session.
    assert wait_until(lambda: len(set(filter(alive, descendants(notebook.executor.pid))) - before) <= 3)
    notebook.executor.close_session(name)


def test_a_copy_has_longer_while_neither_it_nor_its_session_computes() -> None:
    """A shell stands for the session and its child for the copy, which a loaded host may keep waiting for a core."""
    copies = [("(while :; do :; done) & wait", True), ("(sleep 60) & while :; do :; done", True)]
    for script, computes in (("(sleep 60) & wait", False), *copies):
        session = _session.LiveSession.__new__(_session.LiveSession)
        session.worker, session.cpu_mark = SimpleNamespace(host_proc=os.open("/proc", os.O_RDONLY)), 0.0
        shell = subprocess.Popen(["sh", "-c", script], start_new_session=True)
        session.pid, session.pidfd = shell.pid, os.pidfd_open(shell.pid)
        try:
            if computes:
                assert wait_until(partial(session.copy_is_late, 1.0))
            assert session.copy_is_late(_session.LONGEST_COPY_S - 0.1) == computes
            assert session.copy_is_late(_session.LONGEST_COPY_S)
        finally:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            os.close(session.pidfd)
            os.close(session.worker.host_proc)
    assert 2 * _session.LONGEST_COPY_S <= _supervisor.GRACE_S, "a copy that sleeps must not make its worker seem stuck"


def test_a_session_and_its_copy_share_one_memory_limit(notebook) -> None:
    before = memory(notebook.executor.pid)
    assert notebook.cell("large", "import os\nx = []").ok
    for _ in range(5):
        assert notebook.cell("large", "x.append(bytearray(b'x') * (60 << 20)); os.getpid()").ok
    for part in range(5):
        assert notebook.cell("large", f"for i in range(0, 60 << 20, 4096): x[{part}][i] = 2").ok
    assert notebook.cell("large", "sum(map(len, x)) >> 20, x[4][0]").echo == "(300, 2)"
    assert memory(notebook.executor.pid) - before < 512 << 20
    [lost] = notebook.cells("large", "os.abort()")
    assert (lost.kind, lost.rolled_back) == ("crash", False)
    notebook.cells("reaped", *["import os"] * 20)
    ended = [child for child in descendants(notebook.executor.pid) if stat_of(child)[0] == "Z"]
    assert len(ended) <= 3, "dropped copies do not count as processes"


def memory(pid: int) -> int:
    """Bytes of memory of the processes below `pid`, each shared page counted once."""
    parts = [of_proc(child, "smaps_rollup").partition("\nPss:")[2].split() for child in descendants(pid)]
    return sum(int(part[0]) << 10 for part in parts if part)


def test_a_session_is_lost_only_when_its_log_is_too_dear_to_run_again() -> None:
    """Without a copy it may cost as much time as a call has, and hold as many cells as the log has places."""
    limits = SimpleNamespace(session_replay_ms=500.0, wall_s=2.0)
    fresh = {"exact": False, "can_copy": False, "cell": 1, "worker": SimpleNamespace(limits=limits)}

    def recoverable(*seconds: float) -> bool:
        session = SimpleNamespace(log=[], debt_s=0.0, recoverable=True, forget_log=lambda: None, **fresh)
        for cpu_s in seconds:
            _session.LiveSession.remember(session, 3, 0, cpu_s)
        return session.recoverable

    assert recoverable(1.5, 0.5) and not recoverable(1.5, 0.75)
    assert recoverable(*[0.0] * _session.LONGEST_LOG) and not recoverable(*[0.0] * (_session.LONGEST_LOG + 1))


FORKS = """
import os, select, signal, socket, sys, time
from types import SimpleNamespace
sys.path.insert(0, {cwd!r})
from grpo_roc_jax.sandbox import _probing, _session, _wire, isolation

def started(forks):
    \"\"\"A locked-down session that asks for so many forks, each of which waits: (its process id, the listener).\"\"\"
    here, there = socket.socketpair()
    plan = _probing.probe_plan("L1")
    filter_ = isolation.make_filter(plan, session=True)
    if (pid := os.fork()) == 0:
        channel = socket.socket(fileno=os.dup2(there.fileno(), isolation.descriptor_limit(plan.limits)))
        channel.sendmsg([b"x"], _wire.rights(filter_.install(os.getpid(), listener=True)))
        for _ in range(forks):
            if os.fork() == 0:
                break
        time.sleep(20)
        os._exit(0)
    return pid, socket.recv_fds(here, 1, 1)[1][0]

def look():
    \"\"\"Ends the session after the look at the listener that finds its request.\"\"\"
    real = poll()
    return SimpleNamespace(register=real.register, poll=lambda _: (real.poll(5000), end())[0])

def end():
    os.kill(session.pid, signal.SIGKILL)
    os.waitpid(session.pid, 0)

poll, session = select.poll, _session.LiveSession.__new__(_session.LiveSession)
for forks in (1, 2):
    session.pid, session.listener = started(forks)
    session.fork_allowed = forks == 2
    while session.fork_allowed:
        session.answer_fork()
    _session.select.poll = look
    print("ended", repr(session.answer_fork()))
    _session.select.poll = poll
    print("gone", repr(session.answer_fork()))
session.pid, session.listener = started(0)
print("idle", repr(session.answer_fork()))
end()
os.killpg(0, signal.SIGKILL)
"""


def test_answering_a_fork_never_blocks_the_worker() -> None:
    """The session ends after its request was found, alone or with a copy; it is gone; it asks for nothing."""
    command = [sys.executable, "-u", "-c", FORKS.format(cwd=os.getcwd())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, start_new_session=True)
    assert done.stdout.split() == ["ended", "''", "gone", "''"] * 2 + ["idle", "''"], done.stderr
