"""Writes the generated pages: `python docs/reference.py` makes docs/configuration.md and docs/api.md, and the table of
docs/coming_from.md.

The settings come from the classes that hold them, the Python names from their docstrings, so neither page is edited.
"""

import dataclasses
import importlib
import inspect
import json
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import docstring_parser

import grpo_roc_jax
from grpo_roc_jax.config import Config
from grpo_roc_jax.settings.helping import axis_of, section_of
from grpo_roc_jax.settings.layers import is_section
from grpo_roc_jax.settings.options import as_text, default_of, described, fields_of, type_of
from grpo_roc_jax.settings.other_names import METHOD, OTHER_NAMES

DOCS = Path(__file__).resolve().parent
Seen = dict[type, str]
"""Choice -> where its kinds are listed; each choice is listed once."""


def cell(text: str) -> str:
    """Text for a cell of a table: one line, and nothing in it that Markdown or HTML would read."""
    parts = " ".join(text.split()).replace("|", "∣").split("`")
    return "`".join(part if k % 2 else part.replace("<", "&lt;").replace("*", "\\*") for k, part in enumerate(parts))


# ---- configuration -------------------------------------------------------------------------------------------------


def configuration() -> str:
    """Every setting, section by section."""
    about = described(Config)
    sections = [
        name for name in fields_of(Config) if section_of(type_of(Config, name)) or axis_of(type_of(Config, name))
    ]
    plain, seen = [name for name in fields_of(Config) if name not in sections], {}
    lines = [
        "# Configuration",
        "",
        "`python docs/reference.py` generates this page; `grpo-roc train --help SECTION` prints it in a terminal.",
        "A setting is given in YAML or as `--section.field value`. Where a setting chooses a *kind*, the kind has",
        "settings of its own, which follow: `--advantage pass_at_k --advantage.k 4`.",
        "",
        "## Top level",
        "",
        *table(Config, plain, ""),
    ]
    for name in sections:
        found = section_of(type_of(Config, name)) or type_of(Config, name)
        lines += ["", f"## `{name}`", "", cell((axis_of(found) or found).__doc__ or about.get(name, ""))]
        lines += axis(found, name, seen) if axis_of(found) else section(found, name, seen)
    return "\n".join(lines) + "\n"


def table(cls: type, names: list[str], prefix: str) -> Iterator[str]:
    """A row for each setting: name, default, values it may have, meaning."""
    about, hints = described(cls), fields_of(cls)
    yield from ("| setting | default | meaning |", "|---|---|---|")
    for name in names:
        found, default = type_of(cls, name), default_of(hints[name])
        literals = typing.get_args(found) if typing.get_origin(found) is typing.Literal else ()
        choices = f" One of {', '.join(f'`{one}`' for one in literals)}." if literals else ""
        shown = "required" if default is dataclasses.MISSING else f"`{cell(as_text(default))}`"
        yield f"| `{prefix}{name}` | {'empty' if shown == '``' else shown} | {cell(about.get(name, ''))}{choices} |"


def section(cls: type, prefix: str, seen: Seen, names: Iterable[str] | None = None) -> Iterator[str]:
    """The settings of a section or a kind; sections and choices inside it follow its table."""
    names = list(fields_of(cls) if names is None else names)
    if names:
        yield from ("", *table(cls, names, f"{prefix}."))
    for name in names:
        found, place = type_of(cls, name), f"{prefix}.{name}"
        if axis_of(found) and axis_of(found) not in seen:
            yield from ("", f"### Kinds of `{place}`", *axis(found, place, seen))
        elif axis_of(found):
            yield from ("", f"`{place}` has the kinds of `{seen[axis_of(found)]}`.")
        elif is_section(found):
            yield from ("", f"### `{place}`", "", cell(found.__doc__ or ""), *section(found, place, seen))


def axis(found: Any, prefix: str, seen: Seen) -> Iterator[str]:
    """The kinds of a choice that the package itself defines: the settings of all, then those of each."""
    seen[axis_of(found)] = prefix
    kinds = {name: cls for name, cls in axis_of(found).choices().items() if cls.__module__.startswith("grpo_roc_jax.")}
    first, *others = kinds.values()
    shared = [name for name in fields_of(first) if others and all(alike(first, other, name) for other in others)]
    if shared:
        yield from ("", "Settings of every kind:", *section(first, prefix, seen, shared))
    for name, cls in kinds.items():
        own = [field for field in fields_of(cls) if field not in shared]
        yield from ("", f"**`{prefix}: {name}`** {cell(cls.__doc__ or '')}", *section(cls, prefix, seen, own))


