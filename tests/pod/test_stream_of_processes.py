"""Runs of several processes whose rollouts run on: with lag 0 the numbers of one process; with a lag none too old."""

import signal

import numpy as np
import pytest

from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace
from tests.pod.test_processes import assert_same_run, ended, said, start, wait_for_step

pytestmark = pytest.mark.slow


def test_without_a_lag_the_tokens_are_those_of_one_process(tmp_path):
    runs = {"alone": (1, 2, "none"), "several": (2, 1, "{kind: stream, lag: 0}")}
    for name, (count, devices, limit) in runs.items():
        words = "--steps=2", "--group.dynamic_sampling_rounds=1", f"--rollout.step_limit={limit}"
        assert ended(start(tmp_path / name, count, devices, *words)) == [0] * count, said(tmp_path / name)
    assert len(assert_same_run(tmp_path / "several", tmp_path / "alone", 2)) >= 2 * 40


def test_two_processes_with_a_lag_are_stopped_and_one_goes_on(tmp_path):
    words = "--rollout.step_limit=stream", "--eval.every=2", "--checkpoint.every=0"
    two = start(tmp_path, 2, 1, "--steps=500", *words)
    wait_for_step(tmp_path, 3, two)
    two[1].send_signal(signal.SIGTERM)
    assert ended(two, 120) == [143, 143], said(tmp_path)
    steps = int(max(row["step"] for row in read_metrics(tmp_path / "run"))) + 2
    assert ended(start(tmp_path, 1, 2, f"--steps={steps}", *words, "--resume=auto")) == [0], said(tmp_path)
    rows = [row for row in read_metrics(tmp_path / "run") if "rollout/lag_max" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert max(row["rollout/lag_max"] for row in rows) == 1.0
    uids = []
    for step in range(1, steps + 1):
        records = list(read_trace(tmp_path / "run", step))
        assert len(records) == 40, "groups are whole"
        uids += sorted({record.problem.uid for record in records})
        for record in records:
            versions = record.trajectory.versions[record.trajectory.policy_mask]
            assert (np.diff(versions) >= 0).all() and step - 1 - versions.min() <= 1
    assert len(uids) == len(set(uids)) == 5 * steps
