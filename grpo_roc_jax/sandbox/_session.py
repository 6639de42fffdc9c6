"""A worker that serves one session: a long-lived child that can return to its state before a cell.

The worker keeps a copy of the state, which is a fork of the session that is stopped until it is needed, and a log of
the few cheap cells since the copy was made. If a cell has to be killed, the copy takes over and runs the logged cells
again, without output; the session continues as if the killed cell had not been run. A copy costs the following cells
milliseconds of page faults. It is renewed only if the cells since have used `session_replay_ms` of CPU time, or if
running them again may give another state (`exact`: the session uses the clock, files, threads ...).

Between cells the session is stopped, threads and all, so that they compute, write and hold no core while nothing
measures them. The first line of the next cell sees them where they were. What a session could compute nevertheless,
while it is copied, is charged to its next cell.

The system call filter of a session passes its forks to the worker, which allows only the one that it asked for. Code of
the program may still run in the copy (`os.register_at_fork`), so the worker trusts nothing that the copy says: it takes
the copy's process id from the kernel, stops and kills it from outside, and ends all other processes after each cell.
Standard library only.
"""

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import struct
import time
from dataclasses import replace

from . import _messages, _seccomp, _wire, isolation
from ._calls import NONCE_BYTES
from ._messages import TO_WORKER, CallDone, DeadlineExtended, RunCode
from ._meter import FileCount, children_of, cpu_time, read_at, read_of, resident
from ._worker import Killed, Worker, reap_except

SO_PASSCRED, SCM_CREDENTIALS = 16, 2
ENDED, PROTOCOL = "done", "protocol"
"""How a cell ended: it reported its end, or its program wrote to the connection that is for reports."""
COPY_CPU_S, COPY_LOOK_S, LONGEST_COPY_S = 0.25, 0.05, 5.0
"""CPU time of session and copy together in which a copy must be made, time between looks at it, and longest time; then
the session goes on without a copy. The next cell waits for it, and a program can let it sleep, so the longest time is
well below the executor process's `GRACE_S`."""
LONGEST_LOG = 16
"""Most cells that are run again; each holds a descriptor."""


