"""Metrics of several runs as curves: runs are loaded, grouped under labels by their settings, and averaged."""

import difflib
import glob
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_roc_jax.record import metrics
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.settings.cli import flatten
from grpo_roc_jax.settings.files import local_path, read_yaml_mapping
from grpo_roc_jax.types import Metrics

NOT_COMPARED = ("seed", "name", "run_dir", "resume", "log.", "checkpoint.")
"""Settings, or prefixes of settings, in which runs with one label may differ."""
USED = {"sampled": "rollout/sampled", "tokens": "rollout/sampled_tokens", "seconds": "time/step_s"}
"""Axis -> the metric that is summed along it; the remaining axis is `step`."""


@dataclass(frozen=True, eq=False)
class RunData:
    """The files of one run, as far as figures need them."""

    path: Path
    rows: list[Metrics]
    settings: Mapping[str, Any]
    """The resolved configuration, `section.field` -> value; empty if there is none."""
    label: str = ""
    """Label given on the command line; empty to derive one."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Mean and spread of one metric over the runs with one label."""

    x: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    """Standard deviation over runs (n - 1); zeros for one run."""
    runs: int


def load_runs(patterns: Sequence[str]) -> list[RunData]:
    """The runs that the patterns match, each once, in order.

    Raises:
        FileNotFoundError: A pattern matches no run.
    """
    loaded: dict[Path, RunData] = {}
    for pattern in patterns:
        label, where, paths = "", pattern, matching(pattern)
        for at in [index for index, letter in enumerate(pattern) if letter == "="]:
            if not paths:  # a label has the first `=` after which something matches
                label, where = pattern[:at], pattern[at + 1 :]
                paths = matching(where)
        paths = [path.parent if path.name == "metrics.jsonl" else path for path in paths]
        runs = [path for path in paths if (path / "metrics.jsonl").exists()]
        if not runs:
            raise FileNotFoundError(f"{where!r} matches no directory with a metrics.jsonl; name the directory of a run")
        for path in runs:
            loaded.setdefault(path, RunData(path, read_metrics(path), _settings(path), label))
    return list(loaded.values())


def matching(pattern: str) -> list[Path]:
    """The path of that name, or else the paths that match the pattern."""
    path = local_path(pattern)
    return [path] if path.exists() else list(map(Path, sorted(glob.glob(str(path)))))


def by_label(runs: Sequence[RunData], group_by: Sequence[str] = (), each: bool = False) -> dict[str, list[RunData]]:
    """Label -> its runs, in the order in which they were named.

    A run has the label given on the command line. Otherwise runs are grouped by the settings `group_by`, or by all
    settings except the seed, and labeled by the settings in which the groups differ. A run without a configuration is
    labeled by its directory.

    Raises:
        ValueError: No run has a setting of that name.
    """
    named = _directory_names(runs)
    _check_names(runs, group_by)
    if each:
        return {named[i]: [run] for i, run in enumerate(runs)}
    keys = [_key(run, named[i], group_by) for i, run in enumerate(runs)]
    varying = _varying([run for run in runs if run.settings and not run.label])
    groups: dict[str, list[RunData]] = {}
    label_of: dict[Any, str] = {}
    for i, (run, key) in enumerate(zip(runs, keys, strict=True)):
        if key not in label_of:
            label_of[key] = _unused(_label(run, named[i], group_by, varying), label_of.values())
        groups.setdefault(label_of[key], []).append(run)
    return groups


def curve(runs: Sequence[RunData], metric: str, *, x: str = "step", smooth: int = 1) -> Curve | None:
    """Mean and spread of a metric over runs; None if no run has it.

    By step, each step averages the runs that have it. Over an axis of `USED`, the runs are interpolated onto one grid
    over the range that they share.
    """
    lines = [line for line in (_line(run.rows, metric, x) for run in runs) if len(line[0])]
    if not lines:
        return None
    lines = [(places, running_mean(steps, values, smooth)) for steps, places, values in lines]
    if x == "step":
        grid = np.unique(np.concatenate([places for places, _ in lines]))
        table = np.full((len(lines), len(grid)), np.nan)
        for row, (places, values) in enumerate(lines):
            table[row, np.searchsorted(grid, places)] = values
    else:
        lines = [(places[~np.isnan(values)], values[~np.isnan(values)]) for places, values in lines]
        lines = [line for line in lines if len(line[0])]
        if not lines:
            return None
        low, high = max(places[0] for places, _ in lines), min(places[-1] for places, _ in lines)
        if low > high:
            raise ValueError(f"{metric}: the runs of one label share no range of {x}; use --each")
        grid = lines[0][0] if len(lines) == 1 else np.linspace(low, high, max(len(places) for places, _ in lines))
        table = np.stack([np.interp(grid, places, values) for places, values in lines])
    return Curve(grid, *_moments(table), runs=len(lines))


