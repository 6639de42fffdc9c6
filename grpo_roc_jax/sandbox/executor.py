"""The local pool as its user sees it. Programs never run in the process of the user, which never forks.

One executor process is started by exec; frames go over a socket pair. `submit` sends at once what the socket accepts.

A thread that waits for a result attends the connection, one thread at a time: a thread that only reads results and
hands them over would cost several times as much. The keeper, a thread of the executor, attends the connection while no
other thread waits: it sends what the socket did not accept, reads for `asyncio`, and replaces a process that has ended.
"""

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpo_roc_jax.sandbox._messages as _messages
from grpo_roc_jax.sandbox._messages import Capabilities, ExecutorSettings
from grpo_roc_jax.sandbox._wire import pack_call, pack_frame
from grpo_roc_jax.sandbox.base import ProgramExecutor
from grpo_roc_jax.sandbox.cgroup import CgroupLimits
from grpo_roc_jax.sandbox.process import END_S, ExecutorProcess
from grpo_roc_jax.sandbox.program import ExecutorFailed, IsolationUnavailable, Ticket
from grpo_roc_jax.sandbox.result import ToolResult

log = logging.getLogger(__name__)
RESTARTS = 5
"""Number of executor processes lost within `RESTART_WINDOW_S` after which this executor gives up."""
RESTART_WINDOW_S = 60.0
STATS_LIMIT_S = 2.0


@dataclass(frozen=True)
class Supervision:
    """How an executor supervises its process: what it sends, how long it waits, and when it starts another one."""

    in_flight: int = 4096
    """Most calls handed to the executor process at once; further ones wait in the trainer and are counted."""
    beat_s: float = 1.0
    """Seconds between checks for a sign of life while calls run."""
    silent_beats: int = 30
    """Number of checks in a row without a sign of life after which the process counts as frozen. Checks are counted
    instead of seconds, so that a trainer that was frozen itself blames nobody."""
    restart_pauses_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0, 60.0, 60.0, 60.0)
    """Seconds before each retry of a failed start, while calls wait; after the last retry the executor gives up."""
    leave_s: float = 5.0
    """Most seconds that `close` waits for the thread that reads from the process."""
    end_s: float = END_S
    """Seconds that the process has to end its programs and clean up."""


