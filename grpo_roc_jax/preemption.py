"""SIGTERM and SIGINT as one exception at a safe instant, whatever phase the run is in.

Only the optimiser step must not be cut in two: it gives its input buffers away. Everything else can be abandoned,
since the state at the start of the step is whole and is what gets saved.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PREEMPTED_STATUS = 143
"""Exit status of a run that was asked to end, saved its state and can be resumed (128 + SIGTERM)."""


class Preempted(BaseException):
    """Raised in the main thread; a BaseException, so that no handler for ordinary errors swallows it."""


class Preemption:
    """Turns the first SIGTERM or SIGINT into `Preempted`; the second SIGINT acts at once.

    Args:
        raises: False only takes note in `asked`: one of several processes must not leave the others alone.
    """

    def __init__(self, raises: bool = True) -> None:
        self.asked = False
        """Whether a signal came."""
        self._raises = raises
        self._deferred = 0

    @contextmanager
    def installed(self) -> Iterator["Preemption"]:
        """Handles the signals inside the block; a no-op off the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Holds the exception back until the block ends."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1
        if self.asked and self._raises and not self._deferred:
            raise Preempted

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.asked = True
        if self._raises and not self._deferred:
            raise Preempted
