"""A worker: forks a locked-down child per call, watches it, ends it, cleans up; standard library only.

No program text ever enters this process: it goes in a memory file from the executor straight to the child. Otherwise a
later child would find earlier programs in the heap it inherits.
"""

import contextlib
import errno
import fcntl
import math
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

from . import _kernel, _spaces, _wire, sandbox

CONTROL, LIFE = "control", "life"
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
ARMED = 1
TRASH = "trash"
"""Below the base directory: what workers moved away, for the executor process to delete while nobody waits."""


class Killed(Exception):
    """The executor or the root is gone, or told us to end."""


class Worker:
    """One slot: its isolation, its scratch directory and the child that it runs now.

    Args:
        life: Descriptor that reports when the root is gone.
        harness: The module that runs beside programs.
        session_class: What serves a session, from the first cell on.
    """

    def __init__(self, plan: dict, slot: int, control: socket.socket, life: int, harness, session_class) -> None:
        self.plan, self.slot, self.control, self.life, self.harness = plan, slot, control, life, harness
        self.session_class = session_class
        self.limits = plan["limits"]
        self.base = sandbox.base_memory()
        self.uid = None
        self.ruleset = -1
        self.filters = {}
        self.phase = mmap.mmap(-1, 4096)
        """Shared with the child until its lock-down is complete: whether it got that far, or why not."""
        self.null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self.host_proc = high(os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        """The /proc of the executor, from before this process has one of its own, where children are hidden from it."""
        self.scratch = ""
        self.scratch_mark = None
        self.renewals = 0
        self.in_session = False
        self.proc = os.path.isdir("/proc/self")

    def set_up(self) -> None:
        """Reach the plan's level, in the order that works."""
        plan = self.plan
        if plan["namespaces"]:
            self.proc = _spaces.build_root(plan["base"], plan["read"], proc=bool(plan["landlock"]))
            self.uid = plan["uid_base"] + self.slot if plan["own_uid"] else _spaces.INNER_ID
        self.new_scratch()
        if plan["seccomp"]:
            self.filters = {session: sandbox.make_filter(plan, session=session) for session in (False, True)}
        # Programs need not find our modules; done here once, since looking through the names in every child would
        # write to the pages of all of them.
        for name in [name for name in sys.modules if name.startswith(__package__)]:
            del sys.modules[name]
        _kernel.empty_bounding_set()
        _kernel.set_capabilities(_spaces.KEPT if plan["namespaces"] else ())
        # Programs of the same user cannot read this process then; children switch it on again for themselves.
        _kernel.prctl("prctl(PR_SET_DUMPABLE)", _kernel.PR_SET_DUMPABLE, 0)

    def new_scratch(self) -> None:
        """An empty scratch directory; the old one goes as a whole, since cleaning in place can be made to fail."""
        if self.plan["namespaces"]:
            if self.scratch:
                _kernel.umount("umount of scratch", _spaces.SCRATCH)
            self.scratch = _spaces.SCRATCH
            _spaces.mount_scratch(self.limits["scratch_mb"], self.limits["scratch_files"], self.uid)
        else:
            old, self.renewals = self.scratch, self.renewals + 1
            self.scratch = os.path.join(self.plan["base"], f"w{self.slot}-{os.getpid()}-{self.renewals}")
            os.mkdir(self.scratch, 0o700)
            if old:
                os.rename(old, os.path.join(self.plan["base"], TRASH, os.path.basename(old)))
        self.scratch_mark = self.mark()
        if self.plan["landlock"]:
            if self.ruleset >= 0:
                os.close(self.ruleset)
            self.ruleset = high(sandbox.make_ruleset(self.plan, self.scratch))

    def mark(self) -> tuple:
        """Changes whenever something was done to the scratch directory."""
        info = os.stat(self.scratch)
        return (
            info.st_ino,
            info.st_ctime_ns,
            info.st_mtime_ns,
            info.st_mode,
            info.st_nlink,
            len(os.listdir(self.scratch)),
        )

    def clean(self) -> None:
        """Renew the scratch directory if it was touched."""
        try:
            touched = self.mark() != self.scratch_mark
        except OSError:
            touched = True
        if touched:
            self.new_scratch()

    def serve(self) -> None:
        """Run calls until the connection ends."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(self.life, select.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self.life in ready:
                return
            message, fds = _wire.receive(self.control)
            if message is None:
                return
            if message["op"] == "call":
                self.call(message, fds)
            elif message["op"] == "cell":
                self.in_session = True
                self.session_class(self).serve(message, fds)
                return

    def call(self, message: dict, fds: list[int]) -> None:
        """Fork, watch, reap, report, and only then clean: the answer does not wait for that."""
        started = time.monotonic()
        self.phase[:2] = b"\0\0"
        pid = self.fork()
        if pid == 0:
            self.become_program(message, fds)
        os.close(fds[0])
        os.close(fds[1])
        if pid < 0:
            reply = {"op": "refused", "n": message["n"], "errno": -pid}
        else:
            why = self.watch(pid, message["n"], started, fds[2:])
            reply = self.reap(pid, why, started) | {"op": "done", "n": message["n"]}
            self.sweep()
        for fd in fds[2:]:
            os.close(fd)
        self.send(reply)
        self.clean()

    def send(self, message: dict) -> None:
        try:
            _wire.send(self.control, message)
        except OSError as error:
            raise Killed from error

    def fork(self) -> int:
        """A child, or minus the errno if the host has no process left to give."""
        for attempt in range(6):
            try:
                return os.fork()
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ENOMEM):
                    return -error.errno
                time.sleep(0.005 * 2**attempt)
        return -errno.EAGAIN

    def reap(self, pid: int, why: str, started: float) -> dict:
        if not self.in_session and not self.plan["namespaces"]:
            # Before the id is free again: the rest of its process group.
            with contextlib.suppress(OSError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                os.killpg(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        fault = ""
        if self.phase[0] != ARMED:
            size = int.from_bytes(self.phase[2:4], "little")
            fault = self.phase[4 : 4 + size].decode(errors="replace") or "ended before its lock-down was complete"
        return {
            "status": status, "why": why, "fault": fault, "rss": usage.ru_maxrss,
            "wall": time.monotonic() - started, "cpu": usage.ru_utime + usage.ru_stime,
        }  # fmt: skip

    def become_child(self, fds: list[int], targets: list[int]) -> None:
        """Descriptors, directory and environment of a child; nothing of the worker stays open."""
        # A group to be killed as one, in the session of the executor: Linux gives each session an equal share of the
        # cores (autogroup), so ten endless loops with sessions of their own would leave the executor a twelfth.
        os.setpgid(0, 0)
        moved = list(fds)
        while min(moved) < len(targets):
            moved = [os.dup(fd) if fd < len(targets) else fd for fd in moved]
        for fd, target in zip(moved, targets, strict=True):
            os.dup2(fd, target, inheritable=True)

    def become_program(self, message: dict, fds: list[int]) -> None:
        """The child of a stateless call; never returns."""
        try:
            harness = self.harness
            source = harness.read_all(fds[0])
            self.become_child(fds[1:], [0, 1, 2, harness.RESULT_FD])
            keep = self.ruleset
            if keep >= 0:
                keep = os.dup2(keep, 4)
            os.closerange(max(keep, harness.RESULT_FD) + 1, 1 << 16)
            self.enter_sandbox(keep, session=False)
            harness.run_program(source, self.settings(message))
        except BaseException as error:
            self.note_fault(error)
        finally:
            os._exit(98)

    def settings(self, message: dict) -> dict:
        """What the harness must know."""
        denied = () if self.plan["rank"] == 0 else (errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOSYS)
        return {
            "output_bytes": self.limits["output_kb"] << 10, "kill_bytes": self.limits["output_kill_mb"] << 20,
            "denied": denied, "seed": message.get("seed", 0),
        }  # fmt: skip

    def enter_sandbox(self, ruleset: int, *, session: bool) -> int:
        """Scratch directory, environment, lock-down; a listener's descriptor for sessions."""
        os.chdir(self.scratch)
        os.umask(0o077)
        for name in ("HOME", "TMPDIR", "PWD"):
            os.environ[name] = self.scratch
        sys.argv = [""]
        filter_ = self.filters.get(session)
        listener = sandbox.lock_down(self.plan, self.base, self.uid, ruleset, filter_, session=session)
        if ruleset >= 0:
            os.close(ruleset)
        self.phase[0] = ARMED
        self.phase.close()
        return listener

    def note_fault(self, error: BaseException) -> None:
        """Leave the reason where the worker looks, unless the program had begun."""
        with contextlib.suppress(BaseException):
            text = f"{type(error).__name__}: {error}".encode()[:2000]
            self.phase[2:4] = len(text).to_bytes(2, "little")
            self.phase[4 : 4 + len(text)] = text

    def watch(self, pid: int, number: int, started: float, outputs: list[int], extra: dict | None = None) -> str:
        """Wait for the child's end, and end it when a limit says so.

        Args:
            number: Of the call, to tell a late cancellation from one that is meant.
            outputs: Descriptors of stdout, stderr and record, whose sizes are limited.
            extra: Descriptor -> function for further events; a function that returns text ends the wait with it.

        Returns:
            The limit that was hit, or "" if it ended by itself.
        """
        poller, handlers = select.poll(), dict(extra or {})
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            pidfd = -1
        for fd in (self.control.fileno(), self.life, pidfd, *handlers):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        meter = Meter(self, pid, pidfd, number, started, outputs)
        try:
            while True:
                for fd, _ in poller.poll(1000 * meter.tick() if pidfd >= 0 else 2):
                    if fd == pidfd:
                        return ""
                    if fd == self.life:
                        raise Killed
                    if fd == self.control.fileno():
                        if self.cancelled(number):
                            self.kill(pid)
                            return "cancelled"
                    elif word := handlers[fd]():
                        return word
                if pidfd < 0 and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    return ""
                why = meter.over()
                if why:
                    self.kill(pid)
                    return why
        except Killed:
            self.kill(pid)
            self.sweep()
            raise
        finally:
            if pidfd >= 0:
                os.close(pidfd)

    def cancelled(self, number: int) -> bool:
        message, fds = _wire.receive(self.control)
        for fd in fds:
            os.close(fd)
        if message is None:
            raise Killed
        return message["op"] == "kill" and message["n"] == number

    def kill(self, pid: int) -> None:
        # The copy of a session's state is in its process group and must survive it.
        for end in (os.kill,) if self.in_session else (os.kill, os.killpg):
            with contextlib.suppress(OSError):
                end(pid, signal.SIGKILL)

    def sweep(self) -> None:
        """Leave no process behind, whatever the program started."""
        if self.plan["namespaces"]:
            with contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)
        end_children((lambda: [-1]) if self.plan["namespaces"] else partial(children_of, os.getpid()))


def high(fd: int) -> int:
    """The descriptor out of the way of the numbers that children give to theirs; they close it with all others."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 32)
    os.close(fd)
    return moved


def read_at(directory: int, path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def end_children(strays: Callable[[], list[int]], seconds: float = math.inf) -> None:
    """Kills what `strays` names and takes their statuses until this process has no child, or the time is over."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            for stray in strays():
                with contextlib.suppress(OSError):
                    os.kill(stray, signal.SIGKILL)
            time.sleep(0.0005)


def children_of(parent: int) -> list[int]:
    """Process ids of the children, found in /proc."""
    own, found = str(parent).encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                if file.read().rpartition(b")")[2].split()[1] == own:
                    found.append(int(name))
    return found


class Meter:
    """What a running child has used, against its limits."""

    def __init__(self, worker: Worker, pid: int, pidfd: int, number: int, started: float, outputs: list[int]) -> None:
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
