"""The example for reasoning-gym: its tasks are the data, its scores the reward."""

import warnings
from pathlib import Path

import pytest

from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.settings.callables import import_file
from tests.test_readme import TINY

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugins" / "gym_tasks.py"


def test_tasks_train_and_are_scored_by_their_package(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package's own dependencies
        pytest.importorskip("reasoning_gym", reason="needs reasoning-gym; .ci/adapters runs this")
        example = import_file(str(EXAMPLE))
    words = [*TINY, "--sft.steps=0", "--rollout.max_prompt_tokens=128", "--batch.row_length=256", "--log.traces=1"]
    example.main([*words, f"--run_dir={tmp_path / 'run'}"], str(tmp_path / "tasks.jsonl"))
    records = list(read_trace(tmp_path / "run", 2))
    assert records and all(record.verdict is not None for record in records)
    for record in records:
        entry = record.problem.extra["entry"]
        assert entry["answer"] == record.problem.answer and example.TASKS.score_answer(entry["answer"], entry) == 1.0
        assert example.score(record.problem, [record.trajectory]) == [record.verdict.reward]
