"""Results of a run: `summary.json`, the closing lines, and a sample trajectory on the way."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.record.codec import finite
from grpo_roc_jax.record.metrics import recorded, series
from grpo_roc_jax.record.run_dir import SUMMARY_FILE, environment, write_whole
from grpo_roc_jax.settings.points import reach
from grpo_roc_jax.types import Group, Metrics

log = logging.getLogger(__name__)


def summarize_rows(rows: Sequence[Metrics]) -> dict[str, Any]:
    """Figures of a run from its metrics by step; None if no step has them.

    The metrics store a value that was not finite as null. Means leave it out; `max_logprob_gap` becomes None.
    """

    def values(name: str) -> np.ndarray:
        return series([row for row in rows if row["step"] > 0], name)[1]

    def mean(part: np.ndarray) -> float | None:
        finite = part[np.isfinite(part)]
        return float(np.mean(finite)) if len(finite) else None

    errors, gaps = values("rollout/tool_error_in_correct"), values("loss/logprob_gap_max")
    third = max(1, len(errors) // 3)
    return {
        "steps": len(errors),
        "reward_first": mean(values("rollout/reward")[:1]),
        "reward_last_10": mean(values("rollout/reward")[-10:]),
        "tool_error_in_correct_first": mean(errors[:1]),
        "tool_error_in_correct": mean(errors[-third:]),
        "mean_length_first": mean(values("rollout/length")[:1]),
        "mean_length": mean(values("rollout/length")[-third:]),
        "max_logprob_gap": float(gaps.max()) if len(gaps) and np.isfinite(gaps).all() else None,
        "rollouts_sampled": float(np.nansum(values("rollout/sampled"))),
    }


def write_summary(run_dir: Path, config: Config, **measured: Any) -> dict[str, Any]:
    """Writes `summary.json` and returns it: the measured values, figures of the metrics, and the environment. A number
    that is not finite is null, and a disk that fails is logged: a run that has ended stays so.

    `tool_error_in_correct` is over all sampled rollouts before selection, averaged over the last third of the steps.
    """
    summary = finite(
        {
            "name": config.name,
            "seed": config.seed,
            **measured,
            **summarize_rows(recorded(run_dir)),
            **{
                name: value
                for name, value in environment().items()
                if name in ("versions", "python", "commit", "command")
            },
        }
    )
    try:
        reach("summary")
        write_whole(run_dir / SUMMARY_FILE, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        log.warning("%s is not written: %s", SUMMARY_FILE, error)
    return summary


def read_summary(run_dir: Path) -> dict[str, Any]:
    """What `write_summary` wrote."""
    return json.loads((run_dir / SUMMARY_FILE).read_text(encoding="utf-8"))


def summary_lines(run_dir: Path, summary: dict[str, Any]) -> list[str]:
    """The closing lines of a run."""

    def shown(name: str, form: str = ".3f") -> str:
        value = summary.get(name)
        return "-" if value is None else format(value, form)

    return [
        f"accuracy on held-out problems: {shown('accuracy_before')} -> {shown('accuracy_after')}",
        "failing tool calls inside correct trajectories: "
        f"{shown('tool_error_in_correct_first')} -> {shown('tool_error_in_correct')} (last third)",
        f"mean length: {shown('mean_length_first', '.1f')} -> {shown('mean_length', '.1f')} tokens after the prompt",
        f"largest log-prob gap between sampling and training: {shown('max_logprob_gap', '.1e')}",
        f"{summary['seconds']:.0f} s on {summary['device']}",
        f"files: {run_dir} (summary.json, metrics.jsonl, trajectories/, checkpoints/, config.yaml)",
        f"look: python -m grpo_roc_jax.plot {run_dir}; python -m grpo_roc_jax.view {run_dir}",
    ]


def show_trajectory(groups: Sequence[Group], decode: Callable[[Sequence[int]], str], step: int) -> list[str]:
    """One trajectory of the step as text, from another place in each step; nothing without groups."""
    pairs = [pair for group in groups for pair in group.pairs]
    if not pairs:
        return []
    trajectory, verdict = pairs[(step * 31) % len(pairs)]
    head = f"-- a trajectory of step {step}: {verdict.status}, {verdict.tool_errors}/{verdict.tool_calls} calls failed"
    return [head, *decode(trajectory.tokens.tolist()).splitlines(), "--"]
