"""Figures of runs: `python -m grpo_roc_jax.plot RUN [RUN...] [--out FILE.png]`.

Reads `metrics.jsonl` and `config.yaml` of each run, nothing else. Runs whose configurations agree but for the seed make
one line with a band, mean and standard deviation; other runs make a line each. Draws without a display.
"""

import glob
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from grpo_roc_jax.metrics import read_metrics
from grpo_roc_jax.types import Metrics

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
"""Okabe and Ito's palette: told apart with any kind of colour vision, and in print."""
NOT_COMPARED = ("seed", "name", "run_dir", "resume", "log.", "checkpoint.")
"""Settings (or their beginnings) in which runs of one label may differ."""
SAMPLED = "rollout/sampled"


@dataclass(frozen=True)
class Panel:
    """One axis: a metric, and another drawn dashed beside it."""

    metric: str
    title: str
    dashed: str = ""
    log: bool = False
    floor: float | None = None
    """The axis reaches down to this."""


PANELS: tuple[Panel, ...] = (
    Panel("rollout/reward", "reward, all sampled", floor=0.0),
    Panel(
        "rollout/tool_error_in_correct",
        "failing tool calls in correct trajectories\n(dashed: those trained on)",
        dashed="roc/tool_error_in_correct_kept",
        floor=0.0,
    ),
    Panel("eval", "held-out accuracy", floor=0.0),
    Panel("rollout/length", "tokens after the prompt", floor=0.0),
    Panel("rollout/turns", "turns", floor=0.0),
    Panel("roc/kept", "trajectories kept (dashed: dropped)", dashed="roc/dropped", floor=0.0),
    Panel("loss/entropy", "entropy, nats per token", floor=0.0),
    Panel("loss/logprob_gap_max", "largest log-prob gap, sampler to trainer", log=True),
)


@dataclass(frozen=True)
class PlotConfig:
    """Draws the metrics of runs into a PNG, and prints what the last third of each came to."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run directories, patterns (`runs/toy-*`), or `LABEL=pattern`, which puts all that match under one label."""
    out: str = "plot.png"
    """File to write; its ending says the format (png, svg, pdf)."""
    group_by: tuple[str, ...] = ()
    """Settings such as `resample.method`: runs with equal values make one line. Empty: all settings but the seed."""
    each: bool = False
    """One line a run, no bands."""
    x: Literal["step", "sampled"] = "step"
    """`sampled` compares methods at equal sampled trajectories, which is what resampling spends more of."""
    smooth: int = 1
    """Running mean over so many steps; 1 draws what was measured."""
    title: str = ""
    """Above the figure."""

    def __post_init__(self) -> None:
        if self.smooth < 1:
            raise ValueError(f"--smooth {self.smooth}; a number of steps, at least 1, is wanted")
        if not self.runs:
            raise ValueError("no run is named; give directories that hold metrics.jsonl")


@dataclass(frozen=True, eq=False)
class RunData:
    """What is read of one run."""

    path: Path
    rows: list[Metrics]
    settings: Mapping[str, Any]
    """The resolved configuration, `section.field` -> value; empty where there is none."""
    label: str = ""
    """Given on the command line; empty to find one."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Mean and spread of one metric over the runs of a label."""

    x: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    """Standard deviation over runs (n - 1); zeros for one run."""
    runs: int


def load_runs(patterns: Sequence[str]) -> list[RunData]:
    """The runs that the patterns name, each once, in order.

    Raises:
        FileNotFoundError: A pattern without any run.
    """
    found: dict[Path, RunData] = {}
    for pattern in patterns:
        label, _, where = pattern.rpartition("=") if not Path(pattern).exists() else ("", "", pattern)
        paths = [Path(path) for path in sorted(glob.glob(where))]
        paths = [path.parent if path.name == "metrics.jsonl" else path for path in paths]
        runs = [path for path in paths if (path / "metrics.jsonl").exists()]
        if not runs:
            raise FileNotFoundError(f"{where!r} matches no directory with a metrics.jsonl; name the directory of a run")
        for path in runs:
            found.setdefault(path, RunData(path, read_metrics(path), _settings(path), label))
    return list(found.values())


