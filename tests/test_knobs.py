"""No setting without effect: every field of every section is read somewhere besides the section itself."""

import ast
from pathlib import Path

import pytest

from grpo_roc_jax.cli import dotted_fields
from grpo_roc_jax.config import Config

PACKAGE = Path(__file__).resolve().parent.parent / "grpo_roc_jax"


def reads() -> set[str]:
    """Names of attributes that the package reads, checks at construction left out."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        checks = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__post_init__"]
        inside = {id(n) for check in checks for n in ast.walk(check)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in inside:
                found.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                found.add(str(node.slice.value))  # settings that travel to another process as plain data
            elif isinstance(node, ast.Call | ast.Tuple) and id(node) not in inside:  # getattr, get, names in a loop
                parts = node.args if isinstance(node, ast.Call) else node.elts
                found |= {part.value for part in parts if isinstance(part, ast.Constant) and type(part.value) is str}
    return found


READS = reads()


@pytest.mark.parametrize("key", list(dotted_fields(Config)))
def test_setting_is_read(key):
    assert key.rsplit(".", 1)[-1] in READS


def test_an_unread_setting_would_be_found():
    assert "no_such_setting_anywhere" not in READS


def test_every_setting_has_a_help_line():
    """A field without a docstring would be a bare name in `--help`."""
    missing = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Config") and node.name != "Config":
                missing += [f"{node.name}.{name}" for name in undocumented(node)]
    assert not [name for name in missing if name.split(".")[0] not in ("RunConfig", "MethodConfig")]


def undocumented(node: ast.ClassDef) -> list[str]:
    pairs = zip(node.body, [*node.body[1:], None], strict=True)
    return [
        here.target.id
        for here, after in pairs
        if isinstance(here, ast.AnnAssign)
        and isinstance(here.target, ast.Name)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]
