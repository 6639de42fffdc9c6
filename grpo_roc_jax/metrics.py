"""Metrics of a run: named numbers, how to combine them, where they are written, and the count of compilations.

Names are `stage/what`. `metrics.jsonl` in the run directory is the record: always written, cut back on resume so that
no step appears twice. Displays and services (`loggers`) get the same rows and can fail without harm.
"""

import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from grpo_roc_jax import loggers
from grpo_roc_jax.types import Metrics

log = logging.getLogger(__name__)

FILE = "metrics.jsonl"
SFT_FILE = "sft.jsonl"
"""The supervised stage counts its own steps, so it has a file of its own."""
SFT_SHOWN = ("loss/nll", "loss/entropy", "update/grad_norm", "update/lr", "time/sft_s")
"""What people see of a row of it."""
PENDING_ROWS = 10_000
"""Rows kept in memory while the disk refuses them."""

SUMMED = frozenset({"rollout/sampled", "rollout/sampled_tokens", "rollout/observation_tokens", "compile/count"})
SUMMED |= {"rollout/prefilled_tokens", "rollout/compilations", "roc/kept", "roc/dropped", "roc/groups_kept"}
SUMMED |= {"roc/groups", "roc/all_correct", "roc/all_wrong"}
"""Counts: parts of a step add up. Everything else is a mean, or an extreme when its name says so."""


