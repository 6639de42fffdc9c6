"""The core works without `contrib/`: in a copy of the package that lacks the folder, everything that does not name an
adapter or a further method does what it does here."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_roc_jax.settings.cli import CONFIG_DIR, CONTRIB_METHODS

ROOT = Path(__file__).resolve().parent.parent

IMPORT_ALL = """
import importlib, pkgutil, sys
import grpo_roc_jax
from grpo_roc_jax.config import read_config
from docs.methods_table import load_methods
from grpo_roc_jax.settings.cli import ConfigError

for module in pkgutil.walk_packages(grpo_roc_jax.__path__, "grpo_roc_jax."):
    if module.name.endswith("__main__") or ".sandbox._" in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # the library of an extra
        assert not error.name.startswith("grpo_roc_jax"), error
assert not [name for name in sys.modules if name.startswith("grpo_roc_jax.contrib")]
for name in sys.argv[1:]:
    read_config(name)
try:
    read_config("toy.yaml", "--advantage.scale", "mad")
except ConfigError as error:
    print(error)
print(*load_methods())
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """A checkout in which somebody removed `grpo_roc_jax/contrib`."""
    root = tmp_path_factory.mktemp("core") / "checkout"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".git", "__pycache__", "*.pyc"))
    shutil.rmtree(root / "grpo_roc_jax/contrib")
    return root


def run_in(root: Path, *words: str, timeout: float = 300) -> str:
    """What Python prints with the package of that folder."""
    env = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=root, env=env, capture_output=True, text=True, timeout=timeout, errors="replace"
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_every_module_is_imported_and_every_recipe_of_the_core_read(core):
    recipes = [str(path.relative_to(CONFIG_DIR)) for path in (CONFIG_DIR / "methods").glob("*.yaml")]
    recipes += [path.name for path in CONFIG_DIR.glob("*.yaml")]
    message, names = run_in(core, "-c", IMPORT_ALL, *recipes).splitlines()[-2:]
    assert "unknown kind 'mad'" in message
    assert set(names.split()) == {path.stem for path in (CONFIG_DIR / "methods").glob("*.yaml")}
    assert not set(names.split()) & {path.stem for path in CONTRIB_METHODS.glob("*.yaml")}


ROOMS = sorted(path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name[0].isalpha())
PARTS = [f"tests/{room}" for room in ROOMS if room not in ("contrib", "helpers")]
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").glob("test_*.py"))
FILES.remove(f"tests/{Path(__file__).name}")  # copies of copies
PARTS += [" ".join(FILES[i::4]) for i in range(4)]
"""All default tests but these and those of contrib: a room, or a quarter of the files without a room, at a time."""


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.split()[0])
def test_the_tests_of_the_core_pass(core, part):
    run_in(core, "-m", "pytest", "-n2", "-q", "-p", "no:cacheprovider", *part.split(), timeout=3000)


def test_no_test_of_the_core_needs_contrib():
    """By an import, or by the recipe of a further method. Whether the folder exists, `helpers.contrib` says."""
    recipes = "|".join(path.stem for path in CONTRIB_METHODS.glob("*.yaml")) or "(?!)"  # without the folder: none
    needs = re.compile(rf"^(?:from|import) (?:grpo_roc_jax|tests)\.contrib\b|methods/(?:{recipes})\b", re.MULTILINE)
    paths = [path for path in (ROOT / "tests").rglob("*.py") if "contrib" not in path.relative_to(ROOT).parts]
    assert len(paths) > 100
    assert not [str(path.relative_to(ROOT)) for path in paths if needs.search(path.read_text(encoding="utf-8"))]
