"""Planning in the loop: which rows fit, which trajectories a round leaves out, what the update compiles for."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.microcoder import STAGE
from grpo_roc_jax.learner.group_learner import temperature_of
from grpo_roc_jax.method.state import AlgoState
from tests.helpers.samples import make_group
from tests.run.test_rounds import a_run, method, placed


def test_the_update_trains_at_the_temperature_of_the_rollouts():
    config = method("microcoder")

    def run(stage):
        return SimpleNamespace(method=AlgoState(memory={STAGE: np.array([float(stage)])}))

    assert [temperature_of(config, run(stage)) for stage in (0, 2)] == [0.9, 1.1]
    assert temperature_of(method("grpo"), run(0)) == 1.0


def test_the_drift_mask_sees_the_policy_of_each_update():
    """What has drifted leaves in the second update; ratio and advantages stay those of the first."""

    def update(train, packed):
        return SimpleNamespace(params=train.params + 0.2), {"loss/value": np.float32(0)}

    config = method("drift_mask", "--batch.updates=2", "--group.problems=2", "--weights.masks.drift.threshold=0.1")
    groups = [make_group(seed, 4) for seed in (1, 2)]
    learner, run = placed(config, update), a_run()
    given = learner.batches(groups, (), run)
    _, taken, _ = learner.update(run, given)
    assert all(row.policy_mask.any() for batch in given for row in batch.rows)
    later = [(row, before) for row, before in zip(taken[1].rows, given[1].rows, strict=True)]
    lost = [not row.policy_mask.any() for row, _ in later]
    assert lost == [bool(before.advantages.max() < 0) for _, before in later] and 0 < sum(lost) < len(lost)
    for row, before in later:
        np.testing.assert_array_equal(row.logprobs_old, before.logprobs_old)
        np.testing.assert_array_equal(row.advantages, before.advantages)


def test_what_a_method_measures_is_in_the_metrics_of_the_step():
    """With scores 0.1 below the recorded ones: of the first pass, though later updates move the policy."""

    def update(train, packed):
        return SimpleNamespace(params=train.params + 0.2), {"loss/value": np.float32(0)}

    config = method("seq_mask_tis", "--batch.updates=2", "--group.problems=2")
    learner, run = placed(config, update), replace(a_run(), train=SimpleNamespace(params=0.1))
    given = learner.batches([make_group(seed, 4) for seed in (1, 2)], (), run)
    assert not any(row.policy_mask.any() for batch in given for row in batch.rows), "e^-0.1 is below 0.999"
    metrics = learner.update(run, given)[2]
    assert metrics["mismatch/geometric_ratio"] == pytest.approx(np.exp(-0.1), abs=1e-5)
    assert metrics["mismatch/token_kl_k1"] == pytest.approx(0.1, abs=1e-5)
    assert metrics["mismatch/rejection_geometric_ratio_below"] == 1 and metrics["mismatch/veto_vetoed"] == 0
