"""The one page of the viewer: markup, style and script of this package in a file without external resources.

Served, it asks the server. Written to a file, it holds the answers as JSON, in which every `<` is escaped, so no text
can end the element that holds it.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import resources
from itertools import groupby
from typing import Any

from grpo_roc_jax.record.codec import finite
from grpo_roc_jax.view.answers import Block, Runs

Location = tuple[int, Block, int]
"""Run, file of its log, line."""


def by_file(places: Iterable[Location]) -> Iterator[tuple[int, Block, list[int]]]:
    """The lines of each file, for places whose files follow one another, so that a file is opened once."""
    for (run, block), some in groupby(places, key=lambda place: place[:2]):
        yield run, block, [line for *_, line in some]


@cache
def part(name: str) -> str:
    """A file of the page."""
    return resources.files("grpo_roc_jax.view").joinpath("static", name).read_text(encoding="utf-8")


def policy(*, served: bool) -> str:
    """What the page may do: run its own script, use its own style, and, if it is served, ask its server."""
    script, style = (
        "'sha256-" + base64.b64encode(hashlib.sha256(part(name).encode("utf-8")).digest()).decode("ascii") + "'"
        for name in ("viewer.js", "viewer.css")
    )
    rules = f"default-src 'none'; script-src {script}; style-src {style}; base-uri 'none'; form-action 'none'"
    return f"{rules}; connect-src 'self'; frame-ancestors 'none'" if served else rules


def page(data: Any | None) -> str:
    """The page; with `data`, the answers that it holds instead of asking a server."""
    held = "" if data is None else json.dumps(finite(data)).replace("<", "\\u003c")
    slots = {
        "{{policy}}": policy(served=data is None).replace("; frame-ancestors 'none'", ""),
        "{{style}}": part("viewer.css"),
        "{{script}}": part("viewer.js"),
        "{{data}}": held,
    }
    text = part("page.html")
    for slot, content in slots.items():
        before, _, after = text.partition(slot)
        text = before + content + after
    return text


def page_of(runs: Runs, blocks: Iterable[tuple[int, Block]], places: Sequence[Location], start: str = "") -> str:
    """The page with the answers of these runs in it.

    Args:
        runs: All of their metrics are held.
        blocks: Run and file of the log: what the lists hold.
        places: Run, file and line of the trajectories that the page can open.
        start: Where it opens, such as `#/rollouts?step=3`.
    """
    by_run: dict[int, list[Block]] = {number: [] for number in range(len(runs.paths))}
    for run, block in blocks:
        by_run[run].append(block)
    held = {
        run: {f"{kind}.{step}": json.loads(found) for (kind, step), found in zip(b, runs.blocks(run, b), strict=True)}
        for run, b in by_run.items()
    }
    state = [entry | {"blocks": dict.fromkeys(held[run], "held")} for run, entry in enumerate(runs.state())]
    trajectories = {
        f"{run}.{block[0]}.{block[1]}.{line}": found
        for run, block, some in by_file(places)
        for line, found in zip(some, runs.trajectories(run, block, some), strict=True)
    }
    answers = {"metrics": [runs.metrics(run) for run in by_run], "evaluations": runs.evaluations()}
    return page({"state": state, "blocks": held, "trajectories": trajectories, "start": start, **answers})