def running_mean(steps: np.ndarray, values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the values of the last `window` steps; NaN is ignored. The steps are in increasing order."""
    if window == 1:
        return values
    known = ~np.isnan(values)
    total, count = (np.append(0, np.cumsum(part)) for part in (np.where(known, values, 0.0), known))
    first = np.searchsorted(steps, steps - window, side="right")
    total, count = total[1:] - total[first], count[1:] - count[first]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def last_third(rows: Sequence[Metrics], metric: str) -> float:
    """Mean of a metric over the last third of the training steps, or the last evaluation for `eval`; NaN if missing."""
    if metric != "eval":
        return metrics.last_third(rows, metric)
    *_, values = _line(rows, metric, "step")
    return float(values[-1]) if len(values) else math.nan


def _line(rows: Sequence[Metrics], metric: str, x: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(step, x, value) of the rows that have the metric; for an axis of `USED`, x is the amount used so far."""
    points, used = [], 0.0
    for row in rows:
        used += row.get(USED.get(x, ""), 0.0)
        value = _accuracy(row) if metric == "eval" else row.get(metric)
        if value is not None:
            points.append((row["step"], row["step"] if x == "step" else used, value))
    return tuple(np.array(points, np.float64).reshape(-1, 3).T)


def _accuracy(row: Metrics) -> float | None:
    """avg@k over all held-out problems."""
    names = [name for name in row if name.startswith("eval/") and "/avg@" in name]
    overall = [name for name in names if name.startswith("eval/all/")] or (names if len(names) == 1 else [])
    return row[overall[0]] if overall else None


def _moments(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (n - 1) of the columns, ignoring NaN; the deviation of a single value is 0."""
    known = np.ma.masked_invalid(table)
    return known.mean(axis=0).filled(np.nan), known.std(axis=0, ddof=1).filled(0.0)


def _settings(path: Path) -> dict[str, Any]:
    file = path / "config.yaml"
    if not file.exists():
        return {}
    flat = flatten(read_yaml_mapping(file))
    return {name: tuple(value) if isinstance(value, list) else value for name, value in flat}


def _value(run: RunData, setting: str) -> Any:
    """The value of a setting; a choice of kind is named with or without `.kind`."""
    return run.settings.get(
        setting, run.settings.get(f"{setting}.kind", run.settings.get(setting.removesuffix(".kind")))
    )


def _check_names(runs: Sequence[RunData], group_by: Sequence[str]) -> None:
    configured = [run for run in runs if run.settings]
    for setting in group_by if configured else ():
        if all(_value(run, setting) is None for run in configured):
            known = sorted({name for run in configured for name in run.settings})
            near = difflib.get_close_matches(setting, known, 3)
            raise ValueError(
                f"--group_by {setting}: no run has such a setting" + (f"; near: {', '.join(near)}" if near else "")
            )


def _compared(run: RunData) -> dict[str, Any]:
    return {name: value for name, value in run.settings.items() if not name.startswith(NOT_COMPARED)}


def _key(run: RunData, name: str, group_by: Sequence[str]) -> Any:
    if run.label:
        return ("label", run.label)
    if not run.settings:
        return ("directory", name)
    if group_by:
        return ("settings", tuple(str(_value(run, setting)) for setting in group_by))
    return ("settings", tuple(sorted((setting, str(value)) for setting, value in _compared(run).items())))


def _label(run: RunData, name: str, group_by: Sequence[str], varying: Sequence[str]) -> str:
    if run.label:
        return run.label
    shown = [setting for setting in (group_by or varying) if _value(run, setting) is not None]
    if not run.settings or not shown:
        return str(run.settings.get("name", name)) if run.settings and not varying else name
    words = [f"{setting}={_value(run, setting)}" for setting in shown[:3]]
    return ", ".join(words + ([f"and {len(shown) - 3} more"] if len(shown) > 3 else []))


def _varying(runs: Sequence[RunData]) -> list[str]:
    """Settings in which the runs differ, except those of `NOT_COMPARED`."""
    every = [_compared(run) for run in runs]
    names = dict.fromkeys(name for settings in every for name in settings)
    return [name for name in names if len({str(settings.get(name)) for settings in every}) > 1]


def _directory_names(runs: Sequence[RunData]) -> list[str]:
    """Names of the directories, with as many parents as make them unique."""
    paths = [run.path.resolve() for run in runs]
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _unused(label: str, used: Any) -> str:
    number, candidate = 2, label
    while candidate in used:
        candidate, number = f"{label} ({number})", number + 1
    return candidate
