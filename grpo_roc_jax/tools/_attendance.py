"""Which thread attends the connection to the executor process: a thread that waits for a result, one at a time.

A thread that only reads results and hands them over would cost several times as much. One thread of the executor, the
keeper, attends the connection while no other thread waits: it sends what the socket did not accept, reads for
`asyncio`, and replaces a process that has ended.
"""

import contextlib
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from grpo_roc_jax.tools._messages import Message
from grpo_roc_jax.tools._process import ExecutorProcess
from grpo_roc_jax.tools.base import BaseExecutor, Ticket
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.interface import Capabilities
from grpo_roc_jax.tools.registry import Registry


class AttendedExecutor(BaseExecutor):
    """Threads take turns at one connection; subclasses implement `_start_process`, `_take` and `_recover`."""

    def __init__(self, config: ToolsConfig, registry: Registry | None = None) -> None:
        super().__init__(config, registry)
        self._host: ExecutorProcess | None = None
        self._held: deque[Ticket] = deque()
        """Calls that are sent once a process is running and fewer calls are in flight."""
        self._broken = ""
        """Why no process can be started any more; empty while one can."""
        self._down = False
        """The connection has ended, and the keeper has not made another one yet."""
        self._reader = 0
        """Thread that attends the connection now; 0 for none."""
        self._followers = 0
        """Threads that wait for what the reader receives, or for their turn."""
        self._expected = 0
        """Results that are awaited outside `_await`."""
        self._keeper: threading.Thread | None = None
        self._rouse_reader = self._rouse_keeper = -1
        self._poller = select.poll()
        self._polls_out = False

    def _start_process(self) -> ExecutorProcess:
        raise NotImplementedError

    def _take(self, message: Message, payload: bytes) -> None:
        """Process a message of the executor process."""
        raise NotImplementedError

    def _recover(self) -> None:
        """Replace a process that has ended, in the keeper's thread."""
        raise NotImplementedError

    def _open(self) -> Capabilities:
        host = self._start_process()
        self._rouse_reader = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._rouse_keeper = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._take_up(host)
        self._keeper = threading.Thread(target=self._keep, daemon=True, name="tool-executor")
        self._keeper.start()
        return host.capabilities

    def _shut(self) -> None:
        """Wait until no thread is at the connection, and end the process."""
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

    def _take_up(self, host: ExecutorProcess) -> None:
        self._host, self._poller, self._polls_out = host, select.poll(), False
        self._poller.register(self._rouse_reader, select.POLLIN)
        self._poller.register(host.link, select.POLLIN)

    def _has_work(self) -> bool:
        return bool(self._host.unsent or self._expected or self._held)

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
                if fd == self._rouse_reader:
                    os.eventfd_read(fd)
                else:
                    self._attend(events)
        finally:
            self._mutex.acquire()
            self._reader = 0
            if self._followers:
                self._ready.notify_all()
            elif self._has_work():
                os.eventfd_write(self._rouse_keeper, 1)

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
            os.eventfd_write(self._rouse_keeper, 1)

    def _announce(self) -> None:
        if self._followers:
            self._ready.notify_all()
        if self._reader and self._reader != threading.get_ident():
            os.eventfd_write(self._rouse_reader, 1)

    def _ask_for_attention(self) -> None:
        """Wake a thread that sends and reads, even if no thread waits for a result."""
        with self._mutex:
            if self._reader != threading.get_ident() and not self._closed:
                os.eventfd_write(self._rouse_reader if self._reader else self._rouse_keeper, 1)

    def _expect(self, amount: int) -> None:
        with self._mutex:
            before = self._expected
            self._expected += amount
            if 0 in (before, self._expected):
                self._ask_for_attention()

    def _keep(self) -> None:
        """Attend the connection while no other thread does, and replace it when it ends."""
        while not (self._closed or self._broken):
            link = self._host.link
            poller = select.poll()
            poller.register(self._rouse_keeper, select.POLLIN)
            # No events are requested, so this thread notices the end of the connection only; results wake the thread
            # that waits for them.
            poller.register(link, 0)
            ended = any(fd != self._rouse_keeper for fd, _ in poller.poll())
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._rouse_keeper)

            def idle(ended: bool = ended) -> bool:
                return self._down or not (ended or self._has_work())

            self._await(idle, None)
            if self._down and not self._closed:
                self._recover()
