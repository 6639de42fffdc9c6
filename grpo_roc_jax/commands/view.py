"""Shows runs: `grpo-roc view RUN [RUN...] [--step N] [--errors] [--html FILE | --text]`.

Serves a page on loopback, with curves, groups, trajectories and evaluations, which follows runs in progress. `--html`
writes the page to a file, `--text` prints trajectories. The view separates the policy's text from the text that it was
given, by the mask that training used, and shows every call with its outcome, the verdict, and why the trajectory was
kept or not.
"""

import atexit
import errno
import json
import shutil
import sys
import tempfile
import urllib.parse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from grpo_roc_jax.process.outputs import output_file, write_output
from grpo_roc_jax.process.progress import phase, show_log
from grpo_roc_jax.record import index
from grpo_roc_jax.record.live import printable
from grpo_roc_jax.record.segments import SegmentKind, calls, faults, headline, penalties, segments
from grpo_roc_jax.record.trace import TraceRecord, TraceWriter, trace_files
from grpo_roc_jax.settings.files import local_path
from grpo_roc_jax.view.answers import Block, Runs, records_of
from grpo_roc_jax.view.atif import documents, read_atif
from grpo_roc_jax.view.page_server import PageServer
from grpo_roc_jax.view.pages import Location, by_file, page_of

STYLES: dict[SegmentKind, str] = {"prompt": "dim", "policy": "white on rgb(0,50,90)", "observation": "rgb(200,160,60)"}
PORT = 8642
"""Port of the page; another free one if it is in use."""
REWARD_DIGITS = 5e-6
"""Relative error of a reward that is written with six digits, as in 0.333333."""
Row = dict[str, Any]


@dataclass(frozen=True)
class ViewConfig:
    """Shows runs as a page on loopback, a page in a file, or text; every filter narrows the trajectories."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Directories of runs, which the page compares, or files of ATIF."""
    step: int | None = None
    """Trajectories of this training step; without it and without filters, text and files show the newest step."""
    kind: Literal["step", "eval"] = "step"
    """Training rollouts, or those of evaluations."""
    uid: str = ""
    """Problems whose uid contains this."""
    sample: int | None = None
    """Rollouts with this number within their problem."""
    reward: float | None = None
    """Trajectories with this reward, to six digits."""
    status: str = ""
    """Trajectories with this verdict: correct, wrong, no_answer, truncated, ..."""
    kept: Literal["any", "yes", "no"] = "any"
    """Trajectories that selection kept (yes) or dropped (no)."""
    errors: bool = False
    """Trajectories with a tool call that failed."""
    limit: int | None = None
    """How many to show: 3 as text, 200 in a page, all as ATIF; 0 shows all."""
    html: str = ""
    """Writes a self-contained page to this file."""
    atif: str = ""
    """Writes the trajectories to this file in the format ATIF, with token ids and log-probabilities."""
    text: bool = False
    """Prints trajectories instead."""
    port: int = PORT
    """Port of the page on loopback; 0 takes a free one."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("no run is named; give the directories of runs")
        forms = [f"--{name}" for name in ("html", "atif", "text") if getattr(self, name)]
        if len(forms) > 1:
            raise ValueError(f"{' and '.join(forms)}: one command writes one of them; call it once for each")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"--port {self.port}; must be 0 to 65535")
        if self.limit is not None and self.limit < 0:
            raise ValueError(f"--limit {self.limit}; must be at least 0, which shows all")

    @property
    def filtered(self) -> bool:
        """Whether any filter is set."""
        plain = (self.uid, self.status, self.errors, self.kept != "any")
        return any(plain) or any(value is not None for value in (self.step, self.sample, self.reward))

    @property
    def rewards(self) -> tuple[float, float]:
        """Least and largest number that count as `reward`."""
        reward = self.reward or 0.0
        near = max(REWARD_DIGITS * abs(reward), 1e-9)
        return reward - near, reward + near

    @property
    def address(self) -> str:
        """The filters as the query of the page's address; empty if there are none."""
        low, high = self.rewards if self.reward is not None else (None, None)
        filters = {
            "kind": "eval" if self.kind == "eval" else None,
            "step": self.step,
            "uid": self.uid,
            "sample": self.sample,
            "low": low,
            "high": high,
            "status": self.status,
            "kept": None if self.kept == "any" else self.kept,
            "calls": "failed" if self.errors else None,
        }
        query = urllib.parse.urlencode({name: value for name, value in filters.items() if value not in (None, "")})
        return f"#/rollouts?{query}" if query else ""


