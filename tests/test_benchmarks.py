"""What benchmarks count, and the files that they write when a part fails."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench_long_tail
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


def test_a_part_that_fails_is_in_the_file(script, monkeypatch, tmp_path):
    gpu_rollout, out = script("gpu_rollout"), tmp_path / "rows.json"
    monkeypatch.setattr(gpu_rollout, "check", lambda: {}["greedy_tokens"])
    monkeypatch.setattr(sys, "argv", ["gpu_rollout.py", "--toy", "--parts", "check", f"--out={out}"])
    with pytest.raises(SystemExit, match="True"):
        gpu_rollout.main()
    report = json.loads(out.read_text())
    assert report["check"] == [{"failed": "KeyError: 'greedy_tokens'"}] and report["about"]["copy_GBs"] > 0
