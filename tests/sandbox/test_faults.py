"""Processes of the executor or trainer that are killed, and hosts with few resources: nothing is lost or left over."""

import contextlib
import itertools
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from types import SimpleNamespace

import pytest

from grpo_roc_jax.process.points import injected
from grpo_roc_jax.sandbox import Supervision, _meter, _pool, _probing, _session_table, _supervisor
from grpo_roc_jax.tools import CodeCall, ExecutorFailed, ToolsConfig
from grpo_roc_jax.tools.executor import PythonExecutor, settings_of
from tests.helpers.arena import alive, descendants, drain, of_proc, require, resident_kb, stat_of, wait_until

TOOL = "python_code_with_standard_io"
WRITING_LEVEL = "L2" if "L2" in _probing.probe_host().available else "best"
"""A level at which the host sees the files of programs."""
QUICK_BEATS = Supervision(beat_s=0.1, silent_beats=20)


def executor_of(supervision: Supervision | None = None, **settings: object) -> PythonExecutor:
    defaults = {"workers": 4, "roots": 1, "wall_s": 5.0, "preload": ()}
    executor = PythonExecutor(ToolsConfig(**{**defaults, **settings}), supervision=supervision)
    executor.start()
    return executor


def calls_of(count: int, tag: str = "c", pause_s: float = 0.0) -> list[CodeCall]:
    wait = f"import time; time.sleep({pause_s})\n" if pause_s else ""
    return [CodeCall(f"{tag}{i}", TOOL, {"code": f"{wait}print({i} * 2)"}, None) for i in range(count)]


def children(pid: int) -> list[int]:
    """Of an executor process these are its roots, whose children are workers."""
    return [child for child in descendants(pid) if int(stat_of(child)[1]) == pid]


def workers_of(executor) -> list[int]:
    return [pid for root in children(executor.pid) for pid in children(root)]


@pytest.fixture(scope="module")
def shared():
    with executor_of() as made:
        yield made


@pytest.mark.parametrize(("victim", "times"), [("worker", 6), ("root", 2), ("executor", 1)])
def test_killed_during_200_calls(shared, victim: str, times: int) -> None:
    """A process is killed whenever so many more results have arrived."""
    rng, results = random.Random(0), {}
    for call in calls_of(200, victim):
        shared.submit(call)
    for kills in range(1, times + 1):
        part = 200 * kills // (times + 1)
        assert wait_until(lambda part=part: results.update(shared.poll(1.0)) or len(results) >= part)
        pids = {"executor": [shared.pid], "root": children(shared.pid), "worker": workers_of(shared)}[victim]
        with contextlib.suppress(OSError, IndexError):
            os.kill(rng.choice(pids), signal.SIGKILL)
    assert wait_until(lambda: results.update(shared.poll(1.0)) or len(results) == 200)
    for number in range(200):
        result = results[f"{victim}{number}"]
        assert result.infra or (result.kind, result.stdout) == ("ok", f"{number * 2}\n")
    # A call is tried twice, so only one that was hit twice may be lost.
    assert sum(result.infra for result in results.values()) <= times // 2
    assert shared.run(calls_of(4, "after"))[3].stdout == "6\n"


def test_crash_storm_gives_infra_and_recovers(shared) -> None:
    for call in calls_of(20, "storm", pause_s=0.2):
        shared.submit(call)
    killed: set[int] = set()

    def storm() -> bool:
        for pid in workers_of(shared):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        return len(killed) > _pool.STORM

    assert wait_until(storm)
    assert {result.kind for result in drain(shared, 20).values()} <= {"ok", "sandbox_error"}
    assert all(result.kind == "ok" for result in shared.run(calls_of(8, "after")))
    assert shared.stats()["tools/breaker_open"] == 0


