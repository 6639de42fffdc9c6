"""Threads that run one function after another, so that a call of an environment does not start one."""

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

Body = Callable[[], None]


class IdleThreads:
    """Runs each function at once, on an idle thread or on a new one. A function that never returns keeps its thread."""

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[Body]] = deque()

    def run(self, body: Body) -> None:
        """Starts a function, which must not raise."""
        try:
            given = self._idle.pop()
        except IndexError:
            given = SimpleQueue()
            threading.Thread(target=self._serve, args=(given,), daemon=True, name="environment").start()
        given.put(body)

    def _serve(self, given: SimpleQueue[Body]) -> None:
        while True:
            given.get()()
            self._idle.append(given)
