"""Displays and services that show metrics: console, TensorBoard, Weights & Biases, trackio.

`metrics.jsonl` is the record, so each of these may be slow, full or unavailable. Services run in `Background`: a thread
that constructs and owns its writer, fed by a queue that never blocks the run.
"""

import importlib
import importlib.util
import logging
import math
import os
import queue
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from grpo_roc_jax.process.installing import install_command
from grpo_roc_jax.process.points import reach
from grpo_roc_jax.record.live import EVENTS, Board, after, colored, printable, table
from grpo_roc_jax.record.tables import Rows, tables
from grpo_roc_jax.record.trace import TraceRecord
from grpo_roc_jax.settings.options import as_mapping
from grpo_roc_jax.settings.secrets import without_secrets

log = logging.getLogger(__name__)

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("rollout/reward", "reward", "{:.3f}"),
    ("rollout/tool_error_in_correct", "tool errors in correct", "{:.3f}"),
    ("rollout/length", "tokens", "{:.0f}"),
    ("rollout/turns", "turns", "{:.1f}"),
    ("rollout/truncated", "truncated", "{:.2f}"),
    ("roc/kept", "kept", "{:.0f}"),
    ("loss/entropy", "entropy", "{:.2f}"),
    ("update/grad_norm", "grad norm", "{:.2f}"),
    ("loss/logprob_gap_max", "log-prob gap", "{:.0e}"),
    ("time/step_s", "s", "{:.1f}"),
)
"""(metric, label, format) of the columns in the line of a step. Metrics that a row lacks are left out."""
ALWAYS = 4
"""Number of leading columns that are shown at any width of the terminal."""


def require(module: str, setting: str, *, extra: str) -> None:
    """Checks before the run that the package of a setting is installed.

    Raises:
        ModuleNotFoundError: It is missing; the message has the command that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(
            f"{setting} needs the package {module}, which is not installed; {install_command(extra)} or "
            f"leave {setting} off"
        )


def format_row(step: int, metrics: Mapping[str, float], width: int = 0) -> str:
    """`step 12  reward 0.531  ...`; with a width, columns that do not fit are left out from the right."""
    shown = [
        (name, f"{label} {form.format(metrics[name]) if math.isfinite(metrics[name]) else '-'}")
        for name, label, form in COLUMNS
        if metrics.get(name) is not None
    ]
    scores = {name: value for name, value in metrics.items() if name.startswith("eval/") and "/avg@" in name}
    others = [f"{name.removeprefix('eval/')} {value:.3f}" for name, value in scores.items()]
    line = f"step {step:>4}"
    for index, text in enumerate([text for _, text in shown] + others):
        if width and index >= ALWAYS and len(line) + len(text) + 2 > width:
            break
        line += f"  {text}"
    return line


class MetricsWriter:
    """Receives rows of metrics. Its exceptions are logged and do not end the run. Each writer ignores what it cannot
    show."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one row; a later row of the same step adds to it."""
        raise NotImplementedError

    def say(self, text: str, event: bool = False) -> None:
        """Shows a line of text; `event` is true for events in `events.jsonl`."""

    def sample(self, step: int, record: TraceRecord, records: Sequence[TraceRecord]) -> None:
        """Shows a trajectory of a step; `records` are all that were sampled for it."""

    def tables(self, step: int, named_tables: Mapping[str, Rows]) -> None:
        """Shows tables of the trajectories of a step."""

    def cut(self, step: int) -> None:
        """Discards what was written for later steps; called when a run resumes after `step`."""

    def close(self) -> None:
        """Writes pending rows, in bounded time."""


