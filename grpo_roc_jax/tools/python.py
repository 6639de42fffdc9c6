"""PythonExecutor: the local pool as the trainer sees it. Programs never run in the trainer, which never forks.

One executor process is started by exec; frames go over a socket pair. A thread reads the answers; `submit` writes at
once what the socket takes and leaves the rest to that thread, so it never waits.
"""

import contextlib
import dataclasses
import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections import deque
from typing import Any

from grpo_roc_jax.tools import _boot, _wire
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
        self._lock = threading.RLock()
        self._process: subprocess.Popen | None = None
        self._link: socket.socket | None = None
        self._unsent: deque[memoryview] = deque()
        self._held: deque[Ticket] = deque()
        self._sent: set[str] = set()
        self._lost_at: deque[float] = deque(maxlen=RESTARTS)
        self._sessions: set[str] = set()
        self._gone_sessions: set[str] = set()
        self._numbers: dict[int, dict[str, float]] = {}
        self._stats_asked = 0
        self._stats_ready = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wake_read = self._wake_write = -1
        self._broken = ""
        self._blocked = False

    @property
    def pid(self) -> int | None:
        """Process id of the executor process."""
        return self._process.pid if self._process else None

    def _open(self) -> Capabilities:
        capabilities = self._start_process()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="tool-executor")
        self._thread.start()
        return capabilities

    def _start_process(self) -> Capabilities:
        """Execute the process and wait until its first workers are up.

        Raises:
            IsolationUnavailable: the wanted level cannot be reached.
            ExecutorFailed: the process did not become ready.
        """
        ours, theirs = socket.socketpair()
        self._process = _boot.start("_supervisor", str(theirs.fileno()), fd=theirs.fileno(), isolated=False)
        theirs.close()
        self._link, self._reader = ours, _wire.FrameReader()
        try:
            ours.sendall(_wire.pack_frame({"op": "start", "config": settings_of(self.config)}))
            answer = self._first_answer(ours)
        except OSError as error:
            answer = {"op": "failed", "message": f"the executor process: {error}"}
        if answer["op"] != "ready":
            ours.close()
            self._process.wait()
            failure = IsolationUnavailable if answer["op"] == "unavailable" else ExecutorFailed
            raise failure(answer["message"])
        ours.setblocking(False)
        return Capabilities(
            answer["level"], tuple(answer["missing"]), tuple(answer["layers"]), answer["versions"], answer["workers"]
        )

    def _first_answer(self, link: socket.socket) -> dict:
        limit = self.config.start_timeout_s
        deadline = time.monotonic() + limit
        while True:
            link.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                data = link.recv(1 << 16)
            except TimeoutError:
                message = f"no worker was ready within {limit:g} s; raise tools.start_timeout_s or preload less"
                return {"op": "failed", "message": message}
            if not data:
                return {"op": "failed", "message": "the executor process ended while it started"}
            for header, _ in self._reader.feed(data):
                return header

    # The trainer's threads.

    def _launch(self, ticket: Ticket) -> None:
        with self._lock:
            if self._broken:
                self._finish(ticket.call.id, ToolResult("sandbox_error", error_message=self._broken))
            elif len(self._sent) >= self.config.max_in_flight:
                self._held.append(ticket)
                self._counts["held_back"] = self._counts.get("held_back", 0) + 1
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
        header = {
            "op": "call", "id": call.id, "session": session, "seed": call.seed & (2**64 - 1), "code": len(code),
            "attempt": ticket.attempt,
        }  # fmt: skip
        self._write(_wire.pack_frame(header, code, stdin))

    def _write(self, frame: bytes) -> None:
        """Send what the socket takes now; the reading thread sends the rest."""
        view = memoryview(frame)
        if not self._unsent:
            try:
                view = view[self._link.send(view) :]
            except BlockingIOError:
                pass
            except OSError:
                return
        if view:
            self._unsent.append(view)
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")

    def _drop(self, ids: list[str]) -> None:
        with self._lock:
            dropped = set(ids)
            self._held = deque(ticket for ticket in self._held if ticket.call.id not in dropped)
            self._sent -= dropped
            self._write(_wire.pack_frame({"op": "cancel", "ids": ids}))

    def close_session(self, session: str) -> None:
        with self._lock:
            self._gone_sessions.discard(session)
            if session in self._sessions:
                self._sessions.discard(session)
                self._write(_wire.pack_frame({"op": "close", "session": session}))

    def stats(self) -> dict[str, float]:
        numbers = super().stats()
        with self._lock:
            if not self._started or self._closed or self._broken:
                return numbers
            self._stats_asked += 1
            number = self._stats_asked
            self._write(_wire.pack_frame({"op": "stats", "n": number}))
        with self._stats_ready:
            self._stats_ready.wait_for(lambda: number in self._numbers or self._closed, STATS_LIMIT_S)
            numbers |= self._numbers.pop(number, {})
        numbers["tools/held"] = float(len(self._held))
        numbers["tools/restarts"] = float(len(self._lost_at))
        return numbers

    def _shut(self) -> None:
        with self._lock:
            self._wake()
            if self._link is not None:
                self._link.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)
        if self._process is not None:
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        with self._stats_ready:
            self._stats_ready.notify_all()
        for fd in (self._wake_read, self._wake_write):
            os.close(fd)

    # The reading thread.

    def _serve(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError, ValueError, EOFError, _wire.BadFrame):
                self._exchange()
            if not self._closed:
                self._recover()

    def _exchange(self) -> None:
        """Read answers and write what `submit` had to leave, until the connection ends."""
        poller, link = select.poll(), self._link.fileno()
        poller.register(self._wake_read, select.POLLIN)
        poller.register(link, select.POLLIN)
        while not self._closed:
            for fd, events in poller.poll():
                if fd == self._wake_read:
                    os.read(fd, 4096)
                elif events & ~select.POLLOUT:
                    data = self._link.recv(1 << 18)
                    if not data:
                        raise EOFError
                    for header, payload in self._reader.feed(data):
                        self._take(header, payload)
            if self._unsent or self._blocked:
                with self._lock:
                    self._blocked = not self._send_rest()
                poller.modify(link, select.POLLIN | (select.POLLOUT if self._blocked else 0))

    def _send_rest(self) -> bool:
        """Send what was left over; False while the socket takes no more."""
        while self._unsent:
            try:
                sent = self._link.send(self._unsent[0])
            except BlockingIOError:
                return False
            self._unsent[0] = self._unsent[0][sent:]
            if not self._unsent[0]:
                self._unsent.popleft()
        return True

    def _take(self, header: dict, payload: bytes) -> None:
        if header["op"] == "result":
            with self._lock:
                self._sent.discard(header["id"])
                while self._held and len(self._sent) < self.config.max_in_flight:
                    self._send_call(self._held.popleft())
            size, fields = header["out"], header["fields"]
            stdout = payload[:size].decode("utf-8", "surrogatepass")
            stderr = payload[size:].decode("utf-8", "surrogatepass")
            self._finish(header["id"], ToolResult(**fields, stdout=stdout, stderr=stderr))
        elif header["op"] == "died":
            log.error("the tool executor process ended by a mistake of its own:\n%s", header["message"])
        elif header["op"] == "stats":
            with self._stats_ready:
                self._numbers[header["n"]] = header["numbers"]
                self._stats_ready.notify_all()

    def _recover(self) -> None:
        """The executor process is gone: start another and run its stateless calls once more."""
        log.warning("the tool executor process is gone; starting another one")
        with self._lock:
            self._link.close()
            self._process.kill()
            self._process.wait()
            self._unsent.clear()
            now = time.monotonic()
            storm = len(self._lost_at) == RESTARTS and now - self._lost_at[0] < RESTART_WINDOW_S
            self._lost_at.append(now)
            self._gone_sessions |= self._sessions
            self._sessions.clear()
            try:
                if storm:
                    raise ExecutorFailed(f"the executor process ended {RESTARTS} times within {RESTART_WINDOW_S:g} s")
                self._check_level(self._start_process())
            except (ExecutorFailed, IsolationUnavailable, OSError) as error:
                self._broken = f"the executor process could not be restarted: {error}"
            self._resubmit()

    def _check_level(self, reached: Capabilities) -> None:
        if reached.level != self.capabilities.level:
            self._link.close()
            raise ExecutorFailed(f"it reached {reached.level} only, {self.capabilities.level} before")

    def _resubmit(self) -> None:
        with self._ready:
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
