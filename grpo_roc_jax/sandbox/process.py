"""The executor process from the trainer's side: started by exec, one connection, ended by closing it."""

import contextlib
import logging
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import grpo_roc_jax.sandbox._messages as _messages
from grpo_roc_jax.sandbox._messages import TO_TRAINER, Capabilities, ExecutorSettings, Message
from grpo_roc_jax.sandbox._start import start
from grpo_roc_jax.sandbox._wire import BadFrame, FrameReader, pack_frame
from grpo_roc_jax.sandbox.cgroup import CgroupLimits, make_cgroup
from grpo_roc_jax.sandbox.program import ExecutorFailed, IsolationUnavailable

log = logging.getLogger(__name__)
END_S = 10.0
"""Seconds that the process has to end its programs and clean up."""


def resolved(settings: ExecutorSettings) -> ExecutorSettings:
    """The settings with the size of the pool resolved, if they leave it open."""
    size = settings.pool_size or workers_for(len(settings.cpu_list) or len(os.sched_getaffinity(0)))
    return replace(settings, pool_size=size, root_count=settings.root_count or max(1, size // 4))


def workers_for(cores: int) -> int:
    """Number of programs in flight for so many cores: many, since one that loops for ever must not hold up
    the others."""
    return 16 * cores if cores <= 16 else max(256, 2 * cores)


class ExecutorProcess:
    """A running executor process whose first workers are up, at most `start_timeout_s` after its start.

    It has `end_s` seconds to end its programs and clean up, before it is killed.
    Raises IsolationUnavailable or ExecutorFailed.
    """

    def __init__(
        self,
        settings: ExecutorSettings,
        cgroup: CgroupLimits | None,
        start_timeout_s: float,
        *,
        end_s: float = END_S,
    ) -> None:
        self._end_s = end_s
        self._group = make_cgroup(cgroup) if cgroup else None
        self.link, other = socket.socketpair()
        # Results that arrive between two polls of the trainer wait here; the kernel lowers the number if it must.
        other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        self.process = start("_supervisor", other.fileno())
        other.close()
        self._reader = FrameReader()
        self.unsent: deque[memoryview] = deque()
        """What the socket did not accept yet."""
        self._enter_group()
        try:
            self.link.sendall(pack_frame(_messages.encode(resolved(settings))))
            answer = self._first_answer(start_timeout_s)
        except (OSError, EOFError, BadFrame) as error:
            answer = _messages.Failed(f"the executor process ended while it started: {error}")
        if not isinstance(answer, Capabilities):
            self.end()
            raise (IsolationUnavailable if answer.no_level else ExecutorFailed)(answer.message)
        self.link.setblocking(False)
        self.capabilities = replace(answer, layers=(*answer.layers, "cgroup")) if self._group else answer

    def _enter_group(self) -> None:
        try:
            if self._group:
                self._group.add(self.process.pid)
        except OSError as error:
            self.kill()
            raise IsolationUnavailable(f"the executor process may not enter its cgroup: {error}") from None

    def _remove_group(self) -> None:
        if self._group:
            self._group.remove()

    def _first_answer(self, limit_s: float) -> Message:
        deadline = time.monotonic() + limit_s
        while True:
            self.link.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                for header, _ in self._reader.read(self.link):
                    return _messages.decode(header, TO_TRAINER)
            except TimeoutError:
                message = f"no worker was ready within {limit_s:g} s; raise tools.start_timeout_s or preload less"
                return _messages.Failed(message)

    def read(self) -> Iterator[tuple[Message, bytes]]:
        """All messages that have arrived, with the bytes that follow each. Raises if the connection is lost."""
        reader, link, decode = self._reader, self.link, _messages.decode
        with contextlib.suppress(BlockingIOError):
            while True:
                for header, payload in reader.read(link):
                    yield decode(header, TO_TRAINER), payload
                if not reader.more:
                    return

    def send(self, frame: bytes) -> None:
        """Send what the socket accepts now; `send_rest` sends the rest. Does nothing if the connection has ended."""
        view = memoryview(frame)
        if not self.unsent:
            try:
                view = view[self.link.send(view) :]
            except BlockingIOError:
                pass
            except OSError:
                return
        if view:
            self.unsent.append(view)

    def send_rest(self) -> None:
        """Send what is left, as far as the socket accepts it. Raises OSError if the connection has ended."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                view = self.unsent[0] = self.unsent[0][self.link.send(self.unsent[0]) :]
                if not view:
                    self.unsent.popleft()

    def kill(self) -> None:
        """Remove what is left of a process that ended unexpectedly or is stuck."""
        self.link.close()
        self.process.kill()
        try:
            self.process.wait(self._end_s)
        except subprocess.TimeoutExpired:  # it waits inside the kernel, and ends as soon as that returns
            log.warning("the tool executor process %d was killed and does not end; it is left behind", self.process.pid)
            return
        self._remove_group()

    def end(self) -> None:
        """Hang up, which ends the process with everything it runs, and wait for that."""
        self.link.close()
        try:
            self.process.wait(self._end_s)
            self._remove_group()
        except subprocess.TimeoutExpired:
            log.warning(
                "the tool executor process %d did not end within %g s; killing it", self.process.pid, self._end_s
            )
            self.kill()