@pytest.mark.parametrize("waits", [pytest.param("poll", marks=pytest.mark.slow), "run", "nobody"])
def test_a_frozen_executor_is_replaced_and_its_calls_run_again(waits: str) -> None:
    """Whether the trainer polls, waits without a limit, or does something else meanwhile."""
    with executor_of(QUICK_BEATS) as executor:
        frozen = executor.pid
        os.kill(frozen, signal.SIGSTOP)
        if waits == "run":
            results = executor.run(calls_of(4))
        else:
            for call in calls_of(5):
                executor.submit(call)
            assert wait_until(lambda: executor.silent_beats > 1)
            assert executor.cancel(["c4"]) is False, "it never ran"
            assert waits == "poll" or wait_until(lambda: executor.pid != frozen and executor.connected)
            polled = drain(executor, 4)
            results = [polled[f"c{i}"] for i in range(4)]
        assert [(result.kind, result.stdout) for result in results] == [("ok", f"{2 * i}\n") for i in range(4)]
        assert executor.pid != frozen and not alive(frozen)


def test_a_slow_call_is_a_sign_of_no_frozen_process() -> None:
    with executor_of(QUICK_BEATS) as executor:
        before = executor.pid
        assert executor.run(calls_of(1, pause_s=3.0))[0].kind == "ok"
        executor.submit(calls_of(1, "cut", pause_s=9.0)[0])
        time.sleep(0.5)
        assert executor.cancel(["cut0"]) and executor.pid == before


def test_a_restart_that_fails_is_tried_again_while_calls_wait() -> None:
    with executor_of(Supervision(restart_pauses_s=(0.1,) * 4)) as executor:
        with injected("tool.restart=eagain@1,tool.restart=eagain@2,tool.restart=eagain@3") as happened:
            os.kill(executor.pid, signal.SIGKILL)
            assert executor.run(calls_of(2))[1].stdout == "2\n"
            assert happened == {"tool.restart=eagain": 3}
        with injected("tool.restart=eagain"):
            os.kill(executor.pid, signal.SIGKILL)
            assert "could not be restarted: [Errno 11]" in executor.run(calls_of(1, "x"))[0].error_message


def test_a_process_that_is_frozen_while_it_starts_is_killed() -> None:
    """A stopped process ends by SIGKILL only."""
    before, stopped = supervisors(), []

    def stop_the_next() -> None:
        stopped.extend(wait_until(lambda: supervisors() - before))
        os.kill(stopped[0], signal.SIGSTOP)

    thread = threading.Thread(target=stop_the_next)
    thread.start()
    with pytest.raises(ExecutorFailed, match="no worker was ready within"):
        executor_of(Supervision(end_s=0.5), start_timeout_s=0.5)
    thread.join()
    assert supervisors() == before and not alive(stopped[0])


def supervisors() -> set[int]:
    """Process ids of the executor processes of this process."""
    return {pid for pid in children(os.getpid()) if "_supervisor" in of_proc(pid, "cmdline")}


def test_a_worker_that_is_stuck_beyond_its_deadline_is_killed() -> None:
    killed: list[str] = []
    owner = object.__new__(_supervisor.Supervisor)
    owner.loop, owner.counts = SimpleNamespace(later=lambda *_: killed.append("waits")), Counter()
    call = SimpleNamespace(n=1, deadline=time.monotonic() + 9, worker=SimpleNamespace(kill=lambda: killed.append("x")))
    owner.running = {1: call}
    owner.overdue(call)
    call.deadline = 0.0
    owner.overdue(call)
    owner.running.clear()
    owner.overdue(call)
    assert killed == ["waits", "x"] and owner.counts == {"workers_stuck": 1}


