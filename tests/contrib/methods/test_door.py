"""What the core knows of further methods: nothing but what they declare."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.methods_table import SKETCH, SKETCH_MARKS, load_methods, read_method, sketch_table, with_table
from grpo_roc_jax.contrib.methods import hints
from grpo_roc_jax.settings.cli import CONFIG_DIR, CONTRIB_METHODS, file_layers, find_config
from grpo_roc_jax.types import CONDITIONS, Condition, condition_kind, traits_of
from tests import test_layering as layering

ROOT = Path(__file__).resolve().parents[3]
ON_DEVICE = {"contrib.methods.tw_grpo", "contrib.methods.vespo"}
"""A surrogate, and a method with passes of its own."""


def test_recipes_beside_methods_are_named_like_those_of_the_core(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = CONTRIB_METHODS / "hill.yaml"
    names = ("configs/methods/hill.yaml", "methods/hill.yaml", "methods/hill")
    assert [find_config(name) for name in names] == [path] * 3
    monkeypatch.chdir(CONTRIB_METHODS)  # by its path, it finds its base in the configs directory too
    assert [next(iter(file_layers(Path(at)))).name for at in ("hill.yaml", path)] == ["toy.yaml"] * 2
    assert not {p.name for p in CONTRIB_METHODS.glob("*.yaml")} & {p.name for p in (CONFIG_DIR / "methods").glob("*")}


def test_no_module_outside_names_a_file_of_the_folder():
    names = {path.stem for path in CONTRIB_METHODS.glob("*.py")} - {"__init__"}
    named = re.compile(rf"contrib[./]methods[./:](?:{'|'.join(names)})\b")
    package = ROOT / "grpo_roc_jax"
    others = [path for path in package.rglob("*.py") if CONTRIB_METHODS not in path.parents]
    assert not [path for path in others if named.search(path.read_text(encoding="utf-8"))]


def test_its_rewards_are_known_without_the_configuration_of_a_run():
    config = "g.RewardConfig(functions=['ranking', 'screening'])"
    code = f"import grpo_roc_jax as g; print(*g.make_scorer({config}).functions)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ranking", "screening"]


def test_a_condition_says_what_other_stages_must_know():
    assert traits_of(hints.HINT).helped and traits_of(hints.HINT).moves and not traits_of(hints.WRITER).attempt
    assert traits_of("of another version") == traits_of("")
    assert Condition.parse("of another version:3") == Condition("of another version", 3)
    assert condition_kind("hint", helped=True, moves=True, optional=True) == "hint"
    before = dict(CONDITIONS)
    with pytest.raises(ValueError, match=r"condition 'hint' is .* choose another name"):
        condition_kind("hint", attempt=False)
    assert before == CONDITIONS


def test_sketches_are_told_and_counted_apart():
    methods = load_methods()
    sketches = [m for m in methods.values() if m.stand_in]
    assert all(m.title.endswith(SKETCH) and m.as_in_paper for m in sketches)
    words = re.compile(rf"\b{len(methods) - len(sketches)}\b[^|.]*\b{len(sketches)} (?:are )?sketches")
    for page in ("README.md", "docs/index.md", "docs/comparison.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert words.search(text), page
        counts = {int(count) for count in re.findall(r"(\d+)\**(?: of the)? recipes", text)}
        assert counts <= {len(methods) - len(sketches)}, f"{page}: sketches are counted apart"
    page = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    assert f"Of the {len(methods)} recipes, {len(methods) - len(sketches)} " in page
    assert f"The other {len(sketches)} are sketches" in page
    assert with_table(page, sketch_table(), *SKETCH_MARKS) == page, "python docs/methods_table.py docs/methods.md"


ADMITS = re.compile(
    r"stands? in for|stand-in|not available|not included|recollection|this project|not from the paper|was not verified",
    re.IGNORECASE,
)


def test_a_method_that_says_it_replaces_a_part_of_its_paper_is_a_sketch():
    """In its module or in the comments of its recipe, whatever follows in the table."""
    methods = load_methods()
    texts = {
        name: " ".join(line for line in m.path.read_text().splitlines() if line.startswith("#"))
        for name, m in methods.items()
    }
    for path in CONTRIB_METHODS.glob("*.py"):
        if path.stem in texts:
            texts[path.stem] += ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    admitted = {name for name, text in texts.items() if ADMITS.search(text)}
    assert len(admitted) > 15
    assert not [name for name in admitted if not methods[name].stand_in]


@pytest.mark.parametrize("line", ["# stand-in: a table for the model", "# as in the paper: the sum", ""])
def test_a_sketch_says_what_it_is_in_three_places(tmp_path, line):
    path = tmp_path / "mine.yaml"
    title = "# Mine" if line else f"# Mine{SKETCH}"
    path.write_text(f"{title}, arXiv:1\n# axes: a\n# formula: x\n# state: none\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="write all three, or none"):
        read_method(path)


def test_methods_compute_on_the_host_but_for_surrogates():
    assert layering.with_device_libraries("contrib.methods.") == ON_DEVICE
