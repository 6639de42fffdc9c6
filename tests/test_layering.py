"""The map of the package, kept true: who may import whom, and which side of host and device a module is on.

A new module gets a place in `LINES`; a module imports only from lines above its own and from its own line.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "grpo_roc_jax"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE

LINES = """
types shapes cli preemption hlo topology
hlo_cost roofline
codec checkpoint_files loggers accuracy processes
text
tools
data
text.train_toy_tokenizer
model
sharding offload
parallel
rollout
reward
pack
method
buffer statistics
loss
update
checkpoint metrics trace view_html
view plot unread
config
policy
estimate
stages
sample rounds
run_dir run_state
summary evaluate supervised step
export chat plan preflight difficulty
train
sft
"""
"""Lines of modules and packages, the lowest first. A module named by itself stands apart from its package."""

DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax", "jaxtyping", "tokamax"}
HOST = ("types", "codec", "checkpoint_files", "loggers", "accuracy", "cli", "preemption", "run_dir", "buffer", "trace")
HOST += ("view", "view_html", "plot", "metrics", "statistics", "text", "tools", "data", "reward")
"""Modules and packages that work where JAX is not even installed, with all they import."""
DEVICE_IN_METHOD = {"method.surrogate"}


@cache
def modules() -> dict[str, ast.Module]:
    """Name without the package -> syntax tree; packages by their `__init__`."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix(".")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(name: str, *, everywhere: bool) -> set[str]:
    """Names that a module imports: all of them, or those of its top level alone."""
    tree = modules()[name]
    nodes = ast.walk(tree) if everywhere else top_level(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # what runs inside a tool's child knows no package name
                parents = [PACKAGE, *name.split(".")][: -node.level]
                base = ".".join(parents + ([base] if base else []))
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def top_level(tree: ast.Module):
    """Statements that run at import, those under `if` and `try` included, bodies of functions left out."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += list(ast.iter_child_nodes(node))


def own_imports(name: str, *, everywhere: bool) -> set[str]:
    """Modules of the package that a module imports."""
    names = {
        n.removeprefix(f"{PACKAGE}.") for n in imported(name, everywhere=everywhere) if n.startswith(f"{PACKAGE}.")
    }
    return {n for n in names if n in modules() and n != name}


def reached(name: str) -> set[str]:
    """Modules of the package that are imported when this one is."""
    seen, waiting = set(), [name]
    while waiting:
        for other in own_imports(waiting.pop(), everywhere=False) - seen:
            seen.add(other)
            waiting.append(other)
    return seen


def line_of(name: str) -> int | None:
    """Index of the line that names the module, or else one of its packages."""
    places = {entry: i for i, line in enumerate(LINES.strip().splitlines()) for entry in line.split()}
    parts = name.split(".")
    return next((places[key] for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in places), None)


def test_the_reader_of_imports_sees_them():
    assert "types" in own_imports("codec", everywhere=False)
    assert "jax.monitoring" in imported("metrics", everywhere=True)
    assert "jax.monitoring" not in imported("metrics", everywhere=False)
    assert "tools._kernel" in own_imports("tools._landlock", everywhere=False)
    assert {"codec", "types", "view_html"} <= reached("view") and "cli" in reached("checkpoint")


def test_every_module_has_a_place_on_the_map_and_every_place_a_module():
    homeless = [name for name in modules() if name and line_of(name) is None]
    assert not homeless, f"{homeless} have no place in LINES"
    empty = [entry for entry in LINES.split() if entry not in modules()]
    assert not empty, f"{empty} in LINES are no modules"


@pytest.mark.parametrize("name", [name for name in modules() if name])
def test_modules_import_downwards(name):
    wrong = [other for other in own_imports(name, everywhere=True) if other and line_of(other) > line_of(name)]
    assert not wrong, f"{name} imports {wrong}, which stand above it on the map"


def test_no_module_imports_itself_through_others():
    cycles = [name for name in modules() if name in reached(name)]
    assert not cycles


@pytest.mark.parametrize("place", HOST)
def test_host_modules_need_no_device_library(place):
    names = [name for name in modules() if name == place or name.startswith(f"{place}.")]
    for name in names:
        for module in {name, *reached(name)}:
            used = {full.split(".")[0] for full in imported(module, everywhere=False)} & DEVICE_LIBRARIES
            assert not used, f"{name} reaches {module}, which imports {used}"


@pytest.mark.parametrize("name", [name for name in modules() if name.startswith("method.")])
def test_methods_compute_on_the_host_but_for_the_surrogate(name):
    used = {full.split(".")[0] for full in imported(name, everywhere=True)} & DEVICE_LIBRARIES
    assert bool(used) == (name in DEVICE_IN_METHOD)


@pytest.mark.parametrize("name", [name for name in modules() if name.startswith("tools")])
def test_tools_touch_no_device_library_even_late(name):
    used = {full.split(".")[0] for full in imported(name, everywhere=True)} & DEVICE_LIBRARIES
    assert not used


def test_importing_the_package_and_its_viewers_loads_no_jax():
    code = f"import sys, {PACKAGE}, {PACKAGE}.view, {PACKAGE}.plot, {PACKAGE}.trace, {PACKAGE}.tools.executor; "
    code += "sys.exit(int(any(name.split('.')[0] == 'jax' for name in sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
