"""Planning in the loop: which rows fit, which trajectories a round leaves out, what the update compiles for."""

from types import SimpleNamespace

import numpy as np

from grpo_roc_jax.contrib.methods.microcoder import STAGE
from grpo_roc_jax.learner.group_learner import temperature_of
from grpo_roc_jax.method.state import AlgoState
from tests.run.test_rounds import method


def test_the_update_trains_at_the_temperature_of_the_rollouts():
    config = method("microcoder")

    def run(stage):
        return SimpleNamespace(method=AlgoState(memory={STAGE: np.array([float(stage)])}))

    assert [temperature_of(config, run(stage)) for stage in (0, 2)] == [0.9, 1.1]
    assert temperature_of(method("grpo"), run(0)) == 1.0
