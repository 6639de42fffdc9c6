"""The event loop of the executor process, its connection to the trainer, and the number of calls that it runs.

Standard library only.
"""

import heapq
import itertools
import os
import selectors
import socket
import time
from collections.abc import Callable

from . import _messages, _wire

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
TOGETHER_S = 0.01
"""While calls wait for workers, results are collected and sent at this interval in seconds: the trainer is not needed
to keep workers busy, and waking it for each result costs it more than reading one. Short compared with the time in
the queue."""
PAUSE_S, STEP_S = 5.0, 0.5
"""Seconds without a change before the width grows again, and seconds for each further call."""


class EventLoop:
    """Each turn waits for the next event or timer and calls what is due."""

    def __init__(self) -> None:
        self.selector = selectors.EpollSelector()
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def watch(self, sock: socket.socket, action: Callable[[int], None], events: int = READ) -> None:
        """Call `action` with the events that occur on a socket; a second call for the same socket replaces these."""
        known = self.selector.get_map().get(sock)
        if known is None:
            self.selector.register(sock, events, action)
        elif known.events != events:
            self.selector.modify(sock, events, action)

    def forget(self, sock: socket.socket) -> None:
        self.selector.unregister(sock)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (time.monotonic() + delay_s, next(self._order), action))

    def turn(self) -> None:
        pause_s = max(0.0, self.timers[0][0] - time.monotonic()) if self.timers else None
        for key, events in self.selector.select(pause_s):
            key.data(events)
        while self.timers and self.timers[0][0] <= time.monotonic():
            heapq.heappop(self.timers)[2]()


class TrainerLink:
    """Receives and sends without blocking; `on_message` gets each message and the bytes that follow it."""

    def __init__(
        self, loop: EventLoop, sock: socket.socket, on_message: Callable[[_messages.Message, bytes], None]
    ) -> None:
        self.loop, self.sock, self.on_message = loop, sock, on_message
        self._reader, self._out = _wire.FrameReader(), bytearray()
        self._pending = self._timed = False
        """Whether results wait to be sent, and whether a timer will send them."""
        sock.setblocking(False)
        loop.watch(sock, self._on_event)

    def _on_event(self, events: int) -> None:
        """Raises EOFError if the trainer hung up."""
        if events & WRITE:
            self.flush()
        if not events & READ:
            return
        try:
            frames = self._reader.read(self.sock)
        except BlockingIOError:
            return
        for header, payload in frames:
            self.on_message(_messages.decode(header, _messages.TO_EXECUTOR), payload)

    def send(self, message: _messages.Message) -> None:
        self.send_soon(message)
        self.flush()

    def send_soon(self, message: _messages.Message, *parts: bytes) -> None:
        """Send a message together with others of this turn of the loop, or of `TOGETHER_S` while calls wait."""
        self._out += _wire.pack_frame(_messages.encode(message), *parts)
        self._pending = True

    def end_turn(self, *, calls_wait: bool) -> None:
        """Send the results of this turn, or hold them a little longer while calls wait for workers."""
        if not self._pending:
            return
        if not calls_wait:
            self.flush()
        elif not self._timed:
            self._timed = True
            self.loop.later(TOGETHER_S, self.flush)

    def flush(self) -> None:
        """Send what the socket accepts now; the rest is sent when it accepts more."""
        self._pending = self._timed = False
        try:
            while self._out:
                del self._out[: self.sock.send(self._out[: 1 << 18])]
        except BlockingIOError:
            pass
        self.loop.watch(self.sock, self._on_event, READ | (WRITE if self._out else 0))


class Width:
    """The number of calls that may run at a time: it falls at once if the host is short of something, and grows back
    slowly."""

    def __init__(self, loop: EventLoop, full: int) -> None:
        self.loop, self.full, self.calls = loop, full, full

    def narrow(self, running: int, least: int | None = None) -> None:
        """Limits the number of calls for a while to fewer than the `running` ones, but at least to `least` (default:
        four per core)."""
        least = least or 4 * len(os.sched_getaffinity(0))
        was_full = self.calls == self.full
        self.calls = min(self.calls, max(least, 3 * running // 4))
        if was_full and self.calls < self.full:
            self.loop.later(PAUSE_S, self._widen)

    def _widen(self) -> None:
        self.calls = min(self.full, self.calls + 1)
        if self.calls < self.full:
            self.loop.later(STEP_S, self._widen)
