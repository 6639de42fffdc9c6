"""Live sessions: state is kept, cells are transactional, sessions never meet."""

import time

import pytest

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
        ("import sys, os\nsys.stdout.write('no newline'); os.write(1, b'raw')", {}),
        ("print('second')", {"stdout": "second\n"}),
    ],
    "cheap cells are run again silently and in order": [
        *((code, {}) for code in ("log = []", "log.append(1); print('loud')", "1/0", "log.append(2)")),
        ("log.append(3)\nwhile True: pass", {"rolled_back": True, "stdout": ""}),
        ("log", {"echo": "[1, 2]", "stdout": "", "cell": 5}),
    ],
    "a first cell that is ended leaves an empty session": [
        ("x = 1\nwhile True: pass", {"kind": "timeout", "rolled_back": True}),
        ("x", {"error_type": "NameError"}),
    ],
}
ENDS = {
    "exception": "import os; os._exit(0)",
    "crash": "import os; os.abort()",
    "output_limit": "while True: print('y' * 1_000_000)",
}
for kind, end in ENDS.items():
    ended = (f"x += 1\n{end}", {"kind": kind, "rolled_back": True})
    CELLS[f"{kind} is rolled back"] = [("x = 10", {}), ended, ("x", {"echo": "10"}), ended, ("x", {"echo": "10"})]


@pytest.mark.parametrize("name", CELLS)
def test_cells_follow_each_other(notebook, name: str) -> None:
    for code, expected in CELLS[name]:
        result = notebook.cell(name, code)
        assert {field: getattr(result, field) for field in expected} == expected, result
        assert not result.rolled_back or "rolled back" in result.observation
    notebook.executor.close_session(name)


def test_rolling_back_also_of_a_cancelled_cell_gives_the_very_state_of_clock_and_chance(notebook) -> None:
    notebook.cell("exact", "import random, time\na = random.random(); b = time.time_ns(); c = object(); d = id(c)", 3)
    before = notebook.cell("exact", "a, b, d").echo
    assert notebook.cell("exact", "a = 0\nwhile True: pass").rolled_back
    assert notebook.cell("exact", "a, b, d").echo == before
    notebook.executor.submit(call := notebook.call("exact", "a = 2\nwhile True: pass"))
    time.sleep(0.2)
    notebook.executor.cancel([call.id])
    assert notebook.cell("exact", "a, b, d").echo == before and notebook.executor.poll() == []
    notebook.executor.close_session("exact")


def test_parallel_cells_run_in_order_sessions_share_nothing_and_equal_seeds_give_equal_draws(notebook) -> None:
    notebook.cell("order", "log = []")
    calls = [notebook.call("order", f"log.append({i}); log") for i in range(10)]
    assert notebook.executor.run(calls)[9].echo == str(list(range(10)))
    code = "import random, numpy\nrandom.random(), float(numpy.random.rand())"
    assert notebook.cell("s1", f"a = 1\n{code}", 5).echo == notebook.cell("s2", code, 5).echo
    assert notebook.cell("s2", "'a' in globals()").echo == "False" and notebook.cells("s1", "a")[0].echo == "1"
    notebook.executor.close_session("s2")


def test_a_program_that_writes_to_its_sessions_connection_made_the_error(notebook) -> None:
    for code in (
        "os.write(4, b'junk')\nwhile True: pass",
        "[os.write(4, b'D') for _ in range(3)]",
        "import socket\nsocket.socket(fileno=4).shutdown(socket.SHUT_RDWR)",
    ):
        _, *results, last = notebook.cells("protocol", "import os\nx = 1", code, "x", "x")
        assert not any(result.infra for result in results)
        [wrong] = [result for result in results if not result.ok]
        assert wrong.counts_as_error and (wrong.error_type == "ProtocolViolation" or "shutdown" in code)
        assert last.echo == ("1" if wrong.rolled_back else "")


