"""The map of the package, kept true: who may import whom, and which side of host and device a module is on.

A room is a folder; each module at the root is a room of its own, the commands are one together.
"""

import ast
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests import reading_table

PACKAGE = "grpo_roc_jax"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE

ROOMS: dict[str, str] = {
    "sandbox": "",
    "checks": "",
    "types": "sandbox checks",
    "shapes": "",
    "hints": "",
    "settings": "hints",
    "process": "hints settings",
    "gguf_files": "",
    "text": "checks types settings gguf_files",
    "tools": "checks sandbox types settings process",
    "environments": "sandbox types settings process tools",
    "data": "types settings process text tools environments",
    "worlds": "sandbox types hints settings text tools environments data",
    "reward": "checks sandbox types hints settings process tools",
    "model": "shapes settings process gguf_files",
    "method": "checks types shapes settings",
    "engine": "checks types shapes settings process model",
    "rollout": "checks sandbox types settings text tools environments model engine",
    "learner": "checks types shapes settings process method model",
    "record": "sandbox types settings process learner",
    "view": "sandbox types settings record",
    "pod": "settings process",
    "serving": "sandbox types shapes settings process text tools environments model method engine rollout learner",
    "config": "settings text data worlds tools environments reward model method engine rollout learner record pod",
    "run": "checks sandbox types shapes settings process gguf_files text data worlds tools environments reward model "
    "method engine rollout learner record pod serving config",
    "stream": "types settings process tools reward model method engine rollout pod config run",
    "planner": "types shapes settings process text data tools reward model method engine rollout learner record pod "
    "config run stream",
    "contrib": "sandbox types shapes settings process text data tools environments reward model method",
    "train": "types shapes settings process text data tools environments reward model method engine rollout learner "
    "record pod serving config run stream planner",
    "commands": "sandbox types shapes hints settings process text data worlds tools environments reward model method "
    "engine rollout learner record pod serving config run stream planner view train",
}
"""Room -> the rooms that it may import. No two rooms import each other: each names only rooms above its own line."""

DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax", "jaxtyping", "tokamax"}
HOST = """
checks types hints settings process gguf_files view commands.view commands.plot sandbox worlds text tools environments
data reward pod.preemption run.buffer run.statistics record.codec record.events record.checkpoint_files record.loggers
record.accuracy record.run_dir record.trace record.segments record.index record.metrics
""".split()  # noqa: SIM905 (shorter than a list)
"""Modules and packages that work where JAX is not even installed, with all they import."""
DEVICE_IN_METHOD = {"method.divergence", "method.surrogate", "method.reference"}
"""Surrogates, the divergence in the loss, and the loss on one page are functions of arrays on the device."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


PATHS = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def modules() -> dict[str, ast.Module]:
    """Name without the package -> syntax tree; packages by their `__init__`."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in PATHS.items()}