@dataclass(frozen=True, eq=False)
class Matches:
    """The trajectories that pass the filters."""

    places: tuple[Location, ...]
    """Locations of the first trajectories, up to the limit."""
    matched: int
    """Number of trajectories that pass."""
    total: int
    """Number of trajectories that were read."""
    blocks: frozenset[tuple[int, Block]]
    """Run and file of every trajectory that passes."""
    config: ViewConfig

    @property
    def records(self) -> list[TraceRecord]:
        """The records of the first trajectories, without those that cannot be read."""
        logs = [{(kind, step): log for log, kind, step in trace_files(run)} for run in self.config.runs]
        chosen = (records_of(logs[run][block], block, rows) for run, block, rows in by_file(self.places))
        return [record for _, record in chain.from_iterable(chosen)]


def choose(config: ViewConfig) -> Matches:
    """The trajectories that pass the filters, in the order of the log.

    Raises:
        FileNotFoundError: A run saved no trajectories.
    """
    limit = config.limit if config.limit is not None else (0 if config.atif else 200 if config.html else 3)
    shown: list[Location] = []
    matched = total = 0
    blocks = set()
    for number, run in enumerate(config.runs):
        step = config.step if config.filtered else max(steps_of(run, config.kind))
        for block, number_in_file, row in rows_of(run, config.kind, step):
            total += 1
            if matches(row, config):
                matched += 1
                blocks.add((number, block))
                if not limit or len(shown) < limit:
                    shown.append((number, block, number_in_file))
    return Matches(tuple(shown), matched, total, frozenset(blocks), config)


def steps_of(run: str, kind: str) -> list[int]:
    """Steps with trajectories of this kind.

    Raises:
        FileNotFoundError: There are none.
    """
    files = trace_files(run)
    steps = [step for _, file_kind, step in files if file_kind == kind]
    if not steps:
        hint = f"--kind {files[0][1]} shows those that it holds" if files else "name a run with log.traces above 0"
        raise FileNotFoundError(f"{run} holds no trajectories of kind {kind!r}; {hint}")
    return steps


def rows_of(run: str, kind: str, step: int | None = None) -> Iterator[tuple[Block, int, Row]]:
    """(file, number of the row in its index, the row) of the trajectories of a run or of one of its steps."""
    for log, file_kind, number in trace_files(run):
        if file_kind == kind and step in (None, number):
            for row_number, row in enumerate(index.rows(index.load(log, kind, number))):
                yield (file_kind, number), row_number, row


def available(config: ViewConfig) -> str:
    """Which steps and statuses the log has, for filters that match nothing."""
    steps = sorted({step for run in config.runs for step in steps_of(run, config.kind)})
    within = config.step if config.step in steps else None
    rows = (row for run in config.runs for _, _, row in rows_of(run, config.kind, within))
    statuses = Counter(row["status"] for row in rows).most_common()
    of = f"step {within}" if within is not None else "the log"
    shown = ", ".join(map(str, steps if len(steps) <= 20 else [*steps[:10], "...", *steps[-9:]]))
    return f"steps in the log: {shown}\nstatuses in {of}: {', '.join(f'{name} {count}' for name, count in statuses)}"


def matches(row: Row, config: ViewConfig) -> bool:
    """Whether a trajectory passes the filters."""
    low, high = config.rewards
    return (
        config.uid in row["problem"][0]
        and (config.sample is None or row["sample"] == config.sample)
        and (config.reward is None or (row["reward"] is not None and low <= row["reward"] <= high))
        and (not config.status or row["status"] == config.status)
        and (config.kept == "any" or row["kept"] == (config.kept == "yes"))
        and (not config.errors or row["tool_errors"] > 0)
    )


def overview(run: str, kind: str = "step") -> Table:
    """A table with a row per step: rollouts, mean reward, tool errors in correct ones, kept. At most 30 rows, evenly
    spaced."""
    steps = steps_of(run, kind)
    chosen = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, min(30, len(steps))).round().astype(int))]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("step", "rollouts", "reward", "tool errors in correct", "kept", "verdicts"):
        table.add_column(name, justify="left" if name == "verdicts" else "right")
    for step in chosen:
        table.add_row(*_overview_row(step, [row for _, _, row in rows_of(run, kind, step)]))
    return table


def _overview_row(step: int, rows: Sequence[Row]) -> list[str]:
    scored = [row for row in rows if row["status"] != "unscored"]
    right = [row for row in scored if row["status"] == "correct"]
    calls = sum(row["tool_calls"] for row in right)
    share = f"{sum(row['tool_errors'] for row in right) / calls:.3f}" if calls else "-"
    reward = sum(row["reward"] or 0.0 for row in scored) / len(scored) if scored else 0.0
    words = ", ".join(f"{status} {count}" for status, count in Counter(row["status"] for row in scored).most_common())
    return [str(step), str(len(rows)), f"{reward:.3f}", share, str(sum(row["kept"] for row in rows)), words]


