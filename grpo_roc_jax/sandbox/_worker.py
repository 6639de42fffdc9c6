"""A worker: forks a locked-down child per call, watches it, ends it, cleans up; standard library only.

No program text ever enters this process: a memory file carries it from the executor process straight to the child.
Otherwise later children would find earlier programs in the heap that they inherit.
"""

import _signal
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
from dataclasses import replace
from functools import partial

from . import _kernel, _messages, _spaces, _wire, isolation
from ._messages import TO_WORKER, CallDone, CallRefused, IsolationPlan, KillCall, RunCode
from ._meter import FileCount, Meter, children_of

ARMED = 1
TRASH = "trash"
"""Directory below the base directory for old scratch directories, which the executor process deletes later."""
MOST_TRASH, LONGEST_WAIT_S = 256, 5.0
"""Directories in it after which a worker waits, for so long, before it adds its own: programs may make files faster
than one thread deletes them."""
Handlers = dict[int, Callable[[], str]]


class Killed(Exception):
    """The executor process or the root has ended, so the worker must end too."""


class Worker:
    """One slot: its isolation, its scratch directory and the child that it runs now.

    `life` reports when the root is gone; `harness` is the module that runs in the same process as programs.
    """

    def __init__(self, plan: IsolationPlan, slot: int, control: socket.socket, life: int, harness) -> None:
        self.plan, self.slot, self.control, self.life, self.harness = plan, slot, control, life, harness
        self.limits = plan.limits
        self.base = isolation.base_memory()
        self.uid, self.ruleset, self.filters = None, -1, {}
        self.phase = mmap.mmap(-1, 4096)
        """Shared with the child until its lock-down is complete: whether it succeeded, or why not."""
        self.null = high(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        self.host_proc = high(os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        """The /proc of the executor process. In the worker's own /proc, children are hidden from it."""
        self.scratch, self.scratch_mark, self.renewals = "", None, 0
        self.counts_files = not plan.namespaces and plan.rank != 1
        """Whether its files are counted by looking; elsewhere a mount limits them, or none can be written."""
        self.in_session = False
        self.proc = os.path.isdir("/proc/self")

    def set_up(self) -> None:
        """Isolate the worker as planned, in the only order that works."""
        plan = self.plan
        if plan.namespaces:
            self.proc = _spaces.build_root(plan.base, plan.read, proc=bool(plan.landlock), links=plan.links)
            self.uid = plan.uid_base + self.slot if plan.own_uid else _spaces.INNER_ID
        self.new_scratch()
        if plan.seccomp:
            self.filters = {session: isolation.make_filter(plan, session=session) for session in (False, True)}
        # Hide these modules from programs. Done once here, since going through all names in each child would write to
        # their pages.
        for name in [name for name in sys.modules if name.startswith(__package__)]:
            del sys.modules[name]
        _kernel.empty_bounding_set()
        _kernel.set_capabilities(_spaces.WORKER_CAPABILITIES if plan.namespaces else ())
        # Programs of the same user cannot read this process then. Children enable it for themselves again.
        _kernel.prctl("prctl(PR_SET_DUMPABLE)", _kernel.PR_SET_DUMPABLE, 0)

    def new_scratch(self) -> None:
        """Make an empty scratch directory. The old one is moved away whole, since programs can make cleaning fail."""
        if self.plan.namespaces:
            if self.scratch:
                _kernel.umount("umount of scratch", self.scratch)
            self.scratch = _spaces.scratch_name(self.plan.read)
            _spaces.mount_scratch(self.scratch, self.limits.scratch_mb, self.limits.scratch_files, self.uid)
        else:
            old, self.renewals = self.scratch, self.renewals + 1
            # Nobody can guess the name: programs of other workers may ask for the size of a file whose name they know.
            self.scratch = os.path.join(self.plan.base, f"w{self.slot}-{self.renewals}-{os.urandom(12).hex()}")
            os.mkdir(self.scratch, 0o700)
            if old:
                self.move_away(old)
        self.scratch_mark = self.mark()
        if self.plan.landlock:
            if self.ruleset >= 0:
                os.close(self.ruleset)
            self.ruleset = high(isolation.make_ruleset(self.plan, self.scratch))

    def move_away(self, old: str) -> None:
        """Leave a directory to the executor process, which deletes it; wait first if many are left there already."""
        trash, deadline = os.path.join(self.plan.base, TRASH), time.monotonic() + LONGEST_WAIT_S
        while len(os.listdir(trash)) >= MOST_TRASH and time.monotonic() < deadline:
            time.sleep(0.01)
        os.rename(old, os.path.join(trash, os.path.basename(old)))

    def mark(self) -> tuple:
        """A value that changes whenever the scratch directory is changed."""
        info, names = os.stat(self.scratch), os.listdir(self.scratch)
        return info.st_ino, info.st_ctime_ns, info.st_mtime_ns, info.st_mode, info.st_nlink, len(names)

    def clean(self) -> None:
        try:
            touched = self.mark() != self.scratch_mark
        except OSError:
            touched = True
        if touched:
            self.new_scratch()

    def serve(self) -> tuple[RunCode, list[int]] | None:
        """Run calls until the connection ends or the first cell of a session arrives, which is returned."""
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(self.life, select.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self.life in ready:
                return None
            message, fds = _messages.receive(self.control, TO_WORKER)
            if message is None:
                return None
            if isinstance(message, RunCode):
                if message.cell:
                    self.in_session = True
                    return message, fds
                self.call(message, fds)

    def call(self, message: RunCode, fds: list[int]) -> None:
        """Fork, watch, reap and report; then clean up, so that the answer does not wait for it."""
        started = time.monotonic()
        self.phase[:2] = b"\0\0"
        pid = self.fork()
        if pid == 0:
            self.become_program(message.seed, fds)
        _wire.close_all(fds[:2])
        if pid < 0:
            reply = CallRefused(message.n)
        else:
            files = FileCount(self, pid) if self.counts_files else None
            why = self.watch(pid, message.n, started, fds[2:], files)
            reply = self.reap(pid, why, started, message.n)
            self.sweep()
            if files and not reply.why:
                reply = replace(reply, why=files.over_at_end())
        _wire.close_all(fds[2:])
        self.send(reply)
        self.clean()

    def send(self, message: _messages.Message) -> None:
        try:
            _messages.send(self.control, message)
        except OSError as error:
            raise Killed from error

    def fork(self) -> int:
        """Fork a child; returns minus the errno if the host has no process to spare."""
        for attempt in range(6):
            try:
                return os.fork()
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ENOMEM):
                    return -error.errno
                time.sleep(0.005 * 2**attempt)
        return -errno.EAGAIN

    def reap(self, pid: int, why: str, started: float, number: int) -> CallDone:
        if not self.in_session and not self.plan.namespaces:
            # Kill the rest of its process group before the id can be reused.
            with contextlib.suppress(OSError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                os.killpg(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
        fault = ""
        if not self.is_armed():
            size = int.from_bytes(self.phase[2:4], "little")
            fault = self.phase[4 : 4 + size].decode(errors="replace") or "ended before its lock-down was complete"
        wall, cpu = time.monotonic() - started, usage.ru_utime + usage.ru_stime
        return CallDone(number, status, why, fault, usage.ru_maxrss, wall, cpu)

    def become_child(self, fds: list[int], targets: list[int]) -> None:
        """Give the child a process group, which can be killed as one, its descriptors, and Python's handler of SIGINT,
        which all other processes ignore.

        It stays in the session of the executor, since Linux gives each session an equal share of the cores (autogroup):
        ten endless loops with sessions of their own would leave the executor a twelfth.
        """
        os.setpgid(0, 0)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)  # faster than that of `signal`
        isolation.offer_to_oom_killer(self.host_proc)
        moved = list(fds)
        while min(moved) < len(targets):
            moved = [os.dup(fd) if fd < len(targets) else fd for fd in moved]
        for fd, target in zip(moved, targets, strict=True):
            os.dup2(fd, target, inheritable=True)

    def become_program(self, seed: int, fds: list[int]) -> None:
        """Run a stateless call in the child. Never returns."""
        try:
            harness = self.harness
            source = harness.read_all(fds[0])
            self.become_child(fds[1:], [0, 1, 2, harness.RESULT_FD])
            keep = self.ruleset if self.ruleset < 0 else os.dup2(self.ruleset, 4)
            os.closerange(max(keep, harness.RESULT_FD) + 1, 1 << 16)
            self.enter_sandbox(keep, session=False)
            harness.run_program(source, self.program_settings(), seed)
        except BaseException as error:
            self.note_fault(error)
        finally:
            os._exit(98)

    def program_settings(self):
        denied = () if self.plan.rank == 0 else (errno.EPERM, errno.EACCES, errno.EROFS, errno.ENOSYS)
        return self.harness.ProgramSettings(self.limits.output_kb << 10, self.limits.output_kill_mb << 20, denied)

    def enter_sandbox(self, ruleset: int, *, session: bool) -> int:
        """Enter the scratch directory and lock the child down; returns what `isolation.lock_down` returns."""
        os.chdir(self.scratch)
        os.umask(0o077)
        os.environ.update(HOME=self.scratch, TMPDIR=self.scratch, PWD=self.scratch)
        sys.argv = [""]
        filter_ = self.filters.get(session)
        listener = isolation.lock_down(self.plan, self.base, self.uid, ruleset, filter_, session=session)
        if ruleset >= 0:
            os.close(ruleset)
        self.phase[0] = ARMED
        self.phase.close()
        return listener

    def is_armed(self) -> bool:
        """Whether the child is locked down. Until then it runs no program, and nobody may look at its files."""
        return self.phase[0] == ARMED

    def note_fault(self, error: BaseException) -> None:
        """Leave the error where the worker reads it, unless the program had begun."""
        with contextlib.suppress(BaseException):
            text = f"{type(error).__name__}: {error}".encode()[:2000]
            self.phase[2:4] = len(text).to_bytes(2, "little")
            self.phase[4 : 4 + len(text)] = text

    def watch(
        self, pid: int, number: int, started: float, outputs: list[int], files: FileCount | None,
        handlers: Handlers | None = None, look: Callable[[], None] | None = None, unpaid_s: float = 0.0,
    ) -> str:  # fmt: skip
        """Wait for the child to end, and kill it if it exceeds a limit; returns that limit, or "".

        Args:
            number: Number of the call; a cancellation with another number came too late and is ignored.
            outputs: Descriptors of stdout, stderr and record, whose size is limited.
            files: Counts the files of the child; None where that is not needed.
            handlers: Descriptor -> function for further events; text that a function returns ends the wait.
            look: Called now and then.
            unpaid_s: CPU time that is charged to the child although it was used before.
        """
        poller, handlers = select.poll(), handlers or {}
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            pidfd = -1
        for fd in (self.control.fileno(), self.life, pidfd, *handlers):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        meter = Meter(self, pid, pidfd, number, started, outputs, files, unpaid_s)
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
                if look:
                    look()
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
        message, fds = _messages.receive(self.control, TO_WORKER)
        _wire.close_all(fds)
        if message is None:
            raise Killed
        return isinstance(message, KillCall) and message.n == number

    def kill(self, pid: int) -> None:
        # A session's process group holds the copy of its state, which must survive.
        for end in (os.kill,) if self.in_session else (os.kill, os.killpg):
            with contextlib.suppress(OSError):
                end(pid, signal.SIGKILL)

    def sweep(self) -> None:
        """End every process that the program started."""
        if self.plan.namespaces:
            with contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)
        end_children((lambda: [-1]) if self.plan.namespaces else partial(children_of, os.getpid()))


def high(fd: int) -> int:
    """Move a descriptor above the numbers that children use for theirs. Children close it with all others."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 32)
    os.close(fd)
    return moved


def end_children(strays: Callable[[], list[int]], seconds: float = math.inf) -> None:
    """Kill and reap the processes that `strays` returns until this process has no child, or the time is over."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            for stray in strays():
                with contextlib.suppress(OSError):
                    os.kill(stray, signal.SIGKILL)
            time.sleep(0.0005)


def reap_except(spared: set[int]) -> None:
    """Reap ended children up to the first of those in `spared`, for which other code waits."""
    with contextlib.suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in spared:
                return
            os.waitpid(ended.si_pid, 0)
