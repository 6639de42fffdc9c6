"""What benchmarks count, and the files that they write when a part fails."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_long_tail, bench_stream, on_device
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.lora import LowRank
from grpo_roc_jax.record.trace import TraceWriter, eval_records
from tests.helpers.samples import make_group


@pytest.fixture
def script(monkeypatch):
    """Imports a benchmark that names others as one that is started does."""
    monkeypatch.syspath_prepend(Path(bench_long_tail.__file__).parent)
    return importlib.import_module


def test_an_evaluation_is_no_training_step(tmp_path):
    """It has the number of the step that it follows."""
    group, writer = make_group(1, 4), TraceWriter(tmp_path)
    records = [replace(record, advantages=record.trajectory.logprobs) for record in eval_records(2, [group])]
    for step, kind in ((1, "step"), (2, "step"), (2, "eval")):
        assert writer.write(step, records, kind)
    (tmp_path / "summary.json").write_text("{}")
    assert [len(groups) for groups in bench_long_tail.steps_of(tmp_path)] == [1, 1]
    assert bench_long_tail.partial_rows(tmp_path)["trained"] == 2 * group.size


def test_frozen_matrices_have_no_gradient(script):
    """By hand: 2 layers of q and o 8 x 8, k and v 8 x 4, three of 8 x 16, and an unembedding of 8 x 32."""
    model = ModelConfig(d_model=8, layers=2, heads=2, kv_heads=1, head_dim=4, d_ff=16, vocab_size=32)
    useful, lengths = script("bench_update").useful_flops, np.array([3])
    matrices, pairs = 2 * (2 * 64 + 2 * 32 + 3 * 128) + 256, 12 * 2 * 8 * 6
    assert useful(model, lengths) == 6 * matrices * 3 + pairs
    adapter = 2 * 5 * (8 + 8)
    assert useful(model, lengths, LowRank(rank=5, targets=("q_proj",))) == (4 * matrices + 6 * adapter) * 3 + pairs


def test_runs_of_the_file_are_not_repeated(tmp_path, monkeypatch, capsys):
    """Stopped in the third of four runs, so that two are left. Lag 1 gains 1 with one seed, 3 with the other."""
    ran = []

    def one_run(config, overlap):
        if len(ran) == 2 and stops:
            raise KeyboardInterrupt
        lag = config.rollout.step_limit.lag
        ran.append((config.seed, lag))
        return {"steps_per_s": 1.0 + lag, "late_reward": config.seed + lag * (1.0 + 2 * config.seed)}

    monkeypatch.setattr(bench_stream, "one_run", one_run)
    rows = tmp_path / "rows.jsonl"
    words = ["bench_stream.py", "--steps=2", "--seeds", "0", "1", "--lags", "0", "1", f"--rows={rows}"]
    for stops in (True, False, False):
        monkeypatch.setattr(sys, "argv", words)
        try:
            bench_stream.main()
        except KeyboardInterrupt:
            assert stops
    assert ran == [(0, 0), (0, 1), (1, 0), (1, 1)] and len(rows.read_text().splitlines()) == 4
    *_, line, summary = capsys.readouterr().out.splitlines()
    assert line == "reward at lag 1 less lag 0: +2.0000, +1.0000 to +3.0000"
    assert json.loads(summary)["gain"] == {"1": {"mean": 2.0, "low": 1.0, "high": 3.0}}
    monkeypatch.setattr(sys, "argv", [*words, "--optim.lr=3e-3"])
    bench_stream.main()
    assert len(ran) == 8, "other settings are other runs"


ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_all_parts_of_the_script_for_a_new_device_run_on_a_cpu(tmp_path):
    out = tmp_path / "cpu"
    command = [sys.executable, "-m", "benchmarks.on_device", "--tiny", "--out", str(out)]
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report, page = json.loads((tmp_path / "cpu.json").read_text()), (tmp_path / "cpu.md").read_text()
    assert list(report["parts"]) == ["train", "doctor", "kernels", "plan", "beside"]
    assert all(f"## {name} (" in page for name in report["parts"]) and "failed" not in page
    assert [row["step"] for row in report["parts"]["train"]["result"]] == [1, 2]
    means = report["parts"]["beside"]["result"]["means"]
    assert means["time/update_s"] > 0 and means["rollout/tokens_per_s"] > 0
    assert report["device"]["platform"] == "cpu" and report["versions"]["jax"]


def test_kernels_equal_the_reference():
    report = on_device.kernels(tiny=True)
    assert report["paths"] and all(path["equal"] for path in report["paths"].values())


def test_a_part_that_fails_is_named_and_stops_no_other(tmp_path, monkeypatch, capsys):
    def broken(*given):
        raise RuntimeError("no such device")

    monkeypatch.setattr(on_device, "trained", broken)
    monkeypatch.setattr(on_device, "kernels", lambda tiny: {"dtype": "float32", "length": 1, "paths": {}})
    assert on_device.main(["--tiny", "--out", str(tmp_path / "it")]) == 1
    assert "failed: train, beside" in capsys.readouterr().out
    report = json.loads((tmp_path / "it.json").read_text())
    assert "no such device" in report["parts"]["train"]["error"] and "result" in report["parts"]["doctor"]
    assert "no such device" in (tmp_path / "it.md").read_text()
