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

from grpo_roc_jax.process.points import listening
from grpo_roc_jax.sandbox import Supervision, _wire
from grpo_roc_jax.sandbox._loop import TOGETHER_S
from grpo_roc_jax.sandbox._messages import ExecutorStats, SubmitCall, encode
from grpo_roc_jax.sandbox._supervisor import Supervisor
from grpo_roc_jax.tools import CodeCall, ToolsConfig, default_registry
from grpo_roc_jax.tools.executor import BaseExecutor, PythonExecutor
from tests.helpers.arena import wait_until

TOOL = "python_code_with_standard_io"
IN_FLIGHT = 8


def call(name: str, code: str = "print(1)") -> CodeCall:
    return CodeCall(name, TOOL, {"code": code}, None)


@pytest.fixture(scope="module")
def executor() -> Iterator[BaseExecutor]:
    registry = default_registry()

    def nap(seconds: float) -> None:
        """Sleeps in the trainer."""
        time.sleep(seconds)

    registry.add(nap, where="trainer")
    config = ToolsConfig(workers=4, roots=1, preload=())
    with PythonExecutor(config, registry, supervision=Supervision(in_flight=IN_FLIGHT)) as made:
        yield made


def test_threads_that_wait_at_once_each_get_their_results(executor: BaseExecutor) -> None:
    seen: dict[int, list[str]] = {}

    def work(number: int) -> None:
        calls = [call(f"t{number}/{i}", f"print({number}, {i})") for i in range(15)]
        seen[number] = [result.stdout for code_call in calls for result in executor.run([code_call])]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == {number: [f"{number} {i}\n" for i in range(15)] for number in range(6)}


def test_a_thread_that_reads_on_keeps_nobody_waiting(executor: BaseExecutor) -> None:
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
    for thread in (first, second):
        thread.join(60)
        assert not thread.is_alive()


def test_what_ends_in_the_trainer_wakes_the_thread_that_reads(executor: BaseExecutor) -> None:
    executor.submit(call("slow", "while True: pass"))
    executor.submit(CodeCall("nap", "nap", {"seconds": 0.2}, None))
    assert [name for name, _ in executor.poll(60.0)] == ["nap"]
    executor.cancel(["slow"])


def test_asyncio_beside_a_thread_that_polls(executor: BaseExecutor) -> None:
    async def gather() -> list[str]:
        return [result.stdout for result in await asyncio.gather(*(executor.arun(call(f"a{i}")) for i in range(30)))]

    outputs: list[list[str]] = []
    thread = threading.Thread(target=lambda: outputs.append(asyncio.run(gather())))
    thread.start()
    for number in range(30):
        executor.submit(call(f"p{number}"))
    names: set[str] = set()
    while len(names) < 30:
        names |= {name for name, _ in executor.poll(5.0)}
    thread.join(30)
    assert outputs == [["1\n"] * 30]
    assert names == {f"p{number}" for number in range(30)}


def test_held_calls_go_on_while_nobody_polls(executor: BaseExecutor) -> None:
    """More calls than may be in flight, each with more text than the socket accepts at once."""
    for number in range(60):
        executor.submit(call(f"h{number}", f"x = {number} # " + "y" * 30_000))
    assert wait_until(lambda: len(executor.in_flight) <= IN_FLIGHT)
    done: list = []
    while len(done) < 60:
        done += executor.poll(5.0)
    assert all(result.ok for _, result in done)


def test_a_lost_process_is_replaced_while_nobody_polls(executor: BaseExecutor) -> None:
    first = executor.pid
    executor.submit(call("again", "print('again')"))
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: executor.pid != first)
    assert [(name, result.stdout) for name, result in executor.poll(60.0)] == [("again", "again\n")]


def test_submit_does_not_wait_for_the_replacement(executor: BaseExecutor) -> None:
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
        done: list = []
        assert wait_until(lambda: done.extend(executor.poll()) or len(done) == 20)
    assert all(result.ok for _, result in done)


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
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert sorted(map(str, seen)) == [{"run": "sandbox_error", "poll": "[]"}[name] for name in sorted(waiting)]


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


@pytest.mark.parametrize(("size", "more"), [(_wire.ROOM, True), (_wire.ROOM - 1, False)])
def test_a_read_that_fills_the_buffer_says_that_there_may_be_more(size: int, more: bool) -> None:
    reader, frame = _wire.FrameReader(), _wire.pack_frame({}, bytes(size - len(_wire.pack_frame({}))))
    waiting = SimpleNamespace(recv_into=lambda view: view.__setitem__(slice(size), frame) or size)
    ((header, payload),) = reader.read(waiting)
    assert (header, len(payload), reader.more) == ({}, len(frame) - 10, more)


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


def test_a_frame_has_at_most_sixteen_mebibytes() -> None:
    room = (16 << 20) - 4 - len("{}")
    assert len(_wire.pack_frame({}, bytes(room))) == (16 << 20) + 4
    with pytest.raises(_wire.BadFrame, match="a frame of 16777217 bytes; must be at most 16777216"):
        _wire.pack_frame({}, bytes(room + 1))


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