class QuietConsole(Console):
    """A console that stops writing when its reader has closed (`| head -1`); rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):  # so that the interpreter's own flush at exit does not fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        log.warning("nobody reads the output any more; the run continues, and metrics.jsonl has every row")


class Screen(Progress):
    """Progress bars below the table of the newest figures."""

    board: Board | None = None

    def get_renderables(self) -> Iterable[Any]:
        if self.board is not None:
            yield table(self.board, ascii_only=self.console.options.ascii_only)
        yield from super().get_renderables()


class ConsoleWriter(MetricsWriter):
    """Writes a line per step; in a terminal above a table of the newest figures and a bar, which are redrawn."""

    def __init__(self, total_steps: int, mode: str = "auto", console: Console | None = None) -> None:
        # Notebooks get plain lines, which stay in their files.
        self._console = console or QuietConsole(highlight=False, force_jupyter=False)
        if not self._console.encoding.startswith("utf") and hasattr(self._console.file, "reconfigure"):
            self._console.file.reconfigure(errors="replace")
        self._screen = None
        if mode == "live" or (mode == "auto" and self._console.is_interactive):
            self._screen = Screen(
                TextColumn("[bold]{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                console=self._console,
                refresh_per_second=2,
            )
            self._task = self._screen.add_task("training", total=total_steps, status="")
            self._screen.board = Board(total_steps)

    @property
    def bars(self) -> Progress | None:
        """The progress display, for bars in addition to the training bar; None if the console cannot redraw."""
        return self._screen if self._console.is_terminal else None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._screen is None:
            self.say(format_row(step, metrics))
            return
        self._screen.board = after(self._screen.board, step, metrics)
        self._screen.start()
        line = printable(format_row(step, metrics, self._console.width))
        self._console.print(line, no_wrap=True, overflow="ellipsis")
        self._screen.update(self._task, completed=step)

    def say(self, text: str, event: bool = False) -> None:
        self._console.print(printable(text), soft_wrap=self._screen is None)
        if event and self._screen is not None:
            board = self._screen.board
            self._screen.board = replace(board, events=(*board.events, text)[-EVENTS:])

    def sample(self, step: int, record: TraceRecord, records: Sequence[TraceRecord]) -> None:
        self._console.print(colored(record), soft_wrap=self._screen is None)

    def cut(self, step: int) -> None:
        if self._screen is not None:
            self._screen.reset(self._task, completed=step)  # earlier steps must not count in the elapsed time
            self._screen.board = Board(self._screen.board.steps, step)

    def close(self) -> None:
        if self._screen is not None:
            self._screen.stop()


class TensorBoardWriter(MetricsWriter):
    """Scalars in TensorBoard event files, through tensorboardX (no TensorFlow, no PyTorch)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None
        self._purge: int | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            module = importlib.import_module("tensorboardX")
            self._writer = module.SummaryWriter(str(self._directory), purge_step=self._purge)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def cut(self, step: int) -> None:
        self._purge = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbWriter(MetricsWriter):
    """Rows in Weights & Biases. The step is logged as a metric, since the service rejects steps it has already seen.

    `cut` does nothing: later rows of a step replace earlier ones in the service's plots.
    """

    def __init__(self, run_dir: Path, config: Any) -> None:
        if without_secrets(sys.argv) != sys.argv:  # the service records the command line
            for name in ("WANDB__DISABLE_META", "WANDB_X_DISABLE_META"):
                os.environ.setdefault(name, "true")
        self._wandb = importlib.import_module("wandb")
        self._run = self._wandb.init(
            project=config.log.wandb.project,
            name=config.name,
            id=_stored_id(run_dir / "wandb_id"),
            resume="allow",
            mode=config.log.wandb.kind,
            dir=str(run_dir),
            config=without_secrets(as_mapping(config)),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def tables(self, step: int, named_tables: Mapping[str, Rows]) -> None:
        self._run.log({"step": step, **made_by(self._wandb.Table, named_tables)})

    def close(self) -> None:
        self._run.finish()


def made_by(table: Callable[..., Any], named_tables: Mapping[str, Rows]) -> dict[str, Any]:
    """The tables as objects of a service."""
    return {name: table(columns=list(rows.columns), data=rows.rows) for name, rows in named_tables.items()}


class TrackioWriter(MetricsWriter):
    """Rows and tables in trackio's files on this machine, which `trackio show` opens. A resumed run continues under its
    name there."""

    def __init__(self, run_dir: Path, config: Any) -> None:
        self._trackio = importlib.import_module("trackio")
        self._run = self._trackio.init(
            project=config.log.wandb.project,
            name=f"{config.name}-{_stored_id(run_dir / 'trackio_id')}",
            resume="allow",
            config=without_secrets(as_mapping(config)),
            embed=False,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def tables(self, step: int, named_tables: Mapping[str, Rows]) -> None:
        self._run.log(made_by(self._trackio.Table, named_tables), step=step)

    def close(self) -> None:
        self._run.finish()


class Background(MetricsWriter):
    """Runs a writer in a daemon thread. No method blocks or raises; calls are dropped and counted if the queue is full.

    Args:
        make: Makes the writer, inside the thread (a service may wait for a network while it starts).
        name: Name for messages.
        capacity: Number of calls that the queue holds; when it is full, the newest are dropped.
        close_s: Longest wait for pending calls when the run ends, in seconds.
        shows: Whether the writer takes tables of trajectories.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        name: str,
        *,
        capacity: int = 1000,
        close_s: float = 10.0,
        shows: bool = False,
    ) -> None:
        self.dropped = 0
        """Number of calls dropped because the queue was full."""
        self.failed = 0
        """Number of calls that raised."""
        self._name, self._shows = name, shows
        self._close_s = close_s
        self._queue: queue.Queue[tuple[str, tuple]] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._serve, args=(make,), name=f"log-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put("write", step, dict(metrics))

    def sample(self, step: int, record: TraceRecord, records: Sequence[TraceRecord]) -> None:
        if self._shows:
            self._put("tables", step, tables(records))

    def cut(self, step: int) -> None:
        self._put("cut", step)

    def close(self) -> None:
        try:
            self._queue.put(("close", ()), timeout=self._close_s)
        except queue.Full:
            log.warning("%s accepts no more rows; %d are lost", self._name, self._queue.qsize())
            return
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            log.warning("%s did not finish within %.0f s; the run ends without it", self._name, self._close_s)

    def _put(self, *call: Any) -> None:
        try:
            self._queue.put_nowait((call[0], call[1:]))
        except queue.Full:
            if self.dropped == 0:
                log.warning("%s is too slow; it misses rows (metrics.jsonl has them all)", self._name)
            self.dropped += 1

    def _serve(self, make: Callable[[], Any]) -> None:
        writer = self._attempt(make)
        while True:
            method, arguments = self._queue.get()
            if writer is not None:
                self._attempt(getattr(writer, method), *arguments)
            if method == "close":
                return

    def _attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            reach("logger.write")
            return function(*arguments)
        except Exception as error:
            if self.failed == 0:
                log.warning("%s failed: %s (the run continues; metrics.jsonl has every row)", self._name, error)
            self.failed += 1
            return None


def _stored_id(path: Path) -> str:
    """The run's id at the service, stored so that a resumed run uses it again."""
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
