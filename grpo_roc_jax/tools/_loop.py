"""The event loop of the executor process: sockets and timers, each with a function to call. Standard library only."""

import heapq
import itertools
import selectors
import socket
import time
from collections.abc import Callable

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class EventLoop:
    """One turn waits for the next event or timer and calls what is due."""

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
