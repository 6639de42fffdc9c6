"""The package as it is installed: what the wheel and the source archive hold, and the commands under one name."""

import ast
import email
import importlib.util
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import grpo_roc_jax
from grpo_roc_jax.__main__ import COMMANDS, main, module_of
from grpo_roc_jax.sandbox import _start

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "gguf ray gymnasium mcp openenv verifiers datasets serve wandb trackio tensorboard".split()  # noqa: SIM905
"""Those that the package imports."""
RECIPES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml"))
FURTHER = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "grpo_roc_jax/contrib/methods").glob("*.yaml"))
READ_ALL = """
import grpo_roc_jax
from pathlib import Path
from grpo_roc_jax.settings.cli import CONFIG_DIR, CONTRIB_METHODS, file_layers, find_config
from docs.methods_table import load_methods
assert CONFIG_DIR == Path(grpo_roc_jax.__file__).parent / "configs", CONFIG_DIR
for path in CONFIG_DIR.rglob("*.yaml"):
    assert all(layer.values for layer in file_layers(find_config(str(path.relative_to(CONFIG_DIR)))))
for path in CONTRIB_METHODS.glob("*.yaml"):
    assert len(list(file_layers(find_config(f"methods/{path.name}")))) > 1  # with those of its base
print(len(load_methods()), CONFIG_DIR)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, source archive), built without network."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed; pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory):
    """The wheel's content in a folder, as pip writes it."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(folder)
    return folder


def run_installed(site: Path, *words: str, cwd: Path) -> str:
    """Standard output of Python with the package of that folder; the checkout is out of sight."""
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env={"PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_page_installs_from_an_index_that_does_not_have_the_project():
    """Extras are named as `.[NAME]` of a copy; with a wheel, `doctor` prints the packages."""
    pattern = re.compile(r"pip install[^\n`|&]*?(?<![\w/.-])grpo[-_]roc[-_]jax(?![-_][\d.]+-py3|\w)")
    patterns = ("*.md", "docs/**/*.md", "notebooks/*.ipynb", "configs/**/*")
    patterns += tuple(f"{room}/**/*" for room in ("grpo_roc_jax", "examples", "benchmarks", "tests"))
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    lines = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.suffix in (".md", ".ipynb", ".yaml", ".py", ".sh")
        and path.name not in (Path(__file__).name, "CHANGELOG.md")
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    allowed = ("docs/faq.md: ", "tests/commands/")  # one says that it finds nothing, one has an address
    assert not [line for line in lines if not line.startswith(allowed)]


def test_the_wheel_holds_every_module_and_recipe_and_nothing_else(unpacked):
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "grpo_roc_jax").rglob("*.py")}
    recipes = {f"grpo_roc_jax/{name}" for name in RECIPES}
    files = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    files = {name for name in files if ".dist-info/" not in name}
    page = {f"grpo_roc_jax/view/static/{name}" for name in ("page.html", "viewer.css", "viewer.js")}
    project = {f"grpo_roc_jax/project/{path.name}" for path in (ROOT / "examples" / "project").glob("*.*")}
    tables = {"grpo_roc_jax/text/toy.model", "grpo_roc_jax/hints/other_names.csv"}
    assert files == modules | recipes | set(FURTHER) | page | project | tables


def test_the_metadata_name_version_licence_and_entry_point(unpacked):
    (info,) = unpacked.glob("*.dist-info")
    metadata = email.message_from_string((info / "METADATA").read_text(encoding="utf-8"))
    assert metadata["Version"] == grpo_roc_jax.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text(encoding="utf-8")
    assert "grpo-roc = grpo_roc_jax.__main__:main" in (info / "entry_points.txt").read_text(encoding="utf-8")


def test_recipes_of_the_wheel_are_found_with_their_bases(unpacked, tmp_path):
    count, folder = run_installed(unpacked, "-c", READ_ALL, cwd=tmp_path).split()
    assert int(count) == len([name for name in RECIPES if name.startswith("configs/methods/")]) + len(FURTHER)
    assert Path(folder) == unpacked / "grpo_roc_jax" / "configs"


def test_the_wheel_helps_outside_a_checkout_and_makes_a_new_project(unpacked, tmp_path):
    assert run_installed(unpacked, "-m", "grpo_roc_jax", cwd=tmp_path).startswith("usage: grpo-roc COMMAND")
    printed = run_installed(unpacked, "-m", "grpo_roc_jax", "new", "mine", cwd=tmp_path)
    assert "data/problems.jsonl" in printed and (tmp_path / "mine" / "data" / "problems.jsonl").is_file()


def test_the_source_archive_holds_what_a_wheel_is_built_from(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*RECIPES, *FURTHER, "pyproject.toml", "LICENSE", "README.md", "grpo_roc_jax/__main__.py"} <= names


def test_every_import_of_another_library_is_declared():
    named = {"orbax": "orbax_checkpoint", "yaml": "pyyaml", "google": "protobuf"}
    named |= {"libtpu": "jax"}  # its extra `tpu` brings it
    used: set[str] = set()
    for path in (ROOT / "grpo_roc_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                used |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                used.add(node.module.split(".")[0])
    used -= {"grpo_roc_jax", _start.PACKAGE, *sys.stdlib_module_names}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for name in EXTRAS for line in project["optional-dependencies"][name])]
    declared = {re.match(r"[\w.-]+", line)[0].replace("-", "_").lower() for line in lines}  # `orbax-checkpoint>=0.12`
    assert {named.get(name, name) for name in used} <= declared


@pytest.mark.parametrize("words", [[], ["help"], ["--help"]])
def test_the_help_fits_a_screen_and_names_every_command(words, capsys):
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    assert all(any(line.split()[:1] == [name] for line in lines) for name in COMMANDS)


def test_help_of_a_command_is_that_of_the_command_and_an_unknown_one_has_status_2(capsys):
    with pytest.raises(SystemExit) as left:
        main(["help", "new"])
    assert left.value.code == 0 and capsys.readouterr().out.startswith("usage: grpo-roc new ")
    for words, message in (
        (["help", "trian"], "did you mean 'train'?"),
        (["trian", "toy.yaml"], "did you mean 'train'?"),
        (["xyz"], "`grpo-roc help` lists all commands"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_the_help_imports_nothing_heavy():
    code = "import sys; from grpo_roc_jax.__main__ import main; main([]); "
    code += "sys.exit(bool({'jax', 'numpy', 'pyarrow', 'matplotlib', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_every_command_is_a_module_with_main():
    for command in COMMANDS:
        path = ROOT / "grpo_roc_jax" / f"{module_of(command).replace('.', '/')}.py"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
        assert len(function.args.args) == 1 and ast.unparse(function.returns) == "int"


def test_words_after_the_command_are_passed_on_with_its_status(tmp_path, capsys):
    assert main(["run-tools", str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl" in capsys.readouterr().err
    assert main(["check-reward", "answer"]) == 0
    assert "right answer       reward 1 (correct)" in capsys.readouterr().out


def test_modules_of_the_working_directory_are_found(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def zero(problem, trajectories):\n    return [0.0] * len(trajectories)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    assert main(["check-reward", "my_rewards:zero"]) == 0


def test_the_version_is_written_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" in project["dynamic"] and "version" not in project
    assert f"## [{grpo_roc_jax.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
