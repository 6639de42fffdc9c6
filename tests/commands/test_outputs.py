"""No command writes its results over a file that it reads."""

import os
from pathlib import Path

import pytest

from grpo_roc_jax.commands import difficulty, evaluate, run_tools, view
from grpo_roc_jax.config import read_config
from grpo_roc_jax.data import gsm8k_traces
from grpo_roc_jax.process.outputs import output_file, write_output
from grpo_roc_jax.record.run_dir import choose_run_dir
from grpo_roc_jax.view.curves import load_runs

COMMANDS = {
    "run-tools": (run_tools.main, ["in.jsonl"]),
    "difficulty": (difficulty.main, ["policy", "--data", "world:gcd:1", "own=in.jsonl"]),
    "gsm8k_traces": (gsm8k_traces.main, ["in.jsonl"]),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("link", [None, os.symlink, os.link], ids=["the file", "a link to it", "its other name"])
def test_a_file_that_is_read_is_not_written(command, link, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"question": "1+1?", "answer": "#### 2", "code": "1"}\n')
    before = (tmp_path / "in.jsonl").read_bytes()
    if link:
        link("in.jsonl", "out.jsonl")
    out = "out.jsonl" if link else "./in.jsonl"
    main, words = COMMANDS[command]
    assert main([*words, "--out", out]) == 2
    assert f"--out {Path(out)} would overwrite in.jsonl, which is read" in capsys.readouterr().err
    assert (tmp_path / "in.jsonl").read_bytes() == before


def test_results_that_cannot_be_written_are_one_line(tmp_path):
    for name, reason in (("/dev/full", "No space left"), (tmp_path / "none" / "x", "No such file")):
        with pytest.raises(ValueError, match=f"--out {name} could not be written: {reason}"):
            write_output("--out", Path(name), "text")


def test_the_home_directory_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    """The shell expands none in `--out=~/x`. No folder of that name is made."""
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    for folder in ("runs/toy/trajectories", "configs"):
        (home / folder).mkdir(parents=True)
    (home / "runs/toy/metrics.jsonl").write_text('{"step": 1}\n')
    (home / "configs/low.yaml").write_text("seed: 7\n")
    (home / "configs/high.yaml").write_text("base: ~/configs/low.yaml\n")
    assert output_file("--out", "~/new/x.json") == home / "new/x.json"
    assert choose_run_dir("n", "~/runs/new", "never") == home / "runs/new"
    assert evaluate.folder_of(evaluate.EvaluateConfig("p", keep="~/kept")) == home / "kept"
    assert read_config("~/configs/high.yaml").seed == 7
    assert [run.path for run in load_runs(["~/runs/toy", "~/runs/t*", "a=~/runs/toy"])] == [home / "runs/toy"]
    assert view.opened("~/runs/toy") == str(home / "runs/toy") and not (tmp_path / "~").exists()


def test_other_files_are_written(tmp_path):
    (tmp_path / "in.jsonl").touch()
    out = output_file("--out", tmp_path / "new" / "out.jsonl", [tmp_path / "in.jsonl", "world:gcd:1", tmp_path, "-"])
    assert out == tmp_path / "new" / "out.jsonl" and not out.exists()
    assert output_file("--out", os.devnull, [os.devnull]), "no regular file"
