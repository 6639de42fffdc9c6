"""What the proof that every setting matters is made of: cases, configurations, observations.

A case names a setting, another value for it, the context in which it matters, and an observer: a function of the
configuration that runs the code of the stage which reads the setting and returns what came out, never the
configuration itself.
"""

import atexit
import functools
import hashlib
import json
import shutil
import sys
import tempfile
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.settings import cli, layers, options

Observer = Callable[[Config], Any]
"""Configuration -> what the stage made of it, comparable by ==."""
BASE: dict[str, Any] = {
    **{"name": "knobs", "steps": 2, "group.problems": 4, "group.size": 4, "batch.row_length": 600, "batch.rows": 4},
    **{"data.sources": ("{files}/problems.jsonl",), "data.eval_sources": ("{files}/held_out.jsonl",)},
    **{"data.eval_problems": 2, "data.shuffle": False},
    **{"model.d_model": 16, "model.heads": 2, "model.kv_heads": 1, "model.head_dim": 8, "model.d_ff": 16},
    **{"rollout.max_prompt_tokens": 400, "rollout.max_response_tokens": 200, "rollout.slots": 8},
    "reward.functions": ("answer", {"kind": "format", "weight": 0.0}, {"kind": "clean_tools", "weight": 0.0}),
}
"""Small, and with every kind of trajectory in it."""


@dataclass(frozen=True)
class Case:
    """One setting and how to see it."""

    observe: Observer
    value: Any = None
    """Another value; None for those of `other_values`, of which one must be seen."""
    context: Mapping[str, Any] = field(default_factory=dict)
    along: Mapping[str, Any] = field(default_factory=dict)
    """Changed with it: what the observer does not see."""
    unless: Callable[[], str] = lambda: ""
    """Why this host cannot show it; empty where it can."""

    def without(self) -> Config:
        return made(self.context)

    def changed(self, key: str) -> Iterator[Config]:
        """The configurations with another value that are not refused."""
        values = other_values(self.without(), key) if self.value is None else [self.value]
        for value in values:
            try:
                yield made({**self.context, **self.along, key: value})
            except cli.ConfigError:
                if len(values) == 1:
                    raise


@dataclass(frozen=True)
class Seen:
    """Settings that one observer sees in one context: those that are named, and all below a name."""

    observe: Observer
    names: tuple[str, ...]
    context: Mapping[str, Any]
    values: Mapping[str, Any]


def seen(observe: Observer, names: str, context: Mapping[str, Any] | None = None, **values: Any) -> Seen:
    """Settings and sections that the observer sees, in a context; `values` are those that the type of a setting does
    not tell, such as paths, by what follows the first name."""
    section, *_ = parts = names.split()
    return Seen(observe, tuple(parts), context or {}, {f"{section}.{name}": value for name, value in values.items()})


def only(observe: Observer, section: str, context: Mapping[str, Any] | None = None, **values: Any) -> Seen:
    """Of a section the settings that have a value here."""
    return replace(seen(observe, section, context, **values), names=())


def table(lines: Sequence[Seen], keys: Iterable[str]) -> dict[str, Case]:
    """The case of each setting, by the line with its value, else by the one with the longest beginning of its name."""
    by_value = {key: line for line in lines for key in line.values}
    by_name = {name: line for line in lines for name in line.names}
    cases = {}
    for key in keys:
        beginnings = [key.rsplit(".", n)[0] for n in range(key.count(".") + 1)]
        if line := by_value.get(key) or next(filter(None, map(by_name.get, beginnings)), None):
            cases[key] = Case(line.observe, line.values.get(key), line.context)
    return cases


def other_values(config: Config, key: str) -> list[Any]:
    """Other values of a setting by its type: twice and half a number, nothing, the other choices and kinds."""
    owner: Any = config
    *parts, name = key.split(".")
    for part in parts:
        items = isinstance(owner, tuple)
        owner = next(item for item in owner if item.kind == part) if items else getattr(owner, part)
    value, kind = getattr(owner, name), options.type_of(type(owner), name)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        half = value // 2 if kind is int else value / 2
        return [other for other in dict.fromkeys((2 * value, half, 1, 0)) if other != value]
    if typing.get_origin(kind) is typing.Literal:
        return [choice for choice in typing.get_args(kind) if choice != value]
    if isinstance(kind, type) and issubclass(kind, options.Axis):
        return [choice for choice in kind.choices() if choice != value.kind]
    if value is None and kind in (int, float):
        return [2, 0.5]
    raise TypeError(f"{key} = {value!r} needs a value in the table")


def made(overrides: Mapping[str, Any]) -> Config:
    """The base configuration with these settings, set together, so that only the whole has to make sense. `{files}` in
    texts is the directory of `files`."""
    return _built(json.dumps(BASE | dict(overrides)).replace("{files}", str(files())))


@functools.cache
def _built(settings: str) -> Config:
    layer = layers.Layer("knobs")
    for key, value in json.loads(settings).items():
        layers.put(layer.values, tuple(key.split(".")), value)
    return cli.build(Config, [layer])


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
            part = part.dtype, part.shape, part.tobytes()
        elif isinstance(part, Mapping):
            part = digest(*(value for pair in sorted(part.items()) for value in pair))
        elif isinstance(part, list | tuple):
            part = [digest(*part)]
        total.update(repr(part).encode())
    return total.hexdigest()


@functools.cache
def files() -> Path:
    """A directory with the data, tokenizers and checkpoints that contexts name; gone when the tests end."""
    folder = Path(tempfile.mkdtemp(prefix="knobs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "python").symlink_to(Path(sys.executable).resolve())
    write_lines(folder / "problems.jsonl", [_row(i) for i in range(6)])
    write_lines(folder / "held_out.jsonl", [_row(i) for i in range(20, 24)])
    write_lines(folder / "more.jsonl", [{"question": f"How many are {i}?", "answer": str(i)} for i in range(5)])
    write_lines(folder / "bad.jsonl", [{"question": "q", "answer": None}, {"question": "r", "answer": "1"}])
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    write_lines(folder / "traces.jsonl", [{"messages": talk}])
    return folder


def _row(i: int) -> dict[str, Any]:
    """The problem class, 0 to 3, is how often the scripted policy solves it: never, sometimes, often, always."""
    number = 100 + 7 * i
    asked = {"question": f"Item {i} of class {i % 4}: name the number {number} of the list", "answer": str(number)}
    return asked | {"solution": f"it is {number}", "explained": f"plainly {number}"}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
