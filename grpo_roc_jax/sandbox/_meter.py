"""Measures what a running program has used and compares it with the limits. Standard library only."""

import contextlib
import os
import resource
import signal
import stat
import time
from collections.abc import Callable

from ._messages import DeadlineExtended
from ._wire import file_size, make_memory_file

FIRST_TICK_S, LONGEST_TICK_S = 0.004, 0.05
PATIENCE_S = 10.0
"""Seconds beyond its wall-clock limit that a starved call may take, if the kernel reports its wait for a core."""
BLIND_PATIENCE_S = 2.0
"""Seconds as above if the kernel does not report the wait."""
KERNEL_PATIENCE_S = 0.5
"""Seconds beyond its limit for which a call may wait inside the kernel."""
STARVED_SHARE = 0.02
"""In that case, a call that had less than this share of a core since the last check counts as asleep."""
LONGEST_CHECK_S = 0.5
"""Longest time between two checks of a starved call."""
LEAST_WAIT_S = 0.05
"""A shorter wait for a core does not prolong a call."""
LONG_S, LONG_NICE = 0.02, 10
"""CPU time after which a call gets a lower priority, and what is added to its niceness. Most calls need a quarter of
that time; on busy cores each of them would have to share with endless loops otherwise."""
THOROUGH_S, THOROUGH_CPU_S, THOROUGH_BYTES = 0.25, 0.02, 1 << 20
"""Seconds between two thorough checks of the files of a running program. At the end of a cell there is one only if the
session has used this much CPU time, or written this many bytes, since the last one: less cannot take much space."""
STOP_S = 0.5
"""Longest time in seconds until a program counts as stopped: a thread that waits for the disk stops later."""


def children_of(parent: int, proc: int | None = None) -> list[int]:
    """Process ids of a process's children, from /proc or another such directory that is open as `proc`."""
    parent_bytes, children = str(parent).encode(), []
    for name in os.listdir("/proc" if proc is None else proc):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                stat_line = read_at(proc, f"{name}/stat" if proc is not None else f"/proc/{name}/stat")
                if stat_line.rpartition(b")")[2].split()[1] == parent_bytes:
                    children.append(int(name))
    return children


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

    def __init__(
        self, worker, pid: int, pidfd: int, number: int, started: float, outputs: list[int],
        files: "FileCount | None", unpaid_s: float = 0.0,
    ) -> None:  # fmt: skip
        """`unpaid_s`: CPU time that the child used before this call, and that nothing has been charged for."""
        self.worker, self.pid, self.pidfd, self.number = worker, pid, pidfd, number
        self.started, self.outputs = started, outputs
        self.limits = worker.limits
        self.cpu_start = self.cpu() - unpaid_s
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
        self.files = files

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
                niceness = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PGRP, self.pid, min(19, niceness + LONG_NICE))
        kill_bytes = self.limits.output_kill_mb << 20
        if any(file_size(fd) > kill_bytes for fd in self.outputs):
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
        if self.files and self.worker.is_armed():
            why = self.files.over()
            if self.files.grows_fast:
                self.step = FIRST_TICK_S
            return why
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
            if self.had_its_share(used, over) or (waited - over < LEAST_WAIT_S and not self.ready(over)):
                return False
            self.deadline = now + min(max(waited - over, LEAST_WAIT_S), LONGEST_CHECK_S, PATIENCE_S - over)
        self.extend(PATIENCE_S)
        return True

    def ready(self, over: float) -> bool:
        """Whether its first thread runs or waits for a core, or for a moment for the kernel, rather than sleeps.

        A busy host makes threads wait for locks of the kernel, and a program can make its own wait for the disk.
        """
        try:
            state = read_of(self.worker.host_proc, self.pidfd, "stat").rpartition(b")")[2].split()[0]
            return state == b"R" or (state == b"D" and over < KERNEL_PATIENCE_S)
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


