"""ExPO: explanations as supervised rows."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from grpo_roc_jax.config import read_config
from grpo_roc_jax.learner.group_learner import GroupLearner
from grpo_roc_jax.learner.pack import BatchConfig, pack
from grpo_roc_jax.method.compose import Scores
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.run.run_state import RunState
from tests.helpers.method_groups import make_group
from tests.method.test_entropy_control import group


@pytest.mark.parametrize("words", [(), ("--advantage.adjust=entropy_bonus",), ("--surrogate=kl_cov",)], ids=str)
def test_explanations_alone_have_the_leaves_of_every_batch(words):
    """Else a step in which nothing but explanations trains would compile a program of its own (ExPO)."""
    config = read_config("methods/expo.yaml", *words)

    class Scored(GroupLearner):
        def score(self, params, groups, temperature):
            recorded = [t.logprobs for some in groups for t in some.trajectories]
            return Scores(recorded, recorded)

    learner = Scored(config, None, lambda problem: [1, 2])
    run = RunState(SimpleNamespace(params=None), 0.0, None, AlgoState())
    explained = make_group([1], condition=["explanation"])
    usual, _ = learner.rows([group()], run)
    alone = learner.explanation_rows([explained], run)
    layout = BatchConfig(row_length=16, rows=1)
    assert jax.tree.structure(pack(alone, layout, 1)[0]) == jax.tree.structure(pack(usual, layout, 1)[0])
    assert not any(row.entropy_coefficient or np.any(row.marked) for row in alone if row.marked is not None)