def by_label(runs: Sequence[RunData], group_by: Sequence[str] = (), each: bool = False) -> dict[str, list[RunData]]:
    """Label -> its runs, in the order they were named.

    Labels given on the command line come first; then the settings of `group_by`; then all settings but the seed, named
    by those in which the groups differ. A run without configuration stands alone under the name of its directory.
    """
    named = _directory_names(runs)
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
    """Mean and spread of a metric over runs; None when no run has it.

    By step, each step averages the runs that have it. By sampled trajectories, runs are interpolated onto one grid over
    the range that all of them cover.
    """
    lines = [line for line in (_line(run.rows, metric, x) for run in runs) if len(line[0])]
    if not lines:
        return None
    lines = [(places, running_mean(values, smooth)) for places, values in lines]
    if x == "step":
        grid = np.unique(np.concatenate([places for places, _ in lines]))
        table = np.full((len(lines), len(grid)), np.nan)
        for row, (places, values) in enumerate(lines):
            table[row, np.searchsorted(grid, places)] = values
    else:
        low, high = max(places[0] for places, _ in lines), min(places[-1] for places, _ in lines)
        if low > high:  # no common range: a figure that said nothing about it would mislead
            raise ValueError(f"{metric}: the runs of one label share no range of sampled trajectories; use --each")
        grid = lines[0][0] if len(lines) == 1 else np.linspace(low, high, max(len(places) for places, _ in lines))
        table = np.stack([np.interp(grid, places, values) for places, values in lines])
    return Curve(grid, *_moments(table), runs=len(lines))


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values, fewer at the start; not-a-number counts for nothing."""
    if window == 1:
        return values
    known = ~np.isnan(values)
    total = np.cumsum(np.where(known, values, 0.0))
    count = np.cumsum(known)
    total[window:], count[window:] = total[window:] - total[:-window], count[window:] - count[:-window]
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def draw(runs: Sequence[RunData], config: PlotConfig) -> Figure:
    """The figure: eight panels, a line or band for each label."""
    groups = by_label(runs, config.group_by, config.each)
    figure = Figure(figsize=(17, 8), layout="constrained")
    axes = figure.subplots(2, 4).ravel()
    for panel, axis in zip(PANELS, axes, strict=True):
        for index, members in enumerate(groups.values()):
            colour = COLOURS[index % len(COLOURS)]
            _draw_curve(axis, members, panel.metric, config, colour)
            if panel.dashed:
                _draw_curve(axis, members, panel.dashed, config, colour, dashed=True)
        _finish_axis(axis, panel, config)
    handles = [_handle(axes[0], COLOURS[i % len(COLOURS)]) for i in range(len(groups))]
    names = [f"{label}  ({_describe(members)})" for label, members in groups.items()]
    # Below the panels: as many columns as fit the width at about 8 points a letter.
    columns = max(1, min(len(names), int(150 / (max(map(len, names)) + 6))))
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=11)
    if config.title:
        figure.suptitle(config.title, fontsize=14)
    return figure


def table(runs: Sequence[RunData], config: PlotConfig) -> str:
    """Text: mean over the last third of the steps of each run, then mean and deviation over the runs of a label."""
    names = ("rollout/reward", "rollout/tool_error_in_correct", "rollout/length", "rollout/turns", "eval")
    groups = by_label(runs, config.group_by, config.each)
    width = max(len(label) for label in groups)
    heads = "  ".join(f"{name.split('/')[-1]:>23}" for name in names)
    lines = ["mean over the last third of the steps (eval: last evaluation)", f"{'':<{width}}  runs  {heads}"]
    for label, members in groups.items():
        cells = []
        for name in names:
            values = [last_third(run.rows, name) for run in members]
            known = np.array([value for value in values if not math.isnan(value)])
            spread = f" ± {known.std(ddof=1):.4f}" if len(known) > 1 else ""
            cells.append(f"{known.mean():.4f}{spread}" if len(known) else "-")
        lines.append(f"{label:<{width}}  {len(members):>4}  " + "  ".join(f"{cell:>23}" for cell in cells))
    return "\n".join(lines)


def last_third(rows: Sequence[Metrics], metric: str) -> float:
    """Mean of a metric over the last third of the training steps; of the last evaluation for `eval`; NaN without."""
    steps, values = _line(rows, metric, "step")
    if not len(steps):
        return math.nan
    if metric == "eval":
        return float(values[-1])
    last = max(row["step"] for row in rows)
    chosen = values[steps > last - max(1, round(last / 3))]
    return float(np.nanmean(chosen)) if len(chosen) and not np.isnan(chosen).all() else math.nan


def main(arguments: Sequence[str] | None = None) -> int:
    config = tyro.cli(PlotConfig, args=arguments, prog="python -m grpo_roc_jax.plot", description=PlotConfig.__doc__)
    try:
        runs = load_runs(config.runs)
        figure = draw(runs, config)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(config.out, dpi=110)
    print(table(runs, config))
    print(f"written: {config.out}")
    return 0


def _line(rows: Sequence[Metrics], metric: str, x: str) -> tuple[np.ndarray, np.ndarray]:
    """(x, value) of the rows that have the metric; `sampled` adds up what was sampled until then."""
    places, values, sampled = [], [], 0.0
    for row in rows:
        sampled += row.get(SAMPLED, 0.0)
        value = _accuracy(row) if metric == "eval" else row.get(metric)
        if value is not None:
            places.append(sampled if x == "sampled" else row["step"])
            values.append(value)
    return np.array(places, np.float64), np.array(values, np.float64)


def _accuracy(row: Metrics) -> float | None:
    """avg@k over all held-out problems."""
    names = [name for name in row if name.startswith("eval/") and "/avg@" in name]
    overall = [name for name in names if name.startswith("eval/all/")] or (names if len(names) == 1 else [])
    return row[overall[0]] if overall else None


def _moments(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (n - 1) of the columns, over what is known; 0 deviation of a single value."""
    known = ~np.isnan(table)
    count = known.sum(axis=0)
    filled = np.where(known, table, 0.0)
    mean = np.where(count > 0, filled.sum(axis=0) / np.maximum(count, 1), np.nan)
    squares = (np.where(known, table - np.where(count > 0, mean, 0.0), 0.0) ** 2).sum(axis=0)
    return mean, np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1)), 0.0)


