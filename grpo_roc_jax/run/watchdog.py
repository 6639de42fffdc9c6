"""The watchdog: a run that reaches none of its points for too long says where it stands, and ends if asked to."""

import faulthandler
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_roc_jax.config import WatchConfig
from grpo_roc_jax.run.watch import INFRASTRUCTURE_STATUS
from grpo_roc_jax.settings.points import listening
from grpo_roc_jax.settings.secrets import hidden

log = logging.getLogger(__name__)

GRACE_S = 60.0
"""Seconds that an orderly end may take; then the process ends at once, and its newest checkpoint stands."""
SHOWN = 20
"""Points in a report."""


class Watchdog:
    """Watches the points that the thread which made it reaches (`settings.points`).

    The time from a point to the next one may be `watch.stall_factor` times the longest that this took before, but at
    least `watch.stall_floor_s`. A process that was stopped as a whole is not blamed for that time.

    Args:
        run_dir: Where reports are written.
        config: Factor, floor, and whether `stalled` ends the run.
        in_flight: What the run waits for, in lines.
    """

    def __init__(self, run_dir: Path, config: WatchConfig, in_flight: Callable[[], Sequence[str]] = lambda: ()):
        self._run_dir, self._config, self._in_flight = run_dir, config, in_flight
        self._thread = threading.get_ident()
        self._at = ("start", time.monotonic())
        self._longest: dict[str, float] = {}
        self._last: deque[tuple[str, float]] = deque(maxlen=SHOWN)
        self._poll_s = min(5.0, config.stall_floor_s / 4)
        self._ended = threading.Event()
        self.ending = ""
        """Why the run was asked to end; empty while it was not."""

    @contextmanager
    def watching(self) -> Iterator["Watchdog"]:
        """Watches within the block."""
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            with listening(self._reach):
                yield self
        finally:
            self._ended.set()
            thread.join()

    def limit_s(self, point: str) -> float:
        """Seconds that may pass after a point."""
        return max(self._config.stall_floor_s, self._config.stall_factor * self._longest.get(point, 0.0))

    def _reach(self, name: str) -> None:
        if threading.get_ident() == self._thread:
            (before, since), now = self._at, time.monotonic()
            self._longest[before] = max(self._longest.get(before, 0.0), now - since)
            self._last.append((name, now))
            self._at = (name, now)

    def _watch(self) -> None:
        reported, looked = None, time.monotonic()
        while not self._ended.wait(self._poll_s):
            now, at = time.monotonic(), self._at
            if (late := now - looked - self._poll_s) > self._poll_s:
                self._at = at = (at[0], at[1] + late)  # the whole process stood still
            looked = now
            if at == reported or now - at[1] <= self.limit_s(at[0]):
                continue
            reported = at
            text = f"no progress for {now - at[1]:.0f} s after {at[0]}, where {self.limit_s(at[0]):.0f} s may pass"
            log.error("%s; see %s", text, self._report(text))
            if "stalled" in self._config.stop:
                self._end(text)

    def _report(self, text: str) -> Path:
        """Writes what is in flight and the stacks of all threads."""
        path = self._run_dir / f"stalled_{int(time.time())}.txt"
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            now = time.monotonic()
            points = [f"  {name}, {now - when:.1f} s ago" for name, when in self._last]
            print(text, "last points:", *points, "in flight:", sep="\n", file=file)
            with suppress(Exception):  # of a run in any state
                print(*(f"  {hidden(line)}" for line in self._in_flight()), sep="\n", file=file)
            print("stacks:", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        return path

    def _end(self, text: str) -> None:
        self.ending = text
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._ended.wait(GRACE_S):
            log.error("the run does not end by itself; its newest checkpoint stands")
            os._exit(INFRASTRUCTURE_STATUS)
