"""The engine with recurrent layers: their memory belongs to one position, so every way to a row must end there."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from grpo_roc_jax.engine.config import SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.protocol import RunOptions
from grpo_roc_jax.model.config import GatedDelta, ModelConfig, SomeExtras
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from grpo_roc_jax.model.transformer import init_params
from tests.helpers.engine_checks import reference_gap
from tests.helpers.rollout_fakes import ROLLOUT, STOPS, FakeTools, StopPairs, changed, make_requests, one_rollout

DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=6, value_dim=10, every=2)
MODEL = ModelConfig(
    d_model=32, layers=2, heads=4, kv_heads=2, head_dim=8, d_ff=64, vocab_size=97, qk_norm=True, windows=DELTA
)
MODEL = replace(MODEL, norm_offset=True, norm_eps=1e-4, extras=SomeExtras(rotary_share=0.5))
SETTINGS = replace(ROLLOUT, narrow=(), slots=6)


@pytest.fixture(scope="module")
def params():
    drawn = jax.jit(partial(init_params, config=MODEL))(jax.random.key(1))
    return drawn | {"embed": 6.0 * drawn["embed"]}


@pytest.fixture(scope="module")
def engine():
    return make_engine(MODEL, SETTINGS, SamplingConfig(), STOPS, seed=11)


def run(engine, params, requests, tools=None, **changes):
    sampler = engine.publish(params, 5)
    return changed(engine, **changes).run(sampler, requests, tools or FakeTools(requests), RunOptions())


def test_rows_that_wait_share_prompts_and_take_observations_equal_the_training_forward(engine, params):
    """20 rows in 6 slots: prompts are copied within a round and written again later; rows wait for tools while others
    decode; observations of many lengths are padded."""
    requests = make_requests()
    rollouts, stats = run(engine, params, requests)
    assert sum(len(rollout.turns) for rollout in rollouts) > 1.5 * len(rollouts)
    assert stats.forks > 0 and stats.reused == 0 and stats.prompts > 4
    assert reference_gap(params, rollouts, MODEL) < 2e-5
    again, _ = run(engine, params, requests, pipeline="on")
    assert reference_gap(params, again, MODEL) < 2e-5
    for rollout, other in zip(rollouts, again, strict=True):
        np.testing.assert_array_equal(rollout.tokens, other.tokens)


@pytest.mark.parametrize("pipeline", ["off", "on"])
def test_a_row_cut_within_a_chunk_forgets_what_was_cut(engine, params, pipeline):
    requests = make_requests(3, 3)
    tools = StopPairs(requests)
    rollouts, _ = run(engine, params, requests, tools, pipeline=pipeline)
    assert tools.cut >= 10 and max(len(rollout.turns) for rollout in rollouts) >= 3
    assert reference_gap(params, rollouts, MODEL) < 2e-5


def test_prompts_of_one_token_begin_empty_in_a_used_slot(engine, params):
    requests = [
        one_rollout(index, np.array([9 + index], np.int32), 40, s, step=2) for index in range(2) for s in range(9)
    ]
    rollouts, _ = run(engine, params, requests)
    assert reference_gap(params, rollouts, MODEL) < 2e-5


NARROW = replace(SETTINGS, slots=16, narrow=(2, 4), append_rows=3)
TIGHT = replace(SETTINGS, kv_tokens=192, block=16)
"""Six slots, and room for a row and a half of the longest."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "mesh"), [(NARROW, None), (NARROW, ShardingConfig(data=2, fsdp=2, tensor=2)), (TIGHT, None)]
)
def test_rows_in_other_programs_and_rows_written_again_equal_the_training_forward(params, settings, mesh):
    requests = make_requests(3, 4)
    engine = make_engine(MODEL, settings, SamplingConfig(), STOPS, mesh and make_mesh(mesh), seed=11)
    sampler = engine.publish(params, 5)
    engine.warmup(sampler)
    for tools in (FakeTools(requests), StopPairs(requests)):
        rollouts, stats = engine.run(sampler, requests, tools)
        assert stats.compilations == 0 and (stats.evictions >= 3) is (settings is TIGHT)
        assert reference_gap(params, rollouts, MODEL) < 2e-5
    assert tools.cut > 10
