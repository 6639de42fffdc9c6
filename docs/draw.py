"""Draws the pictures of the documentation: `python docs/draw.py` writes docs/images/*.svg.

Groups and rollouts are those of recorded runs; the JSON file beside a picture has the command, the commit and the rows.
"""

import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from rich.console import Console

from grpo_roc_jax.record.live import Board, after, colored, table
from grpo_roc_jax.record.trace import from_json

IMAGES = Path(__file__).resolve().parent / "images"
RESULTS = IMAGES.parent.parent / "benchmarks" / "results"
INK, SOFT, LINE, PAPER = "#1f2933", "#7b8794", "#cbd2d9", "#ffffff"
GREEN, RED, BLUE, ORANGE = "#2f9e44", "#e03131", "#1971c2", "#e8590c"


def text(x: float, y: float, words: str, size: int = 13, color: str = INK, anchor: str = "start", bold: bool = False):
    """A line of text whose baseline is at y."""
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str = PAPER, line: str = LINE, opacity: float = 1):
    """A rectangle with round corners."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" '
        f'stroke="{line}" fill-opacity="{opacity:g}"/>'
    )


def dot(x: float, y: float, color: str):
    """A tool call."""
    return f'<circle cx="{x:g}" cy="{y:g}" r="4.5" fill="{color}"/>'


def curve(x0: float, y0: float, x1: float, y1: float, color: str = LINE, arrow: bool = False):
    """A line between two points that leaves and arrives horizontally."""
    middle, end = (x0 + x1) / 2, ' marker-end="url(#arrow)"' if arrow else ""
    path = f"M{x0:g} {y0:g} C{middle:g} {y0:g} {middle:g} {y1:g} {x1:g} {y1:g}"
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.3"{end}/>'


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A whole file; white behind everything, so that it can be read on a dark page."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif"><title>{title}</title>'
        '<defs><marker id="arrow" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{SOFT}"/></marker></defs>'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>', *parts, "</svg>\n"])


# ---- the method ----------------------------------------------------------------------------------------------------


def group_resampled() -> str:
    """A recorded group of 2G = 16, in order of penalty, and the G = 8 that trained."""
    rollouts = json.loads((IMAGES / "group_resampled.json").read_text(encoding="utf-8"))["rollouts"]
    correct = np.array([rollout["status"] == "correct" for rollout in rollouts])
    penalties = np.array([rollout["penalty"] for rollout in rollouts])
    kept = [index for index, rollout in enumerate(rollouts) if rollout["kept"]]
    positive, negative = np.flatnonzero(correct), np.flatnonzero(~correct)
    ranked = [*positive[np.argsort(penalties[positive], kind="stable")].tolist(), *negative.tolist()]
    left, middle, right, top, step = 24, 300, 620, 84, 24
    gap = {place: 20 * (place >= len(positive)) for place in range(16)}

    def row(x: float, y: float, index: int, more: str = "", pale: bool = False) -> str:
        color = GREEN if correct[index] else RED
        marks = "".join(
            dot(x + 74 + 13 * k, y, GREEN if call == "ok" else RED) for k, call in enumerate(rollouts[index]["calls"])
        )
        inside = (
            box(x, y - 10, 190, 20, color, color, 0.12)
            + text(x + 8, y + 4, f"{index + 1}", 11, SOFT)
            + text(x + 28, y + 4, "right" if correct[index] else "wrong", 12, color)
            + marks
            + text(x + 182, y + 4, more, 11, SOFT, "end")
        )
        return f'<g opacity="{0.35 if pale else 1}">{inside}</g>'

    parts = [
        text(left, 32, "2G rollouts of one problem", 15, bold=True),
        text(left, 52, "a dot is a tool call; red failed", 12, SOFT),
        text(middle, 32, "sorted", 15, bold=True),
        text(middle, 52, "successes: by the share of failed calls", 12, SOFT),
        text(right, 32, "G that train", 15, bold=True),
        text(right, 52, "in proportion, at least 2 of each", 12, SOFT),
    ]
    for place, index in enumerate(ranked):
        at = top + step * place + gap[place]
        parts.append(curve(left + 192, top + step * index, middle - 3, at))
        shown = f"{penalties[index]:.2f}" if correct[index] else "drawn" if index in kept else ""
        parts.append(row(middle, at, index, shown, pale=index not in kept))
    chosen = [index for index in ranked if index in kept]
    for place, index in enumerate(chosen):
        at = top + 60 + 32 * place + 20 * (not correct[index])
        parts.append(row(right, at, index))
        from_y = top + step * ranked.index(index) + gap[ranked.index(index)]
        parts.append(curve(middle + 192, from_y, right - 3, at, SOFT, arrow=True))
    parts += [row(left, top + step * index, index) for index in range(16)]
    parts.append(text(middle, top + step * len(positive) + 2, "failures: a uniform draw", 12, SOFT))
    return picture(836, top + step * 16 + 26, "A group of 16 rollouts is resampled to 8", parts)


def real_groups() -> str:
    """Groups of a pretrained model in the first and in the last step of a recorded run."""
    recorded = json.loads((IMAGES / "real_groups.json").read_text(encoding="utf-8"))
    left, wide, cell, gap = 24, 394, 21, 34
    parts = []
    for column, (step, groups) in enumerate(recorded["steps"].items()):
        x = left + column * wide
        rows = [row for group in groups for row in group]
        right, calls, errors = (sum(row[k] for row in rows) for k in range(3))
        parts.append(text(x, 32, f"RL step {step}: {len(groups)} problems, 16 rollouts each", 15, bold=True))
        parts.append(text(x, 52, f"{right} of {len(rows)} right; {errors} of {calls} calls failed", 12, SOFT))
        for line, group in enumerate(groups):
            y = 70 + gap * line
            for place, (solved, _, failed, trained) in enumerate(sorted(group, key=lambda row: (-row[0], row[2]))):
                color, at = GREEN if solved else RED, x + (cell + 2) * place
                mark = dot(at + cell / 2, y + 12, INK) if failed else ""
                opacity = 1 if trained else 0.35
                parts.append(f'<g opacity="{opacity}">{box(at, y, cell, 24, color, color, 0.4)}{mark}</g>')
    legend = "green: right; red: wrong; dot: a call failed; pale: left out by the selection, or all of its group equal"
    parts.append(text(left, 84 + gap * len(groups), legend, 12, SOFT))
    height = 102 + gap * len(groups)
    return picture(2 * wide + left, height, "Groups of SmolLM2-135M in the first and in the last step of a run", parts)


def trl_curves() -> str:
    """The reward of each step of the same run here and by TRL, and its mean over four steps."""
    lines = (RESULTS / "trl_smollm2.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = {name: run["reward"] for name, run in json.loads(lines[-1])["runs"].items()}
    left, top, wide, high, over = 52, 56, 560, 220, 4
    steps = len(rewards["ours"])
    largest = np.ceil(10 * max(max(values) for values in rewards.values())) / 10
    parts = [text(left, 28, f"reward of a step; lines: mean over {over} steps", 15, bold=True)]
    parts += [text(left + wide / 2, top + high + 40, "step", 12, SOFT, "middle")]
    for tenth in range(round(10 * largest) + 1):
        y = top + high * (1 - tenth / 10 / largest)
        parts.append(f'<path d="M{left} {y:g} h{wide}" stroke="{LINE}" stroke-width="0.7"/>')
        parts.append(text(left - 8, y + 4, f"{tenth / 10:.1f}", 11, SOFT, "end"))
    for step in range(4, steps + 1, 4):
        parts.append(text(left + wide * step / (steps + 1), top + high + 18, str(step), 11, SOFT, "middle"))
    for line, (name, color, label) in enumerate((("ours", BLUE, "grpo_roc_jax"), ("trl", ORANGE, "TRL"))):
        places = [
            (left + wide * (i + 1) / (steps + 1), top + high * (1 - value / largest))
            for i, value in enumerate(rewards[name])
        ]
        parts += [f'<circle cx="{x:g}" cy="{y:.1f}" r="3" fill="{color}" fill-opacity="0.45"/>' for x, y in places]
        means = [
            (places[i][0], float(np.mean([y for _, y in places[i - over + 1 : i + 1]]))) for i in range(over - 1, steps)
        ]
        path = " L".join(f"{x:g} {y:.1f}" for x, y in means)
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(text(left + wide + 12, top + 16 + 20 * line, label, 13, color))
    return picture(left + wide + 130, top + high + 56, "The same GRPO run here and by TRL", parts)


# ---- concepts ------------------------------------------------------------------------------------------------------


def ids_are_the_truth() -> str:
    """One trajectory: ids, who wrote them, which are trained, and what is recorded when they are drawn."""
    cells = [("prompt", SOFT, 3), ("turn 1", BLUE, 4), ("observation", ORANGE, 3), ("turn 2", BLUE, 3)]
    ids = [9, 311, 27, 58, 140, 7, 302, 16, 88, 303, 41, 5, 2]
    parts = [text(24, 32, "One trajectory; index t of every array refers to token t", 15, bold=True)]
    names = ("tokens", "policy_mask", "logprobs", "versions")
    parts += [text(24, 105 + 34 * k, name, 12, SOFT) for k, name in enumerate(names)]
    x = 120
    for name, color, count in cells:
        parts.append(text(x + 26 * count, 66, name, 12, color, "middle"))
        for _ in range(count):
            at, own = (x - 120) // 52, color == BLUE
            values = (
                str(ids[at]),
                "1" if own else "0",
                f"-{0.1 * (at % 7 + 1):.1f}" if own else "",
                "5" if own else "",
            )
            for k, value in enumerate(values):
                parts.append(box(x, 84 + 34 * k, 48, 30, color, color, 0.14 if value else 0.03))
                parts.append(text(x + 24, 104 + 34 * k, value, 12, INK, "middle"))
            x += 52
    parts.append(
        text(
            24,
            246,
            "Recorded while sampling. The update reads these arrays; text is only made from them to be read by",
            12,
        )
    )
    parts.append(
        text(
            24,
            264,
            "people, tools and rewards, and is never encoded again. Gradients flow through the tokens with mask 1.",
            12,
        )
    )
    return picture(820, 284, "The arrays of a trajectory", parts)


def one_loss_form() -> str:
    """rows -> advantages, weights, log-ratio -> sum."""
    parts = [text(24, 32, "loss = sum over tokens of  weights · phi(log-ratio, advantages)", 15, bold=True)]
    steps = [
        ("rows", "which trajectories", "plan, resample"),
        ("advantages", "how good a token was", "shaping, advantage"),
        ("phi", "how the ratio enters", "surrogate"),
        ("weights", "how much a token counts", "weights"),
    ]
    for k, (name, what, where) in enumerate(steps):
        x = 24 + 196 * k
        parts += [box(x, 56, 176, 78, BLUE, BLUE, 0.08), text(x + 88, 80, name, 14, BLUE, "middle", True)]
        parts += [text(x + 88, 101, what, 12, INK, "middle"), text(x + 88, 121, where, 11, SOFT, "middle")]
    parts.append(
        text(24, 166, "The weights contain the normalizer of the whole batch. So the sum may be cut anywhere:", 12)
    )
    for k, (count, name) in enumerate([(1, "one batch"), (2, "two micro-batches"), (4, "four devices")]):
        x = 24 + 262 * k
        for part in range(count):
            wide = 236 / count
            parts.append(box(x + wide * part, 182, wide - 4, 26, GREEN, GREEN, 0.16))
        parts.append(text(x + 118, 228, name, 12, SOFT, "middle"))
    parts.append(text(24, 256, "give the same gradient, up to the rounding of float32.", 12))
    return picture(820, 274, "The one form of the loss", parts)


def addressed_randomness() -> str:
    """Two schedules of the same rows give the same tokens."""
    parts = [text(24, 32, "The address of a token decides the random number that draws it", 15, bold=True)]
    parts.append(text(24, 54, "(seed, step, problem, sample, position)  →  uniform number  →  token", 13, BLUE))
    rows = [("A", BLUE, 5), ("B", ORANGE, 3), ("C", GREEN, 4)]
    layouts = [
        ("two slots, C waits for B", {"A": (0, 0), "B": (1, 0), "C": (1, 3)}),
        ("three slots", {"A": (2, 0), "B": (0, 0), "C": (1, 0)}),
    ]
    for k, (title, places) in enumerate(layouts):
        x = 24 + 400 * k
        parts.append(text(x, 90, title, 13, bold=True))
        for slot in range(2 + k):
            parts.append(text(x, 120 + 34 * slot, f"slot {slot}", 11, SOFT))
        for name, color, length in rows:
            slot, start = places[name]
            for t in range(length):
                at = x + 44 + 46 * (start + t)
                parts.append(box(at, 102 + 34 * slot, 42, 28, color, color, 0.15))
                parts.append(text(at + 21, 121 + 34 * slot, f"{name}{t}", 12, INK, "middle"))
    parts.append(
        text(
            24, 226, "A3 is the same token in both: nothing depends on the slot, the batch, the order or a resume.", 12
        )
    )
    return picture(820, 246, "Tokens do not depend on the schedule", parts)


# ---- a run in the terminal -----------------------------------------------------------------------------------------

NIGHT, LIGHT = "#16202b", "#e4e7eb"
INKS = {"green": "#69db7c", "red": "#ff8787", "cyan": "#66d9e8", "yellow": "#ffd43b"}


def live_table() -> str:
    """What a terminal shows while a run trains: ten recorded steps of the toy, and one of their rollouts."""
    recorded = json.loads((IMAGES / "live_table.json").read_text(encoding="utf-8"))
    board = Board(30)
    for row in recorded["rows"]:
        board = after(board, row["step"], {name: value for name, value in row.items() if name != "step"})
    console = Console(file=io.StringIO(), width=96, color_system="truecolor", force_terminal=True, _environ={})
    shown = (colored(from_json(recorded["record"])), table(board))
    rows = [row for one in shown for row in (*console.render_lines(one, pad=False), [])][:-1]
    parts = [f'<rect width="820" height="{22 * len(rows) + 28}" rx="8" fill="{NIGHT}"/>']
    for line, row in enumerate(rows):
        spans = []
        for segment in row:
            style = segment.style
            color = INKS.get(style.color.name, LIGHT) if style and style.color else LIGHT
            color = SOFT if style and style.dim else color
            weight = ' font-weight="600"' if style and style.bold else ""
            words = segment.text.replace("&", "&amp;").replace("<", "&lt;")
            spans.append(f'<tspan fill="{color}"{weight}>{words}</tspan>')
        place = f'x="20" y="{22 * line + 30}" font-size="13" font-family="ui-monospace, monospace" xml:space="preserve"'
        parts.append(f"<text {place}>{''.join(spans)}</text>")
    return picture(820, 22 * len(rows) + 28, "A run in the terminal", parts)


BADGES = (("license", "Apache-2.0"), ("python", "3.11 | 3.12+"), ("ci", ".ci/run"), ("docs", "docs/index.md"))


def badge(name: str, value: str) -> str:
    """A badge that needs no server: the name, then the value."""
    left, right = 7 * len(name) + 14, 7 * len(value) + 14
    parts = [f'<rect width="{left}" height="20" fill="{INK}"/>']
    parts.append(f'<rect x="{left}" width="{right}" height="20" fill="{BLUE}"/>')
    parts.append(text(left / 2, 14, name, 11, PAPER, "middle") + text(left + right / 2, 14, value, 11, PAPER, "middle"))
    return picture(left + right, 20, f"{name}: {value}", parts)


PICTURES: tuple[Callable[[], str], ...] = (
    group_resampled,
    real_groups,
    ids_are_the_truth,
    trl_curves,
    one_loss_form,
    addressed_randomness,
    live_table,
)


def files() -> dict[str, str]:
    """Name of every picture -> its content."""
    drawn = {f"{make.__name__}.svg": make() for make in PICTURES}
    return drawn | {f"badge_{name}.svg": badge(name, value) for name, value in BADGES}


if __name__ == "__main__":
    for name, content in files().items():
        (IMAGES / name).write_text(content, encoding="utf-8")
