"""Finds rows that the files of a run lack. A power cut loses what was written but not yet on the disk, including rows
of steps before a checkpoint if the logs were not synced. A resumed run reports what is missing. How many events there
were is not known, so lost events are not reported."""

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from grpo_roc_jax.record import index
from grpo_roc_jax.record.metrics import SFT_FILE, recorded
from grpo_roc_jax.record.trace import trace_files


def missing_rows(run_dir: Path, step: int, traces: int = 0, sft_steps: int = 0) -> list[str]:
    """A line for each file of a run that lacks steps up to `step`, or a part of one; empty for a complete record.

    Args:
        run_dir: Directory of the run.
        step: Step of the checkpoint from which the run resumes.
        traces: `log.traces`, the number of steps between saved trajectories.
        sft_steps: Steps of the supervised stage that the run has had.
    """
    wanted = range(1, step + 1)
    have = {int(row["step"]) for row in recorded(run_dir) if "time/step_s" in row}
    lines = [f"metrics.jsonl lacks {spans(lost)}"] if (lost := [s for s in wanted if s not in have]) else []
    if sft_steps and all(row["step"] != sft_steps for row in recorded(run_dir / SFT_FILE)):
        lines.append(f"{SFT_FILE} lacks its last row, of {spans([sft_steps])}")
    files = [file for file in trace_files(run_dir) if file[2] <= step]
    saved = {number for _, kind, number in files if kind == "step"}
    if traces and (lost := [s for s in wanted if s % traces == 0 and s not in saved]):
        lines.append(f"trajectories/ lacks {spans(lost)}")
    for kind, what in (
        ("step", "trajectories/ lacks a part of"),
        ("eval", "trajectories/ lacks a part of evaluations at"),
    ):
        if lost := [number for path, found, number in files if found == kind and not index.intact(path)]:
            lines.append(f"{what} {spans(lost)}")
    return lines


def spans(steps: Iterable[int]) -> str:
    """`step 3`, `steps 3-7, 9`: ascending numbers with runs joined."""
    steps = list(steps)
    runs = [[s for _, s in run] for _, run in groupby(enumerate(steps), lambda pair: pair[1] - pair[0])]
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"step{'s' if len(steps) > 1 else ''} {words}"
