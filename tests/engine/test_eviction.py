"""Rows that gave up their blocks are written again: with recurrent layers from the first token, with router replay
without losing recorded experts."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.model.transformer import init_params
from tests.engine.test_recurrent import MODEL as RECURRENT
from tests.engine.test_recurrent import StopText, gap
from tests.engine.test_routes import MIXED
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import ROLLOUT, STOPS, FakeTools, make_requests

SHORT = replace(ROLLOUT, kv_tokens=192, block=16, narrow=())
"""Six slots, and room for a row and a half of the longest."""


@pytest.mark.slow
@pytest.mark.parametrize("tools", [FakeTools, StopText])
def test_evicted_rows_with_recurrent_layers_equal_the_training_forward(tools):
    drawn = init_params(jax.random.key(1), RECURRENT)
    params = drawn | {"embed": 6.0 * drawn["embed"]}
    engine, requests = make_engine(RECURRENT, SHORT, SamplingConfig(), STOPS, seed=11), make_requests(3, 3)
    rollouts, stats = engine.run(engine.publish(params, 5), requests, tools(requests))
    assert stats.evictions >= 3
    assert gap(params, rollouts) < 2e-5


@pytest.mark.slow
def test_evicted_rows_keep_the_experts_of_the_tokens_that_they_decoded():
    params, requests = jax.device_put(random_params(MIXED, seed=1)), make_requests(3, 3)
    found = []
    for rollout in (ROLLOUT, SHORT):
        engine = make_engine(replace(MIXED, compute_dtype="float32"), rollout, SamplingConfig(), STOPS, None, seed=11)
        rollouts, stats = engine.run(engine.publish(params, 5), requests, FakeTools(requests))
        found.append(rollouts)
    assert stats.evictions
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.routes, other.routes)
