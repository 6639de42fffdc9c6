"""PythonExecutor: the local pool as the trainer sees it. Programs never run in the trainer, which never forks.

One executor process is started by exec; frames go over a socket pair. `submit` sends at once what the socket takes.
Results are read by whoever waits for one, one thread at a time for all that wait: to hand each over from a thread that
does nothing but read costs several times what reading it does. A thread of ours, the keeper, stands in where nobody
waits: it replaces an executor process that ended, sends what the socket did not take, and reads for `asyncio`.
"""

import contextlib
import dataclasses
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from grpo_roc_jax.tools import _wire
from grpo_roc_jax.tools._process import ExecutorProcess
from grpo_roc_jax.tools.config import ToolsConfig, parse_cpus
from grpo_roc_jax.tools.executor import BaseExecutor, Capabilities, ExecutorFailed, IsolationUnavailable, Ticket
from grpo_roc_jax.tools.registry import Registry
from grpo_roc_jax.types import ToolResult

log = logging.getLogger(__name__)
RESTARTS = 5
"""Executor processes lost within `RESTART_WINDOW_S` before this executor gives up."""
RESTART_WINDOW_S = 60.0
STATS_LIMIT_S = 2.0


def settings_of(config: ToolsConfig) -> dict[str, Any]:
    """The configuration as the executor process gets it: plain data, automatic choices made."""
    automatic = {
        "pool_size": config.pool_size,
        "root_count": config.root_count,
        "cpu_list": sorted(parse_cpus(config.cpus)) if config.cpus else [],
    }
    return dataclasses.asdict(config) | automatic