@dataclass(frozen=True)
class LogConfig:
    """Where metrics go, and how much of the trajectories is kept. `metrics.jsonl` is always written."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """`live`: a progress bar with a line per step above it; `plain`: the lines alone; `auto`: live in a terminal or
    notebook, plain into a file."""
    tensorboard: bool = False
    """Event files under `tensorboard/` of the run; wants the extra `tensorboard`."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases, from a thread of its own; wants the extra `wandb`. Its failures never reach the run."""
    wandb_project: str = "grpo-roc-jax"
    """Project there."""
    traces: int = 1
    """Trajectories of every n-th step are kept as JSON lines; 0 keeps none. About 4 KB a trajectory plus 12 bytes a
    token before text."""
    samples: int = 10
    """Steps between sample trajectories shown on the console; 0 shows none."""

    def __post_init__(self) -> None:
        for name in ("traces", "samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"log.{name} = {getattr(self, name)}; a number of steps, or 0 for never, is wanted")


class MetricsWriter(Protocol):
    """Takes rows of metrics; one that raises is reported and left alone for a while."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row; a later row of the same step adds to it."""

    def say(self, text: str) -> None:
        """A line for people."""

    def cut(self, step: int) -> None:
        """The run goes on after `step`: what was written of later steps is void."""

    def close(self) -> None:
        """Writes what is waiting, in bounded time."""


class RunConfig(Protocol):
    """What `make_writer` reads of a run's configuration."""

    name: str
    steps: int
    log: LogConfig


class JsonlWriter:
    """Rows in `metrics.jsonl`, flushed one by one; a full disk delays them and loses none but the oldest of thousands.

    A number that is not finite is written as null, which every JSON reader takes. The first row of a process voids what
    the file has of its step and later ones, unless `cut` said before where the run goes on.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._waiting: deque[bytes] = deque(maxlen=PENDING_ROWS)
        self._fresh = True
        self._end = _whole_bytes(self.path)
        """Bytes of the file that are whole rows; a row cut by a kill or a full disk lies beyond."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._fresh:
            self.cut(step - 1)
        row = {"step": int(step)} | {name: _finite(value) for name, value in metrics.items()}
        self._waiting.append(json.dumps(row).encode() + b"\n")
        self._flush()

    def say(self, text: str) -> None:
        """Words are not recorded."""

    def cut(self, step: int) -> None:
        self._fresh = False
        if not self.path.exists():
            return
        end = 0
        with open(self.path, "rb") as file:
            for line in file:
                row = _parsed(line)
                if row is None or row["step"] > step:
                    break
                end += len(line)
        os.truncate(self.path, end)
        self._end = end
        self._waiting.clear()

    def close(self) -> None:
        if self._waiting:
            self._flush()

    def _flush(self) -> None:
        if not self.path.exists():
            self._end = 0
        with open(self.path, "ab", buffering=0) as file:
            if file.tell() > self._end:
                file.truncate(self._end)
            while self._waiting:
                row = self._waiting[0]
                if file.write(row) != len(row):
                    raise OSError(f"{self.path} took part of a row; it is cut back and tried again with the next one")
                self._waiting.popleft()
                self._end += len(row)


class Writer:
    """Hands every row to several writers and lets none of them harm the run or the others."""

    def __init__(
        self, writers: Sequence[MetricsWriter], sft: MetricsWriter | None = None, warn_every: int = 20
    ) -> None:
        self._writers = (*writers, sft) if sft else tuple(writers)
        self._sft = sft
        self._warn_every = warn_every
        self.failures = [0] * len(self._writers)
        """Calls that raised, by writer."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One row to all. Values are Python or NumPy numbers; device arrays are fetched by the caller."""
        row = {name: float(value) for name, value in metrics.items()}
        self._each("write", step, row, but=self._sft)

    def write_sft(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One row of the supervised stage: `sft.jsonl` and a line for people."""
        row = {name: float(value) for name, value in metrics.items()}
        shown = [f"{name.split('/')[-1]} {row[name]:.4g}" for name in SFT_SHOWN if name in row]
        self.say("  ".join([f"sft {step:>4}", *shown]))
        if self._sft is not None:
            self._each("write", step, row, only=self._sft)

    def say(self, text: str) -> None:
        """A line for people to all that show lines."""
        self._each("say", text)

    def cut(self, step: int) -> None:
        """Voids what was written of steps after `step`."""
        self._each("cut", step, but=self._sft)

    @property
    def bars(self) -> Any:
        """The bars of the console, for a line beside the training bar; None where there are none."""
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
                if self.failures[index] % self._warn_every == 0:
                    log.warning("%s failed to %s: %s (the run goes on)", type(writer).__name__, method, error)
                self.failures[index] += 1


def make_writer(run_dir: str | Path, config: RunConfig) -> Writer:
    """The writers that `config.log` asks for; a context manager.

    Raises:
        ModuleNotFoundError: A service whose extra is not installed.
    """
    run_dir = Path(run_dir)
    writers: list[MetricsWriter] = [JsonlWriter(run_dir / FILE)]
    if config.log.console != "off":
        writers.append(loggers.ConsoleWriter(config.steps, config.log.console))
    if config.log.tensorboard:
        loggers.require("tensorboardX", "log.tensorboard", extra="tensorboard")
        make = lambda: loggers.TensorBoardWriter(run_dir / "tensorboard")  # noqa: E731
        writers.append(loggers.Background(make, "tensorboard"))
    if config.log.wandb != "off":
        loggers.require("wandb", "log.wandb", extra="wandb")
        writers.append(loggers.Background(lambda: loggers.WandbWriter(run_dir, config), "wandb"))
    return Writer(writers, sft=JsonlWriter(run_dir / SFT_FILE))


def read_metrics(path: str | Path) -> list[Metrics]:
    """Rows by step, ascending, rows of one step merged; null is NaN. `path`: the file or the run directory.

    Lines that are no rows (a run that was killed or is writing) are passed over.
    """
    path = Path(path)
    path = path / FILE if path.is_dir() else path
    rows: dict[int, Metrics] = {}
    with open(path, "rb") as file:
        for line in file:
            row = _parsed(line)
            if row is not None:
                found = {name: math.nan if value is None else float(value) for name, value in row.items()}
                rows.setdefault(row["step"], {}).update(found)
    return [rows[step] for step in sorted(rows)]


def series(rows: Sequence[Metrics], name: str, *, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """(x, values) of the rows that have both names."""
    pairs = [(row[x], row[name]) for row in rows if name in row and x in row]
    return tuple(np.array(pairs, np.float64).reshape(-1, 2).T)


def aggregate(parts: Sequence[Metrics], weights: Sequence[float] | None = None) -> Metrics:
    """Metrics of parts of a step (refills, hosts, mini-batches) as those of the whole.

    Counts in `SUMMED` and `time/...` add up; names that end in `_max` or `_min` take the extreme; the rest is the mean
    weighted by `weights` over the parts that have the name. A part without weight counts for nothing in a mean.
    """
    weights = [1.0] * len(parts) if weights is None else weights
    combined: Metrics = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        pairs = [(part[name], weight) for part, weight in zip(parts, weights, strict=True) if name in part]
        values = [value for value, _ in pairs]
        if name in SUMMED or name.startswith("time/"):
            combined[name] = float(sum(values))
        elif name.endswith("_max"):
            combined[name] = float(max(values))
        elif name.endswith("_min"):
            combined[name] = float(min(values))
        else:
            total = sum(weight for _, weight in pairs)
            combined[name] = sum(v * w for v, w in pairs if w) / total if total else math.nan
    return combined


class CompilationCounter:
    """Counts the programs that JAX compiles while it is open; `count` and `seconds` since then.

    A training step that compiles anything after the first one has a shape that depends on data.
    """

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0

    def __enter__(self) -> "CompilationCounter":
        import jax.monitoring  # here, so that reading metrics needs no JAX

        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        import jax.monitoring

        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, seconds: float, **_: Any) -> None:
        if event == self.EVENT:
            self.count += 1
            self.seconds += seconds


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The row, or None for what is no whole row."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _whole_bytes(path: Path) -> int:
    """Length of the file up to its last line end."""
    if not path.exists():
        return 0
    size = 0
    with open(path, "rb") as file:
        for block in _blocks_backwards(file):
            start, content = block
            place = content.rfind(b"\n")
            if place >= 0:
                size = start + place + 1
                break
    return size


def _blocks_backwards(file: Any, block: int = 1 << 16) -> Iterator[tuple[int, bytes]]:
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        yield start, file.read(end - start)
        end = start
