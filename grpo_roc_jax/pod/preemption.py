"""Signals to stop as one exception, raised when it is safe to stop, in any phase of the run.

SIGTERM and SIGINT, SIGHUP of a terminal that closes, and SIGUSR1, by which SLURM announces the end of a job
(`--signal=USR1@120`). Under nohup SIGHUP stays ignored.

Only the optimizer step must not be interrupted, since it donates its input buffers. Everything else can be abandoned:
the state at the start of the step is complete, and that state is saved.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PREEMPTED_STATUS = 143
"""Exit status of a run that was asked to stop, saved its state and can be resumed (128 + SIGTERM)."""


class Preempted(BaseException):
    """Raised in the main thread; a BaseException, so that no `except Exception` catches it."""


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Preemption:
    """Turns the first of `SIGNALS` into `Preempted`; a second SIGINT raises KeyboardInterrupt at once.

    Args:
        raises: False only sets `asked`: in a run of several processes none may stop without the others.
    """

    def __init__(self, raises: bool = True) -> None:
        self.asked = False
        """Whether a signal was received."""
        self._raises = raises
        self._deferred = 0

    @contextmanager
    def installed(self) -> Iterator["Preemption"]:
        """Handles the signals inside the block; a no-op outside the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        handled = [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]
        before = {number: signal.signal(number, self._on_signal) for number in handled}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Delays the exception until the block ends."""
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
