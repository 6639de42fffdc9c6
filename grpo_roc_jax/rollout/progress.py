"""How far the rollouts of a step are: rows live, waiting for tools, done; tokens per second.

On terminals a bar is drawn; elsewhere, so that log files hold no control codes or partial lines, there are whole lines
(`settings.progress`).
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from grpo_roc_jax.settings.progress import Phase, phase

REFRESH_S = 0.2
"""Time between redraws; an update in between only reads the clock."""


class RolloutLines:
    """Lines for `RunOptions.progress`, where no bar is drawn: a phase from the first update until the last row is done.

    Args:
        name: Of the phase.
    """

    def __init__(self, name: str = "rollouts"):
        self._name, self._phase, self._open = name, Phase(name), ExitStack()
        self._first = 0

    def update(self, *, live: int, waiting: int, done: int, total: int, tokens: int) -> None:
        """The engine's counts after a round."""
        if total != self._phase.steps or done < self._phase.done:
            self._open.close()  # an exception ended the previous run
            begun = phase(self._name, steps=total, routine=True, unit="rollout")
            self._phase, self._first = self._open.enter_context(begun), tokens
        rate = (tokens - self._first) / max(self._phase.clock() - self._phase.started, REFRESH_S)
        on_tools = f", {waiting} on tools" if waiting else ""
        self._phase.at(done, f"{live} live{on_tools}, {rate:,.0f} tokens/s")
        if done >= total:
            self.close()

    def close(self) -> None:
        """Ends the phase, if rollouts were given up."""
        self._open.close()
        self._phase = Phase(self._name)


class RolloutProgress:
    """A line among other bars, for `RunOptions.progress`; shown from the first update until the last row is done."""

    def __init__(self, bars: Progress):
        self._bars = bars  # its columns show the description, the bar and the field `status`
        self._task: TaskID | None = None
        self._total = self._done = self._first = 0
        self._started = self._drawn = 0.0

    def update(self, *, live: int, waiting: int, done: int, total: int, tokens: int) -> None:
        """The engine's counts after a round."""
        now = time.perf_counter()
        if self._task is not None and (total != self._total or done < self._done):
            self._end()  # an exception ended the previous run
        if self._task is None:
            # The rate counts from here, without compilations and prompts.
            self._started, self._first, self._drawn = now, tokens, 0.0
            self._task = self._bars.add_task("rollouts", total=total, status="")
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
def rollout_display(mode: str, console: Console | None = None) -> Iterator[RolloutProgress | RolloutLines]:
    """A display on standard error for commands without a training bar; lines of the narrator where no bar is drawn.

    Args:
        mode: `log.console`: `auto` and `live` draw on a terminal, `plain` and `off` never draw.
        console: Used instead of standard error.
    """
    console = console or Console(stderr=True, force_jupyter=False)
    if mode not in ("auto", "live") or not console.is_terminal:
        yield RolloutLines()
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