def test_a_cancelled_cell_leaves_every_queue() -> None:
    def cell(n: int) -> SimpleNamespace:
        return SimpleNamespace(n=n, id=str(n), session="s", worker=None, arrived=0.0)

    owner = object.__new__(_supervisor.Supervisor)
    owner.pools, owner.counts = {"full": SimpleNamespace(pending=deque())}, Counter()
    owner.sessions, cells = _session_table.SessionTable(owner), [cell(n) for n in range(4)]
    owner.calls = {call.id: call for call in cells}
    for call in cells[:2]:
        owner.sessions.add(call)
    owner.cancel(["1"])
    assert [*owner.pools["full"].pending, *owner.sessions.states["s"].queue] == cells[:1]
    owner.cancel(["0"])
    assert not owner.pools["full"].pending and owner.counts["cancelled"] == 2
    owner.sessions.states["s"].running = None
    owner.sessions.states["s"].worker = SimpleNamespace()
    owner.sessions.add(cells[2])
    owner.cancel(["2"])
    assert not owner.sessions.ready and not owner.calls.keys() & {"0", "1", "2"}


def test_trainer_death_leaves_no_process() -> None:
    script = f"""
import os, sys, time
sys.path.insert(0, {os.getcwd()!r})
from grpo_roc_jax.tools import *
executor = make_executor(ToolsConfig(workers=3, roots=1, preload=()))
executor.start()
for i in range(3):
    executor.submit(CodeCall(str(i), {TOOL!r}, {{"code": "while True: pass"}}, None))
executor.submit(CodeCall("s", "jupyter_code", {{"code": "x = 1"}}, "session"))
print(executor.pid, flush=True)
time.sleep(60)
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(trainer.stdout.readline())
    assert wait_until(lambda: len(descendants(pid)) > 5)
    family = descendants(pid) | {pid}
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert wait_until(lambda: not any(map(alive, family)))


def test_close_leaves_no_process_and_no_file(tmp_path, caplog) -> None:
    executor = executor_of(level=WRITING_LEVEL, wall_s=30, scratch_dir=str(tmp_path))
    executor.submit(CodeCall("a", TOOL, {"code": "open('x', 'w').write('y')\nwhile True: pass"}, None))
    [mine] = tmp_path.iterdir()
    if executor.capabilities.level == "L2":
        assert wait_until(lambda: list(mine.glob("w*/x")))
    family = descendants(executor.pid) | {executor.pid}
    assert os.getsid(0) not in map(os.getsid, family), "Ctrl-C in the trainer's terminal would reach them"
    with caplog.at_level("WARNING"):
        executor.close()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING], "it was killed because it did not end"
    assert [pid for pid in family if alive(pid)] == []
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_executor_left_on_disk_is_removed_by_the_next(tmp_path) -> None:
    first = executor_of(scratch_dir=str(tmp_path), level=WRITING_LEVEL)
    [left] = tmp_path.iterdir()
    os.kill(first.pid, signal.SIGKILL)
    first.run(calls_of(1))
    assert wait_until(lambda: not left.exists())
    first.close()
    assert list(tmp_path.iterdir()) == []


def test_small_ulimits() -> None:
    script = f"""
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
resource.setrlimit(resource.RLIMIT_NPROC, (64, 64))
sys.path.insert(0, {os.getcwd()!r})
from grpo_roc_jax.tools import *
with make_executor(ToolsConfig(preload=())) as executor:
    calls = [CodeCall(str(i), {TOOL!r}, {{"code": f"print({{i}})"}}, None) for i in range(60)]
    results = executor.run(calls)
    assert all(r.kind == "ok" and r.stdout == f"{{i}}\\n" for i, r in enumerate(results)), results
    print("workers", executor.capabilities.workers)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 1 <= int(done.stdout.split()[1]) <= 32


def test_cancelled_calls_end_and_deliver_nothing() -> None:
    with executor_of(wall_s=300, cpu_s=300) as executor:
        for i in range(6):
            executor.submit(CodeCall(f"b{i}", TOOL, {"code": "while True: pass"}, None))
        assert wait_until(lambda: executor.stats()["tools/running"] == 4)
        executor.cancel(executor.in_flight)
        assert executor.run(calls_of(4))[0].ok
        assert executor.poll(0.2) == []
        assert (executor.stats()["tools/cancelled"], executor.stats()["tools/running"]) == (6, 0)


