"""What a running program has used, against its limits: when a worker looks, and what it makes of it."""

import contextlib
import os
import time

FIRST_TICK_S, LONGEST_TICK_S = 0.004, 0.05
PATIENCE_S = 10.0
"""How much longer than its wall-clock limit a starved call may take, where the kernel says how long it waited."""
BLIND_PATIENCE_S = 2.0
"""The same where it does not."""
STARVED_SHARE = 0.02
"""Without the kernel's word, a call that had less than this share of a core since the last look is asleep."""
LONGEST_LOOK_S = 0.5
LEAST_WAIT_S = 0.05
"""A wait for a core shorter than this is not worth another look."""
LONG_S, LONG_NICE = 0.02, 10
"""CPU time after which a call runs behind those that have just begun, and how far behind. Most calls need a quarter of
that time; on busy cores endless loops would make each of them wait for turns."""
WALK_S = 0.01
"""Time spent at most on adding up the files of a scratch directory."""


def read_at(directory: int, path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


class Meter:
    """What a running child has used, against its limits.

    Args:
        worker: The `Worker` that runs it.
    """

    def __init__(self, worker, pid: int, pidfd: int, number: int, started: float, outputs: list[int]) -> None:
        self.worker, self.pid, self.pidfd, self.number = worker, pid, pidfd, number
        self.started, self.outputs = started, outputs
        self.limits = worker.limits
        self.clock = (~pid << 3) | 2
        """The kernel's name for the CPU clock of another process."""
        self.cpu_start = self.cpu()
        self.step = FIRST_TICK_S
        self.deadline = started + self.limits["wall_s"]
        self.looked = (started, self.cpu_start)
        self.waited_before = (self.waited() or 0.0) if worker.in_session else 0.0
        # What the fork took is no time of the program's either.
        self.waited_before -= time.monotonic() - started
        self.extended = False
        self.behind = worker.in_session
        """Whether it runs behind others already; sessions never do, since that could not be taken back."""
        threads = self.limits["threads"]
        self.count_threads = threads if worker.proc and not worker.plan["namespaces"] else 0
        self.sum_files = not worker.plan["namespaces"] and worker.plan["rank"] != 1
        self.device = os.stat(worker.scratch).st_dev if self.sum_files else 0

    def cpu(self) -> float:
        try:
            return time.clock_gettime(self.clock)
        except OSError:
            return 0.0

    def waited(self) -> float | None:
        """Seconds that the child's first thread was ready to run and had no core; None where nobody says.

        The kernel adds a wait when it ends.
        """
        try:
            return int(self.told("schedstat").split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return None

    def told(self, name: str) -> bytes:
        """A file of the child's in the executor's /proc, where it has another process id."""
        known = read_at(self.worker.host_proc, f"self/fdinfo/{self.pidfd}").partition(b"\nPid:")[2]
        return read_at(self.worker.host_proc, f"{int(known.split()[0])}/{name}")

    def tick(self) -> float:
        """Seconds until the next look."""
        self.step = min(2 * self.step, LONGEST_TICK_S)
        return max(0.0, min(self.step, self.deadline - time.monotonic()))

    def over(self) -> str:
        """The limit that is exceeded now, or ""."""
        now, used = time.monotonic(), self.cpu() - self.cpu_start
        if used > self.limits["cpu_s"]:
            return "cpu"
        if used > LONG_S and not self.behind:
            self.behind = True
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PGRP, self.pid, LONG_NICE)
        if now >= self.deadline:
            waited, patience = self.waited(), PATIENCE_S
            if waited is None:
                goes_on, patience = self.starved(now, used), BLIND_PATIENCE_S
            else:
                goes_on = self.kept_waiting(now, used, waited - self.waited_before)
            if not goes_on:
                return "wall"
            if now >= self.started + self.limits["wall_s"] + patience:
                return "starved"
        kill_bytes = self.limits["output_kill_mb"] << 20
        for fd in self.outputs:
            if os.fstat(fd).st_size > kill_bytes:
                return "output"
        if self.count_threads and self.thread_count() > self.count_threads:
            return "threads"
        if self.sum_files and self.files_over():
            return "scratch"
        return ""

    def had_its_share(self, used: float, over: float = 0.0) -> bool:
        """Whether it came to run so long that its time-out is its own; else every endless loop would be prolonged.

        The longer it is over its limit, the less will do: on a host that has too little for all, endless loops that
        all wait for their share would keep the workers from the others.
        """
        return used >= min(self.limits["cpu_floor_s"], self.limits["wall_s"] / 10) * (1 - over / PATIENCE_S)

    def kept_waiting(self, now: float, used: float, waited: float) -> bool:
        """Whether its limit is not over yet if the time in which it only waited for a core does not count."""
        over = now - self.started - self.limits["wall_s"]
        if over < PATIENCE_S:
            if self.had_its_share(used, over) or (waited - over < LEAST_WAIT_S and not self.ready()):
                return False
            self.deadline = now + min(max(waited - over, LEAST_WAIT_S), LONGEST_LOOK_S, PATIENCE_S - over)
        self.extend(PATIENCE_S)
        return True

    def ready(self) -> bool:
        """Whether its first thread is not asleep: it runs, waits for a core, or for the kernel."""
        try:
            return self.told("stat").rpartition(b")")[2].split()[0] in (b"R", b"D")
        except (OSError, IndexError, ValueError):
            return False

    def starved(self, now: float, used: float) -> bool:
        """Whether the host, not the program, seems to be why it is not done; then it gets another while."""
        then, before = self.looked
        self.looked = (now, used)
        share = (used - before) / max(now - then, 1e-3)
        if self.had_its_share(used) or share < STARVED_SHARE:
            return False
        self.extend(BLIND_PATIENCE_S)
        self.deadline = now + 0.25
        return True

    def extend(self, seconds: float) -> None:
        """Tell the executor process, once, that the answer may be so much later."""
        if not self.extended:
            self.extended = True
            self.worker.send({"op": "extended", "n": self.number, "s": seconds})

    def thread_count(self) -> int:
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                return int(file.read().rpartition(b")")[2].split()[17])
        except (OSError, IndexError, ValueError):
            return 0

    def unlinked(self) -> int:
        """Bytes of files that are open but have no name any more. Mapped ones are bounded by the address space."""
        size, directory = 0, f"/proc/{self.pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                with contextlib.suppress(OSError):
                    info = os.stat(f"{directory}/{name}")
                    size += info.st_blocks * 512 if info.st_nlink == 0 and info.st_dev == self.device else 0
        return size

    def files_over(self) -> bool:
        """Size and number of files below the scratch directory; without a mount of its own nobody else counts them.

        A tree made to be slow to walk is judged by what was written instead.
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
            if size > self.limits["scratch_mb"] << 20 or count > self.limits["scratch_files"]:
                return True
            if time.monotonic() > until:
                return self.written() > 2 * (self.limits["scratch_mb"] + self.limits["output_kill_mb"]) << 20
        return False

    def written(self) -> int:
        """Bytes written so far, to whatever."""
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{self.pid}/io") as file:
            numbers = dict(line.split(": ") for line in file.read().splitlines())
            return max(int(numbers["wchar"]), int(numbers["write_bytes"]))
        return 0
