"""Measures what a running program has used and compares it with the limits. Standard library only."""

import contextlib
import os
import resource
import time

from ._messages import DeadlineExtended

FIRST_TICK_S, LONGEST_TICK_S = 0.004, 0.05
PATIENCE_S = 10.0
"""Time beyond its wall-clock limit that a starved call may take, if the kernel reports its wait for a core."""
BLIND_PATIENCE_S = 2.0
"""The same if the kernel does not report it."""
STARVED_SHARE = 0.02
"""In that case, a call that had less than this share of a core since the last check counts as asleep."""
LONGEST_CHECK_S = 0.5
"""Longest time between two checks of a starved call."""
LEAST_WAIT_S = 0.05
"""A shorter wait for a core does not prolong a call."""
LONG_S, LONG_NICE = 0.02, 10
"""CPU time after which a call gets a lower priority, and what is added to its niceness. Most calls need a quarter of
that time; on busy cores each of them would have to share with endless loops otherwise."""
WALK_S = 0.01
"""Longest time spent on adding up the files of a scratch directory."""


def read_at(directory: int | None, path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def read_of(proc: int, pidfd: int, name: str) -> bytes:
    """A file of a process in the executor's /proc, the directory `proc`, where it has another process id."""
    known = read_at(proc, f"self/fdinfo/{pidfd}").partition(b"\nPid:")[2]
    return read_at(proc, f"{int(known.split()[0])}/{name}")


def resident(proc: int, pidfd: int) -> int:
    """Resident memory of a process, in bytes; 0 if it is gone."""
    try:
        return int(read_of(proc, pidfd, "statm").split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def cpu_time(pid: int) -> float:
    """CPU seconds of a process; 0 if it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # the kernel's name for the CPU clock of another process
    except OSError:
        return 0.0


class Meter:
    """Compares what a running child of the `Worker` has used with its limits."""

    def __init__(self, worker, pid: int, pidfd: int, number: int, started: float, outputs: list[int]) -> None:
        self.worker, self.pid, self.pidfd, self.number = worker, pid, pidfd, number
        self.started, self.outputs = started, outputs
        self.limits = worker.limits
        self.cpu_start = self.cpu()
        self.step, self.deadline = FIRST_TICK_S, started + self.limits.wall_s
        self.checked = (started, self.cpu_start)
        self.waited_before = (self.waited() or 0.0) if worker.in_session else 0.0
        # The time of the fork is not charged to the program either.
        self.waited_before -= time.monotonic() - started
        self.extended = False
        self.may_slow = not worker.in_session
        """Whether its priority can still be lowered; never that of sessions, since it could not be raised again."""
        namespaces = worker.plan.namespaces
        self.count_threads = self.limits.threads if worker.proc and not namespaces else 0
        self.sum_files = not namespaces and worker.plan.rank != 1
        self.device = os.stat(worker.scratch).st_dev if self.sum_files else 0

    def cpu(self) -> float:
        return cpu_time(self.pid)

    def waited(self) -> float | None:
        """Seconds that the first thread waited for a core, counted when a wait ends; None if not reported."""
        try:
            return int(read_of(self.worker.host_proc, self.pidfd, "schedstat").split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return None

    def tick(self) -> float:
        """Seconds until the next check."""
        self.step = min(2 * self.step, LONGEST_TICK_S)
        return max(0.0, min(self.step, self.deadline - time.monotonic()))

    def over(self) -> str:
        now, used = time.monotonic(), self.cpu() - self.cpu_start
        if used > self.limits.cpu_s:
            return "cpu"
        if used > LONG_S and self.may_slow:
            self.may_slow = False
            with contextlib.suppress(OSError):
                own = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PGRP, self.pid, min(19, own + LONG_NICE))
        kill_bytes = self.limits.output_kill_mb << 20
        if any(os.fstat(fd).st_size > kill_bytes for fd in self.outputs):
            return "output"
        if now >= self.deadline:
            waited, patience = self.waited(), PATIENCE_S
            if waited is None:
                goes_on, patience = self.starved(now, used), BLIND_PATIENCE_S
            else:
                goes_on = self.kept_waiting(now, used, waited - self.waited_before)
            if not goes_on:
                return "wall"
            if now >= self.started + self.limits.wall_s + patience:
                return "starved"
        if self.count_threads and self.thread_count() > self.count_threads:
            return "threads"
        if self.sum_files and self.files_over():
            return "scratch"
        return ""

    def had_its_share(self, used: float, over: float = 0.0) -> bool:
        """Whether it had enough CPU time for its time-out to be its own; else every endless loop would be prolonged.

        The longer it is over its limit, the less is enough; else such loops would occupy an overloaded host's workers.
        """
        return used >= min(self.limits.cpu_floor_s, self.limits.wall_s / 10) * (1 - over / PATIENCE_S)

    def kept_waiting(self, now: float, used: float, waited: float) -> bool:
        """Whether it is within its limit if the time in which it waited for a core is not counted."""
        over = now - self.started - self.limits.wall_s
        if over < PATIENCE_S:
            if self.had_its_share(used, over) or (waited - over < LEAST_WAIT_S and not self.ready()):
                return False
            self.deadline = now + min(max(waited - over, LEAST_WAIT_S), LONGEST_CHECK_S, PATIENCE_S - over)
        self.extend(PATIENCE_S)
        return True

    def ready(self) -> bool:
        """Whether its first thread is not asleep: it runs, or waits for a core or for the kernel."""
        try:
            state = read_of(self.worker.host_proc, self.pidfd, "stat").rpartition(b")")[2].split()[0]
            return state in (b"R", b"D")
        except (OSError, IndexError, ValueError):
            return False

    def starved(self, now: float, used: float) -> bool:
        """Whether it seems not to have ended because of the host's load; if so, its deadline is extended."""
        then, before = self.checked
        self.checked = (now, used)
        share = (used - before) / max(now - then, 1e-3)
        if self.had_its_share(used) or share < STARVED_SHARE:
            return False
        self.extend(BLIND_PATIENCE_S)
        self.deadline = now + 0.25
        return True

    def extend(self, seconds: float) -> None:
        """Report to the executor process, once, how much later the answer may come."""
        if not self.extended:
            self.extended = True
            self.worker.send(DeadlineExtended(self.number, seconds))

    def thread_count(self) -> int:
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                return int(file.read().rpartition(b")")[2].split()[17])
        except (OSError, IndexError, ValueError):
            return 0

    def unlinked(self) -> int:
        """Bytes of open files without a name. Mapped ones are bounded by the address space."""
        size, directory = 0, f"/proc/{self.pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                with contextlib.suppress(OSError):
                    info = os.stat(f"{directory}/{name}")
                    size += info.st_blocks * 512 if info.st_nlink == 0 and info.st_dev == self.device else 0
        return size

    def files_over(self) -> bool:
        """Whether the files in the scratch directory exceed a limit; only a mount of its own would enforce that.

        A tree that takes too long to walk is judged by the bytes written instead.
        """
        size, count = self.unlinked(), 0
        todo, until = [self.worker.scratch], time.monotonic() + WALK_S
        while todo:
            try:
                with os.scandir(todo.pop()) as entries:
                    for entry in entries:
                        count += 1
                        if entry.is_dir(follow_symlinks=False):
                            todo.append(entry.path)
                        else:
                            size += entry.stat(follow_symlinks=False).st_blocks * 512
            except OSError:
                continue
            if size > self.limits.scratch_mb << 20 or count > self.limits.scratch_files:
                return True
            if time.monotonic() > until:
                return self.written() > 2 * (self.limits.scratch_mb + self.limits.output_kill_mb) << 20
        return False

    def written(self) -> int:
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{self.pid}/io") as file:
            numbers = dict(line.split(": ") for line in file.read().splitlines())
            return max(int(numbers["wchar"]), int(numbers["write_bytes"]))
        return 0