def test_queue_time_is_not_charged_and_the_trainer_never_forks(monkeypatch) -> None:
    """The last call waits for longer than a call may take."""
    forks: list[str] = []
    os.register_at_fork(before=lambda: forks.append("fork"))
    monkeypatch.setattr(os, "fork", lambda: forks.append("os.fork"))
    with executor_of(workers=1, wall_s=1.5) as executor:
        results = executor.run(calls_of(4, pause_s=0.6))
    assert [result.kind for result in results] == ["ok"] * 4 and forks == []
    assert results[3].queue_ms > 1500


def test_time_without_a_core_is_not_charged() -> None:
    for used_s, used_lately_s, waited_s, ready, after_s, verdict in (
        (2.0, 2.0, 3.0, True, 5.1, "wall"),  # had its share
        (0.2, 0.2, 4.5, False, 5.1, ""),  # ready to run nearly all the time, and no core: goes on
        (0.02, 0.02, 9.8, False, 14.5, ""),
        (0.02, 0.02, 9.2, False, 14.5, "wall"),
        (0.2, 0.2, 9.8, True, 11.5, "wall"),  # the longer it takes, the less CPU is enough of a share
        (0.2, 0.2, 4.5, False, 9.7, "wall"),  # without the wait it had its 5 s
        (0.2, 0.2, 0.04, False, 5.01, "wall"),  # asleep; every call waits for a moment
        (0.2, 0.2, 0.04, True, 5.01, ""),  # in the middle of a wait that the kernel has not added yet
        (0.0, 0.0, 14.5, True, 15.1, "starved"),  # until the patience is over
        (5.1, 5.1, 0.1, True, 5.3, "cpu"),
        (0.1, 0.1, 0.9, True, 1.0, ""),
        # Where the kernel does not say how long it waited, the clock does.
        (2.0, 2.0, None, True, 5.1, "wall"),  # had its share
        (0.2, 0.2, None, True, 5.1, ""),  # ran whenever it could: starved, goes on
        (0.2, 0.0, None, True, 5.1, "wall"),  # asleep
        (0.3, 0.02, None, True, 7.1, "starved"),  # until the patience is over
        (5.1, 0.1, None, True, 5.3, "cpu"),
        (0.1, 0.1, None, True, 1.0, ""),
    ):
        gap_s = 0.25 if used_lately_s != used_s else after_s
        meter, sent = meter_that_saw(used_s, used_s - used_lately_s, after_s, gap_s=gap_s)
        meter.waited, meter.waited_before = lambda s=waited_s: None if s is None else s + 1.0, 1.0
        meter.ready = lambda over, ready=ready: ready
        assert meter.over() == verdict, (used_s, used_lately_s, waited_s, ready, after_s)
        more_s = [2.0 if waited_s is None else 10.0] if after_s > 5 and verdict in ("", "starved") else []
        assert [(message.n, message.s) for message in sent] == [(7, s) for s in more_s]
        assert meter.deadline <= meter.started + 15.0 or verdict == "starved"


def test_waiting_for_the_disk_is_charged(tmp_path) -> None:
    """A program that loops over reads which miss, or over fsync, hardly uses a core and hardly waits for one."""
    (tmp_path / "self/fdinfo").mkdir(parents=True)
    (tmp_path / "7").mkdir()
    (tmp_path / "self/fdinfo/5").write_text("pos:\t0\nPid:\t7\n")
    (tmp_path / "7/schedstat").write_text("1000 1000000 3")
    late = [(state, 5.1, "wall") for state in "ST"]
    for state, after_s, verdict in (("R", 5.1, ""), ("R", 9.0, ""), ("D", 5.1, ""), ("D", 5.6, "wall"), *late):
        (tmp_path / "7/stat").write_text(f"7 (a program) {state} 1 7 7 0")
        meter, _ = meter_that_saw(0.02, 0.0, after_s, gap_s=after_s)
        meter.worker.host_proc, meter.pidfd, meter.waited_before = os.open(tmp_path, os.O_RDONLY), 5, 0.0
        assert (meter.over(), meter.waited()) == (verdict, 0.001), (state, after_s)
        os.close(meter.worker.host_proc)