class FileCount:
    """Adds up the files of a program if no mount of its own limits them: at L0 and L2.

    A running program may move, hide and delete files while they are counted. A count that finds an error or too much is
    therefore repeated while the program is stopped; what cannot be measured even then counts as too much.

    Args:
        pid: The child of the `Worker`.
        copy: Process id of the copy of a session, which may have deleted files open too; 0 if there is none.
        drop_copy: Ends the copy; called before the session counts as over its limit.
    """

    def __init__(
        self, worker, pid: int, copy: Callable[[], int] = lambda: 0, drop_copy: Callable[[], None] = lambda: None
    ) -> None:
        self.worker, self.pid, self.copy, self.drop_copy = worker, pid, copy, drop_copy
        self.limits, self.several = worker.limits, worker.plan.rank == 0 or worker.limits.processes > 1
        self.device = os.stat(worker.scratch).st_dev
        self.memory_device, self.private = None, 0
        if worker.plan.rank == 0:  # where programs can make memory files of their own
            probe = make_memory_file()
            self.memory_device, self.private = os.fstat(probe).st_dev, private_memory(os.getpid())
            os.close(probe)
        self.size, self.grows_fast = 0, False
        # A process that has just been forked has written nothing and used no core.
        self.thorough_at, self.written_then, self.cpu_then = time.monotonic(), 0, 0.0

    def note_thorough(self) -> None:
        self.thorough_at, self.written_then, self.cpu_then = time.monotonic(), self.written(), cpu_time(self.pid)

    def over(self) -> str:
        """The limit that the running program exceeds, or ""."""
        written = self.written() - self.written_then
        thorough = time.monotonic() - self.thorough_at >= THOROUGH_S
        if 2 * written <= self.limits.scratch_mb << 20 and not self.look(thorough=thorough):
            return ""
        stopped = self.stop()
        try:
            return self.judge() if stopped else ""
        finally:
            for pid in stopped:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)

    def over_at_rest(self) -> str:
        """Like `over`, for a session that has been asked to stop. Most cells do too little to take much space."""
        spent, written = cpu_time(self.pid) - self.cpu_then, self.written() - self.written_then
        if spent < THOROUGH_CPU_S and written < THOROUGH_BYTES:
            return ""
        return self.judge() if await_stop(self.pid) else ""

    def over_at_end(self) -> str:
        """Like `over`, for a program that has ended, with all its processes."""
        try:
            return self.limit_of(*self.named())
        except OSError:
            return "scratch"

    def stop(self) -> list[int]:
        """Stop the program; returns its processes, none if it has ended."""
        pids: list[int] = []
        for _ in range(2 if self.several else 1):  # one may have forked another meanwhile
            for pid in set(self.processes()) - {*pids, self.copy()}:
                pids.append(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            if not await_stop(pid) and pid == self.pid:
                return []
        return pids

    def processes(self) -> list[int]:
        pids = [self.pid, *filter(None, [self.copy()])]
        if self.several:
            todo = [os.getpid()]
            while todo:
                below = children_of(todo.pop())
                todo += below
                pids += [pid for pid in below if pid not in pids]
        return pids

    def judge(self) -> str:
        """The limit that the files of a stopped program exceed, also without the copy of a session, or ""."""
        why = self.look(thorough=True)
        if why and self.copy():
            self.drop_copy()
            why = self.look(thorough=True)
        return why

    def look(self, *, thorough: bool) -> str:
        """The limit that the files seem to exceed, or ""; a `thorough` look finds those that only a mapping holds."""
        try:
            sizes, count = self.named()
            memory_bytes = 0
            for pid in self.processes() if thorough else [self.pid]:
                try:
                    memory_bytes += self.deleted(pid, sizes, thorough=thorough)
                except OSError:
                    if pid == self.pid or not has_ended(str(pid)):
                        raise
            why = self.limit_of(sizes, count)
            if not why and self.memory_device is not None:
                used = private_memory(self.pid) - self.private + memory_bytes
                why = "memory" if memory_bytes and used > self.limits.memory_mb << 20 else ""
        except OSError:
            return "scratch"
        if thorough and not why:
            self.note_thorough()
        return why

    def limit_of(self, sizes: dict[int, int], count: int) -> str:
        size, limit = sum(sizes.values()), self.limits.scratch_mb << 20
        self.grows_fast, self.size = size - self.size > limit // 8, size
        return "scratch" if size > limit or count > self.limits.scratch_files else ""

    def named(self) -> tuple[dict[int, int], int]:
        """Bytes of each file in the scratch directory by inode, and their number; the walk ends beyond the limit.

        Raises OSError if something cannot be measured, or has moved.
        """
        sizes, count, todo = {}, 0, [self.worker.scratch]
        while todo and count <= self.limits.scratch_files:
            with os.scandir(todo.pop()) as entries:
                for entry in entries:
                    count += 1
                    info = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(info.st_mode):
                        if info.st_ino in sizes:
                            raise OSError("a directory has moved")
                        todo.append(entry.path)
                    sizes[info.st_ino] = 512 * info.st_blocks
        return sizes, count

    def deleted(self, pid: int, sizes: dict[int, int], *, thorough: bool) -> int:
        """Add the files without a name that a process holds to `sizes`; returns the bytes of its memory files."""
        memory_files: dict[int, int] = {}
        for table in self.tables(pid) if thorough else [f"/proc/{pid}/fd"]:
            for name in os.listdir(table):
                info = os.stat(f"{table}/{name}")
                if info.st_nlink == 0 and stat.S_ISREG(info.st_mode):
                    if info.st_dev == self.device:
                        sizes[info.st_ino] = 512 * info.st_blocks
                    elif info.st_dev == self.memory_device:
                        memory_files[info.st_ino] = 512 * info.st_blocks
        if thorough:
            self.add_mapped(pid, sizes)
        return sum(memory_files.values())

    def tables(self, pid: int) -> list[str]:
        """Directories of the descriptors of a process. At L0 its threads may have tables of their own."""
        threads = os.listdir(f"/proc/{pid}/task")
        alive = [f"/proc/{pid}/task/{thread}/fd" for thread in threads if not has_ended(f"{pid}/task/{thread}")]
        return alive if self.worker.plan.rank == 0 else alive[:1]

    def add_mapped(self, pid: int, sizes: dict[int, int]) -> None:
        """Add deleted files that are mapped. Of those without a descriptor no size is known: they count as largest."""
        with open(f"/proc/{pid}/maps", "rb", buffering=1 << 18) as file:
            text = file.read()
        if b" (deleted)\n" not in text:
            return
        top = os.fsencode(os.path.realpath(self.worker.scratch)) + b"/"
        for line in text.splitlines():
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[5].startswith(top) and fields[5].endswith(b" (deleted)"):
                sizes.setdefault(int(fields[4]), self.limits.file_mb << 20)

    def written(self) -> int:
        """Bytes that the process has written."""
        try:
            words = read_at(None, f"/proc/{self.pid}/io").split()
            return max(int(words[words.index(name) + 1]) for name in (b"wchar:", b"write_bytes:"))
        except (OSError, ValueError, IndexError):
            return 0


def private_memory(pid: int) -> int:
    """Resident memory of a process that belongs to no file, in bytes."""
    resident_pages, shared_pages = read_at(None, f"/proc/{pid}/statm").split()[1:3]
    return (int(resident_pages) - int(shared_pages)) * resource.getpagesize()


def has_ended(path: str) -> bool:
    """Whether a process or thread below /proc has ended or is gone."""
    try:
        return read_at(None, f"/proc/{path}/stat").rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


def await_stop(pid: int) -> bool:
    """Wait until a process that got SIGSTOP stands still, if it does so in time; False if it has ended."""
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        try:
            change = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it is no child of this process
            if has_ended(str(pid)):
                return False
            if read_at(None, f"/proc/{pid}/stat").rpartition(b")")[2].split()[0] == b"T":
                return True
        else:
            if change:
                return change.si_code == os.CLD_STOPPED
        time.sleep(0.0001)
    return True
