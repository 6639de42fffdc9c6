"""Threads that are used again: one for each episode, since what a thread has opened may belong to it."""

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

Body = Callable[[], None]


class IdleThreads:
    """Hands out idle threads, and new ones when none is idle. A function that never returns keeps its thread."""

    def __init__(self) -> None:
        self._waiting: deque[SimpleQueue[Body]] = deque()

    @property
    def idle(self) -> int:
        """Number of threads that have no owner."""
        return len(self._waiting)

    def lease(self) -> "LeasedThread":
        """A thread that serves one owner until it is released."""
        try:
            bodies = self._waiting.pop()
        except IndexError:
            bodies = SimpleQueue()
            threading.Thread(target=self._serve, args=(bodies,), daemon=True, name="environment").start()
        return LeasedThread(bodies, lambda: self._waiting.append(bodies))

    @staticmethod
    def _serve(bodies: SimpleQueue[Body]) -> None:
        while True:
            bodies.get()()


class LeasedThread:
    """Runs functions one after another, all on the same thread."""

    def __init__(self, bodies: SimpleQueue[Body], idle: Body):
        self._bodies, self._idle = bodies, idle

    def run(self, body: Body) -> None:
        """Runs a function, which must not raise, after those before it."""
        self._bodies.put(body)

    def release(self) -> None:
        """Gives the thread back once its functions have returned; nothing may be run on it afterwards."""
        self._bodies.put(self._idle)
