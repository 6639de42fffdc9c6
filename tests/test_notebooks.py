"""The notebooks, executed top to bottom with a small setting."""

import os
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
SMALL = "--steps=2 --sft.steps=4 --data.eval_problems=6 --group.problems=2 --group.size=4"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed; pip install -e '.[dev]'")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed; pip install -e '.[dev]'")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed; pip install -e '.[dev]'")
    monkeypatch.setenv("QUICKSTART_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("QUICKSTART_ARGS", SMALL)
    monkeypatch.setenv("JAX_PLATFORMS", os.environ.get("JAX_PLATFORMS", "cpu"))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(path.parent)}}).execute()
    printed = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    assert not [o for o in printed if o.output_type == "error"]
    assert any("image/png" in o.get("data", {}) for o in printed)
    assert (tmp_path / "run" / "summary.json").exists()


def test_there_is_a_notebook_to_run():
    assert NOTEBOOKS
