"""Recorded dialogues are cut into states, and a policy is trained by single steps from there (configs/cobalt.yaml)."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from grpo_roc_jax.commands import cut_traces, difficulty, export
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.train import main
from tests.test_methods_run import cut_after
from tests.test_train import numbers

ROOM = ("--rollout.max_turns=1", "--rollout.max_prompt_tokens=176", "--batch.row_length=296")
"""What configs/cobalt.yaml sets."""


def saved_state(run_dir):
    """Parameters and moments after the third step."""
    return jax.tree.leaves(ocp.load(Path(run_dir).absolute() / "checkpoints" / "step_00000003" / "train"))


@pytest.mark.slow
def test_three_steps_from_cut_trajectories_and_an_exact_resume(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ["--data.eval_problems=0", "--log.traces=1"]
    assert main(["--steps=1", "--sft.steps=120", "--run_dir=run", *short]) == 0
    assert cut_traces.main(["run", "--out", "states.jsonl"]) == 0
    assert difficulty.main(["run", "--data", "states.jsonl", "--out", "kept.jsonl", "--samples=4", *ROOM]) == 0
    prompts = {json.loads(line)["prompt"] for line in (tmp_path / "kept.jsonl").read_text().splitlines()}
    assert prompts and all("So far:\n" in prompt for prompt in prompts)
    assert export.main(["run", "exported"]) == 0

    words = ["cobalt.yaml", "--steps=3", "--checkpoint.every=1", *short]
    assert main([*words, "--run_dir=whole"]) == 0
    cut_after(tmp_path / "whole", tmp_path / "again", 1)
    assert main([*words, "--run_dir=again", "--resume=auto"]) == 0
    rows = numbers("whole")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert numbers("again") == rows
    for array, other in zip(saved_state("again"), saved_state("whole"), strict=True):
        np.testing.assert_array_equal(array, other)
    records = [record for step in (1, 2, 3) for record in read_trace("whole", step)]
    assert {record.problem.prompt for record in records} <= prompts
    assert {len(record.trajectory.turns) for record in records} == {1}
    assert any(record.advantages is not None and record.advantages.any() for record in records)
