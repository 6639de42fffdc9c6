"""Shows trajectories of a run: `python -m grpo_roc_jax.view RUN [--step N] [--errors] [--html FILE]`.

Separates what the policy wrote from what it was given, by the mask that training used, and shows every call with its
outcome, the verdict, and why the trajectory was kept or not. Reads only the trajectory log.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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

from grpo_roc_jax.record.atif import read_atif, to_atif
from grpo_roc_jax.record.page import render_page
from grpo_roc_jax.record.segments import SegmentKind, calls, faults, headline, penalties, segments
from grpo_roc_jax.record.trace import TraceRecord, from_json, read_lines, to_line, trace_files

STYLES: dict[SegmentKind, str] = {"prompt": "dim", "policy": "white on rgb(0,50,90)", "observation": "rgb(200,160,60)"}


@dataclass(frozen=True)
class ViewConfig:
    """Shows trajectories of a run; every filter narrows the choice."""

    run: tyro.conf.Positional[str]
    """Directory of the run, or a file of ATIF."""
    step: int | None = None
    """Of this training step; without it and without filters, of the newest."""
    kind: Literal["step", "eval"] = "step"
    """Training rollouts, or those of evaluations."""
    uid: str = ""
    """Problems whose uid contains this."""
    sample: int | None = None
    """This rollout of its problem."""
    reward: float | None = None
    """With this reward."""
    status: str = ""
    """With this verdict: correct, wrong, no_answer, truncated, ..."""
    kept: Literal["any", "yes", "no"] = "any"
    """By what selection did."""
    errors: bool = False
    """With a tool call that failed."""
    limit: int | None = None
    """How many to show: 3 in the terminal, 200 in a page, all in a file of ATIF; 0 shows all."""
    html: str = ""
    """Writes a page to this file instead of the terminal."""
    atif: str = ""
    """Writes the trajectories to this file in the format ATIF, with token ids and log-probabilities."""

    @property
    def filtered(self) -> bool:
        """Whether anything narrows the choice."""
        plain = (self.uid, self.status, self.errors, self.kept != "any")
        return any(plain) or any(value is not None for value in (self.step, self.sample, self.reward))


@dataclass(frozen=True, eq=False)
class Choice:
    """The trajectories of a run that pass the filters."""

    records: tuple[TraceRecord, ...]
    """The first ones, up to the limit."""
    matched: int
    """Number of trajectories that pass."""
    total: int
    """Number of trajectories that were read."""


def choose(config: ViewConfig) -> Choice:
    """The trajectories that pass the filters, in the order of the log.

    Raises:
        FileNotFoundError: The run kept no trajectories.
    """
    if Path(config.run).is_file():
        return chosen(config, (json.loads(to_line(record)) for record in read_atif(Path(config.run))))
    files = trace_files(config.run)
    steps = [step for _, kind, step in files if kind == config.kind]
    if not steps:
        hint = f"--kind {files[0][1]} shows those that it holds" if files else "name a run with log.traces above 0"
        raise FileNotFoundError(f"{config.run} holds no trajectories of kind {config.kind!r}; {hint}")
    return chosen(config, read_lines(config.run, config.step if config.filtered else max(steps), config.kind))


def chosen(config: ViewConfig, lines: Iterable[dict[str, Any]]) -> Choice:
    """The lines that pass the filters."""
    limit = config.limit if config.limit is not None else (0 if config.atif else 200 if config.html else 3)
    shown: list[TraceRecord] = []
    matched = total = 0
    for line in lines:
        total += 1
        if matches(line, config):
            matched += 1
            if not limit or len(shown) < limit:
                shown.append(from_json(line))
    return Choice(tuple(shown), matched, total)


def available(config: ViewConfig) -> str:
    """Which steps and statuses the log holds, for filters that match nothing."""
    steps = [step for _, kind, step in trace_files(config.run) if kind == config.kind]
    within = config.step if config.step in steps else None
    verdicts = [line["verdict"] for line in read_lines(config.run, within, config.kind)]
    found = Counter(verdict["status"] if verdict else "unscored" for verdict in verdicts).most_common()
    of = f"step {within}" if within is not None else "the log"
    shown = ", ".join(map(str, steps if len(steps) <= 20 else [*steps[:10], "...", *steps[-9:]]))
    return f"steps in the log: {shown}\nstatuses in {of}: {', '.join(f'{name} {count}' for name, count in found)}"


def matches(line: dict[str, Any], config: ViewConfig) -> bool:
    """Whether a parsed line passes the filters."""
    verdict = line["verdict"] or {}
    return (
        config.uid in line["problem"]["uid"]
        and (config.sample is None or line["sample"] == config.sample)
        and (config.reward is None or ("reward" in verdict and abs(verdict["reward"] - config.reward) < 1e-9))
        and (not config.status or verdict.get("status") == config.status)
        and (config.kept == "any" or line["kept"] == (config.kept == "yes"))
        and (not config.errors or verdict.get("tool_errors", 0) > 0)
    )


def overview(run: str | Path, kind: str = "step") -> Table:
    """A row per step: rollouts, mean reward, tool errors in correct ones, kept. At most 30, evenly spaced."""
    steps = [step for _, found, step in trace_files(run) if found == kind]
    chosen = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, min(30, len(steps))).round().astype(int))]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("step", "rollouts", "reward", "tool errors in correct", "kept", "verdicts"):
        table.add_column(name, justify="left" if name == "verdicts" else "right")
    for step in chosen:
        table.add_row(*_overview_row(step, list(read_lines(run, step, kind))))
    return table


def _overview_row(step: int, lines: Sequence[dict[str, Any]]) -> list[str]:
    verdicts = [line["verdict"] for line in lines if line["verdict"]]
    right = [verdict for verdict in verdicts if verdict["status"] == "correct"]
    calls = sum(verdict["tool_calls"] for verdict in right)
    share = sum(verdict["tool_errors"] for verdict in right) / calls if calls else 0.0
    reward = sum(verdict["reward"] for verdict in verdicts) / len(verdicts) if verdicts else 0.0
    statuses = Counter(verdict["status"] for verdict in verdicts).most_common()
    words = ", ".join(f"{status} {count}" for status, count in statuses)
    kept = str(sum(line["kept"] for line in lines))
    return [str(step), str(len(lines)), f"{reward:.3f}", f"{share:.3f}", kept, words]


def render(record: TraceRecord) -> Panel:
    """One trajectory for the terminal."""
    parts: list[Any] = [printable(headline(record))]
    parts += [Text(fault, style="bold red") for fault in faults(record)]
    for segment in segments(record):
        label = f"{segment.kind}, {segment.end - segment.start} tokens{segment.origin}"
        parts.append(Rule(label, style="dim", align="left"))
        parts.append(printable(segment.text, STYLES[segment.kind]))
    if any(turn.calls for turn in record.trajectory.turns):
        parts.append(Padding(_calls(record), (1, 0, 0, 0)))
    verdict = record.verdict
    if verdict is not None:
        words = f"answer {verdict.answer!r}, reference {record.problem.answer!r}: {verdict.status}"
        parts.append(Padding(printable(words), (1, 0, 0, 0)))
    if record.penalties:
        parts.append(Text(penalties(record)))
    good = verdict is not None and verdict.status == "correct"
    return Panel(
        Group(*parts), title=printable(record.problem.uid), title_align="left", border_style="green" if good else "red"
    )


def printable(text: str, style: str = "") -> Text:
    """Text for the terminal: no markup, and control characters as visible symbols, since tools print anything."""
    pictures = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
    return Text(text.translate(pictures), style=style)


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


def page(config: ViewConfig, choice: Choice | None = None) -> str:
    """A self-contained HTML page of the chosen trajectories; in a notebook, `IPython.display.HTML(page(config))`."""
    choice = choice or choose(config)
    title = f"{config.run}: {len(choice.records)} of {choice.matched} matching trajectories ({choice.total} read)"
    return render_page(title, choice.records)


def show(records: Iterable[TraceRecord], console: Console | None = None) -> None:
    """Prints trajectories; works in a terminal and in a notebook."""
    console = console or Console()
    for record in records:
        console.print(render(record))


def main(arguments: Sequence[str] | None = None) -> int:
    config = tyro.cli(ViewConfig, args=arguments, prog="python -m grpo_roc_jax.view")
    try:
        choice = choose(config)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if not choice.matched:
        print(f"no trajectory matches\n{available(config)}")
        return 0
    if config.html:
        Path(config.html).write_text(page(config, choice), encoding="utf-8")
        print(f"written: {config.html}")
        return 0
    if config.atif:
        text = "".join(json.dumps(to_atif(record)) + "\n" for record in choice.records)
        Path(config.atif).write_text(text, encoding="utf-8")
        print(f"written: {config.atif}, {len(choice.records)} trajectories")
        return 0
    console = Console()
    if not config.filtered and not Path(config.run).is_file():
        steps = sum(kind == config.kind for _, kind, _ in trace_files(config.run))
        console.print(f"{config.run}: {steps} steps with trajectories", markup=False, highlight=False, soft_wrap=True)
        console.print(overview(config.run, config.kind))
    show(choice.records, console)
    left = choice.matched - len(choice.records)
    more = f"; {left} more: --limit {choice.matched}, or --html FILE" if left else ""
    summary = f"{choice.matched} of {choice.total} trajectories match{more}"
    console.print(summary, markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
