"""Metrics of a run: named numbers, how they are aggregated, where they are written, and the count of compilations.

Names have the form `stage/name`. `metrics.jsonl` in the run directory is the record: it is always written, and
truncated on resume so that no step appears twice. Displays and services (`loggers`) get the same rows; their failures
do not affect the run.
"""

import json
import logging
import math
import mmap
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from grpo_roc_jax.process.points import reach
from grpo_roc_jax.record import loggers
from grpo_roc_jax.record.loggers import MetricsWriter
from grpo_roc_jax.settings.options import Axis, Count, kind, settings
from grpo_roc_jax.settings.secrets import hidden
from grpo_roc_jax.types import Metrics

log = logging.getLogger(__name__)

FILE = "metrics.jsonl"
SFT_FILE = "sft.jsonl"
"""The supervised stage counts its own steps, so it has its own file."""
SFT_SHOWN = ("loss/nll", "loss/entropy", "update/grad_norm", "update/lr", "time/sft_s")
"""Metrics of the supervised stage that the console shows."""
PENDING_ROWS = 10_000
"""Most rows kept in memory while they cannot be written."""
WARN_EVERY = 20
"""Number of failures of a writer between two warnings."""


class Wandb(Axis, axis="log.wandb"):
    """Weights & Biases, or trackio, from a thread of its own; its failures never reach the run. Every `log.samples`
    steps it also gets a table of all rollouts, with verdicts, penalties and advantages, and the text of some."""

    package: ClassVar[str] = "wandb"
    """Package that it imports, and the extra that installs it."""


@kind("off")
class WandbOff(Wandb):
    """Nothing is logged there."""


@settings
class WandbProject(Wandb):
    """Metrics are logged to a project; needs the extra `wandb`."""

    project: str = "grpo-roc-jax"
    """Project there."""


@kind("online")
class WandbOnline(WandbProject):
    """Metrics are sent during the run; needs the extra `wandb`."""


@kind("offline")
class WandbOffline(WandbProject):
    """Metrics are kept in the run directory for `wandb sync`; needs the extra `wandb`."""


@kind("trackio")
class Trackio(WandbProject):
    """Metrics go to trackio's files on this machine, for `trackio show`; needs the extra `trackio`."""

    package: ClassVar[str] = "trackio"


@settings
class LogConfig:
    """Where metrics go, and how much of the trajectories is kept. `metrics.jsonl` is always written."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """`live`: a table of the newest figures and a progress bar, with a line per step above them; `plain`: the lines
    alone; `auto`: live in a terminal, plain into files, pipes and notebooks."""
    tensorboard: bool = False
    """Event files under `tensorboard/` of the run; needs the extra `tensorboard`."""
    wandb: Wandb = field(default_factory=WandbOff)
    """Weights & Biases or trackio, from a thread of its own; its failures never reach the run."""
    traces: Count = 1
    """Trajectories of every n-th step are kept as JSON lines; 0 keeps none. A trajectory takes about 4 KB and 12 bytes
    per token, plus its text."""
    samples: Count = 10
    """Steps between sample trajectories, on the console and as tables in `log.wandb`; 0 shows none."""


class RunConfig(Protocol):
    """The part of a run's configuration that `make_writer` reads."""

    name: str
    steps: int
    log: LogConfig


