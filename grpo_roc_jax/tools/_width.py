"""How many calls run at a time: fewer than workers while the host is short of something. Standard library only."""

import os

from ._loop import EventLoop

PAUSE_S, STEP_S = 5.0, 0.5
"""Time without a change before the width grows again, and the time for each further call."""


class Width:
    """A number of calls that falls at once and grows back slowly."""

    def __init__(self, loop: EventLoop, full: int) -> None:
        self.loop, self.full, self.calls = loop, full, full

    def narrow(self, running: int, least: int | None = None) -> None:
        """Let fewer calls than the `running` ones run at a time, for a while.

        Args:
            least: Calls that may run in any case; by default four for each core.
        """
        least = least or 4 * len(os.sched_getaffinity(0))
        was_full = self.calls == self.full
        self.calls = min(self.calls, max(least, 3 * running // 4))
        if was_full and self.calls < self.full:
            self.loop.later(PAUSE_S, self._widen)

    def _widen(self) -> None:
        self.calls = min(self.full, self.calls + 1)
        if self.calls < self.full:
            self.loop.later(STEP_S, self._widen)
