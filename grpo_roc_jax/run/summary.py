"""Results of a run: `summary.json`, the closing lines, and sample trajectories during the run."""

import json
import logging
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.process.points import reach
from grpo_roc_jax.record.codec import finite
from grpo_roc_jax.record.events import read_events
from grpo_roc_jax.record.metrics import SFT_FILE, last_third, recorded, series
from grpo_roc_jax.record.run_dir import SUMMARY_FILE, environment, write_whole
from grpo_roc_jax.record.storage import is_address
from grpo_roc_jax.record.trace import TraceRecord, context_of
from grpo_roc_jax.run.watch import DIVERGED_STATUS, INFRASTRUCTURE_STATUS, NO_SIGNAL_STATUS
from grpo_roc_jax.settings.files import read_json_object
from grpo_roc_jax.settings.secrets import hidden
from grpo_roc_jax.types import Metrics

log = logging.getLogger(__name__)


PROG = "python -m grpo_roc_jax"


def summarize_rows(rows: Sequence[Metrics]) -> dict[str, Any]:
    """Figures of a run from its metrics of each step; None where no step has them.

    The metrics file stores values that are not finite as null. Means leave them out; `max_logprob_gap` becomes None.
    """

    def values(name: str) -> np.ndarray:
        return series([row for row in rows if row["step"] > 0], name)[1]

    def mean(part: np.ndarray) -> float | None:
        finite = part[np.isfinite(part)]
        return float(np.mean(finite)) if len(finite) else None

    def late(name: str) -> float | None:
        value = last_third(rows, name)
        return None if math.isnan(value) else value

    gaps = values("loss/logprob_gap_max")
    return {
        "steps": sum(row["step"] > 0 for row in rows),
        "reward_first": mean(values("rollout/reward")[:1]),
        "reward_last_10": mean(values("rollout/reward")[-10:]),
        "tool_error_in_correct_first": mean(values("rollout/tool_error_in_correct")[:1]),
        "tool_error_in_correct": late("rollout/tool_error_in_correct"),
        "mean_length_first": mean(values("rollout/length")[:1]),
        "mean_length": late("rollout/length"),
        "max_logprob_gap": float(gaps.max()) if len(gaps) and np.isfinite(gaps).all() else None,
        "rollouts_sampled": float(np.nansum(values("rollout/sampled"))),
    }


def write_summary(run_dir: Path, config: Config, **measured: Any) -> dict[str, Any]:
    """Writes and returns `summary.json`: the measured values, figures from the metrics, and the environment. Numbers
    that are not finite are written as null. A disk failure is logged and not raised, since the run has ended.

    `tool_error_in_correct` is over all sampled rollouts before selection, averaged over the last third of the steps;
    those in which no correct rollout has a call are left out.
    """
    if supervised := recorded(run_dir / SFT_FILE):
        measured["left_out"] = measured.get("left_out", {}) | {"traces": int(supervised[-1].get("data/left_out", 0))}
    here = environment()
    about = {name: here[name] for name in ("versions", "python", "commit", "command")}
    rows = summarize_rows(recorded(run_dir))
    summary = finite({"name": config.name, "seed": config.seed, **measured, **rows, **about})
    try:
        reach("summary")
        write_whole(run_dir / SUMMARY_FILE, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        log.warning("%s is not written: %s", SUMMARY_FILE, error)
    return summary


def read_summary(run_dir: Path) -> dict[str, Any]:
    """Reads what `write_summary` wrote.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not JSON.
    """
    return read_json_object(run_dir / SUMMARY_FILE)


def summary_lines(run_dir: Path, summary: dict[str, Any], named: str = "") -> list[str]:
    """The closing lines of a run. `named`: `run_dir` of its configuration."""

    def shown(name: str, form: str = ".3f") -> str:
        value = summary.get(name)
        return "-" if value is None else format(value, form)

    dropped = {name: count for name, count in summary.get("left_out", {}).items() if count}
    causes = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in dropped.items())
    return [
        *([f"left out, since they are too long: {causes}"] if causes else []),
        f"accuracy on held-out problems: {shown('accuracy_before')} -> {shown('accuracy_after')}",
        "failing tool calls inside correct trajectories: "
        f"{shown('tool_error_in_correct_first')} -> {shown('tool_error_in_correct')} (last third)",
        f"mean length: {shown('mean_length_first', '.1f')} -> {shown('mean_length', '.1f')} tokens after the prompt",
        f"largest log-prob gap between sampling and training: {shown('max_logprob_gap', '.1e')}",
        f"{summary['seconds']:.0f} s on {summary['device']}",
        f"files: {run_dir} (summary.json, metrics.jsonl, trajectories/, checkpoints/, config.yaml)",
        *next_lines(run_dir, summary, named=named),
    ]


