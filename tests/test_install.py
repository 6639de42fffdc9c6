"""The package as it is installed: what the wheel and the source archive hold, and the commands under one name."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from grpo_roc_jax.__main__ import COMMANDS, main
from grpo_roc_jax.sandbox import _start

ROOT = Path(__file__).resolve().parent.parent
RECIPES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
FURTHER = {path.relative_to(ROOT).as_posix() for path in (ROOT / "grpo_roc_jax/contrib/methods").glob("*.yaml")}
READ_ALL = """
import grpo_roc_jax
from pathlib import Path
from grpo_roc_jax.settings.cli import CONFIG_DIR, CONTRIB_METHODS, file_layers, find_config
assert CONFIG_DIR == Path(grpo_roc_jax.__file__).parent / "configs", CONFIG_DIR
names = [str(path.relative_to(CONFIG_DIR)) for path in CONFIG_DIR.rglob("*.yaml")]
names += [f"methods/{path.name}" for path in CONTRIB_METHODS.glob("*.yaml")]
assert all(layer.values for name in names for layer in file_layers(find_config(name)))
print(len(names))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The content of a wheel that is built without network, in a folder, as pip writes it."""
    pytest.importorskip("hatchling", reason="hatchling is not installed; pip install -e '.[dev]'")
    folder, site = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(site)
    return site


def run_installed(site: Path, *words: str, cwd: Path) -> str:
    """Standard output of Python with the package of that folder; the checkout is out of sight."""
    options = {"cwd": cwd, "env": {"PYTHONPATH": str(site)}, "timeout": 120, "text": True, "check": True}
    return subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, **options).stdout


def test_no_page_installs_from_an_index_that_does_not_have_the_project():
    """Extras are named as `.[NAME]` of a copy; with a wheel, `doctor` prints the packages."""
    pattern = re.compile(r"pip install[^\n`|&]*?(?<![\w/.-])grpo[-_]roc[-_]jax(?![-_][\d.]+-py3|\w)")
    pages = [path for room in ("docs", "notebooks", "configs", "examples") for path in (ROOT / room).rglob("*.*")]
    pages = [page for page in pages if page.suffix in (".md", ".ipynb", ".yaml") and page.name != "faq.md"]
    assert not [page for page in [ROOT / "README.md", *pages] if pattern.search(page.read_text(encoding="utf-8"))]


def test_the_wheel_holds_every_module_and_recipe_and_nothing_else(unpacked):
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "grpo_roc_jax").rglob("*.py")}
    recipes = {f"grpo_roc_jax/{name}" for name in RECIPES}
    files = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    (entry_points,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert "grpo-roc = grpo_roc_jax.__main__:main" in entry_points.read_text(encoding="utf-8")
    files = {name for name in files if ".dist-info/" not in name}
    page = {f"grpo_roc_jax/view/static/{name}" for name in ("page.html", "viewer.css", "viewer.js")}
    project = {f"grpo_roc_jax/project/{path.name}" for path in (ROOT / "examples" / "project").glob("*.*")}
    tables = {"grpo_roc_jax/text/toy.model", "grpo_roc_jax/hints/other_names.csv"}
    assert files == modules | recipes | FURTHER | page | project | tables


def test_the_wheel_finds_its_recipes_and_makes_a_new_project(unpacked, tmp_path):
    assert int(run_installed(unpacked, "-c", READ_ALL, cwd=tmp_path)) == len(RECIPES) + len(FURTHER)
    printed = run_installed(unpacked, "-m", "grpo_roc_jax", "new", "mine", cwd=tmp_path)
    assert "data/problems.jsonl" in printed and (tmp_path / "mine" / "data" / "problems.jsonl").is_file()


def test_the_help_fits_a_screen_and_names_every_command(capsys):
    assert main([]) == main(["help"]) == main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 3 * 24 and max(map(len, lines)) <= 100
    assert all(any(line.split()[:1] == [name] for line in lines) for name in COMMANDS)
    with pytest.raises(SystemExit) as left:
        main(["help", "new"])
    assert left.value.code == 0 and capsys.readouterr().out.startswith("usage: grpo-roc new ")
    for words, message in ((["trian"], "did you mean 'train'?"), (["xyz"], "`grpo-roc help` lists all commands")):
        assert main(words) == 2
        assert message in capsys.readouterr().err


EXTRAS = "gguf ray gymnasium mcp openenv verifiers datasets serve wandb trackio tensorboard".split()  # noqa: SIM905


def test_every_import_of_another_library_is_declared():
    named = {"orbax": "orbax_checkpoint", "yaml": "pyyaml", "google": "protobuf"}
    named |= {"libtpu": "jax"}  # its extra `tpu` brings it
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "grpo_roc_jax").rglob("*.py")]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    used = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    used |= {node.module.split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
    used -= {"grpo_roc_jax", _start.PACKAGE, *sys.stdlib_module_names}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for name in EXTRAS for line in project["optional-dependencies"][name])]
    declared = {re.match(r"[\w.-]+", line)[0].replace("-", "_").lower() for line in lines}  # `orbax-checkpoint>=0.12`
    assert {named.get(name, name) for name in used} <= declared
