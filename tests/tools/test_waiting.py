"""Which thread reads the connection to the executor process while several wait, or none does; and when results are
sent over it."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from grpo_roc_jax.tools import CodeCall, ToolsConfig, _wire, default_registry, make_executor
from grpo_roc_jax.tools._loop import TOGETHER_S
from grpo_roc_jax.tools._messages import ExecutorStats, SubmitCall, encode
from grpo_roc_jax.tools._supervisor import Supervisor
from grpo_roc_jax.tools.base import BaseExecutor

TOOL = "python_code_with_standard_io"


def call(name: str, code: str = "print(1)") -> CodeCall:
    return CodeCall(name, TOOL, {"code": code}, None)


@pytest.fixture(scope="module")
def executor() -> Iterator[BaseExecutor]:
    registry = default_registry()

    def nap(seconds: float) -> None:
        """Sleeps in the trainer."""
        time.sleep(seconds)

    registry.add(nap, where="trainer")
    with make_executor(ToolsConfig(workers=4, roots=1, preload=(), max_in_flight=8), registry) as made:
        yield made


def test_threads_that_wait_at_once_each_get_their_results(executor: BaseExecutor) -> None:
    seen: dict[int, list[str]] = {}

    def work(number: int) -> None:
        calls = [call(f"t{number}/{i}", f"print({number}, {i})") for i in range(40)]
        seen[number] = [result.stdout for one in calls for result in executor.run([one])]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {number: [f"{number} {i}\n" for i in range(40)] for number in range(6)}


def test_a_thread_that_reads_on_keeps_nobody_waiting(executor: BaseExecutor) -> None:
    """The first thread reads for the second one; when it leaves, the second one reads for itself."""
    taken: dict[str, float] = {}

    def work(name: str, seconds: float) -> None:
        started = time.monotonic()
        executor.run([call(name, f"import time; time.sleep({seconds})")])
        taken[name] = time.monotonic() - started

    threads = [threading.Thread(target=work, args=one) for one in (("long", 1.5), ("short", 0.1), ("longest", 3.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert taken["short"] < 1.4 and taken["long"] < 2.9 and taken["longest"] < 10


def test_what_ends_in_the_trainer_wakes_the_thread_that_reads(executor: BaseExecutor) -> None:
    executor.submit(call("slow", "import time; time.sleep(3)"))
    executor.submit(CodeCall("nap", "nap", {"seconds": 0.2}, None))
    started = time.monotonic()
    assert [name for name, _ in executor.poll(10.0)] == ["nap"]
    assert time.monotonic() - started < 2.5
    executor.cancel(["slow"])


def test_asyncio_beside_a_thread_that_polls(executor: BaseExecutor) -> None:
    async def gather() -> list[str]:
        return [result.stdout for result in await asyncio.gather(*(executor.arun(call(f"a{i}")) for i in range(30)))]

    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(gather())))
    thread.start()
    for number in range(30):
        executor.submit(call(f"p{number}"))
    names: set[str] = set()
    while len(names) < 30:
        names |= {name for name, _ in executor.poll(5.0)}
    thread.join(30)
    assert found == [["1\n"] * 30]
    assert names == {f"p{number}" for number in range(30)}


def test_held_calls_go_on_while_nobody_polls(executor: BaseExecutor) -> None:
    """More calls than may be in flight, each with more text than the socket accepts at once."""
    for number in range(60):
        executor.submit(call(f"h{number}", f"x = {number} # " + "y" * 30_000))
    deadline = time.monotonic() + 30
    while len(executor._finished) < 60 - 8 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(executor._finished) >= 60 - 8
    done: list = []
    while len(done) < 60:
        done += executor.poll(5.0)
    assert all(result.ok for _, result in done)


def test_a_lost_process_is_replaced_while_nobody_polls(executor: BaseExecutor) -> None:
    first = executor.pid
    executor.submit(call("again", "print('again')"))
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while executor.pid == first and time.monotonic() < deadline:
        time.sleep(0.05)
    assert executor.pid != first
    assert [(name, result.stdout) for name, result in executor.poll(10.0)] == [("again", "again\n")]


def test_submit_does_not_wait_for_the_replacement(executor: BaseExecutor) -> None:
    os.kill(executor.pid, signal.SIGKILL)
    slowest, deadline, number = 0.0, time.monotonic() + 1.0, 0
    while time.monotonic() < deadline:
        started = time.monotonic()
        executor.submit(call(f"r{number}"))
        executor.poll()
        slowest, number = max(slowest, time.monotonic() - started), number + 1
        time.sleep(0.02)
    assert slowest < 0.5
    done: list = []
    deadline = time.monotonic() + 30
    while executor.stats()["tools/in_flight"] and time.monotonic() < deadline:
        done += executor.poll(1.0)
    assert all(result.ok for _, result in done)


def test_closing_frees_threads_that_wait() -> None:
    executor = make_executor(ToolsConfig(workers=2, roots=1, preload=()))
    executor.start()
    seen: list = []
    waiting = [
        threading.Thread(target=lambda: seen.append(executor.run([call("w", "while True: pass")])[0].kind)),
        threading.Thread(target=lambda: seen.append(executor.poll(60.0))),
    ]
    for thread in waiting:
        thread.start()
    time.sleep(0.3)
    started = time.monotonic()
    executor.close()
    for thread in waiting:
        thread.join(10)
    assert time.monotonic() - started < 8
    assert sorted(map(str, seen)) == ["[]", "sandbox_error"]


def test_frames_in_pieces_and_frames_larger_than_the_buffer() -> None:
    here, there = socket.socketpair()
    frames = [({"n": n}, bytes([n]) * size) for n, size in enumerate((0, 10, _wire.ROOM * 3, 5, _wire.ROOM - 20, 1))]
    data = b"".join(_wire.pack_frame(header, payload) for header, payload in frames)

    def send() -> None:
        for start in range(0, len(data), 70_001):
            there.sendall(data[start : start + 70_001])
        there.sendall(b"\1")
        there.close()

    thread = threading.Thread(target=send)
    thread.start()
    reader, got = _wire.FrameReader(), []
    with pytest.raises(EOFError):
        while True:
            got += reader.read(here)
    thread.join()
    here.close()
    assert got == frames


@pytest.mark.parametrize(
    "data",
    [
        _wire.PREFIX.pack(_wire.MAX_FRAME + 1, 2) + b"{}",
        _wire.PREFIX.pack(5, 2) + b"{}",
        _wire.PREFIX.pack(6, 2) + b"[]",
        _wire.PREFIX.pack(6, 2) + b"{x",
        _wire.PREFIX.pack(8, 4) + b"{}{}",
        _wire.PREFIX.pack(6, 2) + b"\xff\xff",
    ],
)
def test_frames_that_are_none(data: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(data)
        with pytest.raises(_wire.BadFrame):
            _wire.FrameReader().read(here)


def test_the_frame_of_a_call_is_what_the_encoder_would_write() -> None:
    for name, session in (("a/1", None), ('q"\\\u00e9\ud800', "s\n")):
        frame = _wire.pack_call(name, session, 2**64 - 1, 2, b"code", b"in")
        header = {"op": "SubmitCall", "id": name, "session": session, "seed": 2**64 - 1, "code": 4, "attempt": 2}
        assert frame == _wire.pack_frame(header, b"code", b"in")
        assert header == encode(SubmitCall(name, session, 2**64 - 1, 4, 2))


def test_results_travel_together_while_calls_wait_for_workers():
    """Results are held until one timer at most, and sent at once if no call waits."""
    there, here = socket.socketpair()
    here.setblocking(False)
    reader, supervisor = _wire.FrameReader(), Supervisor(there)
    supervisor.pools["full"] = pool = SimpleNamespace(pending=deque(["a call"]))

    def arrived() -> list[int]:
        return [header["n"] for header, _ in reader.read(here)]

    for n in (1, 2):
        supervisor.link.send_soon(ExecutorStats(n, {}))
        supervisor.send_results()
    with pytest.raises(BlockingIOError):
        arrived()
    [(due, _, act)] = supervisor.loop.timers
    assert due <= time.monotonic() + TOGETHER_S
    act()
    assert arrived() == [1, 2]
    supervisor.link.send_soon(ExecutorStats(3, {}))
    pool.pending.clear()
    supervisor.send_results()
    assert arrived() == [3]
    supervisor.link.send_soon(ExecutorStats(4, {}))
    supervisor.link.send(ExecutorStats(5, {}))
    assert arrived() == [4, 5]
    there.close()
    here.close()
