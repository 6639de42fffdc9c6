"""Problem sets by hub id: a folder in the form of the hub stands for one, or a hub on loopback."""

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.hub import load_hub
from grpo_roc_jax.data.pipeline import make_problem_stream
from tests.helpers.fake_hub import COMMIT, fake_hub

if not importlib.util.find_spec("datasets"):  # which takes a second to import
    pytest.skip("datasets is not installed", allow_module_level=True)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "sums").mkdir()
    for split, rows in (("train", [("2+3", "5"), ("1+1", "2")]), ("test", [("4+4", "8")])):
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows]
        (tmp_path / "sums" / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "sums"


def test_rows_of_a_commit_become_problems(folder):
    problems, report = load_hub(f"hub:{folder}@{COMMIT}")
    assert [(p.prompt, p.answer, p.source) for p in problems] == [("2+3", "5", "sums"), ("1+1", "2", "sums")]
    assert f"@{COMMIT}::train: 2 problems of 2 rows" in str(report)
    assert [p.prompt for p in load_hub(f"hub:{folder}@{COMMIT}::test")[0]] == ["4+4"]


def test_a_branch_is_looked_up_once_and_its_commit_recorded(folder, monkeypatch):
    revisions = []

    def info(self, name, revision):
        revisions.append(revision)
        return SimpleNamespace(sha=COMMIT)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    stream = make_problem_stream(DataConfig(sources=(f"hub:{folder}@main",)), problems=2, seed=0)
    assert {problem.answer for problem in next(stream)} == {"5", "2"} and revisions == ["main"]
    assert f"@{COMMIT}" in stream.notes[0]


LOAD = """
import sys
from grpo_roc_jax.data.hub import load_hub
problems, report = load_hub(sys.argv[1])
print([(p.prompt, p.answer, p.source) for p in problems], report)
"""


def test_a_data_set_of_a_hub_is_read_at_its_commit_and_afterwards_without_a_network(folder, tmp_path):
    """In processes of their own, since the hub's address is read when its package is imported."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    def load(source, **variables):
        # Only what is said here: other tests and the machine set variables of the hub, HF_HUB_OFFLINE among them.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment = {**inherited, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "*", **variables}
        done = subprocess.run([sys.executable, "-c", LOAD, source], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with fake_hub("owner/sums", files) as (address, paths):
        online = load("hub:owner/sums@main", HF_ENDPOINT=address)
    rows = "[('2+3', '5', 'sums'), ('1+1', '2', 'sums')]"
    assert online.startswith(rows) and f"hub:owner/sums@{COMMIT}::train: 2 problems of 2 rows" in online
    fetched = [path for path in paths if "/resolve/" in path]
    assert fetched and all(f"/resolve/{COMMIT}/" in path for path in fetched), "files of no branch"
    assert load(f"hub:owner/sums@{COMMIT}", HF_ENDPOINT=address, HF_HUB_OFFLINE="1") == online


@pytest.mark.parametrize(
    ("source", "message"),
    [("hub:owner/name", "must be hub:OWNER/NAME@REVISION"), (f"hub:/no/such/folder@{COMMIT}", "no/such/folder")],
)
def test_what_cannot_be_loaded_is_said(source, message, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=message):
        load_hub(source)