def next_lines(run_dir: Path, summary: dict[str, Any] | None, status: int | None = None, named: str = "") -> list[str]:
    """Suggests up to three commands to run next.

    Args:
        run_dir: Directory of the run.
        summary: Summary of a run that has ended; None for one that was stopped or has failed.
        status: Exit status of a run that was stopped for one of the reasons in `run.watch`.
        named: `run_dir` of its configuration, which may be the address of a store.
    """
    run = shlex.quote(str(run_dir))
    again = f"--run_dir {shlex.quote(hidden(named)) if is_address(named) else run} --resume auto"
    alarms = [event for event in read_events(run_dir) if event.get("action") or event["event"] == "stalled"]
    last = f"; the last of {len(alarms)} alarms is {alarms[-1]['event']} at step {alarms[-1]['step']}" if alarms else ""
    view = (f"{PROG} view {run}", f"curves, groups and rollouts in the browser{last}")
    if summary is None:
        batches = sorted((run_dir / "batches").glob("*.npz"))
        third = {
            NO_SIGNAL_STATUS: (f"{PROG} view {run} --text", "rollouts of the newest step as text"),
            DIVERGED_STATUS: (f"{PROG} replay {shlex.quote(str(batches[-1]))}", "the rows of its last update")
            if batches
            else (f"{PROG} plot {run}", "its curves as a picture"),
            INFRASTRUCTURE_STATUS: (f"{PROG} doctor", "what this machine can do"),
        }.get(status, (f"{PROG} chat {run}", "ask the policy that is saved"))
        commands = [(f"the same command with {again}", "goes on from here"), view, third]
    elif not summary["steps"]:
        commands = [(f"the same command of train with {again}", "reinforcement learning"), view]
        commands.append((f"{PROG} chat {run}", "ask the policy"))
    else:
        measured = (f"{PROG} evaluate {run} --samples 16", "its accuracy, from more samples")
        curves = (f"{PROG} plot {run}", "its curves as a picture")
        commands = [view, (f"{PROG} chat {run}", "ask it"), curves if summary["accuracy_after"] is None else measured]
    width = max(len(command) for command, _ in commands)
    return ["next:", *(f"  {command:<{width}}  # {words}" for command, words in commands)]


def one_of(records: Sequence[TraceRecord], step: int, decode: Callable[[Sequence[int]], str]) -> TraceRecord | None:
    """One trajectory of the step, with its context. None without groups.

    Where there are any, it is one in which the tool was needed: a success with a call that worked, of a problem that
    no rollout solved without one. Otherwise any success with such a call, or any trajectory with a call. Its position
    among these changes with the step.
    """
    scored = [record for record in records if record.group >= 0 and record.verdict is not None]
    if not scored:
        return None
    called = [record for record in scored if record.verdict.tool_calls]
    solved = [record for record in called if _solved(record) and record.verdict.tool_errors < record.verdict.tool_calls]
    guessed = {record.group for record in scored if _solved(record) and not record.verdict.tool_calls}
    needed = [record for record in solved if record.group not in guessed]
    candidates = needed or solved or called or scored
    record = candidates[(step * 31) % len(candidates)]
    return replace(record, context=context_of(record.trajectory, decode))


def _solved(record: TraceRecord) -> bool:
    return record.verdict is not None and record.verdict.status == "correct"