class LiveSession:
    """The child that holds the variables, and the copy of its state."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.pid = self.cell = 0
        self.sock: socket.socket | None = None
        self.listener = -1
        self.pidfd = -1
        self.copy: socket.socket | None = None
        self.copy_pid, self.copy_pidfd, self.copy_size = 0, -1, 0
        """The copy's process, and its memory in bytes."""
        self.fork_allowed = False
        self.may_have_strays = worker.plan.rank == 0 or worker.limits.processes > 1
        """Whether the session may have processes that the worker did not ask for."""
        self.empty_size = 0
        """Resident memory before the first cell, most of it shared with the root."""
        self.can_copy = self.recoverable = True
        self.log: list[tuple[int, int, int]] = []
        """Cells since the copy: descriptor of the code, seed, number."""
        self.debt_s = 0.0
        """CPU time that it would take to run the log again."""
        self.exact = self.stopped = False
        self.cpu_mark = 0.0
        """CPU seconds of the session when its last cell ended."""
        self.files: FileCount | None = None

    def serve(self, message: _messages.Message | None, fds: list[int]) -> None:
        """Run the first cell and all later ones, until the executor process closes the session."""
        try:
            while message is not None:
                if isinstance(message, RunCode):
                    self.run(message, fds)
                message, fds = self.wait()
        finally:
            self.drop_copy()
            if self.pid:
                with contextlib.suppress(OSError):
                    os.kill(self.pid, signal.SIGKILL)
            self.worker.sweep()

    def wait(self) -> tuple[_messages.Message | None, list[int]]:
        """Wait for the next message, and meanwhile refuse forks that the session asked for before it was stopped."""
        worker = self.worker
        poller = select.poll()
        for fd in (worker.control.fileno(), worker.life, self.listener):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        while True:
            for fd, event in poller.poll():
                if fd == worker.life:
                    return None, []
                if fd == worker.control.fileno():
                    return _messages.receive(worker.control, TO_WORKER)
                self.answer_fork()
                if event & select.POLLHUP:
                    poller.unregister(fd)

    def stop(self, stopped: bool) -> None:
        """Stop or continue the child with all its threads."""
        if self.pid and stopped != self.stopped:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGSTOP if stopped else signal.SIGCONT)
            self.stopped = stopped

    def open(self) -> str:
        """Start the child. Returns why it could not be locked down, or ""."""
        worker = self.worker
        sock, other = _wire.pair()
        worker.phase[:2] = b"\0\0"
        pid = worker.fork()
        if pid == 0:
            self.become_session(other)
        other.close()
        if pid < 0:
            sock.close()
            return f"fork: {errno.errorcode.get(-pid, -pid)}"
        self.sock, self.cell = sock, 0
        self.follow(pid)
        greeting, received = None, []
        with contextlib.suppress(OSError):
            sock.settimeout(5)
            greeting, received = _wire.receive_datagram(sock)
            sock.settimeout(None)
        if greeting is None:
            worker.kill(pid)
            return worker.reap(pid, "", time.monotonic(), -1).fault
        self.listener = received[0] if received else -1
        self.can_copy = bool(received) or worker.plan.rank == 0 or worker.limits.processes > 1
        self.empty_size = resident(worker.host_proc, self.pidfd)
        return ""

    def follow(self, pid: int) -> None:
        """Take a process as the session."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pid, self.pidfd, self.stopped, self.cpu_mark = pid, os.pidfd_open(pid), False, cpu_time(pid)
        if self.worker.counts_files:
            self.files = FileCount(self.worker, pid, lambda: self.copy_pid, self.give_up_copy)

    def become_session(self, sock: socket.socket) -> None:
        """Serve the session in the child. Never returns."""
        worker = self.worker
        try:
            harness = worker.harness
            worker.become_child([worker.null, worker.null, worker.null, sock.detach()], [0, 1, 2, 4])
            ruleset = worker.ruleset if worker.ruleset < 0 else os.dup2(worker.ruleset, 5)
            os.dup2(worker.null, harness.RESULT_FD)
            os.closerange(6, 1 << 16)
            control, settings = harness._socket.socket(fileno=4), worker.program_settings()
            greeting = socket.socket(fileno=os.dup2(4, isolation.descriptor_limit(worker.limits)))
            listener = worker.enter_sandbox(ruleset, session=True)
            greeting.sendmsg([b"{}"], _wire.rights(listener) if listener else [])
            greeting.close()
            if listener:
                os.close(listener)
            harness.run_session(control, settings)
        except BaseException as error:
            worker.note_fault(error)
        finally:
            os._exit(98)

    def run(self, message: RunCode, fds: list[int]) -> None:
        """Run one cell and send its result to the executor process."""
        worker, started = self.worker, time.monotonic()
        self.exact = self.exact or message.exact
        fault = self.open() if not self.pid else ""
        self.cell += 1
        if fault:
            done = CallDone(message.n, 0, "", fault, rss=0, wall=0.0, cpu=0.0, cell=self.cell)
            self.pid = self.cell = 0
        else:
            self.stop(False)
            done = self.run_in_child(message, fds, started)
        self.stop(True)
        _wire.discard(fds[1:2])
        _wire.close_all(fds[2:])
        worker.send(done)
        if done.alive:
            self.remember(fds[0], message.seed, done.cpu)
        else:
            _wire.discard(fds[:1])
        if self.may_have_strays:
            self.end_strays()

    def remember(self, code: int, seed: int, cpu_s: float) -> None:
        """Log a cell that has ended, or copy the state if that is cheaper or the only exact way."""
        self.log.append((code, seed, self.cell))
        self.debt_s += cpu_s
        limit_s = self.worker.limits.session_replay_ms / 1000
        if not (self.exact or self.debt_s > limit_s or len(self.log) > LONGEST_LOG):
            return
        if self.can_copy:
            self.make_copy()
        elif self.exact or self.debt_s > self.worker.limits.wall_s or len(self.log) > LONGEST_LOG:
            self.recoverable = False
            self.forget_log()

    def forget_log(self) -> None:
        _wire.discard(code for code, _, _ in self.log)
        self.log.clear()
        self.debt_s = 0.0

    def send_cell(self, code: int, outputs: list[int], seed: int, number: int) -> None:
        text = b"C" + struct.pack("<IQ", number, seed & (2**64 - 1))
        self.sock.sendmsg([text], _wire.rights(code, *outputs))

    def await_cell(self, number: int, started: float, outputs: list[int]) -> str:
        """Watch the session until its cell is done; returns `ENDED`, or the limit that was exceeded."""
        handlers = {self.sock.fileno(): self.receive}
        if self.listener >= 0:
            handlers[self.listener] = self.answer_fork
        unpaid = cpu_time(self.pid) - self.cpu_mark
        look = self.check_memory
        return self.worker.watch(self.pid, number, started, outputs, self.files, handlers, look, unpaid)

    def run_in_child(self, message: RunCode, fds: list[int], started: float) -> CallDone:
        worker, cell, cpu = self.worker, self.cell, cpu_time(self.pid)
        why = self.run_cell(fds[0], fds[1:], message.seed, cell, message.n, started)
        if why == ENDED:
            why = self.come_to_rest() or ENDED
        if why == ENDED:
            wall, used = time.monotonic() - started, cpu_time(self.pid) - cpu
            return CallDone(message.n, 0, "", "", rss=0, wall=wall, cpu=used, alive=True, cell=cell)
        worker.kill(self.pid)
        done = worker.reap(self.pid, why, started, message.n)
        used = max(0.0, done.cpu - cpu)
        # No copy brings back the files, and with too many of them every later cell would end alike.
        good = why != "scratch" and self.return_to_before(message.n)
        if why == "scratch":
            self.forget()
        return replace(done, fault="", cpu=used, cell=cell, rolled_back=good)

    def run_cell(self, code: int, outputs: list[int], seed: int, cell: int, number: int, started: float) -> str:
        """Send a cell and watch it; returns `ENDED`, the limit that was exceeded, or "" if the session ended."""
        try:
            if self.receive() in (ENDED, PROTOCOL):
                return PROTOCOL  # before there is anything to report
            self.send_cell(code, outputs, seed, cell)
            why = self.await_cell(number, started, outputs[1:])
            self.cpu_mark = cpu_time(self.pid)
        except OSError:
            return ""
        return PROTOCOL if why == ENDED and os.fstat(outputs[3]).st_size <= NONCE_BYTES else why

    def come_to_rest(self) -> str:
        """Stop the session after a cell, and return the limit that its files exceed, or ""."""
        self.stop(True)
        if not self.files:
            return ""
        if self.may_have_strays:
            self.end_strays()
        return self.files.over_at_rest()

    def return_to_before(self, number: int) -> bool:
        """Return to the state before the cell that was killed. False if only an empty state is left."""
        self.worker.send(DeadlineExtended(number, 2 * self.worker.limits.wall_s))
        log, self.log = self.log, []
        cell, good = self.cell - 1, self.recoverable and self.take_over()
        started = time.monotonic()
        if good:
            self.cell = cell
            good = all(self.run_again(*entry, started) for entry in log)
        _wire.discard(code for code, _, _ in log)
        self.debt_s = 0.0
        if not good:
            self.forget()
        elif self.can_copy and log:
            self.make_copy()
        return good

    def run_again(self, code: int, seed: int, cell: int, started: float) -> bool:
        """Run a logged cell again and drop its output. All of them together may take as long as one cell."""
        files = [_wire.make_memory_file() for _ in range(3)]
        try:
            return self.run_cell(code, [self.worker.null, *files], seed, cell, -1, started) == ENDED
        finally:
            _wire.discard(files)

    def receive(self) -> str:
        """Receives a message of the session: its cell is done, or it could not be copied; "" if there is none."""
        try:
            data = self.sock.recv(64, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return ""
        except OSError:
            return "gone"
        if data in (b"N", b"D"):
            return ENDED if data == b"D" else ""
        return PROTOCOL if data else "gone"

    def make_copy(self) -> None:
        """Let the session replace the copy by one of its present state, after its result has been sent."""
        self.drop_copy()
        self.forget_log()
        self.stop(False)
        sock, other = _wire.pair()
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
        self.fork_allowed = True
        pid = 0
        with contextlib.suppress(OSError):
            self.sock.sendmsg([b"S"], _wire.rights(other.fileno()))
            other.close()
            pid = self.await_copy(sock)
        other.close()
        self.stop(True)
        self.fork_allowed = False
        self.recoverable = False
        with contextlib.suppress(OSError):
            self.copy_pidfd = os.pidfd_open(pid)  # raises for 0
            self.copy, self.copy_pid, self.recoverable = sock, pid, True
            self.signal_copy(signal.SIGSTOP)
            self.copy_size = self.own_size(self.copy_pidfd)
            self.check_memory()
        if self.copy is None:
            sock.close()
            self.can_copy = False
            self.may_have_strays = True

    def await_copy(self, sock: socket.socket) -> int:
        """Process id of the copy, when it waits on its connection; 0 if none does so in time."""
        poller, started = select.poll(), time.monotonic()
        for fd in (sock.fileno(), self.sock.fileno(), self.listener, self.worker.life):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        while not self.copy_is_late(time.monotonic() - started):
            for fd, _ in poller.poll(1000 * COPY_LOOK_S):
                if fd == self.worker.life:
                    raise Killed
                if fd == sock.fileno():
                    return self.sender(sock)
                if fd == self.sock.fileno():
                    return 0  # The next cell reads the refusal, or whatever else is there.
                self.answer_fork()
        return 0

    def copy_is_late(self, seconds: float) -> bool:
        """Whether a copy has had its time. Both processes run meanwhile, so what they compute is part of it."""
        if seconds >= LONGEST_COPY_S:
            return True
        used, proc = cpu_time(self.pid) - self.cpu_mark, self.worker.host_proc
        if used <= COPY_CPU_S and seconds > COPY_LOOK_S:
            with contextlib.suppress(OSError, IndexError, ValueError):
                for child in children_of(int(read_of(proc, self.pidfd, "stat").split()[0]), proc):
                    ticks = sum(map(int, read_at(proc, f"{child}/stat").rpartition(b")")[2].split()[11:13]))
                    used += ticks / os.sysconf("SC_CLK_TCK")
        return used > COPY_CPU_S

    def sender(self, sock: socket.socket) -> int:
        """Process id, as the kernel reports it, of the copy that sent a message; 0 if the session itself sent it."""
        _, ancillary, _, _ = sock.recvmsg(64, socket.CMSG_SPACE(12))
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, SCM_CREDENTIALS):
                pid = struct.unpack("3i", payload[:12])[0]
                return 0 if pid == self.pid else pid
        return 0

    def drop_copy(self) -> None:
        """Kill the copy."""
        if self.copy is not None:
            self.signal_copy(signal.SIGKILL)
            self.release_copy().close()
        reap_except({self.pid})

    def signal_copy(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self.copy_pidfd, number)

    def release_copy(self) -> socket.socket:
        """Forget the copy, and return its connection."""
        os.close(self.copy_pidfd)
        sock, self.copy, self.copy_pid, self.copy_pidfd, self.copy_size = self.copy, None, 0, -1, 0
        return sock

    def take_over(self) -> bool:
        """Make the copy the session; if there is none yet, the session starts with an empty state."""
        self.pid = 0
        self.sock.close()
        if self.copy is None:
            self.clear_away()
            return not self.open()
        pid = self.copy_pid
        self.signal_copy(signal.SIGCONT)
        self.sock = self.release_copy()
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return False
        except ChildProcessError:
            return False
        self.follow(pid)
        return True

    def own_size(self, pidfd: int) -> int:
        """Resident memory of a process beyond that of an empty session, in bytes."""
        return max(0, resident(self.worker.host_proc, pidfd) - self.empty_size)

    def check_memory(self) -> None:
        """Drop the copy if the session and its copy together exceed the memory of a program."""
        limit = self.worker.limits.memory_mb << 20
        if self.copy is not None and self.own_size(self.pidfd) + self.copy_size > limit:
            self.give_up_copy()

    def give_up_copy(self) -> None:
        """Drop the copy because the session is too large for another one."""
        self.drop_copy()
        self.recoverable = self.can_copy = False

    def end_strays(self) -> None:
        """Kill all processes below the worker except the session and its copy, which stays stopped."""
        if self.copy is not None:
            self.signal_copy(signal.SIGSTOP)
        expected = {self.pid, self.copy_pid}
        proc = self.worker.host_proc
        parents = [int(os.readlink("self", dir_fd=proc))]
        while parents:
            for child in children_of(parents.pop(), proc):
                parents.append(child)
                with contextlib.suppress(OSError, IndexError):
                    inner = read_at(proc, f"{child}/status").partition(b"\nNSpid:")[2].split(b"\n")[0].split()[-1]
                    if int(inner) not in expected:
                        os.kill(int(inner), signal.SIGKILL)
        reap_except({self.pid})

    def forget(self) -> None:
        """Drop all state, so that the next cell starts in an empty session."""
        if self.pid:
            self.worker.kill(self.pid)
        self.drop_copy()
        self.forget_log()
        self.pid = self.cell = 0
        self.exact, self.recoverable = False, True
        self.clear_away()

    def clear_away(self) -> None:
        """End all processes of the session and remove its files."""
        if self.listener >= 0:
            os.close(self.listener)
            self.listener = -1
        self.worker.sweep()
        self.worker.clean()

    def answer_fork(self) -> str:
        """Allow the fork that the worker asked for, by the session's main thread; refuse all others.

        To receive where nothing asks would block for good, for example after the session has ended (POLLHUP alone). If
        it ends between the look and the call, its request still counts, and the call fails.
        """
        poller = select.poll()
        poller.register(self.listener, select.POLLIN)
        if not any(event & select.POLLIN for _, event in poller.poll(0)):
            return ""
        request = bytearray(80)
        try:
            fcntl.ioctl(self.listener, _seccomp.NOTIF_RECV, request)
        except OSError:
            return ""
        name, pid = struct.unpack_from("<QI", request)
        allowed = self.fork_allowed and pid == self.pid
        if allowed:
            self.fork_allowed = False
        flags, error = (_seccomp.NOTIF_CONTINUE, 0) if allowed else (0, -errno.EPERM)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.listener, _seccomp.NOTIF_SEND, struct.pack("<QqiI", name, 0, error, flags))
        return ""
