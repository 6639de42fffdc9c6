"""Every setting says what it is: a field without a docstring would be a bare name in `--help`. That each one changes
something is shown by `test_knob_effects.py`."""

import ast
import dataclasses
import math
import typing
from pathlib import Path

import pytest

from grpo_roc_jax.config import Config, read_config
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.settings.options import Axis, adapter

PACKAGE = Path(__file__).resolve().parent.parent / "grpo_roc_jax"
NOT_SECTIONS = ("Config", "RunConfig", "MethodConfig")
"""The whole, and two views of it."""


def test_every_setting_has_a_help_line():
    missing = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and node.name not in NOT_SECTIONS:
                missing += [f"{node.name}.{name}" for name in undocumented(node)]
    assert not missing


def test_a_bare_field_would_be_found():
    section = ast.parse('class C:\n    a: int = 0\n    """Said."""\n    b: int = 0\n    c: int = 0\n    """Said."""\n')
    assert undocumented(section.body[0]) == ["b"]


def undocumented(node: ast.ClassDef) -> list[str]:
    pairs = zip(node.body, [*node.body[1:], None], strict=True)
    return [
        here.target.id
        for here, after in pairs
        if isinstance(here, ast.AnnAssign)
        and isinstance(here.target, ast.Name)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]


def sections(section: type = Config) -> set[type]:
    """A section and all sections and kinds that its settings may be."""
    known: set[type] = set()
    waiting: list = [section]
    while waiting:
        kind = waiting.pop()
        waiting += typing.get_args(kind)
        if not dataclasses.is_dataclass(kind) and not (isinstance(kind, type) and issubclass(kind, Axis)):
            continue
        if kind not in known:
            known.add(kind)
            waiting += getattr(kind, "kinds", {}).values() if not getattr(kind, "kind", "") else ()
            waiting += (
                typing.get_type_hints(kind, include_extras=True).values() if dataclasses.is_dataclass(kind) else ()
            )
    return {kind for kind in known if dataclasses.is_dataclass(kind)}


def floats(kind: type) -> list[str]:
    """The settings of a section that may be a float, alone or in a list or mapping."""

    def may_be(hint):
        return hint is float or any(map(may_be, typing.get_args(hint)))

    hints = typing.get_type_hints(kind)
    return [field.name for field in dataclasses.fields(kind) if field.init and may_be(hints[field.name])]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_no_setting_is_infinite_or_not_a_number(value):
    """In every section and kind of the core, for numbers alone, in lists and in mappings."""
    kinds = [kind for kind in sections() if ".contrib." not in kind.__module__]
    assert sum(len(floats(kind)) for kind in kinds) > 60
    assert accepted_by(kinds, value) == []


def accepted_by(kinds: list[type], value: float) -> list[str]:
    """The settings of these kinds that take the value, alone, in a list or in a mapping."""
    accepted = []
    for kind, name in [(each, name) for each in kinds for name in floats(each)]:
        for tried in (value, [value], {"a": value}):
            try:
                made = adapter(kind).validate_python({name: tried})
            except Exception:
                continue
            accepted.append(f"{kind.__name__}.{name} = {getattr(made, name)}")
    return accepted


@pytest.mark.parametrize("word", ["inf", "-Infinity", "nan", ".inf", "1e999"])
def test_the_message_says_that_a_number_must_be_finite(tmp_path, word):
    (tmp_path / "run.yaml").write_text(f"optim: {{lr: {word}}}\n")
    with pytest.raises(ConfigError, match=r"optim\.lr = .*run.yaml.*must be a (finite )?number"):
        read_config(str(tmp_path / "run.yaml"))