def _draw_curve(
    axis: Axes, runs: Sequence[RunData], metric: str, config: PlotConfig, colour: str, dashed: bool = False
) -> None:
    found = curve(runs, metric, x=config.x, smooth=1 if metric == "eval" else config.smooth)
    if found is None:
        return
    marker = "o" if metric == "eval" or len(found.x) == 1 else None
    style = {"color": colour, "linestyle": "--" if dashed else "-", "linewidth": 1.2 if dashed else 1.8}
    axis.plot(found.x, found.mean, marker=marker, markersize=4, alpha=0.7 if dashed else 1.0, **style)
    if found.runs > 1 and not dashed:
        axis.fill_between(
            found.x, found.mean - found.std, found.mean + found.std, color=colour, alpha=0.18, linewidth=0
        )


def _finish_axis(axis: Axes, panel: Panel, config: PlotConfig) -> None:
    axis.set_title(panel.title, fontsize=11)
    axis.set_xlabel("training step" if config.x == "step" else "sampled trajectories", fontsize=10)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axis.grid(True, alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if not axis.lines:
        axis.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axis.transAxes, color="#888888")
        axis.set_xticks([])
        axis.set_yticks([])
        return
    if panel.log and any((np.asarray(line.get_ydata()) > 0).any() for line in axis.lines):
        axis.set_yscale("log")
    elif panel.log:
        axis.set_yticks([0.0])  # zero throughout
    elif panel.floor is not None:
        top = axis.get_ylim()[1]
        axis.set_ylim(panel.floor, top + 0.04 * (top - panel.floor) if top > panel.floor else panel.floor + 1)


def _handle(axis: Axes, colour: str) -> Any:
    return axis.plot([], [], color=colour, linewidth=3)[0]


def _describe(members: Sequence[RunData]) -> str:
    return f"{len(members)} runs, mean ± std" if len(members) > 1 else "1 run"


def _settings(path: Path) -> dict[str, Any]:
    file = path / "config.yaml"
    return dict(_flat(yaml.safe_load(file.read_text(encoding="utf-8")) or {})) if file.exists() else {}


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", tuple(value) if isinstance(value, list) else value


def _compared(run: RunData) -> dict[str, Any]:
    return {name: value for name, value in run.settings.items() if not name.startswith(NOT_COMPARED)}


def _key(run: RunData, name: str, group_by: Sequence[str]) -> Any:
    if run.label:
        return ("label", run.label)
    if not run.settings:
        return ("directory", name)
    if group_by:
        return ("settings", tuple(str(run.settings.get(setting)) for setting in group_by))
    return ("settings", tuple(sorted((setting, str(value)) for setting, value in _compared(run).items())))


def _label(run: RunData, name: str, group_by: Sequence[str], varying: Sequence[str]) -> str:
    if run.label:
        return run.label
    shown = [setting for setting in (group_by or varying) if setting in run.settings]
    if not run.settings or not shown:
        return str(run.settings.get("name", name)) if run.settings and not varying else name
    words = [f"{setting}={run.settings[setting]}" for setting in shown[:3]]
    return ", ".join(words + ([f"and {len(shown) - 3} more"] if len(shown) > 3 else []))


def _varying(runs: Sequence[RunData]) -> list[str]:
    """Settings in which the runs differ, besides those that never count."""
    every = [_compared(run) for run in runs]
    names = dict.fromkeys(name for settings in every for name in settings)
    return [name for name in names if len({str(settings.get(name)) for settings in every}) > 1]


def _directory_names(runs: Sequence[RunData]) -> list[str]:
    """Names of the directories, with as many parents as tell them apart."""
    paths = [run.path.resolve() for run in runs]
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _unused(label: str, taken: Any) -> str:
    number, found = 2, label
    while found in taken:
        found, number = f"{label} ({number})", number + 1
    return found


if __name__ == "__main__":
    sys.exit(main())
