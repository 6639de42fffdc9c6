"""A line that shows how the rollouts of a step stand: rows live, waiting on tools, done, tokens per second."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

REFRESH_S = 0.2
"""Time between redraws; an update in between costs a clock reading."""


class RolloutProgress:
    """A context manager to hand to `Engine.run`; draws on a terminal, or anywhere when asked."""

    def __init__(self, *, show: bool | None = None, description: str = "rollouts"):
        """
        Args:
            show: True draws even into a file, False never; None when standard error is a terminal.
            description: Words in front of the line, e.g. the step.
        """
        self._shown = sys.stderr.isatty() if show is None else show
        self._description = description
        self._started = self._drawn = 0.0
        self._progress: Progress | None = None

    def __enter__(self) -> "RolloutProgress":
        self._started = time.perf_counter()
        if self._shown:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("done · {task.fields[live]} live · {task.fields[waiting]} on tools"),
                TextColumn("{task.fields[rate]:,.0f} tok/s"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=sys.stderr.isatty(),
                auto_refresh=False,
            )
            self._progress.start()
            self._task = self._progress.add_task(self._description, live=0, waiting=0, rate=0.0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.refresh()
            self._progress.stop()
            self._progress = None

    def update(self, *, live: int, waiting: int, done: int, total: int, tokens: int) -> None:
        """The engine's counts after a round."""
        if self._progress is None:
            return
        now = time.perf_counter()
        if now - self._drawn < REFRESH_S and done < total:
            return
        self._drawn = now
        rate = tokens / max(now - self._started, 1e-9)
        self._progress.update(self._task, completed=done, total=total, live=live, waiting=waiting, rate=rate)
        self._progress.refresh()
