"""A line that shows how the rollouts of a step stand: rows live, waiting on tools, done, tokens per second.

It is drawn on a terminal or not at all: files get no control codes and no half lines.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

REFRESH_S = 0.2
"""Time between redraws; an update in between costs a clock reading."""


class RolloutProgress:
    """Handed to `Engine.run`; a line among other bars that comes with the first update and goes with the last row."""

    def __init__(self, bars: Progress, *, description: str = "rollouts"):
        """
        Args:
            bars: Where to draw; its columns show `description` and the fields `status`, beside the bar.
            description: Words in front of the line.
        """
        self._bars, self._description = bars, description
        self._task: TaskID | None = None
        self._total = self._done = self._first = 0
        self._started = self._drawn = 0.0

    def update(self, *, live: int, waiting: int, done: int, total: int, tokens: int) -> None:
        """The engine's counts after a round."""
        now = time.perf_counter()
        if self._task is not None and (total != self._total or done < self._done):
            self._end()  # the run before was left by an exception
        if self._task is None:
            # The rate counts from here: what came before holds compilations and the prompts.
            self._started, self._first, self._drawn = now, tokens, 0.0
            self._task = self._bars.add_task(self._description, total=total, status="")
            self._bars.start()
        self._total, self._done = total, done
        if done >= total:
            self._end()
        elif now - self._drawn >= REFRESH_S:
            self._drawn = now
            rate = (tokens - self._first) / max(now - self._started, REFRESH_S)
            status = f"{live} live · {waiting} on tools · {rate:,.0f} tok/s"
            self._bars.update(self._task, completed=done, status=status)
            self._bars.refresh()

    def _end(self) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
            self._bars.refresh()
            self._task = None


@contextmanager
def rollout_display(mode: str, console: Console | None = None) -> Iterator[RolloutProgress | None]:
    """A display of its own on standard error, for commands without a training bar; None where it is not wanted.

    Args:
        mode: `log.console`: `auto` and `live` draw on a terminal or in a notebook, `plain` and `off` never do.
        console: Instead of standard error.
    """
    console = console or Console(stderr=True)
    if mode not in ("auto", "live") or not (console.is_terminal or console.is_jupyter):
        yield None
        return
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
    )
    try:
        yield RolloutProgress(bars)
    finally:
        bars.stop()
