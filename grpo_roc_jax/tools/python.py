"""PythonExecutor: the local pool as the trainer sees it. Programs never run in the trainer, which never forks.

One executor process is started by exec; frames go over a socket pair. `submit` sends at once what the socket accepts.
Which thread reads the results is described in `_attendance`.
"""

import logging
import time
from collections import deque

from grpo_roc_jax.tools import _messages
from grpo_roc_jax.tools._attendance import AttendedExecutor
from grpo_roc_jax.tools._process import ExecutorProcess, settings_of
from grpo_roc_jax.tools._wire import pack_call, pack_frame
from grpo_roc_jax.tools.base import Ticket
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.interface import ExecutorFailed, IsolationUnavailable
from grpo_roc_jax.tools.registry import Registry
from grpo_roc_jax.types import ToolResult

log = logging.getLogger(__name__)
RESTARTS = 5
"""Executor processes lost within `RESTART_WINDOW_S` before this executor gives up."""
RESTART_WINDOW_S = 60.0
STATS_LIMIT_S = 2.0


class PythonExecutor(AttendedExecutor):
    """Runs programs on this host."""

    def __init__(self, config: ToolsConfig, registry: Registry | None = None) -> None:
        super().__init__(config, registry)
        self._sent: set[str] = set()
        self._lost_at: deque[float] = deque(maxlen=RESTARTS)
        self._sessions: set[str] = set()
        self._gone_sessions: set[str] = set()
        self._numbers: dict[int, dict[str, float]] = {}
        self._stats_requested = 0

    @property
    def pid(self) -> int | None:
        """Process id of the executor process."""
        return self._host.process.pid if self._host else None

    def _start_process(self) -> ExecutorProcess:
        return ExecutorProcess(settings_of(self.config), self.config.start_timeout_s)

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
        job, call, session = ticket.job, ticket.call, ticket.job.session
        code, stdin = job.code.encode("utf-8", "surrogatepass"), job.stdin.encode("utf-8", "surrogatepass")
        if session is not None:
            if session in self._gone_sessions:
                message = "the session is gone: the executor process had to be restarted"
                self._finish(call.id, ToolResult("sandbox_error", error_message=message, session_id=session))
                return
            self._sessions.add(session)
        self._sent.add(call.id)
        self._write(pack_call(call.id, session, call.seed & (2**64 - 1), ticket.attempt, code, stdin))

    def _send(self, message: _messages.Message) -> None:
        self._write(pack_frame(_messages.encode(message)))

    def _write(self, frame: bytes) -> None:
        """Send a frame; the part that the socket does not accept now is sent later. Called with `_mutex`."""
        self._host.send(frame)
        if self._host.unsent:
            self._ask_for_attention()

    def _send_held(self) -> None:
        while self._held and len(self._sent) < self.config.max_in_flight:
            self._send_call(self._held.popleft())

    def _drop(self, ids: list[str]) -> None:
        with self._mutex:
            dropped = set(ids)
            self._held = deque(ticket for ticket in self._held if ticket.call.id not in dropped)
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
            if not self._started or self._closed or self._broken or self._down:
                return numbers
            self._stats_requested += 1
            number = self._stats_requested
            self._send(_messages.RequestStats(number))
        self._await(lambda: number in self._numbers, STATS_LIMIT_S)
        numbers |= self._numbers.pop(number, {})
        numbers["tools/held"] = float(len(self._held))
        numbers["tools/restarts"] = float(len(self._lost_at))
        return numbers

    def _take(self, message: _messages.Message, payload: bytes) -> None:
        if isinstance(message, _messages.CallResult):
            fields = message.fields
            fields["stdout"] = payload[: message.out].decode("utf-8", "surrogatepass")
            if message.out < len(payload):
                fields["stderr"] = payload[message.out :].decode("utf-8", "surrogatepass")
            with self._mutex:
                self._sent.discard(message.id)
                if self._held:
                    self._send_held()
                self._finish_with(message.id, fields)
        elif isinstance(message, _messages.Failed):
            log.error("the tool executor process ended with an error:\n%s", message.message)
        elif isinstance(message, _messages.ExecutorStats):
            with self._mutex:
                self._numbers[message.n] = message.numbers
                self._announce()

    def _recover(self) -> None:
        """Start another executor process and run the stateless calls of the lost one again."""
        log.warning("the tool executor process is gone; starting another one")
        with self._mutex:
            self._host.kill()
            self._host.unsent.clear()
            now = time.monotonic()
            storm = len(self._lost_at) == RESTARTS and now - self._lost_at[0] < RESTART_WINDOW_S
            self._lost_at.append(now)
            self._gone_sessions |= self._sessions
            self._sessions.clear()
        broken = ""
        try:
            if storm:
                raise ExecutorFailed(f"the executor process ended {RESTARTS} times within {RESTART_WINDOW_S:g} s")
            host = self._start_process()
            if host.capabilities.level != self.capabilities.level:
                host.kill()
                raise ExecutorFailed(f"it reached {host.capabilities.level} only, {self.capabilities.level} before")
        except (ExecutorFailed, IsolationUnavailable, OSError) as error:
            broken = f"the executor process could not be restarted: {error}"
        with self._mutex:
            self._broken = broken
            if not broken:
                # Otherwise the connection stays down, and nothing is read any more.
                self._take_up(host)
                self._down = False
            self._resubmit()
            self._ready.notify_all()

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
