"""The documentation: every link and anchor exists, pictures and generated pages are current, its code runs."""

import ast
import builtins
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml

from grpo_roc_jax.config import Config
from grpo_roc_jax.method.roc import error_penalty, format_penalty, quota
from grpo_roc_jax.process.points import POINTS, VALUES
from grpo_roc_jax.settings.layers import known_keys
from grpo_roc_jax.settings.options import fields_of
from tests.conftest import HERE, NAMED_TEST, fault_rows
from tests.helpers.contrib import HAS_CONTRIB, with_contrib
from tests.helpers.parts import part_of

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(DOCS.rglob("*.md"))]
PAGES += sorted(ROOT.glob("examples/**/*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)


@cache
def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


@cache
def anchors(path: Path) -> frozenset[str]:
    """What a link to a part of a page may end in: its headings as mkdocs and GitHub write them."""
    headings = re.findall(r"^#+ +(.+)$", prose(path), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in headings]
    return frozenset(re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", text.lower()).strip()) for text in plain)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_and_anchor_of_a_page_exists(path):
    missing = []
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", prose(path))):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", target):
            continue
        file = (path.parent / target).resolve() if target else path
        if not HAS_CONTRIB and "contrib" in file.parts:
            continue
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            missing.append(link)
    assert not missing


def script(name: str):
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@with_contrib
def test_every_test_file_that_ci_a_page_or_a_module_names_exists():
    modules = (ROOT / "grpo_roc_jax").rglob("*.py")
    texts = [path.read_text(encoding="utf-8") for path in (*sorted((ROOT / ".ci").iterdir()), *PAGES, *modules)]
    names = sorted({name for text in texts for name in re.findall(r"\btests/[\w/]+\.py\b", text)})
    assert len(names) > 20 and [name for name in names if not (ROOT / name).is_file()] == []


def test_the_pictures_are_what_their_script_draws():
    for name, content in script("draw").files().items():
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == content, "run `python docs/draw.py`"


OPENED = re.compile(r"^ *```(.*)$", re.MULTILINE)
LANGUAGES = ("sh", "bash", "python", "python run", "yaml", "json", "console", "text")
"""A block of `text` is a diagram or what a file contains; what a command printed is in a block of `console`, which
`docs/record.py` records with its command."""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_output_is_recorded_with_its_command(path):
    """A block without a language could be an output without its command; so could lines of a run in another one."""
    text = path.read_text(encoding="utf-8")
    opened = OPENED.findall(text)[::2]
    assert set(opened) <= set(LANGUAGES)
    blocks = re.findall(r"^ *```(.*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    others = [block for language, block in blocks if language != "console"]
    printed = re.compile(
        r"^(step +\d+  reward|sft +\d+  nll|plan: |problem: |files: |configuration: |stopped: )", re.MULTILINE
    )
    assert not [block for block in others if printed.search(block)]


def test_the_group_of_the_first_picture_obeys_the_selection():
    """Its quotas, penalties and ranks are those of the method, and its command stands beside it on every page."""
    record = json.loads((DOCS / "images" / "group_resampled.json").read_text(encoding="utf-8"))
    rows = record["rollouts"]
    column = {name: np.array([row[name] for row in rows]) for name in ("answers", "well_formed", "turns", "kept")}
    calls = np.array([len(row["calls"]) for row in rows])
    failed = np.array([sum(kind != "ok" for kind in row["calls"]) for row in rows])
    formats = format_penalty(column["answers"], column["well_formed"], column["turns"])
    correct, kept = np.array([row["status"] == "correct" for row in rows]), column["kept"]
    penalties = np.array([row["penalty"] for row in rows])
    np.testing.assert_allclose(penalties[correct], (error_penalty(calls, failed) + formats)[correct])
    counts = [int(part.sum()) for part in (~correct, correct, kept & ~correct, kept & correct)]
    assert quota(*counts[:2], 8) == tuple(counts[2:])
    assert penalties[correct & kept].max() <= penalties[correct & ~kept].min()
    assert {row["why"] for row in rows} == {"kept", "penalty", "quota"} and len(rows) == 16
    for page in (ROOT / "README.md", DOCS / "index.md", DOCS / "method.md"):
        assert record["command"] in re.sub(r" *\\\n +", " ", page.read_text(encoding="utf-8")), page.name


def test_every_picture_of_a_page_has_a_record():
    """It is drawn by `docs/draw.py`, from rows under benchmarks/results, or taken of the page of a recorded run."""
    drawn, results = set(script("draw").files()), ROOT / "benchmarks" / "results"
    shown = (DOCS / "view.md").read_text(encoding="utf-8")
    for path in PAGES:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", re.sub(r"`[^`\n]*`", "", prose(path))):
            file = (path.parent / target).resolve()
            if file.parent == results:
                study = "_".join(file.stem.split("_")[:2])
                assert any(results.glob(f"{study}.json*")), f"{path.name}: {target}"
            elif file.name.startswith("view_"):
                assert path.name == "view.md" and "GRPO_ROC_SCREENSHOTS=docs/images" in shown
            else:
                assert file.name in drawn and file.parent == DOCS / "images", f"{path.name}: {target}"


@with_contrib
@pytest.mark.parametrize(
    "name", ["configuration.md", "api.md", "coming_from.md", pytest.param("memory.md", marks=pytest.mark.slow)]
)
def test_the_generated_pages_are_current(name):
    content = script("reference").PAGES[name]()
    assert (DOCS / name).read_text(encoding="utf-8") == content, "run `python docs/reference.py`"


def test_the_menu_names_every_page_once():
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    entries = [entry for part in menu for entry in part.values()]
    named = [e for e in entries if isinstance(e, str)]
    named += [page for e in entries if not isinstance(e, str) for item in e for page in item.values()]
    assert sorted(named) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")), "edit mkdocs.yml"


OTHER_NAMES = ("faults.md", "serving.md", "configuration.md", "coming_from.md")
"""Pages whose dotted names are points of faults, settings of another command or project, or generated."""


@with_contrib
def test_every_setting_that_a_page_names_exists():
    known, sections = set(known_keys(Config)), set(fields_of(Config))
    unknown = []
    for path in PAGES:
        for code in re.findall(r"`([^`\n]+)`", "" if path.name in OTHER_NAMES else prose(path)):
            for name in re.findall(r"(?<![\w/.])([a-z_]+(?:\.[a-z_]+)+)(?![\w/(:])", code):
                first, second = name.split(".")[:2]
                module = (ROOT / "grpo_roc_jax" / first / f"{second}.py").exists()
                section = any(setting.startswith(f"{name}.") for setting in known)
                if first in sections and not (name in known or section or module or second in ("py", "yaml", "json")):
                    unknown.append(f"{path.name}: {name}")
    assert not unknown


@with_contrib
@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "docs/api.md"])
def test_every_class_that_a_page_names_exists(name):
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "grpo_roc_jax").rglob("*.py"))
    defined = {*dir(builtins), *re.findall(r"^ *class (\w+)", source, re.MULTILINE)}
    defined |= set(re.findall(r"^(\w+) = ", source, re.MULTILINE))
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w*)`", prose(ROOT / name)))
    assert len(named) > 10 and not named - defined


RUN = [
    pytest.param(block, id=f"{path.stem}-{number}")
    for path in PAGES
    for number, block in enumerate(re.findall(r"```python run\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))
]
"""Blocks marked `python run` are executed, each on its own; their assertions must hold."""


