"""Figures of runs: `grpo-roc plot RUN [RUN...] [--out FILE.png]`.

Reads only `metrics.jsonl` and `config.yaml` of each run. Runs whose configurations differ only in the seed become one
line with a band (mean and standard deviation); any other run is a line of its own. Needs no display.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from grpo_roc_jax.process.outputs import output_file
from grpo_roc_jax.view.curves import RunData, by_label, curve, last_third, load_runs

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
"""Okabe and Ito's palette, which is distinguishable with any kind of color vision and in print."""

X_LABELS = {
    "step": "training step",
    "sampled": "sampled trajectories",
    "tokens": "sampled tokens",
    "seconds": "seconds in training steps",
}


@dataclass(frozen=True)
class Panel:
    """One axis: a metric, and optionally a second, dashed one."""

    metric: str
    title: str
    dashed: str = ""
    log: bool = False
    floor: float | None = None
    """Lower end of the axis."""


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
    """Draws the metrics of runs into a PNG, and prints their means over the last third of the steps."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Run directories, patterns (`runs/toy-*`), or `LABEL=pattern`, which puts all that match under one label."""
    out: str = "plot.png"
    """File to write; its ending is the format (png, svg, pdf)."""
    group_by: tuple[str, ...] = ()
    """Settings such as `resample` or `optim.lr`; runs with equal values make one line. Empty: all settings but the
    seed."""
    each: bool = False
    """One line a run, no bands."""
    x: Literal["step", "sampled", "tokens", "seconds"] = "step"
    """`sampled` and `tokens` compare methods at equal sampled trajectories or tokens, which is what resampling spends
    more of; `seconds` at equal time in training steps."""
    smooth: int = 1
    """Steps of the running mean; 1 draws the measured values."""
    title: str = ""
    """Above the figure."""

    def __post_init__(self) -> None:
        if self.smooth < 1:
            raise ValueError(f"--smooth {self.smooth}; must be at least 1 step")
        if not self.runs:
            raise ValueError("no run is named; give directories that hold metrics.jsonl")


def draw(
    runs: Sequence[RunData], config: PlotConfig, panels: Sequence[Panel] = PANELS, over: Sequence[str] = ()
) -> Figure:
    """The figure: panels, four in a row, with a line or band per label. `over` repeats them for several `x`."""
    groups = by_label(runs, config.group_by, config.each)
    shown = [(panel, replace(config, x=x)) for x in over or (config.x,) for panel in panels]
    figure = Figure(figsize=(17, len(shown)), layout="constrained")
    axes = figure.subplots(len(shown) // 4, 4).ravel()
    for (panel, here), axis in zip(shown, axes, strict=True):
        for index, members in enumerate(groups.values()):
            color = COLORS[index % len(COLORS)]
            _draw_curve(axis, members, panel.metric, here, color)
            if panel.dashed:
                _draw_curve(axis, members, panel.dashed, here, color, dashed=True)
        _finish_axis(axis, panel, here)
    handles = [Line2D([], [], color=COLORS[i % len(COLORS)], linewidth=3) for i in range(len(groups))]
    names = [f"{label}  ({_describe(members)})" for label, members in groups.items()]
    # Below the panels: as many columns as fit the width at about 8 points per letter.
    columns = max(1, min(len(names), int(150 / (max(map(len, names)) + 6))))
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=11)
    if config.title:
        figure.suptitle(config.title, fontsize=14)
    return figure


def table(runs: Sequence[RunData], config: PlotConfig) -> str:
    """A text table: the mean over the last third of the steps of each run, then mean and deviation over the runs."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    config = tyro.cli(PlotConfig, args=arguments, prog="grpo-roc plot")
    try:
        out = output_file("--out", config.out)
        out = out if out.suffix else out.with_name(f"{out.name}.png")
        known = FigureCanvasBase.get_supported_filetypes()
        if out.suffix[1:].lower() not in known:
            raise ValueError(
                f"--out {config.out}: no figure is written as {out.suffix}; endings are {', '.join(known)}"
            )
        runs = load_runs(config.runs)
        figure = draw(runs, config)
        lines = table(runs, config)
        figure.savefig(out, dpi=110)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(lines)
    print(f"written: {out}")
    return 0


def _draw_curve(
    axis: Axes, runs: Sequence[RunData], metric: str, config: PlotConfig, color: str, dashed: bool = False
) -> None:
    points = curve(runs, metric, x=config.x, smooth=1 if metric == "eval" else config.smooth)
    if points is None:
        return
    marker = "o" if metric == "eval" or len(points.x) == 1 else None
    style = {"color": color, "linestyle": "--" if dashed else "-", "linewidth": 1.2 if dashed else 1.8}
    axis.plot(points.x, points.mean, marker=marker, markersize=4, alpha=0.7 if dashed else 1.0, **style)
    if points.runs > 1 and not dashed:
        axis.fill_between(
            points.x, points.mean - points.std, points.mean + points.std, color=color, alpha=0.18, linewidth=0
        )


def _finish_axis(axis: Axes, panel: Panel, config: PlotConfig) -> None:
    axis.set_title(panel.title, fontsize=11)
    axis.set_xlabel(X_LABELS[config.x], fontsize=10)
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
        axis.set_yticks([0.0])  # all values are zero
    elif panel.floor is not None:
        top = axis.get_ylim()[1]
        axis.set_ylim(panel.floor, top + 0.04 * (top - panel.floor) if top > panel.floor else panel.floor + 1)


def _describe(members: Sequence[RunData]) -> str:
    return f"{len(members)} runs, mean ± std" if len(members) > 1 else "1 run"
