"""The pages of faults and promises name tests that exist; every point of injection is in the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from grpo_roc_jax.process.points import POINTS, VALUES
from tests.conftest import HERE, NAMED_TEST, fault_rows
from tests.helpers.contrib import HAS_CONTRIB
from tests.helpers.parts import part_of

PACKAGE = HERE.parent / "grpo_roc_jax"


@cache
def names_in(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("page", ["faults.md", "promises.md"])
def test_every_test_that_a_page_names_exists(page):
    text = (HERE.parent / "docs" / page).read_text(encoding="utf-8")
    named = NAMED_TEST.findall(text)
    assert len(named) > 20 and text.count("::") == len(named)
    here = [pair for pair in named if HAS_CONTRIB or not pair[0].startswith("contrib/")]
    assert not [f"{file}::{name}" for file, name in here if name not in names_in(HERE / file)]


def test_the_table_has_every_fault_and_a_rotation_covers_it():
    rows = fault_rows()
    names = [row.split("|")[1].strip() for row in rows]
    assert names == [f"F{i}" for i in range(1, 49)] + [f"A{i}" for i in range(1, 10)]
    assert sorted(row for part in range(4) for row in part_of(rows, f"{part}/4")) == sorted(rows)


def test_every_point_is_in_the_code_and_in_the_list():
    code = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    points, values = (set(re.findall(rf"{name}\(\s*\"([a-z.]+)\"", code)) for name in ("reach", "spoiled"))
    assert values == VALUES.keys()
    points |= {f"{name}.memory" for name in re.findall(r"(?:halvings|memory)\.run\(\"(\w+)\"", code)}
    assert points | values == POINTS.keys()


def test_points_of_the_table_exist():
    named = re.findall(r"`([a-z]+\.[a-z]+)=\w+", "".join(fault_rows()))
    assert len(named) > 10 and set(named) <= POINTS.keys()
