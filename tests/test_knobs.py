"""Every setting says what it is: a field without a docstring would be a bare name in `--help`. That each one changes
something is shown by `test_knob_effects.py`."""

import ast
from pathlib import Path

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
