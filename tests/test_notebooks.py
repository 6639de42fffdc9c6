"""The notebooks: their form and their stored outputs; each runs from top to bottom."""

import json
import os
import re
from itertools import groupby
from pathlib import Path

import pytest

from grpo_roc_jax.__main__ import main as grpo_roc
from grpo_roc_jax.settings.callables import import_file
from tests.helpers.parts import part_of

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MACHINE = re.compile(r"/work\b|/tmp\b|/root\b|/home\b|/usr/|/opt/|/mnt\b|/var/|site-packages")
FEW = {"STEPS = 10 ": "STEPS = 1 ", "SUPERVISED = 10": "SUPERVISED = 2"}
SHORT = {"03_your_data_and_a_published_model": FEW | {"--data.eval_problems=100": "--data.eval_problems=8"}}
"""Notebook -> what is changed so that its run, of 12 minutes on two cores, takes two."""
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str = "code") -> list[dict]:
    """The cells of one kind; their sources and printed lines are whole texts."""
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def kinds(outputs: list) -> list[str]:
    """What each output is: a stream, or the types of its data. Warnings come and go."""
    names = [some.get("name") or ",".join(sorted(some.get("data", {}))) or some["output_type"] for some in outputs]
    return [kind for kind, _ in groupby(kind for kind in names if kind != "stderr")]


@each
def test_the_stored_outputs_are_those_of_one_run_and_name_no_machine(path):
    code = cells(path)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run notebooks/build.py"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs and not [output for output in outputs if output["output_type"] == "error"]
    texts = [["".join(output.get("text", "")), output.get("data", {}).get("text/plain", "")] for output in outputs]
    assert not MACHINE.findall(str(texts) + json.dumps([source(cell) for cell in code]))


@each
def test_the_stored_plans_are_those_that_plan_prints(path, capsys):
    """`python notebooks/build.py --plans` renews them."""
    for cell in cells(path):
        if 'grpo_roc(["plan"' in source(cell):
            exec(source(cell), {"grpo_roc": grpo_roc})
            assert capsys.readouterr().out == "".join(cell["outputs"][0]["text"])


@pytest.mark.slow
@pytest.mark.parametrize("path", part_of(NOTEBOOKS), ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, tmp_path_factory, monkeypatch):
    """Each cell prints or draws what is stored, in kind. The policy of the supervised stage is made once for all."""
    folder = tmp_path_factory.getbasetemp() / "notebooks"
    folder.mkdir(exist_ok=True)
    for name in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(name, reason=f"{name} is not installed; pip install -e '.[dev]'")
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "cpu"))
    run = import_file(str(ROOT / "notebooks" / "build.py")).executed(path, folder, SHORT.get(path.stem, {}))
    results = [cell.outputs for cell in run.cells if cell.cell_type == "code"]
    assert [kinds(outputs) for outputs in results] == [kinds(cell["outputs"]) for cell in cells(path)]