class JsonlWriter(MetricsWriter):
    """Writes rows to `metrics.jsonl`, flushed one by one. While the disk is full, the newest `PENDING_ROWS` are kept.

    A number that is not finite is written as null, which every JSON reader accepts. The first row of a process discards
    the rows of its step and later ones in the file, unless `cut` was called before.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._pending: deque[bytes] = deque(maxlen=PENDING_ROWS)
        self._fresh = True
        self._end = _whole_bytes(self.path)
        """Length in bytes of the complete rows in the file. A row cut by a kill or a full disk comes after them."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._fresh:
            self.cut(step - 1)
        row = {"step": int(step)} | {name: _finite(value) for name, value in metrics.items()}
        self._pending.append(json.dumps(row).encode() + b"\n")
        self._flush()

    def cut(self, step: int) -> None:
        self._fresh = False
        if not self.path.exists():
            return
        at = end = 0  # a damaged line between rows must not cost another row
        with open(self.path, "rb") as file:
            for line in file:
                at, row = at + len(line), parsed_row(line)
                if row is not None and row["step"] > step:
                    break
                end = end if row is None else at
        os.truncate(self.path, end)
        self._end = end
        self._pending.clear()

    def close(self) -> None:
        if self._pending:
            self._flush()

    def _flush(self) -> None:
        reach("metrics.write")
        if not self.path.exists():
            self._end = 0
        with open(self.path, "ab", buffering=0) as file:
            if file.tell() > self._end:
                file.truncate(self._end)
            while self._pending:
                row = self._pending[0]
                if file.write(row) != len(row):
                    raise OSError(f"{self.path}: only part of a row was written; it is retried with the next row")
                self._pending.popleft()
                self._end += len(row)


