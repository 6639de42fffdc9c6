"""Problem sets by hub id: a folder in the form of the hub stands for one."""

import importlib.util
import json
from types import SimpleNamespace

import pytest

from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.hub import load_hub
from grpo_roc_jax.data.pipeline import make_problem_stream

if not importlib.util.find_spec("datasets"):  # which takes a second to import
    pytest.skip("datasets is not installed", allow_module_level=True)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "sums").mkdir()
    for split, rows in (("train", [("2+3", "5"), ("1+1", "2")]), ("test", [("4+4", "8")])):
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in rows]
        (tmp_path / "sums" / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "sums"


def test_rows_of_a_commit_become_problems_and_that_of_a_branch_is_looked_up_once(folder, monkeypatch):
    problems, report = load_hub(f"hub:{folder}@{COMMIT}")
    assert [(p.prompt, p.answer, p.source) for p in problems] == [("2+3", "5", "sums"), ("1+1", "2", "sums")]
    assert f"@{COMMIT}::train: 2 problems of 2 rows" in str(report)
    assert [p.prompt for p in load_hub(f"hub:{folder}@{COMMIT}::test")[0]] == ["4+4"]
    revisions = []

    def info(self, name, revision):
        revisions.append(revision)
        return SimpleNamespace(sha=COMMIT)

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    stream = make_problem_stream(DataConfig(sources=(f"hub:{folder}@main",)), problems=2, seed=0)
    assert {problem.answer for problem in next(stream)} == {"5", "2"} and revisions == ["main"]
    assert f"@{COMMIT}" in stream.notes[0]


def test_what_cannot_be_loaded_is_said(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="must be hub:OWNER/NAME@REVISION"):
        load_hub("hub:owner/name")
    with pytest.raises(ValueError, match="no/such/folder"):
        load_hub(f"hub:/no/such/folder@{COMMIT}")
