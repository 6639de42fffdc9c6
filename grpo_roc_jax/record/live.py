"""What a terminal shows while a run trains: a table of the newest figures, and a sample trajectory in color.

`Board` holds the figures, `after` adds a step to them, `table` draws them. Text of the policy, of tools and of problems
is drawn through `inert`, so that no control character in it reaches the terminal.
"""

import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.table import Table
from rich.text import Text

from grpo_roc_jax.record.accuracy import ALL
from grpo_roc_jax.record.segments import segments
from grpo_roc_jax.record.trace import TraceRecord
from grpo_roc_jax.types import Metrics, Turn

HISTORY = 24
"""Number of steps in the small curves."""
EVENTS = 3
"""Number of newest events in the table."""
PHASES = ("rollout", "plan", "select", "rows", "update")
DROPPED = "roc/dropped_"
"""Prefix of the metrics that count dropped trajectories by reason."""
BARS = "▁▂▃▄▅▆▇█"
STYLES = {"prompt": "dim", "policy": "", "call": "cyan", "observation": "green", "error": "red"}


@dataclass(frozen=True)
class Board:
    """The figures of the table."""

    steps: int
    """Number of steps of the whole run."""
    step: int = 0
    """The last finished step."""
    recent: tuple[Mapping[str, float], ...] = ()
    """Metrics of the last `HISTORY` steps, oldest first."""
    accuracy: tuple[tuple[int, float], ...] = ()
    """(step, held-out accuracy) of the first and the last evaluation."""
    events: tuple[str, ...] = ()
    """The newest events, oldest first."""


def after(board: Board, step: int, metrics: Metrics) -> Board:
    """The figures with a row of metrics added: those of a step, of an evaluation, or of both."""
    if "time/step_s" in metrics:
        board = replace(board, step=step, recent=(*board.recent, dict(metrics))[-HISTORY:])
    accuracies = [value for name, value in metrics.items() if name.startswith(f"eval/{ALL}/avg@")]
    return replace(board, accuracy=(*board.accuracy[:1], (step, accuracies[0]))) if accuracies else board


def table(board: Board, *, ascii_only: bool = False) -> Table:
    """The table, which fits any width; `ascii_only` leaves out the small curves."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for name, words in rows(board):
        values = [row[CURVES[name]] for row in board.recent if CURVES[name] in row] if name in CURVES else []
        curve = "" if ascii_only or len(values) < 2 else f"  {sparkline(values)}"
        grid.add_row(name, Text(words + curve, style="yellow" if name == "event" else ""))
    return grid


CURVES = {"reward": "rollout/reward", "failing calls": "rollout/tool_error_in_correct"}
"""Rows with a small curve, and the metric of the curve."""


def rows(board: Board) -> Iterator[tuple[str, str]]:
    """(name, text) of each row of the table. Figures that the run does not have are left out."""
    now = board.recent[-1] if board.recent else {}

    def shown(name: str, form: str) -> str:
        return format(now[name], form) if math.isfinite(now.get(name, math.nan)) else "-"

    if now:
        left = float(np.median([row["time/step_s"] for row in board.recent])) * (board.steps - board.step)
        yield "step", f"{board.step}/{board.steps}  {shown('time/step_s', '.1f')} s a step, {duration(left)} left"
        yield "reward", shown("rollout/reward", ".3f")
        yield "failing calls", f"{shown('rollout/tool_error_in_correct', '.3f')} in correct rollouts"
    if board.accuracy:
        yield "held out", " -> ".join(f"{value:.3f} (step {step})" for step, value in board.accuracy)
    if now:
        why = [(name.removeprefix(DROPPED), count) for name, count in now.items() if name.startswith(DROPPED)]
        reasons = ", ".join(f"{name.replace('_', ' ')} {count:.0f}" for name, count in sorted(why, key=lambda w: -w[1]))
        counts = f"{shown('roc/kept', '.0f')} kept, {shown('roc/dropped', '.0f')} dropped"
        yield "rollouts", f"{counts}: {reasons}" if reasons else counts
        yield "speed", f"{shown('rollout/tokens_per_s', ',.0f')} tokens/s sampled"
        yield "time", phases(now)
    for text in board.events:
        yield "event", " ".join(inert(text.removeprefix("event at ")).split())


def phases(metrics: Mapping[str, float]) -> str:
    """Shares of a step's time; those below 1% are left out."""
    step_seconds = max(metrics.get("time/step_s", 0.0), 1e-9)
    spent = {name: metrics.get(f"time/{name}_s", 0.0) / step_seconds for name in PHASES}
    spent["rest"] = max(0.0, 1 - sum(spent.values()))
    return "  ".join(f"{name} {share:.0%}" for name, share in spent.items() if share >= 0.01)


def sparkline(values: Sequence[float]) -> str:
    """A small curve between the smallest and the largest value; a value that is not finite is a space."""
    array = np.asarray(values, np.float64)
    finite = array[np.isfinite(array)]
    low, spread = (finite.min(), np.ptp(finite)) if len(finite) else (0.0, 0.0)
    places = np.where(np.isfinite(array), (array - low) / (spread or 1.0) * (len(BARS) - 1), -1.0)
    return "".join(BARS[round(level)] if level >= 0 else " " for level in places)


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`."""
    if not seconds < 1e8:  # also for values that are not finite
        return "?"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def colored(record: TraceRecord) -> Text:
    """A trajectory as colored text: prompt, the policy's text with its calls, outputs, errors."""
    verdict = record.verdict
    outcome = f"{verdict.status}, {verdict.tool_errors}/{verdict.tool_calls} calls failed" if verdict else "not scored"
    good = verdict is not None and verdict.status == "correct"
    text = Text(f"-- a trajectory of step {record.step}: {outcome}\n", style="bold green" if good else "bold red")
    body = Text()
    for kind, words in pieces(record):
        body.append(inert(words), style=STYLES[kind])
    body.rstrip()
    return Text.assemble(text, body, "\n--")


def pieces(record: TraceRecord) -> Iterator[tuple[str, str]]:
    """(key of `STYLES`, text) of the parts of a trajectory in order."""
    turns, before = list(record.trajectory.turns), False
    for segment in segments(record):
        if segment.kind != "policy":
            yield ("error" if before and segment.kind == "observation" else segment.kind), segment.text
            continue
        for turn in turns:
            if segment.start <= turn.start and turn.end <= segment.end:
                yield from with_calls(turn)
                before = any(result.counts_as_error for result in turn.results)


def with_calls(turn: Turn) -> Iterator[tuple[str, str]]:
    """The text of a turn, with its calls separated."""
    rest = turn.text
    for call in turn.calls:
        head, call_text, tail = rest.partition(call.raw) if call.raw else (rest, "", "")
        if call_text:
            yield "policy", head
            yield "call", call_text
            rest = tail
    yield "policy", rest


UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of control characters, direction marks and characters without width, lone surrogates, and line
separators."""


def inert(text: str) -> str:
    """Text that has no effect on a terminal: control characters and characters without width are shown as symbols or
    numbers."""
    if text.isprintable():
        return text
    return "".join(c if c in "\t\n" or c.isprintable() else symbol(c) for c in text)


def symbol(character: str) -> str:
    """What is shown in place of a character: itself, unless it could have an effect on the terminal."""
    code = ord(character)
    if code < 32 or code == 127:
        return chr(0x2421 if code == 127 else 0x2400 + code)
    return f"<U+{code:04X}>" if unicodedata.category(character) in UNSEEN else character


def printable(text: str, style: str = "") -> Text:
    """Text for the terminal, without markup."""
    return Text(inert(text), style=style)