def meter_that_saw(used_s: float, used_before_s: float, after_s: float, *, gap_s: float) -> tuple[_meter.Meter, list]:
    """The meter of a call that began `after_s` ago and was last checked `gap_s` ago, and the messages that it sends."""
    limits, sent, now = settings_of(ToolsConfig()).limits, [], time.monotonic()
    meter = _meter.Meter.__new__(_meter.Meter)
    meter.__dict__.update(
        worker=SimpleNamespace(limits=limits, send=sent.append), pid=1, number=7, started=now - after_s, outputs=[],
        limits=limits, cpu_start=0.0, deadline=now - after_s + 5.0, checked=(now - gap_s, used_before_s),
        extended=False, may_slow=False, count_threads=0, files=None, cpu=lambda: used_s, step=0.01,
    )  # fmt: skip
    return meter, sent


@pytest.mark.parametrize("level", ["best", "L2"])
def test_long_calls_get_a_lower_priority_and_sessions_do_not(level: str) -> None:
    require(level)
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    if priority == 19:
        pytest.skip("nothing is below niceness 19")
    with executor_of(level=level, workers=2, wall_s=100.0, cpu_s=100.0) as executor:
        known, long_s = descendants(executor.pid), 10 * _meter.LONG_S
        executor.submit(CodeCall("cell", "jupyter_code", {"code": "while True: pass"}, "s"))
        [looping] = wait_until(lambda: {p for p in descendants(executor.pid) - known if _meter.cpu_time(p) > long_s})
        executor.submit(CodeCall("call", TOOL, {"code": "while True: pass"}, None))
        [slowed] = wait_until(
            lambda: [p for p in filter(alive, descendants(executor.pid)) if niceness(p) not in (0, priority)]
        )
        assert niceness(slowed) == min(19, priority + _meter.LONG_NICE)
        assert slowed != looping and niceness(looping) == priority


def niceness(pid: int) -> int:
    return int(stat_of(pid)[16])


@pytest.mark.slow
def test_soak_10_000_calls_stay_flat() -> None:
    mixed, seen = ["print(1)", "1/0", "open('f', 'w').write('x')", "print('y' * 100000)", "import os; os._exit(1)"], []
    with executor_of() as executor:
        for part in range(9):
            codes = mixed * (200 if part else 400)
            calls = [CodeCall(f"p{part}-{i}", TOOL, {"code": code}, None) for i, code in enumerate(codes)]
            assert not any(result.infra for result in executor.run(calls))
            time.sleep(0 if part else 2)
            seen.append(footprint(executor))
        time.sleep(2)
        before, after = seen[0], footprint(executor)
    assert after["processes"] == before["processes"]
    assert after["descriptors"] <= before["descriptors"] + 4
    assert after["executor kb"] <= before["executor kb"] + 8192, seen
    # This process also holds what other tests left, and grows and shrinks by some MB at once: a leak grows always.
    growth = [later["trainer kb"] - earlier["trainer kb"] for earlier, later in itertools.pairwise(seen)]
    assert statistics.median(growth) <= 512, seen


def footprint(executor) -> dict[str, int]:
    """Processes and descriptors of the trainer and the executor's family, and memory of the two."""
    family = [executor.pid, *descendants(executor.pid)]
    files = len(os.listdir("/proc/self/fd"))
    for pid in family:
        with contextlib.suppress(OSError):
            files += len(os.listdir(f"/proc/{pid}/fd"))
    memory = {"trainer kb": resident_kb(os.getpid()), "executor kb": resident_kb(executor.pid)}
    return {"processes": len(family), "descriptors": files, **memory}
