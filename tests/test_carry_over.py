"""Rows that the deadline of a step cuts, or whose rollouts run on, are trained on in a later step, also after a
restart."""

from types import SimpleNamespace

import numpy as np
import pytest

import grpo_roc_jax as g
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.pod.preemption import Preempted
from grpo_roc_jax.process.points import injected
from grpo_roc_jax.record import metrics, trace
from grpo_roc_jax.run import run_state, sample
from tests.helpers.samples import make_trajectory
from tests.test_train import config_in
from tests.test_train import on_one_device as on_one_device  # a fixture


def test_plans_and_settings_that_have_no_rows_to_go_on_with_are_refused(tmp_path):
    refused_with_partial(tmp_path, "--rollout.early_exit=true")


def refused_with_partial(tmp_path, *words):
    with pytest.raises(g.ConfigError, match="use one of the two"):
        config_in(tmp_path, "--rollout.step_limit=partial", "--rollout.step_limit.seconds=5", *words)


def test_partial_groups_are_part_of_the_checkpoint():
    stream = SimpleNamespace(get_state=dict, set_state=lambda state: None)
    rng = np.random.default_rng(0)
    rows = (make_trajectory(rng, 0), make_trajectory(rng, 1))
    partial = sample.PartialGroup(g.Problem("p", "?", "1", "t"), rows, 3, 5, 0.7)
    run, again = (run_state.RunState("state", (), stream, AlgoState(), partial=part) for part in ((partial,), ()))
    again.load(run.bundle())
    (group,) = again.partial
    assert (group.problem.uid, group.step, group.place, group.temperature) == ("p", 3, 5, 0.7)
    for a, b in zip(group.trajectories, rows, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.versions, b.versions)
        assert (a.stop, a.turns) == (b.stop, b.turns)


@pytest.mark.slow
@pytest.mark.usefixtures("on_one_device")
def test_a_stream_that_was_stopped_goes_on(tmp_path):
    """Its updates come in parts, with chunks of decoding between them. Stopped in the middle of rollouts: each step
    trains on whole groups of tokens that are not too old, and nothing compiles after a run's first step. Evaluations
    come between the steps."""
    run_dir = tmp_path / "run"
    words = ("--rollout.step_limit=stream", "--steps=6", "--eval.every=1", "--checkpoint.every=0", "--resume=auto")
    with injected("sample=term@4"), pytest.raises(Preempted) as seen:
        g.train_policy(config_in(run_dir, *words))
    assert "the state after step 3 is saved" in seen.value.__notes__[0]
    summary = g.train_policy(config_in(run_dir, *words))
    assert summary["compilations_after_first_step"] == 0
    rows = [row for row in metrics.read_metrics(run_dir) if "rollout/lag_max" in row]
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert max(row["rollout/lag_max"] for row in rows) == 1.0 and sum(row["rollout/sampled"] for row in rows) == 6 * 16
    uids = []
    for step in range(1, 7):
        records = list(trace.read_trace(run_dir, step))
        uids += sorted({record.problem.uid for record in records})
        for record in records:
            versions = record.trajectory.versions[record.trajectory.policy_mask]
            assert (np.diff(versions) >= 0).all() and step - 1 - versions.min() <= 1
    assert len(uids) == len(set(uids)) == 12