class Executor(ProgramExecutor):
    """Runs programs in a pool of isolated processes on this host."""

    def __init__(
        self,
        settings: ExecutorSettings | None = None,
        *,
        cgroup: CgroupLimits | None = None,
        share_results: bool = False,
        start_timeout_s: float = 60.0,
        supervision: Supervision | None = None,
    ) -> None:
        """
        Args:
            settings: Limits of a program, isolation and size of the pool.
            cgroup: Limits of all programs together; None sets none.
            share_results: Run programs of the same text and input once.
            start_timeout_s: Seconds until the first worker must be ready.
            supervision: Limits of the supervision of the executor process.
        """
        super().__init__(share_results=share_results)
        if not isinstance(settings, ExecutorSettings | None):
            raise TypeError(
                f"Executor got {type(settings).__name__}; must be ExecutorSettings, such as "
                "ExecutorSettings(limits=ProgramLimits(wall_s=2.0))"
            )
        self.settings = settings or ExecutorSettings()
        self.supervision = supervision or Supervision()
        self._cgroup = cgroup
        self._start_timeout_s = start_timeout_s
        self._host: ExecutorProcess | None = None
        self._queued: deque[Ticket] = deque()
        """Calls that are sent once a process is running and fewer calls are in flight."""
        self._broken = ""
        """Why no process can be started any more; empty while one can."""
        self._down = False
        """Whether the connection has ended and the keeper has not made another one yet."""
        self._reader = 0
        """Thread that attends the connection now; 0 for none."""
        self._followers = 0
        """Number of threads that wait for what the reader receives, or for their turn."""
        self._expected = 0
        """Number of results that are awaited outside `_await`."""
        self._keeper: threading.Thread | None = None
        self._wake_reader = self._wake_keeper = -1
        self._poller = select.poll()
        self._polls_out = False
        self._sent: set[str] = set()
        self._lost_at: deque[float] = deque(maxlen=RESTARTS)
        self._sessions, self._gone_sessions = set(), set()
        self._beat_at, self._heard, self._silent = 0.0, True, 0
        """Time of the last check for a sign of life, whether there was one since, and number of checks in a row without
        one."""
        self._numbers: dict[int, dict[str, float]] = {}
        self._stats_requested = 0

    def _open(self) -> Capabilities:
        host = self._start_process()
        self._wake_reader = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_keeper = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._take_up(host)
        self._keeper = threading.Thread(target=self._keep, daemon=True, name="tool-executor")
        self._keeper.start()
        return host.capabilities

    def _shut(self) -> None:
        """Wait until no thread is at the connection, and end the process."""
        with self._mutex:
            os.eventfd_write(self._wake_keeper, 1)
            self._announce()
            self._ready.notify_all()
            self._ready.wait_for(lambda: self._reader in (0, threading.get_ident()), self.supervision.leave_s)
        if self._keeper is not threading.current_thread():
            self._keeper.join(self._start_timeout_s)
        with self._mutex:
            self._host.end()
            for fd in (self._wake_reader, self._wake_keeper):
                os.close(fd)

    def _take_up(self, host: ExecutorProcess) -> None:
        self._host, self._poller, self._polls_out = host, select.poll(), False
        self._poller.register(self._wake_reader, select.POLLIN)
        self._poller.register(host.link, select.POLLIN)

    def _has_work(self) -> bool:
        return bool(self._host.unsent or self._expected or self._queued or self._silent)

    def _await(self, satisfied: Callable[[], Any], timeout_s: float | None) -> None:
        """Read until `satisfied` holds, the executor is closed or the time is over; wait while another thread reads.

        Data that has arrived is read even if `satisfied` holds already.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        looked = False
        with self._mutex:
            while not self._closed:
                done = satisfied()
                if done and looked:
                    return
                left = 0.0 if done else max(0.0, deadline - time.monotonic())
                if not (self._reader or self._down or (looked and not left)):
                    looked = True
                    self._read_for(left)
                elif left:
                    self._followers += 1
                    self._ready.wait(None if left == math.inf else left)
                    self._followers -= 1
                else:
                    return

    def _read_for(self, seconds: float) -> None:
        """Attend the connection until its next event. Called with `_mutex`, which is released meanwhile."""
        if self._host.unsent or self._polls_out:
            self._polls_out = bool(self._host.unsent)
            self._poller.modify(self._host.link, select.POLLIN | (select.POLLOUT if self._polls_out else 0))
        self._reader = threading.get_ident()
        self._mutex.release()
        try:
            for fd, events in self._poller.poll(None if seconds == math.inf else 1000 * seconds):
                if fd == self._wake_reader:
                    os.eventfd_read(fd)
                else:
                    self._attend(events)
        finally:
            self._mutex.acquire()
            self._reader = 0
            if self._followers or self._closed:  # the thread that closes waits for this one
                self._ready.notify_all()
            elif self._has_work():
                os.eventfd_write(self._wake_keeper, 1)

    def _attend(self, events: int) -> None:
        """Send what is left to send, and process all messages that have arrived."""
        try:
            if events & select.POLLOUT:
                with self._mutex:
                    self._host.send_rest()
            if events == select.POLLOUT:
                return
            for message, payload in self._host.read():
                self._take(message, payload)
        except (OSError, ValueError, EOFError):
            self._lose_link()
        except BaseException:
            # An interrupt, maybe in the middle of a frame, after which the start of the next one is unknown.
            self._lose_link()
            raise

    def _lose_link(self) -> None:
        with self._mutex:
            self._down = True
            os.eventfd_write(self._wake_keeper, 1)

    def _announce(self) -> None:
        if self._followers:
            self._ready.notify_all()
        if self._reader and self._reader != threading.get_ident():
            os.eventfd_write(self._wake_reader, 1)

    def _ask_for_attention(self) -> None:
        """Wake a thread that sends and reads, even if no thread waits for a result."""
        with self._mutex:
            if self._reader != threading.get_ident() and not self._closed:
                os.eventfd_write(self._wake_reader if self._reader else self._wake_keeper, 1)

    def _expect(self, amount: int) -> None:
        with self._mutex:
            before = self._expected
            self._expected += amount
            if 0 in (before, self._expected):
                self._ask_for_attention()

    def _keep(self) -> None:
        """Attend the connection while no other thread does, and replace it when it ends."""
        beat_s = self.supervision.beat_s
        while not (self._closed or self._broken):
            link = self._host.link
            poller = select.poll()
            poller.register(self._wake_keeper, select.POLLIN)
            # No events are requested, so this thread notices the end of the connection only; results wake the thread
            # that waits for them.
            poller.register(link, 0)
            ended = any(fd != self._wake_keeper for fd, _ in poller.poll(1000 * beat_s))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_keeper)

            self._await(lambda ended=ended: self._down or not (ended or self._has_work()), beat_s)
            self._look_for_life()
            if self._down and not self._closed:
                self._recover()

    def _look_for_life(self) -> None:
        """Runs once a beat while calls run: asks a silent process for its numbers, and gives it up if it
        stays silent."""
        with self._mutex:
            now = time.monotonic()
            if self._down or self._closed or now - self._beat_at < self.supervision.beat_s:
                return
            self._beat_at = now
            self._silent = 0 if self._heard or not self._sent else self._silent + 1
            self._heard = False
            if self._silent == 1:
                self._send(_messages.RequestStats(0))
            elif self._silent > self.supervision.silent_beats:
                log.warning("the tool executor process %d has been silent for %d beats", self.pid, self._silent - 1)
                self._host.process.kill()
                self._down = True
                self._announce()

    @property
    def pid(self) -> int | None:
        """Process id of the executor process."""
        return self._host.process.pid if self._host else None

    @property
    def connected(self) -> bool:
        """Whether an executor process is there that calls can be sent to."""
        return self._started and not (self._closed or self._down or self._broken)

    @property
    def silent_beats(self) -> int:
        """Number of checks in a row in which the process gave no sign of life, though calls run."""
        return self._silent

    @property
    def reading_thread(self) -> int:
        """Identifier of the thread that reads from the executor process now; 0 for none."""
        return self._reader

    @property
    def waiting_threads(self) -> int:
        """Number of threads that wait for what `reading_thread` receives, or for their turn to read."""
        return self._followers

    def _start_process(self) -> ExecutorProcess:
        return ExecutorProcess(self.settings, self._cgroup, self._start_timeout_s, end_s=self.supervision.end_s)

    def _launch(self, ticket: Ticket) -> None:
        with self._mutex:
            if self._broken:
                self._finish(ticket.program.id, ToolResult("sandbox_error", error_message=self._broken))
            elif self._down:
                self._queued.append(ticket)
            elif len(self._sent) >= self.supervision.in_flight:
                self._queued.append(ticket)
                self._counts["held_back"] += 1
                self._ask_for_attention()
            else:
                self._send_call(ticket)

    def _send_call(self, ticket: Ticket) -> None:
        program, session = ticket.program, ticket.program.session
        code, stdin = (text.encode("utf-8", "surrogatepass") for text in (program.code, program.stdin))
        if session is not None:
            if session in self._gone_sessions:
                message = "the session is gone: the executor process had to be restarted"
                self._finish(program.id, ToolResult("sandbox_error", error_message=message, session_id=session))
                return
            self._sessions.add(session)
        frame = pack_call(program.id, session, program.seed & (2**64 - 1), ticket.attempt, code, stdin)
        self._sent.add(program.id)
        self._write(frame)

    def _send(self, message: _messages.Message) -> None:
        self._write(pack_frame(_messages.encode(message)))

    def _write(self, frame: bytes) -> None:
        """Send a frame; the part that the socket does not accept now is sent later. Called with `_mutex`."""
        self._host.send(frame)
        if self._host.unsent:
            self._ask_for_attention()

    def _send_held(self) -> None:
        while self._queued and len(self._sent) < self.supervision.in_flight:
            self._send_call(self._queued.popleft())

    def _proven(self, tickets: list[Ticket]) -> bool:
        down = self._down or self._broken or self._silent > 1  # a living process answers within a beat
        return not tickets or not (down or any(ticket.attempt > 1 or ticket in self._queued for ticket in tickets))

    def _drop(self, ids: list[str]) -> None:
        with self._mutex:
            dropped = set(ids)
            self._queued = deque(ticket for ticket in self._queued if ticket.program.id not in dropped)
            self._sent -= dropped
            self._send(_messages.CancelCalls(ids))

    def close_session(self, session: str) -> None:
        with self._mutex:
            self._gone_sessions.discard(session)
            if session in self._sessions:
                self._sessions.discard(session)
                self._send(_messages.CloseSession(session))

    def stats(self) -> dict[str, float]:
        numbers = super().stats()
        with self._mutex:
            if not self.connected:
                return numbers
            self._stats_requested += 1
            number = self._stats_requested
            self._send(_messages.RequestStats(number))
        self._await(lambda: number in self._numbers, STATS_LIMIT_S)
        numbers |= self._numbers.pop(number, {})
        numbers["tools/held"] = float(len(self._queued))
        numbers["tools/restarts"] = float(len(self._lost_at))
        return numbers

    def _take(self, message: _messages.Message, payload: bytes) -> None:
        self._heard, self._silent = True, 0
        if isinstance(message, _messages.CallResult):
            fields = message.fields
            fields["stdout"] = payload[: message.out].decode("utf-8", "surrogatepass")
            if message.out < len(payload):
                fields["stderr"] = payload[message.out :].decode("utf-8", "surrogatepass")
            self._finish_with(message.id, fields)
            with self._mutex:
                self._sent.discard(message.id)
                if self._queued:
                    self._send_held()
        elif isinstance(message, _messages.Failed):
            log.error("the tool executor process ended with an error:\n%s", message.message)
        elif isinstance(message, _messages.ExecutorStats) and message.n:
            with self._mutex:
                self._numbers[message.n] = message.numbers
                self._announce()

    def _recover(self) -> None:
        """Start another executor process and run the stateless calls of the lost one again.

        Until it is up calls wait. A start that fails, and a storm of lost processes, is followed by growing pauses.
        """
        log.warning("the tool executor process is gone; starting another one")
        with self._mutex:
            self._followers += 1
            self._ready.wait_for(lambda: not self._reader, self.supervision.end_s)
            self._followers -= 1
            self._host.kill()
            self._host.unsent.clear()
            now = time.monotonic()
            storm = len(self._lost_at) == RESTARTS and now - self._lost_at[0] < RESTART_WINDOW_S
            self._lost_at.append(now)
            self._gone_sessions |= self._sessions
            self._sessions.clear()
        host, reason = None, f"{RESTARTS} processes ended within {RESTART_WINDOW_S:g} s"
        if not storm:
            host, reason = self._restarted()
        for pause_s in self.supervision.restart_pauses_s:
            if host is not None or self._closed:
                break
            log.warning("the tool executor is down (%s); calls wait, next try in %g s", reason, pause_s)
            with self._mutex:
                self._ready.wait_for(lambda: self._closed, pause_s)
            host, reason = self._restarted()
        with self._mutex:
            self._broken = "" if host is not None else f"the executor process could not be restarted: {reason}"
            if host is not None:
                # Otherwise the connection stays down, and nothing is read any more.
                self._heard, self._silent = True, 0
                self._take_up(host)
                self._down = False
            self._resubmit()
            self._ready.notify_all()

    def _restarted(self) -> tuple[ExecutorProcess | None, str]:
        """Another executor process, or None and the reason."""
        try:
            host = self._start_process()
        except (ExecutorFailed, IsolationUnavailable, OSError) as error:
            return None, str(error)
        if host.capabilities.level == self.capabilities.level:
            return host, ""
        host.kill()
        return None, f"it reached {host.capabilities.level} only, {self.capabilities.level} before"

    def _resubmit(self) -> None:
        lost = [self._tickets[call_id] for call_id in self._sent if call_id in self._tickets]
        self._sent.clear()
        if self._broken:
            lost += self._queued
            self._queued.clear()
        message = self._broken or "the executor process ended while the call ran"
        for ticket in lost:
            if self._broken or ticket.attempt > 1 or ticket.program.session is not None:
                result = ToolResult("sandbox_error", error_message=message, session_id=ticket.program.session)
                self._finish(ticket.program.id, result)
            else:
                ticket.attempt += 1
                self._send_call(ticket)
        self._send_held()