def test_a_session_cannot_pass_itself_off_as_its_copy(notebook) -> None:
    forge = """import contextlib, os
def hook():
    for fd in range(3, 64):
        with contextlib.suppress(OSError): os.write(fd, b"R")
def spin():
    while True: pass
os.register_at_fork(after_in_parent=hook, after_in_child=spin)"""
    results = notebook.cells("forge", forge, "os.getpid() > 0", "os._exit(3)", "os.getpid() > 0 and 1 + 1", "2 + 2")
    assert not any(result.infra for result in results), [(result.kind, result.error_message) for result in results]


FORKING = """import contextlib, os, threading
hits = []
def spin(turns):
    for _ in range(turns):
        with contextlib.suppress(OSError): hits.append(os.fork() or os._exit(0))
threading.Thread(target=spin, args=(10**9,), daemon=True).start()
spin(50)"""
PARK = """import array, contextlib, os, socket
a, b = socket.socketpair()
sent = 0
for fd in range(4, 128):
    with contextlib.suppress(OSError):
        if fd not in (4, a.fileno(), b.fileno()): os.dup2(a.fileno(), fd)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
        socket.socket(fileno=os.dup(fd) if fd == 4 else fd).sendmsg([b"x"], rights)
        sent += 1
sent"""


def test_programs_can_neither_fork_in_a_session_nor_leave_open_files_in_a_socket(notebook) -> None:
    """Neither a cell nor threads that it leaves, which try while the session is copied."""
    if notebook.executor.capabilities.level == "L0":
        pytest.skip("nothing forbids it at L0")
    assert [result.echo for result in notebook.cells("fork", FORKING, *["len(hits)"] * 4)[1:]] == ["0"] * 4
    assert notebook.cells("park", PARK)[0].echo == "0"


@pytest.mark.parametrize("hook", ["spin()", "threading.Thread(target=spin).start()", "kept.append(b'x' * (200 << 20))"])
def test_code_that_runs_in_the_copy_is_limited_too(notebook, hook: str) -> None:
    """Today's copy is the only process beside the session, and it stands still."""
    name, before = f"hook-{hook}", set(filter(alive, descendants(notebook.executor.pid)))
    setup = "import os, threading\nx, kept = 0, []\ndef spin():\n    while True: pass\n"
    notebook.cell(name, f"{setup}os.register_at_fork(after_in_child=lambda: {hook})")
    for count in range(4):
        assert notebook.cell(name, "x += 1; os.getpid() > 0 and x").echo == str(count + 1)
    assert wait_until(lambda: spent(notebook.executor.pid, 0.5) <= 0.2)
    # The session, its copy, and the worker that took the place of the one which serves the session.
    assert wait_until(lambda: len(set(filter(alive, descendants(notebook.executor.pid))) - before) <= 3)
    notebook.executor.close_session(name)


def memory(pid: int) -> int:
    """Bytes of memory of the processes below `pid`, each shared page counted once."""
    parts = [of_proc(child, "smaps_rollup").partition("\nPss:")[2].split() for child in descendants(pid)]
    return sum(int(part[0]) << 10 for part in parts if part)


def test_a_session_and_its_copy_share_one_memory_limit(notebook) -> None:
    before = memory(notebook.executor.pid)
    fill = ["x.append(bytearray(b'x') * (60 << 20)); os.getpid()"] * 5
    change = [f"for i in range(0, 60 << 20, 4096): x[{part}][i] = 2" for part in range(5)]
    assert all(notebook.cell("large", code).ok for code in ("import os\nx = []", *fill, *change))
    assert notebook.cell("large", "sum(map(len, x)) >> 20, x[4][0]").echo == "(300, 2)"
    assert memory(notebook.executor.pid) - before < 512 << 20
    [lost] = notebook.cells("large", "os.abort()")
    assert (lost.kind, lost.rolled_back) == ("crash", False)
    notebook.cells("reaped", *["import os"] * 20)
    ended = [child for child in descendants(notebook.executor.pid) if stat_of(child)[0] == "Z"]
    assert len(ended) <= 3, "dropped copies do not count as processes"
