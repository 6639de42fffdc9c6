"""Finds rows that the files of a run lack. A power cut loses what was written but not yet on the disk, including rows
of steps before a checkpoint if the logs were not synced. So a checkpoint holds how much each log had of the steps
before it (`measure_logs`), and a resumed run reports what is missing (`missing_rows`)."""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

from grpo_roc_jax.record import index
from grpo_roc_jax.record.events import EVENTS_FILE
from grpo_roc_jax.record.metrics import FILE, SFT_FILE, parsed_row, recorded
from grpo_roc_jax.record.trace import FOLDER, NAME, trace_files

ROW = re.compile(rb'^\{"step": (-?\d+).*\}$', re.MULTILINE)
"""A whole row of a log, which begins with its step."""


def measure_logs(run_dir: Path, step: int) -> dict[str, int]:
    """What the logs of a run hold of the steps up to `step`.

    Returns:
        File -> number of rows, or bytes of a file of trajectories. The supervised stage counts its own steps, so all
        its rows count.
    """
    measured = {}
    for name in (FILE, SFT_FILE, EVENTS_FILE):
        if (run_dir / name).exists():
            steps = map(int, ROW.findall((run_dir / name).read_bytes()))
            measured[name] = sum(name == SFT_FILE or number <= step for number in steps)
    files = trace_files(run_dir)
    return measured | {f"{FOLDER}/{path.name}": path.stat().st_size for path, _, number in files if number <= step}


def missing_rows(
    run_dir: Path, step: int, traces: int = 0, sft_steps: int = 0, saved: Mapping[str, int] | None = None
) -> list[str]:
    """A line for each file of a run that lacks steps up to `step`, or a part of one; empty for a complete record.

    Args:
        run_dir: Directory of the run, whose logs hold no later steps.
        step: Step of the checkpoint from which the run resumes.
        traces: `log.traces`, the number of steps between saved trajectories.
        sft_steps: Steps of the supervised stage that the run has had.
        saved: What `measure_logs` measured when the checkpoint was saved. Without it, lost events are not noticed, nor
            a file of trajectories that lost whole lines and has no index; which files there should be is inferred from
            the steps of those that are there, since `log.traces` may have changed.
    """
    saved = saved or {}
    return [*_missing_in_logs(run_dir, step, sft_steps, saved), *_missing_trajectories(run_dir, step, traces, saved)]


def _missing_in_logs(run_dir: Path, step: int, sft_steps: int, saved: Mapping[str, int]) -> list[str]:
    lines = {}
    have = {int(row["step"]) for row in recorded(run_dir) if "time/step_s" in row}
    if lost := [number for number in range(1, step + 1) if number not in have]:
        lines[FILE] = f"{FILE} lacks {spans(lost)}"
    if sft_steps and all(row["step"] != sft_steps for row in recorded(run_dir / SFT_FILE)):
        lines[SFT_FILE] = f"{SFT_FILE} lacks its last row, of {spans([sft_steps])}"
    for name in (FILE, *([SFT_FILE] if sft_steps else []), EVENTS_FILE):
        rows = _row_count(run_dir / name)
        if rows < saved.get(name, 0):
            lines.setdefault(name, f"{name} lacks {saved[name] - rows} of {saved[name]} rows")
    return list(lines.values())


def _missing_trajectories(run_dir: Path, step: int, traces: int, saved: Mapping[str, int]) -> list[str]:
    files = {path.name: path for path, _, number in trace_files(run_dir) if number <= step}
    sizes = {name.removeprefix(f"{FOLDER}/"): size for name, size in saved.items() if name.startswith(f"{FOLDER}/")}
    expected = (sizes.keys() if saved else _due(files, step, traces)) if traces else set()
    gone = expected - files.keys()
    cut = [name for name, path in files.items() if path.stat().st_size < sizes.get(name, 0) or not index.intact(path)]
    lines = []
    for kind, steps in (("step", "{}"), ("eval", "evaluations at {}")):
        for lost, what in ((gone, "lacks"), (cut, "lacks a part of")):
            numbers = sorted(int(match[2]) for match in map(NAME.fullmatch, lost) if match[1] == kind)
            if numbers:
                lines.append(f"{FOLDER}/ {what} {steps.format(spans(numbers))}")
    return lines


def _due(names: Iterable[str], step: int, traces: int) -> set[str]:
    """Names of the files of trajectories that there should be, if the interval that `names` show was always kept."""
    interval = math.lcm(traces, math.gcd(*(int(m[2]) for m in map(NAME.fullmatch, names) if m[1] == "step")))
    return {f"step_{number:08d}.jsonl" for number in range(interval, step + 1, interval)} if interval else set()


def _row_count(path: Path) -> int:
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        return sum(parsed_row(line) is not None for line in file)


def spans(steps: Iterable[int]) -> str:
    """`step 3`, `steps 3-7, 9`: ascending numbers with runs joined."""
    steps = list(steps)
    runs = [[s for _, s in run] for _, run in groupby(enumerate(steps), lambda pair: pair[1] - pair[0])]
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"step{'s' if len(steps) > 1 else ''} {words}"
