"""Tests observe by public means. What is counted here may only become less."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
PACKAGE = "grpo_roc_jax"
PRIVATE_USES = 0
"""Uses of private attributes of the package in tests."""
PATCHES = 45
"""Attributes of modules and classes of the package that tests replace."""
MODULES = {path.stem for path in (TESTS.parent / PACKAGE).rglob("_*.py")}
"""Modules of the sandbox's children have such names by design."""
ELSEWHERE = {"_asdict", "_exit", "_fields", "_replace", "_src", "_cells", "_compute_loss"}
"""Attributes of named tuples and of other libraries."""
OWN = ("self", "cls", "super()")
REPLACERS = ("setattr", "patch.object", "patch.multiple", "patch.dict", "mock.patch")
CONSTANT = re.compile(r"""\b\w+\.([A-Z]{3}[A-Z_]*) = |setattr\([^)]*?\b(_?[A-Z]{3}[A-Z_]*)['"],""")
"""A constant that a test, or a program that it starts, replaces."""
SUSPECT = re.compile(r"\._[a-z]|import .*\b_[a-z]|setattr|patch")


def private(name: str) -> bool:
    return re.match("_[^_]", name) is not None and name not in MODULES | ELSEWHERE


def of_package(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is something that was imported from the package, or a text that names it."""
    if isinstance(node, ast.Constant):
        return str(node.value).startswith(f"{PACKAGE}.")
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in names


def replaces(call: ast.Call, names: set[str]) -> bool:
    """Whether a call replaces an attribute of something of the package."""
    return bool(call.args) and of_package(call.args[0], names) and ast.unparse(call.func).endswith(REPLACERS)


def reaches(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """("private" or "patch", line, code) of each place that reaches behind the public names of the package."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            names |= {alias.asname or alias.name for alias in node.names}
            yield from (("private", node.lineno, alias.name) for alias in node.names if private(alias.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr) and ast.unparse(node.value) not in OWN:
            yield "private", node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and replaces(node, names):
            yield "patch", node.lineno, ast.unparse(node)


def test_tests_use_no_private_attributes_and_replace_few_parts_of_the_package():
    places: dict[str, list[str]] = {"private": [], "patch": []}
    for path in TESTS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for kind, line, code in reaches(ast.parse(text)) if SUSPECT.search(text) else ():
            places[kind].append(f"{path.relative_to(TESTS)}:{line}: {code}")
    assert len(places["private"]) <= PRIVATE_USES, "\n".join(places["private"])
    assert len(places["patch"]) <= PATCHES, "\n".join(places["patch"])


def test_each_kind_of_reach_is_seen():
    code = f"from {PACKAGE}.run import sample, _hidden\nmonkeypatch.setattr(sample.time, 'x', 1)\nengine._rows\n"
    code += f"monkeypatch.setattr('{PACKAGE}.train.y', 1)\nself._mine\nos._exit(1)\nsetattr(engine, 'z', 1)\n"
    assert [(kind, line) for kind, line, _ in reaches(ast.parse(code))] == [
        *(("private", 1), ("patch", 2), ("private", 3), ("patch", 4))
    ]


def bound_early(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each default value of a parameter that is a constant: it is read once, when the module loads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            for default in filter(None, (*node.args.defaults, *node.args.kw_defaults)):
                if isinstance(default, ast.Name) and default.id.isupper():
                    yield default.lineno, default.id


def test_a_constant_that_tests_replace_is_not_bound_when_its_module_loads():
    texts = (path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py"))
    replaced = {name for text in texts for names in CONSTANT.findall(text) for name in names} - {""}
    assert "PAUSE_S" in replaced
    named = re.compile(rf"= (?:{'|'.join(replaced)})\b")
    sources = {path: path.read_text(encoding="utf-8") for path in (TESTS.parent / PACKAGE).rglob("*.py")}
    trees = {path: ast.parse(text) for path, text in sources.items() if named.search(text)}
    early = [f"{path}:{line}: {name}" for path, tree in trees.items() for line, name in bound_early(tree)]
    assert not [entry for entry in early if entry.rsplit(" ", 1)[1] in replaced]
    assert list(bound_early(ast.parse("def f(x, y=PAUSE_S, *, z=MOST): ..."))) == [(1, "PAUSE_S"), (1, "MOST")]
