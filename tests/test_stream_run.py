"""Whole runs whose rollouts run on: with lag 0 as without; with a lag a run that was stopped goes on with its rows."""

import numpy as np
import pytest

from grpo_roc_jax.pod.preemption import Preempted
from grpo_roc_jax.process.points import injected
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.train import train
from tests.test_train import config_in, numbers, params_hash
from tests.test_train import on_one_device as on_one_device  # a fixture

pytestmark = pytest.mark.slow


def test_a_stream_without_a_lag_is_a_plain_run_to_the_byte(tmp_path):
    for name, words in (("plain", ()), ("stream", ("--rollout.step_limit={kind: stream, lag: 0}",))):
        train(config_in(tmp_path / name, "--group.dynamic_sampling_rounds=2", *words))
    plain, stream = numbers(tmp_path / "plain"), numbers(tmp_path / "stream")
    for row, other in zip(plain, stream, strict=True):
        assert {name: other[name] for name in row} == pytest.approx(row, rel=0, abs=0, nan_ok=True)
    assert params_hash(tmp_path / "plain") == params_hash(tmp_path / "stream")


@pytest.mark.usefixtures("on_one_device")
def test_a_stream_that_was_stopped_goes_on(tmp_path):
    """Its updates come in parts, with chunks of decoding between them. Stopped in the middle of rollouts: each step
    trains on whole groups of tokens that are not too old, and nothing compiles after a run's first step. Evaluations
    come between the steps."""
    run_dir = tmp_path / "run"
    words = ("--rollout.step_limit=stream", "--steps=6", "--eval.every=1", "--checkpoint.every=0", "--resume=auto")
    with injected("sample=term@4"), pytest.raises(Preempted) as seen:
        train(config_in(run_dir, *words))
    assert "the state after step 3 is saved" in seen.value.__notes__[0]
    summary = train(config_in(run_dir, *words))
    assert summary["compilations_after_first_step"] == 0
    rows = [row for row in read_metrics(run_dir) if "rollout/lag_max" in row]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert max(row["rollout/lag_max"] for row in rows) == 1.0 and sum(row["rollout/sampled"] for row in rows) == 6 * 16
    uids = []
    for step in range(1, 7):
        records = list(read_trace(run_dir, step))
        uids += sorted({record.problem.uid for record in records})
        for record in records:
            versions = record.trajectory.versions[record.trajectory.policy_mask]
            assert (np.diff(versions) >= 0).all() and step - 1 - versions.min() <= 1
    assert len(uids) == len(set(uids)) == 12
