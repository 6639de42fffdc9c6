"""What the proof that every setting matters is made of: cases, configurations, observations.

A case names a setting, another value for it, the context in which it matters, and an observer: a function of the
configuration that runs the code of the stage which reads the setting and returns what came out, never the
configuration itself.
"""

import atexit
import dataclasses
import functools
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.settings.cli import build
from grpo_roc_jax.settings.layers import Layer, put

Observer = Callable[[Config], Any]
"""Configuration -> what the stage made of it, comparable by ==."""

BASE: dict[str, Any] = {
    "name": "knobs",
    "steps": 2,
    "group.problems": 4,
    "group.size": 4,
    "data.sources": ("{files}/problems.jsonl",),
    "data.eval_sources": ("{files}/held_out.jsonl",),
    "data.eval_problems": 2,
    "data.shuffle": False,
    "model.d_model": 16,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.head_dim": 8,
    "model.d_ff": 16,
    "reward.functions": (
        "answer",
        {"kind": "format", "weight": 0.0},
        {"kind": "clean_tools", "weight": 0.0},
    ),
    "rollout.max_prompt_tokens": 400,
    "rollout.max_response_tokens": 200,
    "batch.row_length": 600,
    "batch.rows": 4,
    "rollout.slots": 8,
}
"""Small, and with every kind of trajectory in it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One setting and how to see it."""

    observe: Observer
    value: Any
    context: tuple[tuple[str, Any], ...] = ()
    along: tuple[tuple[str, Any], ...] = ()
    """Changed with it: what the value does not go without, or what the observer does not see."""
    unless: Callable[[], str] = lambda: ""
    """Why this host cannot show it; empty where it can."""

    def configs(self, key: str, *, alone: bool = False) -> tuple[Config, Config]:
        """(without, with) the changed value, in the case's context."""
        context = dict(self.context)
        along = {} if alone else dict(self.along)
        return made(context), made(context | along | {key: self.value})


def cases(observe: Observer, values: Mapping[str, Any], context: Mapping[str, Any] | None = None) -> dict[str, Case]:
    """A case for each setting and its other value, all seen by one observer in one context."""
    return {key: Case(observe, value, tuple((context or {}).items())) for key, value in values.items()}


def made(overrides: Mapping[str, Any]) -> Config:
    """The base configuration with these settings, set together, so that only the whole has to make sense."""
    return _built(json.dumps(BASE | dict(overrides)))


@functools.cache
def _built(overrides: str) -> Config:
    """The configuration of a JSON object; `{files}` in its texts is the directory of `files`."""
    layer = Layer("knobs")
    for key, value in json.loads(overrides.replace("{files}", str(files()))).items():
        put(layer.values, tuple(key.split(".")), value)
    return build(Config, [layer])


@functools.cache
def observation(observe: Observer, config: Config, attempt: int = 0) -> Any:
    """What is observed, kept by configuration; another attempt observes again."""
    del attempt
    return observe(config)


def digest(*parts: Any) -> str:
    """A short text that tells two sets of arrays and plain values apart."""
    total = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            total.update(f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        elif isinstance(part, Mapping):
            total.update(digest(*(value for pair in sorted(part.items()) for value in pair)).encode())
        elif isinstance(part, list | tuple):
            total.update(f"({digest(*part)})".encode())
        else:
            total.update(repr(part).encode())
    return total.hexdigest()


@functools.cache
def files() -> Path:
    """A directory with the data, tokenizers and checkpoints that contexts name; gone when the tests end."""
    place = Path(tempfile.mkdtemp(prefix="knobs-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    rows = [_row(i) for i in range(6)]
    write_lines(place / "problems.jsonl", rows)
    (place / "python").symlink_to(Path(sys.executable).resolve())
    write_lines(place / "held_out.jsonl", [_row(i) for i in range(20, 24)])
    return place


def _row(i: int) -> dict[str, Any]:
    """The problem class, 0 to 3, is how often the scripted policy solves it: never, sometimes, often, always."""
    return {
        "question": f"Item {i} of class {i % 4}: name the number {100 + 7 * i} of the list",
        "answer": str(100 + 7 * i),
        "hints": [f"first hint {i}", f"second hint {i}", f"third hint {i}"],
        "more_hints": [f"other hint {i}"],
        "solution": f"it is {100 + 7 * i}",
        "explained": f"plainly {100 + 7 * i}",
    }


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