@cache
def imported(name: str, *, everywhere: bool) -> set[str]:
    """Names that a module imports: all of them, or those of its top level alone."""
    tree = modules()[name]
    nodes = ast.walk(tree) if everywhere else top_level(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # what runs inside a tool's child knows no package name
                parents = [PACKAGE, *name.split(".")][: -node.level]
                base = ".".join(parents + ([base] if base else []))
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


def top_level(tree: ast.Module):
    """Statements that run at import, those under `if` and `try` included, bodies of functions left out."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += list(ast.iter_child_nodes(node))


@cache
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


def room_of(name: str) -> str:
    """The room of a module: its folder, or itself where it lies at the root; `__main__` calls the commands."""
    first = name.split(".")[0]
    return "commands" if name == "__main__" else first


def test_the_reader_of_imports_sees_them():
    assert "types" in own_imports("record.codec", everywhere=False)
    assert "jax.monitoring" in imported("record.metrics", everywhere=True)
    assert "jax.monitoring" not in imported("record.metrics", everywhere=False)
    assert "sandbox._kernel" in own_imports("sandbox._landlock", everywhere=False)
    assert {"record.codec", "types", "record.index", "view.pages"} <= reached("commands.view")
    assert "settings.cli" in reached("record.checkpoint")


def test_every_module_has_a_room_and_every_room_a_module():
    rooms = {room_of(name) for name in modules() if name}
    assert rooms | {"contrib"} == ROOMS.keys()


def test_rooms_are_listed_in_the_order_of_their_imports():
    for index, (room, others) in enumerate(ROOMS.items()):
        assert set(others.split()) <= set(list(ROOMS)[:index]), room


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room):
    allowed = {room, *ROOMS[room].split()}
    for name in (name for name in PATHS if name and room_of(name) == room):
        wrong = [other for other in own_imports(name, everywhere=True) if other and room_of(other) not in allowed]
        assert not wrong, f"{name} imports {wrong}; {room} may import {ROOMS[room] or 'no other room'}"


def test_no_module_imports_itself_through_others():
    cycles = [name for name in modules() if name in reached(name)]
    assert not cycles


@pytest.mark.parametrize("prefix", HOST)
def test_host_modules_need_no_device_library(prefix):
    names = [name for name in modules() if name == prefix or name.startswith(f"{prefix}.")]
    for name in names:
        for module in {name, *reached(name)}:
            used = {full.split(".")[0] for full in imported(module, everywhere=False)} & DEVICE_LIBRARIES
            assert not used, f"{name} reaches {module}, which imports {used}"


def with_device_libraries(*packages: str) -> set[str]:
    """The modules of these packages that import a library of the device, at their top level or later."""
    names = (name for name in PATHS if name.startswith(packages))
    roots = {name: {full.split(".")[0] for full in imported(name, everywhere=True)} for name in names}
    assert len(roots) > 5
    return {name for name, used in roots.items() if used & DEVICE_LIBRARIES}


def test_methods_compute_on_the_host_but_for_surrogates_and_tools_touch_no_device_even_late():
    assert with_device_libraries("method.") == DEVICE_IN_METHOD
    assert not with_device_libraries("tools", "sandbox")


def test_importing_the_package_and_its_viewers_loads_no_jax():
    names = ("commands.view", "commands.plot", "record.trace", "tools.executor", "sandbox.executor")
    code = f"import sys, {PACKAGE}, {', '.join(f'{PACKAGE}.{name}' for name in names)}; "
    code += "sys.exit(int(any(name.split('.')[0] == 'jax' for name in sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_walks_of_the_architecture_are_short_and_name_what_exists():
    text = (ROOT.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for title, (stops, files) in reading_table.walks(text).items():
        assert 0 < stops < 8 and 3 < len(files) < 12, title
    section = text.split("## Four walks")[1].split("\n## ")[0]
    rooms = [name for name in reading_table.names_in(section) if name.split(".")[0].split("/")[0] in ROOMS]
    assert len(rooms) > 20 and not [name for name in rooms if reading_table.module_of(name) is None]


LOSS_OF_DEMONSTRATIONS, TEACHING = "NegativeLogLikelihood", "SelfTeacher"


def test_a_run_names_no_method():
    """What a method asks of a run is a hook of `method.part.Part` and of its axes; the supervised stage names its loss,
    and the update of a teacher its kind."""
    kinds = {
        f"{module}.{node.name}"
        for module, tree in modules().items()
        if module.startswith("method.")
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(d).startswith("kind(") for d in node.decorator_list)
        if ast.unparse(node.decorator_list[0]) != "kind('none')"
    }
    assert len(kinds) > 40
    for name in (name for name in PATHS if room_of(name) in ("run", "train")):
        imported_names = {n.removeprefix(f"{PACKAGE}.") for n in imported(name, everywhere=True)}
        named = {n.rpartition(".")[2] for n in imported_names & kinds}
        assert named <= {LOSS_OF_DEMONSTRATIONS, TEACHING}, f"{name} names {named}"


def test_sampler_and_learner_reach_no_run():
    """Each is made and used by anybody with a loop of their own, so neither needs a configuration or a run."""
    for name in ("learner.learner", "rollout.sampler"):
        assert not {other for other in reached(name) if room_of(other) in ("config", "run", "record", "train")}


def test_what_benchmarks_take_from_the_tests_is_there():
    for path in (ROOT.parent / "benchmarks").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), path.name