@pytest.mark.parametrize("block", RUN)
def test_the_code_of_a_page_runs(block, tmp_path, monkeypatch):
    assert len(RUN) >= 4
    monkeypatch.chdir(tmp_path)
    exec(block, {})


# ---- the pages of faults and promises: tests that they name exist; every point of injection is in the code ---------


@cache
def functions_in(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("page", ["faults.md", "promises.md"])
def test_every_test_that_a_page_names_exists(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    named = NAMED_TEST.findall(text)
    assert len(named) > 20 and text.count("::") == len(named)
    here = [pair for pair in named if HAS_CONTRIB or not pair[0].startswith("contrib/")]
    assert not [f"{file}::{name}" for file, name in here if name not in functions_in(HERE / file)]


def test_the_table_has_every_fault_and_a_rotation_covers_it():
    rows = fault_rows()
    names = [row.split("|")[1].strip() for row in rows]
    assert names == [f"F{i}" for i in range(1, 49)] + [f"A{i}" for i in range(1, 10)]
    assert sorted(row for part in range(4) for row in part_of(rows, f"{part}/4")) == sorted(rows)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 7, 15])
def test_every_part_of_the_slow_tests_of_faults_has_some(part):
    """Else pytest ends CI with exit status 5."""
    command = re.search(r"pytest (-m \"faults and slow\".*)", (ROOT / ".ci/run").read_text(encoding="utf-8"))
    args = [sys.executable, "-m", "pytest", "--collect-only", "-n0", *shlex.split(command[1])]
    env = os.environ | {"TESTS_PART": f"{part}/16", "TESTS_SLICE": "0/1"}
    run = subprocess.run(args, env=env, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


def test_every_point_is_in_the_code_and_in_the_list():
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "grpo_roc_jax").rglob("*.py"))
    points, values = (set(re.findall(rf"{name}\(\s*\"([a-z.]+)\"", code)) for name in ("reach", "spoiled"))
    assert values == VALUES.keys()
    points |= {f"{name}.memory" for name in re.findall(r"(?:halvings|memory)\.run\(\"(\w+)\"", code)}
    assert points | values == POINTS.keys()


def test_points_of_the_table_exist():
    named = re.findall(r"`([a-z]+\.[a-z]+)=\w+", "".join(fault_rows()))
    assert len(named) > 10 and set(named) <= POINTS.keys()