def render(record: TraceRecord) -> Panel:
    """One trajectory for the terminal."""
    parts: list[Any] = [printable(headline(record))]
    parts += [Text(fault, style="bold red") for fault in faults(record)]
    parts += [printable(record.trajectory.fault, "red")] if record.trajectory.fault else []
    for segment in segments(record):
        label = f"{segment.kind}, {segment.end - segment.start} tokens{segment.origin}"
        parts.append(Rule(label, style="dim", align="left"))
        parts.append(printable(segment.text, STYLES[segment.kind]))
    if any(turn.calls for turn in record.trajectory.turns):
        parts.append(Padding(_calls(record), (1, 0, 0, 0)))
    verdict = record.verdict
    if verdict is not None:
        answer = "no answer that can be read" if verdict.answer is None else f"answer {verdict.answer!r}"
        words = f"{answer}, reference {record.problem.answer!r}: {verdict.status}"
        parts.append(Padding(printable(words), (1, 0, 0, 0)))
    if record.penalties:
        parts.append(Text(penalties(record)))
    good = verdict is not None and verdict.status == "correct"
    return Panel(
        Group(*parts), title=printable(record.problem.uid), title_align="left", border_style="green" if good else "red"
    )


def _calls(record: TraceRecord) -> Table:
    table = Table(title="calls", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("turn", "tool", "outcome", "ms", "error"):
        table.add_column(name)
    for number, call, result in calls(record):
        if result is None:
            table.add_row(str(number), printable(call.name), "not run", "", "")
            continue
        style = "red" if result.counts_as_error else "yellow" if result.infra else "green"
        error = f"{result.error_type} {result.error_message}".strip()
        outcome = Text(result.kind, style=style)
        table.add_row(str(number), printable(call.name), outcome, f"{result.wall_ms:.0f}", printable(error))
    return table


def page(config: ViewConfig, choice: Matches | None = None) -> str:
    """A self-contained HTML page: curves, the index of the matching steps, and the chosen trajectories."""
    choice = choice or choose(config)
    return page_of(Runs(config.runs), sorted(choice.blocks), choice.places, config.address)


def show(records: Iterable[TraceRecord], console: Console | None = None) -> None:
    """Prints trajectories in a terminal or a notebook."""
    console = console or Console()
    for record in records:
        console.print(render(record))


def opened(run: str) -> str:
    """The directory of a run. For a file in ATIF format it is a temporary directory with its trajectories, removed at
    exit."""
    path = local_path(run)
    if not path.is_file():
        return str(path)
    folder = Path(tempfile.mkdtemp()) / path.name
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    records = sorted(read_atif(path), key=lambda record: record.step)
    writer = TraceWriter(folder)
    for step, records_of_step in groupby(records, key=lambda record: record.step):
        writer.write(step, records_of_step)
    return str(folder)


def serve(config: ViewConfig) -> None:
    """Serves the page until it is interrupted."""
    runs = Runs(config.runs)
    try:
        server = PageServer(runs, config.port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or config.port != PORT:
            raise
        server = PageServer(runs)
    with server:
        print(f"{server.url}{config.address}  (this machine alone; Ctrl-C ends it, --text prints instead)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    show_log()
    try:
        config = tyro.cli(ViewConfig, args=arguments, prog="grpo-roc view")
        named = config.runs
        config = replace(config, runs=tuple(map(opened, named)))
        if not (config.html or config.atif or config.text):
            serve(config)
            return 0
        atif = output_file("--atif", config.atif, named) if config.atif else None
        html = output_file("--html", config.html, named) if config.html else None
        with phase("reading the trajectories", routine=True):
            choice = choose(config)
            nothing = "" if choice.matched else f"no trajectory matches\n{available(config)}"
            document = page(config, choice) if html and choice.matched else ""
        if nothing:
            print(nothing)
        elif atif:
            records = choice.records
            text = "".join(json.dumps(document) + "\n" for document in documents(records))
            write_output("--atif", atif, text)
            print(f"written: {atif} ({len(records)} of {choice.matched} matching trajectories)")
        elif html:
            write_output("--html", html, document)
            print(f"written: {html} ({len(choice.places)} of {choice.matched} matching trajectories)")
        else:
            print_text(config, choice)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def print_text(config: ViewConfig, choice: Matches) -> None:
    """Prints a table of the steps, if there is no filter, and the chosen trajectories."""
    console = Console()
    for run in () if config.filtered else config.runs:
        line = f"{run}: {len(steps_of(run, config.kind))} steps with trajectories"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(overview(run, config.kind))
    show(choice.records, console)
    left = choice.matched - len(choice.places)
    more = f"; {left} more: --limit {choice.matched}, or --html FILE" if left else ""
    summary = f"{choice.matched} of {choice.total} trajectories match{more}"
    console.print(summary, markup=False, highlight=False, soft_wrap=True)
