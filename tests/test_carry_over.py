"""Rows that the deadline of a step cuts are trained on in a later one, also after a restart."""

import numpy as np
import pytest

from grpo_roc_jax.config import Config
from grpo_roc_jax.record.metrics import read_metrics
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.run.sample import PartialGroup
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.train import train
from tests.helpers.samples import make_trajectory
from tests.test_train import config_in


def test_plans_and_settings_that_have_no_rows_to_go_on_with_are_refused(tmp_path):
    refused_with_partial(tmp_path, "--rollout.early_exit=true")


def refused_with_partial(tmp_path, *words):
    with pytest.raises(ConfigError, match="use one of the two"):
        config_in(tmp_path, "--rollout.step_limit=partial", "--rollout.step_limit.seconds=5", *words)


def test_partial_groups_are_part_of_the_checkpoint():
    class Stream:
        state = None

        def get_state(self):
            return {}

        def set_state(self, state):
            self.state = state

    from grpo_roc_jax.method.state import AlgoState
    from grpo_roc_jax.types import Problem

    rng = np.random.default_rng(0)
    rows = (make_trajectory(rng, 0), make_trajectory(rng, 1))
    partial = PartialGroup(Problem("p", "?", "1", "t"), rows, 3, 5, 0.7)
    run = RunState("state", (), Stream(), AlgoState(), partial=(partial,))
    again = RunState("state", (), Stream(), AlgoState())
    again.load(run.bundle())
    (group,) = again.partial
    assert (group.problem.uid, group.step, group.place, group.temperature) == ("p", 3, 5, 0.7)
    for a, b in zip(group.trajectories, rows, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.versions, b.versions)
        assert (a.stop, a.turns) == (b.stop, b.turns)


@pytest.mark.slow
def test_a_run_trains_on_rows_of_two_policies(tmp_path):
    words = ["--rollout.step_limit=partial", "--rollout.step_limit.seconds=1e-4", "--rollout.chunk=4", "--steps=8"]
    config = config_in(tmp_path / "run", *words, "--data.eval_problems=0")
    assert isinstance(config, Config)
    train(config)
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"] > 0]
    assert max(row["rollout/stop_cancelled"] for row in rows) > 0
    mixed = 0
    for step in range(1, 9):
        for record in read_trace(tmp_path / "run", step):
            t = record.trajectory
            versions = t.versions[t.policy_mask]
            assert t.stop != "cancelled" or not record.kept
            assert (np.diff(versions) >= 0).all()
            mixed += len(set(versions.tolist())) > 1
    assert mixed
