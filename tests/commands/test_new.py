"""`grpo-roc new`: the project that it writes passes its own tests and trains."""

import importlib
import sys
from pathlib import Path

import pytest

import grpo_roc_jax as g
from grpo_roc_jax.__main__ import main
from tests.test_readme import TINY

MODULES = ("tools", "rewards", "test_project")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A new project, which is the working directory and on the path."""
    assert main(["new", str(tmp_path / "mine")]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield Path.cwd()
    for name in MODULES:
        sys.modules.pop(name, None)


def test_a_new_project_passes_its_tests(project, capsys, monkeypatch):
    tests = importlib.import_module("test_project")
    for folder in (project.parent, project):
        monkeypatch.chdir(folder)
        for name in dir(tests):
            if name.startswith("test_"):
                getattr(tests, name)()
    assert main(["check-reward", "rewards.py:asked"]) == 0
    assert main(["check-data", "data/demonstrations.jsonl", "config.yaml"]) == 0
    assert "4000 problems of 4000 rows" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_new_project_takes_two_steps(project):
    settings = [*TINY, "--rollout.max_response_tokens=64", "--batch.row_length=256", "--rollout.slots=4"]
    assert g.train_policy(g.read_config("config.yaml", *settings))["steps"] == 2


def test_a_directory_that_holds_something_is_left_alone_and_the_next_command_can_be_pasted(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert main(["new", str(tmp_path)]) == 2
    assert "is not an empty directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert main(["new", str(tmp_path / "my first")]) == 0
    assert f"next: cd '{tmp_path}/my first' && grpo-roc train config.yaml" in capsys.readouterr().out
