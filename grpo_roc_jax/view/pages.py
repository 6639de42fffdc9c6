"""The single page of the viewer: markup, style and script of this package in one file without external resources.

A served page asks the server. A page in a file contains the answers as JSON, in which every `<` is escaped, so no text
can end the element that contains it.
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
"""Index of the run, file of its log, row of the file's index."""


def by_file(places: Iterable[Location]) -> Iterator[tuple[int, Block, list[int]]]:
    """The rows of each file. Locations in the same file must be adjacent, so that each file is opened once."""
    for (run, block), some in groupby(places, key=lambda location: location[:2]):
        yield run, block, [row for *_, row in some]


@cache
def part(name: str) -> str:
    """A file of the page."""
    return resources.files("grpo_roc_jax.view").joinpath("static", name).read_text(encoding="utf-8")


def policy(*, served: bool) -> str:
    """The content security policy: the page may run its own script, use its own style, and, if it is served, ask its
    server."""
    script, style = (
        "'sha256-" + base64.b64encode(hashlib.sha256(part(name).encode("utf-8")).digest()).decode("ascii") + "'"
        for name in ("viewer.js", "viewer.css")
    )
    rules = f"default-src 'none'; script-src {script}; style-src {style}; base-uri 'none'; form-action 'none'"
    return f"{rules}; connect-src 'self'; frame-ancestors 'none'" if served else rules


def page(data: Any | None) -> str:
    """The page; with `data`, the answers that it contains instead of asking a server."""
    embedded = "" if data is None else json.dumps(finite(data)).replace("<", "\\u003c")
    slots = {
        "{{policy}}": policy(served=data is None).replace("; frame-ancestors 'none'", ""),
        "{{style}}": part("viewer.css"),
        "{{script}}": part("viewer.js"),
        "{{data}}": embedded,
    }
    text = part("page.html")
    for slot, content in slots.items():
        before, _, after = text.partition(slot)
        text = before + content + after
    return text


def page_of(runs: Runs, blocks: Iterable[tuple[int, Block]], places: Sequence[Location], start: str = "") -> str:
    """The page with the answers of these runs in it.

    Args:
        runs: The runs; all of their metrics are included.
        blocks: Run and log file of what the lists show.
        places: Run, file and row of the trajectories that the page can open.
        start: Where the page opens, such as `#/rollouts?step=3`.
    """
    by_run: dict[int, list[Block]] = {number: [] for number in range(len(runs.paths))}
    for run, block in blocks:
        by_run[run].append(block)
    indexes = {
        run: {f"{kind}.{step}": json.loads(answer) for (kind, step), answer in zip(b, runs.blocks(run, b), strict=True)}
        for run, b in by_run.items()
    }
    state = [entry | {"blocks": dict.fromkeys(indexes[run], "held")} for run, entry in enumerate(runs.state())]
    trajectories = {
        f"{run}.{block[0]}.{block[1]}.{row}": answer
        for run, block, rows in by_file(places)
        for row, answer in runs.trajectories(run, block, rows).items()
    }
    answers = {"metrics": [runs.metrics(run) for run in by_run], "evaluations": runs.evaluations()}
    return page({"state": state, "blocks": indexes, "trajectories": trajectories, "start": start, **answers})
