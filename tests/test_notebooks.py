"""The notebooks: their form and their stored outputs; each runs from top to bottom."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import venv
from itertools import groupby
from pathlib import Path

import pytest

from grpo_roc_jax.__main__ import main as grpo_roc
from tests.helpers.parts import part_of

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MACHINE = re.compile(r"/work\b|/tmp\b|/root\b|/home\b|/usr/|/opt/|/mnt\b|/var/|site-packages")
SHORT = {
    "03_your_data_and_a_published_model": {
        "STEPS = 10 ": "STEPS = 1 ",
        "SUPERVISED = 10": "SUPERVISED = 2",
        "--data.eval_problems=100": "--data.eval_problems=8",
    }
}
"""Notebook -> what is changed so that its run, of 12 minutes on two cores, takes two."""
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str = "code") -> list[dict]:
    """The cells of one kind; their sources and printed lines are whole texts."""
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def plans(path: Path) -> list[dict]:
    """The cells that print a plan."""
    return [cell for cell in cells(path) if 'grpo_roc(["plan"' in source(cell)]


def kinds(outputs: list) -> list[str]:
    """What each output is: a stream, or the types of its data. Warnings come and go."""
    names = [
        output.get("name") or ",".join(sorted(output.get("data", {}))) or output["output_type"] for output in outputs
    ]
    return [kind for kind, _ in groupby(kind for kind in names if kind != "stderr")]


def test_there_is_a_notebook_for_each_question_and_each_is_listed():
    page = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert not [path.name for path in NOTEBOOKS if f"(../notebooks/{path.name})" not in page]
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(1, 9)]


@each
def test_a_notebook_begins_with_installation_and_what_to_expect(path):
    notebook, code = json.loads(path.read_text(encoding="utf-8")), cells(path)
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    title = source(notebook["cells"][0])
    assert title.startswith(f"# {path.stem[:2]} ") and "badge" not in title  # there is no address to open
    assert source(code[0]) == source(cells(NOTEBOOKS[0])[0]) and ".whl" in source(code[0])
    expected = source(cells(path, "markdown")[1])
    assert all(f"**{word}**" in expected for word in ("Device", "Time", "Prediction"))
    assert all(word in "".join(code[1]["outputs"][0]["text"]) for word in ("grpo_roc_jax", "two CPU cores"))
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", "".join(map(source, cells(path, "markdown"))))
    assert not [link for link in links if not (path.parent / link).exists()]


@each
def test_the_stored_outputs_are_those_of_one_run_and_name_no_machine(path):
    code = cells(path)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run notebooks/build.py"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    texts = "".join(
        "".join(output.get("text", "")) + str(output.get("data", {}).get("text/plain", "")) for output in outputs
    )
    assert len(texts) > 500
    assert not MACHINE.findall(texts + json.dumps([source(cell) for cell in code]))
    assert os.uname().nodename not in texts


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if plans(path)], ids=lambda path: path.stem)
def test_the_stored_plans_are_those_that_plan_prints(path, capsys):
    """`python notebooks/build.py --plans` renews them."""
    for cell in plans(path):
        exec(source(cell), {"grpo_roc": grpo_roc})
        assert capsys.readouterr().out == "".join(cell["outputs"][0]["text"])


def test_the_first_cell_installs_a_wheel_from_the_folder_of_the_notebook(tmp_path, monkeypatch):
    cell, commands = source(cells(NOTEBOOKS[0])[0]), []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    with pytest.raises(SystemExit, match="pip wheel"):
        exec(cell, {})
    (tmp_path / "grpo_roc_jax-0.1.0-py3-none-any.whl").touch()
    exec(cell, {})
    assert [command[1:4] for command in commands] == [["-m", "pip", "install"]]
    assert commands[0][-1].startswith(str(tmp_path / "grpo_roc_jax-0.1.0-py3-none-any.whl"))
    for given, spec in (("other.whl", "other.whl"), ("git+https://host/repository", "@ git+https://host/repository")):
        exec(cell.replace('SOURCE = ""', f"SOURCE = {given!r}"), {})
        assert spec in commands[-1][-1] and "0.1.0" not in commands[-1][-1]


@pytest.mark.slow
def test_the_first_cell_runs_in_an_empty_environment(tmp_path):
    """Really: a wheel is built, and the cell with its name in SOURCE installs it; needs a package index."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("grpo_roc_jax-*.whl")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    cell = source(cells(NOTEBOOKS[0])[0]).replace('SOURCE = ""', f"SOURCE = {str(wheel)!r}")
    used = "\nimport grpo_roc_jax as g\nprint(g.__file__, g.read_config('toy.yaml').name)"
    (tmp_path / "elsewhere").mkdir()
    venv.create(tmp_path / "env", with_pip=True)
    words = [tmp_path / "env" / "bin" / "python", "-c", cell + used]
    done = subprocess.run(words, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "env") in done.stdout and done.stdout.endswith(" toy\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where notebooks run; the policy of the supervised stage is made there once."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.slow
@pytest.mark.parametrize("path", part_of(NOTEBOOKS), ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, folder, monkeypatch):
    """Each cell prints or draws what is stored, in kind."""
    for name in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(name, reason=f"{name} is not installed; pip install -e '.[dev]'")
    spec = importlib.util.spec_from_file_location("build_notebooks", ROOT / "notebooks" / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "cpu"))
    run = build.executed(path, folder, SHORT.get(path.stem, {}))
    results = [cell.outputs for cell in run.cells if cell.cell_type == "code"]
    assert [kinds(outputs) for outputs in results] == [kinds(cell["outputs"]) for cell in cells(path)]