def alike(one: type, other: type, name: str) -> bool:
    """Whether two kinds have a setting of this name with the same default and meaning."""
    if name not in fields_of(other) or described(one).get(name) != described(other).get(name):
        return False
    return as_text(default_of(fields_of(one)[name])) == as_text(default_of(fields_of(other)[name]))


# ---- Python --------------------------------------------------------------------------------------------------------


def api() -> str:
    """The public names with their signatures and docstrings."""
    lines = [
        "# Python",
        "",
        "`python docs/reference.py` generates this page from the docstrings of the names in `__init__.py`.",
        "`import grpo_roc_jax as g` loads nothing heavy; a name is loaded when it is first used.",
    ]
    for name in grpo_roc_jax.__all__[1:]:
        home, _, own = grpo_roc_jax._HOMES[name].partition(":")
        thing = getattr(importlib.import_module(f"grpo_roc_jax.{home}"), own or name)
        lines += [
            "",
            f"## `g.{name}`",
            "",
            *entry(thing, name),
            f"*Defined in `grpo_roc_jax/{home.replace('.', '/')}.py`.*",
        ]
    return "\n".join(lines) + "\n"


def entry(thing: Any, name: str) -> Iterator[str]:
    """Signature, docstring, and the fields and methods of a class."""
    is_class, whole = inspect.isclass(thing), inspect.getdoc(thing) or ""
    parsed = docstring_parser.parse_from_object(thing) if is_class else docstring_parser.parse(whole)
    if not is_class:
        parameters = [as_written(one) for one in inspect.signature(thing).parameters.values()]
        yield from ("```python", f"{name}({', '.join(parameters)})", "```", "")
    for block in re.split(r"\n\s*\n(?:Args|Raises|Returns):", whole)[0].split("\n\n"):
        yield from (block if block.startswith("    ") else cell(block), "")
    methods = inspect.getmembers(thing, inspect.isfunction) if is_class else ()
    about = {one.arg_name: one.description or "" for one in parsed.params}
    fields = [one.name for one in dataclasses.fields(thing)] if is_class and dataclasses.is_dataclass(thing) else about
    rows = [(field, about.get(field, "")) for field in fields]
    for method, function in methods:
        if not method.startswith("_") and method in vars(thing):
            rows.append((f"{method}()", docstring_parser.parse(function.__doc__ or "").short_description or ""))
    if rows:
        yield from ("| name | meaning |", "|---|---|", *(f"| `{row}` | {cell(text)} |" for row, text in rows), "")
    if parsed.returns and parsed.returns.description:
        yield from (f"Returns {cell(parsed.returns.description)}", "")
    for one in parsed.raises:
        yield from (f"Raises `{one.type_name}`: {cell(one.description or '')}", "")


def as_written(parameter: inspect.Parameter) -> str:
    """A parameter with its default, if that can be written."""
    shown = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
    default = parameter.default
    if default is parameter.empty:
        return shown
    text = json.dumps(default) if isinstance(default, str) else repr(default)
    return f"{shown}={text}" if isinstance(default, str | int | float | bool | None) else f"{shown}=..."


def pages() -> dict[str, str]:
    """Name of every generated page -> its content."""
    return {"configuration.md": configuration(), "api.md": api(), "coming_from.md": coming_from()}


TABLE = "<!-- generated table -->", "<!-- end of generated table -->"


def coming_from() -> str:
    """The page for users of other projects, with its table made anew."""
    before, after = TABLE
    head, _, rest = (DOCS / "coming_from.md").read_text(encoding="utf-8").partition(before)
    lines = []
    for project in dict.fromkeys(row.project for row in OTHER_NAMES):
        lines += ["", f"### {project}", "", f"| {project} | here | note |", "|---|---|---|"]
        for row in (row for row in OTHER_NAMES if row.project == project):
            ours = {"": "-", METHOD: "a [recipe](methods.md)"}.get(row.ours, f"`{row.ours}`")
            lines.append(f"| `{row.theirs}` | {ours} | {cell(row.note)} |")
    return "\n".join([head + before, *lines, "", after]) + rest.partition(after)[2]


if __name__ == "__main__":
    for name, content in pages().items():
        (DOCS / name).write_text(content, encoding="utf-8")