class Writer:
    """Passes every row to several writers; an exception of one does not affect the run or the others."""

    def __init__(self, writers: Sequence[MetricsWriter], sft: MetricsWriter | None = None) -> None:
        self._writers = (*writers, sft) if sft else tuple(writers)
        self._sft = sft
        self.failures = [0] * len(self._writers)
        """Number of calls that raised, by writer."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one row to all writers. Values are Python or NumPy numbers; the caller fetches device arrays."""
        self._each("write", step, {name: float(value) for name, value in metrics.items()}, but=self._sft)

    def write_sft(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes one row of the supervised stage to `sft.jsonl` and shows it as a line."""
        row = {name: float(value) for name, value in metrics.items()}
        shown = [f"{name.split('/')[-1]} {row[name]:.4g}" for name in SFT_SHOWN if name in row]
        self.say("  ".join([f"sft {step:>4}", *shown]))
        if self._sft is not None:
            self._each("write", step, row, only=self._sft)

    def say(self, text: str, event: bool = False) -> None:
        """Shows a line of text on all displays."""
        self._each("say", hidden(text), event)

    def sample(self, step: int, record: Any, records: Sequence[Any]) -> None:
        """Shows a trajectory of a step, and gives services all records of the step, before its metrics."""
        self._each("sample", step, record, records)

    def cut(self, step: int) -> None:
        """Discards what was written for steps after `step`."""
        self._each("cut", step, but=self._sft)

    @property
    def bars(self) -> Any:
        """The progress display of the console, for further bars; None if there is none."""
        return next((bars for writer in self._writers if (bars := getattr(writer, "bars", None)) is not None), None)

    def close(self) -> None:
        """Closes all, in bounded time."""
        self._each("close")

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _each(self, method: str, *arguments: Any, only: Any = None, but: Any = None) -> None:
        for index, writer in enumerate(self._writers):
            if (but is not None and writer is but) or (only is not None and writer is not only):
                continue
            try:
                getattr(writer, method)(*arguments)
            except Exception as error:
                if self.failures[index] % WARN_EVERY == 0:
                    log.warning("%s failed to %s: %s (the run continues)", type(writer).__name__, method, error)
                self.failures[index] += 1


def make_writer(run_dir: str | Path, config: RunConfig) -> Writer:
    """The writers that `config.log` selects; a context manager.

    Raises:
        ModuleNotFoundError: A service whose extra is not installed.
    """
    check_extras(config.log)
    run_dir = Path(run_dir)
    writers: list[MetricsWriter] = [JsonlWriter(run_dir / FILE)]
    if config.log.console != "off":
        writers.append(loggers.ConsoleWriter(config.steps, config.log.console))
    if config.log.tensorboard:
        make = partial(loggers.TensorBoardWriter, run_dir / "tensorboard")
        writers.append(loggers.Background(make, "tensorboard"))
    if config.log.wandb.kind != "off":
        name = config.log.wandb.package
        make = loggers.TrackioWriter if name == "trackio" else loggers.WandbWriter
        writers.append(loggers.Background(partial(make, run_dir, config), name, shows=True))
    return Writer(writers, sft=JsonlWriter(run_dir / SFT_FILE))


def check_extras(log: LogConfig) -> None:
    """Raises ModuleNotFoundError if the package of a chosen service is not installed."""
    if log.tensorboard:
        loggers.require("tensorboardX", "log.tensorboard", extra="tensorboard")
    if log.wandb.kind != "off":
        loggers.require(log.wandb.package, "log.wandb", extra=log.wandb.package)


def read_metrics(path: str | Path) -> list[Metrics]:
    """Rows in order of their steps, with rows of one step merged and null read as NaN.

    Lines that are not complete rows (the run was killed or is writing) are skipped.

    Args:
        path: The file or the run directory.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    rows: dict[int, Metrics] = {}
    with open(path, "rb") as file:
        for line in file:
            row = _parsed(line)
            if row is not None:
                rows.setdefault(int(row["step"]), {}).update(row)
    return [rows[step] for step in sorted(rows)]


def recorded(run_dir: str | Path) -> list[Metrics]:
    """The rows of a run; empty if they cannot be read."""
    try:
        return read_metrics(run_dir)
    except OSError:
        return []


def series(rows: Sequence[Metrics], name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of the rows that have the metric."""
    pairs = [(row["step"], row[name]) for row in rows if name in row]
    return tuple(np.array(pairs, np.float64).reshape(-1, 2).T)


def last_third(rows: Sequence[Metrics], name: str) -> float:
    """Mean of a metric over those of the last third of the training steps that have it; NaN if none has.

    The third is counted in steps of the run, rounded, at least one. Values that are not finite are left out.
    """
    last = max((row["step"] for row in rows), default=0)
    first = max(0, last - max(1, round(last / 3)))
    values = series([row for row in rows if row["step"] > first], name)[1]
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


class CompilationCounter:
    """Context manager that counts the programs that JAX compiles or reads from its cache, and the seconds this takes.

    If a training step after the first one compiles anything, a shape depends on data.
    """

    EVENT = "/jax/core/compile/backend_compile_duration"
    HIT = "/jax/compilation_cache/cache_hits"

    def __init__(self) -> None:
        self.count = 0
        """Number of programs, including those from the cache."""
        self.hits = 0
        """Number of programs from the persistent cache."""
        self.seconds = 0.0

    def __enter__(self) -> "CompilationCounter":
        import jax.monitoring  # imported here, so that reading metrics needs no JAX

        jax.monitoring.register_event_duration_secs_listener(self._listen)
        jax.monitoring.register_event_listener(self._hit)
        return self

    def __exit__(self, *_: object) -> None:
        import jax.monitoring

        jax.monitoring.unregister_event_duration_listener(self._listen)
        jax.monitoring.unregister_event_listener(self._hit)

    def metrics(self) -> Metrics:
        """The figures so far, for the log."""
        return {"compile/count": self.count, "compile/cache_hits": self.hits, "compile/seconds": self.seconds}

    def _hit(self, event: str, **_: Any) -> None:
        self.hits += event == self.HIT

    def _listen(self, event: str, seconds: float, **_: Any) -> None:
        if event == self.EVENT:
            self.count += 1
            self.seconds += seconds


def _finite(value: Any) -> Any:
    return hidden(value) if isinstance(value, str) else value if math.isfinite(value) else None


def parsed_row(line: bytes) -> dict[str, Any] | None:
    """The row of metrics, or of words such as an event; None if the line is not a complete row."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
        return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
    except (ValueError, RecursionError):
        return None


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The row of metrics, with null as NaN; None if the line is not a complete one."""
    try:
        return {
            name: math.nan if value is None else float(value) for name, value in (parsed_row(line) or {}).items()
        } or None
    except (ValueError, TypeError, OverflowError):
        return None


def _whole_bytes(path: Path) -> int:
    """Length of the file up to its last line end."""
    if not path.exists() or not path.stat().st_size:
        return 0
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n") + 1