class PythonExecutor(BaseExecutor):
    """Runs programs on this host."""

    def __init__(self, config: ToolsConfig, registry: Registry | None = None) -> None:
        super().__init__(config, registry)
        self._host: ExecutorProcess | None = None
        self._unsent: deque[memoryview] = deque()
        self._held: deque[Ticket] = deque()
        self._sent: set[str] = set()
        self._lost_at: deque[float] = deque(maxlen=RESTARTS)
        self._sessions: set[str] = set()
        self._gone_sessions: set[str] = set()
        self._numbers: dict[int, dict[str, float]] = {}
        self._stats_asked = 0
        self._broken = ""
        self._down = False
        """The connection has ended, and the keeper has not made another one yet."""
        self._reader = 0
        """Thread that attends the connection now."""
        self._followers = 0
        """Threads that wait for what the reader brings, or for their turn."""
        self._expected = 0
        self._keeper: threading.Thread | None = None
        self._rouse_reader = self._rouse_keeper = -1
        self._poller = select.poll()
        self._polls_out = False

    @property
    def pid(self) -> int | None:
        """Process id of the executor process."""
        return self._host.process.pid if self._host else None

    def _open(self) -> Capabilities:
        host = ExecutorProcess(settings_of(self.config))
        self._rouse_reader = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._rouse_keeper = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._take_up(host)
        self._keeper = threading.Thread(target=self._keep, daemon=True, name="tool-executor")
        self._keeper.start()
        return host.capabilities

    def _take_up(self, host: ExecutorProcess) -> None:
        self._host, self._poller, self._polls_out = host, select.poll(), False
        self._poller.register(self._rouse_reader, select.POLLIN)
        self._poller.register(host.link, select.POLLIN)

    # Sending.

    def _launch(self, ticket: Ticket) -> None:
        with self._mutex:
            if self._broken:
                self._finish(ticket.call.id, ToolResult("sandbox_error", error_message=self._broken))
            elif self._down:
                self._held.append(ticket)
            elif len(self._sent) >= self.config.max_in_flight:
                self._held.append(ticket)
                self._counts["held_back"] = self._counts.get("held_back", 0) + 1
                self._ask_for_attention()
            else:
                self._send_call(ticket)

    def _send_call(self, ticket: Ticket) -> None:
        job, call = ticket.job, ticket.call
        code, stdin = job.code.encode("utf-8", "surrogatepass"), job.stdin.encode("utf-8", "surrogatepass")
        session = job.session
        if session is not None:
            if session in self._gone_sessions:
                message = "the session is gone: the executor process had to be restarted"
                self._finish(call.id, ToolResult("sandbox_error", error_message=message, session_id=session))
                return
            self._sessions.add(session)
        self._sent.add(call.id)
        self._write(_wire.pack_call(call.id, session, call.seed & (2**64 - 1), ticket.attempt, code, stdin))

    def _write(self, frame: bytes) -> None:
        """Send what the socket takes now; the rest goes when it takes more."""
        view = memoryview(frame)
        if not self._unsent:
            try:
                view = view[self._host.link.send(view) :]
            except BlockingIOError:
                pass
            except OSError:
                return
        if view:
            self._unsent.append(view)
            self._ask_for_attention()

    def _send_rest(self) -> None:
        """Send what was left over, as far as the socket takes it."""
        with self._mutex, contextlib.suppress(BlockingIOError):
            while self._unsent:
                view = self._unsent[0]
                view = self._unsent[0] = view[self._host.link.send(view) :]
                if not view:
                    self._unsent.popleft()

    def _send_held(self) -> None:
        while self._held and len(self._sent) < self.config.max_in_flight:
            self._send_call(self._held.popleft())

    def _drop(self, ids: list[str]) -> None:
        with self._mutex:
            dropped = set(ids)
            self._held = deque(ticket for ticket in self._held if ticket.call.id not in dropped)
            self._sent -= dropped
            self._write(_wire.pack_frame({"op": "cancel", "ids": ids}))

    def close_session(self, session: str) -> None:
        with self._mutex:
            self._gone_sessions.discard(session)
            if session in self._sessions:
                self._sessions.discard(session)
                self._write(_wire.pack_frame({"op": "close", "session": session}))

    def stats(self) -> dict[str, float]:
        numbers = super().stats()
        with self._mutex:
            if not self._started or self._closed or self._broken or self._down:
                return numbers
            self._stats_asked += 1
            number = self._stats_asked
            self._write(_wire.pack_frame({"op": "stats", "n": number}))
        self._await(lambda: number in self._numbers, STATS_LIMIT_S)
        numbers |= self._numbers.pop(number, {})
        numbers["tools/held"] = float(len(self._held))
        numbers["tools/restarts"] = float(len(self._lost_at))
        return numbers

    # Waiting and reading.

    def _await(self, satisfied: Callable[[], Any], timeout_s: float | None) -> None:
        """Read until `satisfied` holds, the executor is closed or the time is over; follow where another one reads.

        What has come already is read even if nothing has to be waited for.
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
        """Take the turn at the connection for one event at most; called with `_mutex`, which is free meanwhile."""
        if self._unsent or self._polls_out:
            self._polls_out = bool(self._unsent)
            self._poller.modify(self._host.link, select.POLLIN | (select.POLLOUT if self._polls_out else 0))
        self._reader = threading.get_ident()
        self._mutex.release()
        try:
            for fd, events in self._poller.poll(None if seconds == math.inf else 1000 * seconds):
                if fd == self._rouse_reader:
                    os.eventfd_read(fd)
                else:
                    self._attend(events)
        finally:
            self._mutex.acquire()
            self._reader = 0
            if self._followers:
                self._ready.notify_all()
            elif self._unsent or self._held or self._expected:
                os.eventfd_write(self._rouse_keeper, 1)

    def _attend(self, events: int) -> None:
        """Send what waits to be sent, and take all that has come."""
        try:
            if events & select.POLLOUT:
                self._send_rest()
            if events == select.POLLOUT:
                return
            reader, link = self._host.reader, self._host.link
            while True:
                for header, payload in reader.read(link):
                    self._take(header, payload)
                if not reader.more:
                    return
        except BlockingIOError:
            return
        except (OSError, ValueError, EOFError, _wire.BadFrame):
            self._lose_link()
        except BaseException:
            # An interrupt, maybe in the middle of a frame: what follows on this connection could not be told apart.
            self._lose_link()
            raise

    def _take(self, header: dict, payload: bytes) -> None:
        if header["op"] == "result":
            call_id, size, fields = header["id"], header["out"], header["fields"]
            fields["stdout"] = payload[:size].decode("utf-8", "surrogatepass")
            if size < len(payload):
                fields["stderr"] = payload[size:].decode("utf-8", "surrogatepass")
            with self._mutex:
                self._sent.discard(call_id)
                if self._held:
                    self._send_held()
                self._finish_with(call_id, fields)
        elif header["op"] == "died":
            log.error("the tool executor process ended by a mistake of its own:\n%s", header["message"])
        elif header["op"] == "stats":
            with self._mutex:
                self._numbers[header["n"]] = header["numbers"]
                self._announce()

    def _lose_link(self) -> None:
        with self._mutex:
            self._down = True
            os.eventfd_write(self._rouse_keeper, 1)

    def _announce(self) -> None:
        if self._followers:
            self._ready.notify_all()
        if self._reader and self._reader != threading.get_ident():
            os.eventfd_write(self._rouse_reader, 1)

    def _ask_for_attention(self) -> None:
        """Something is to be sent or read, though nobody may be waiting."""
        with self._mutex:
            if self._reader != threading.get_ident() and not self._closed:
                os.eventfd_write(self._rouse_reader if self._reader else self._rouse_keeper, 1)

    def _expect(self, amount: int) -> None:
        with self._mutex:
            before = self._expected
            self._expected += amount
            if 0 in (before, self._expected):
                self._ask_for_attention()

    # The keeper.

    def _keep(self) -> None:
        """Attend the connection where nobody else does, and replace it when it ends."""
        while not (self._closed or self._broken):
            link = self._host.link
            poller = select.poll()
            poller.register(self._rouse_keeper, select.POLLIN)
            # Without events of its own: results wake whoever waits for them, and this thread sees the end only.
            poller.register(link, 0)
            ended = any(fd != self._rouse_keeper for fd, _ in poller.poll())
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._rouse_keeper)

            def idle(ended: bool = ended) -> bool:
                return self._down or not (ended or self._unsent or self._held or self._expected)

            self._await(idle, None)
            if self._down and not self._closed:
                self._recover()

    def _recover(self) -> None:
        """The executor process is gone: start another and run its stateless calls once more."""
        log.warning("the tool executor process is gone; starting another one")
        with self._mutex:
            self._host.kill()
            self._unsent.clear()
            now = time.monotonic()
            storm = len(self._lost_at) == RESTARTS and now - self._lost_at[0] < RESTART_WINDOW_S
            self._lost_at.append(now)
            self._gone_sessions |= self._sessions
            self._sessions.clear()
        broken = ""
        try:
            if storm:
                raise ExecutorFailed(f"the executor process ended {RESTARTS} times within {RESTART_WINDOW_S:g} s")
            host = ExecutorProcess(settings_of(self.config))
            self._check_level(host)
        except (ExecutorFailed, IsolationUnavailable, OSError) as error:
            broken = f"the executor process could not be restarted: {error}"
        with self._mutex:
            self._broken = broken
            if not broken:
                # Otherwise it stays down: there is nothing to be read any more.
                self._take_up(host)
                self._down = False
            self._resubmit()
            self._ready.notify_all()

    def _check_level(self, host: ExecutorProcess) -> None:
        if host.capabilities.level != self.capabilities.level:
            host.kill()
            raise ExecutorFailed(f"it reached {host.capabilities.level} only, {self.capabilities.level} before")

    def _resubmit(self) -> None:
        lost = [self._tickets[call_id] for call_id in self._sent if call_id in self._tickets]
        self._sent.clear()
        if self._broken:
            lost += self._held
            self._held.clear()
        for ticket in lost:
            if self._broken or ticket.attempt > 1 or ticket.job.session is not None:
                message = self._broken or "the executor process ended while the call ran"
                result = ToolResult("sandbox_error", error_message=message, session_id=ticket.job.session)
                self._finish(ticket.call.id, result)
            else:
                ticket.attempt += 1
                self._send_call(ticket)
        self._send_held()

    def _shut(self) -> None:
        with self._mutex:
            os.eventfd_write(self._rouse_keeper, 1)
            self._announce()
            self._ready.notify_all()
            self._ready.wait_for(lambda: self._reader in (0, threading.get_ident()), 5)
        if self._keeper is not threading.current_thread():
            self._keeper.join(self.config.start_timeout_s)
        with self._mutex:
            self._host.end()
            for fd in (self._rouse_reader, self._rouse_keeper):
                os.close(fd)
