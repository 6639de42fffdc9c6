"""The connection of the executor process to the trainer. Standard library only."""

import socket
from collections.abc import Callable

from . import _messages, _wire
from ._loop import READ, WRITE, EventLoop

TOGETHER_S = 0.01
"""While calls wait for workers, results are sent together at this interval: the trainer is not needed to keep workers
busy, and waking it for each result costs it more than reading one. Short compared with the time in the queue."""


class TrainerLink:
    """Receives and sends messages without blocking.

    Args:
        on_message: Called with each message and the bytes that follow it.
    """

    def __init__(
        self, loop: EventLoop, sock: socket.socket, on_message: Callable[[_messages.Message, bytes], None]
    ) -> None:
        self.loop, self.sock, self.on_message = loop, sock, on_message
        self._reader, self._out = _wire.FrameReader(), bytearray()
        self._held = self._timed = False
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
        self._out += _wire.pack_frame(_messages.encode(message))
        self.flush()

    def send_soon(self, message: _messages.Message, *parts: bytes) -> None:
        """Send a message together with others of this turn of the loop, or of `TOGETHER_S` while calls wait."""
        self._out += _wire.pack_frame(_messages.encode(message), *parts)
        self._held = True

    def end_turn(self, *, calls_wait: bool) -> None:
        """Send the results of this turn, or hold them a little longer while calls wait for workers."""
        if not self._held:
            return
        if not calls_wait:
            self.flush()
        elif not self._timed:
            self._timed = True
            self.loop.later(TOGETHER_S, self.flush)

    def flush(self) -> None:
        """Send what the socket accepts now; the rest is sent when it accepts more."""
        self._held = self._timed = False
        try:
            while self._out:
                del self._out[: self.sock.send(self._out[: 1 << 18])]
        except BlockingIOError:
            pass
        self.loop.watch(self.sock, self._on_event, READ | (WRITE if self._out else 0))
