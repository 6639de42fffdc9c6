"""Runs notebooks from top to bottom and stores their outputs: `python notebooks/build.py [NOTEBOOK.ipynb ...]`.

Edit a notebook in Jupyter or as a file, then run this. They run in one temporary directory: the policy of the
supervised stage is made by the first and used by the others, and no path of the machine is stored.
`tests/test_notebooks.py` runs them by the same function. With `--plans` only the cells that print a plan are run, which
takes seconds.
"""

import io
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import MappingProxyType

import nbclient
import nbformat

from grpo_roc_jax.__main__ import main as grpo_roc

HERE = Path(__file__).resolve().parent
NOTEBOOKS = sorted(HERE.glob("[0-9]*.ipynb"))
COLAB = "https://colab.research.google.com/"
BADGE = f"[![Open in Colab]({COLAB}assets/colab-badge.svg)]({COLAB})"
"""Opens Colab's dialog, where a notebook is uploaded; the project has no public address that a link could name."""


def executed(
    path: Path, folder: Path, changes: Mapping[str, str] = MappingProxyType({}), timeout_s: float = 3600
) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in `folder`.

    Args:
        path: The notebook.
        folder: Where it runs.
        changes: Texts of cells that are replaced before it runs, each of which must occur.
        timeout_s: Of one cell, in seconds.

    Raises:
        CellExecutionError: A cell failed.
        ValueError: A text to replace is not there.
    """
    notebook = nbformat.read(path, as_version=4)
    for old, new in changes.items():
        if not any(old in cell.source for cell in notebook.cells):
            raise ValueError(f"{path.name} has no {old!r}")
        for cell in notebook.cells:
            cell.source = cell.source.replace(old, new)
    nbclient.NotebookClient(notebook, timeout=timeout_s, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined([plain(output) for output in cell.outputs], folder)
    return notebook


def with_plans(path: Path) -> nbformat.NotebookNode:
    """The notebook with new outputs of the cells that print a plan, which need no other cell."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code" and 'grpo_roc(["plan"' in cell.source:
            with redirect_stdout(io.StringIO()) as printed:
                exec(cell.source, {"grpo_roc": grpo_roc})
            cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=printed.getvalue())]
    return notebook


def plain(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """What rich shows as a page is kept as text, and a figure without its description."""
    data = output.get("data", {})
    if "image/png" in data:
        data.pop("text/plain", None)
    elif "text/html" in data and "text/plain" in data:
        text = re.sub(r"\x1b\[[0-9;]*m", "", data["text/plain"])
        return nbformat.v4.new_output("stream", name="stdout", text=text.rstrip("\n") + "\n")
    return output


def joined(outputs: list[nbformat.NotebookNode], folder: Path) -> list[nbformat.NotebookNode]:
    """Streams that follow each other as one; the folders of this machine are left out."""
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream":
            output.text = output.text.replace(f"{folder}/", "").replace(str(Path.home()), "~")
            if found and found[-1].output_type == "stream" and found[-1].name == output.name:
                found[-1].text += output.text
                continue
        found.append(output)
    return found


def main(words: list[str]) -> None:
    named = [Path(word).resolve() for word in words if word != "--plans"] or NOTEBOOKS
    with tempfile.TemporaryDirectory() as folder:
        for path in named:
            started = time.perf_counter()
            nbformat.write(with_plans(path) if "--plans" in words else executed(path, Path(folder)), path)
            print(f"{path.name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
