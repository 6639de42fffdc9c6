"""A cache that starts small and grows with its rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.protocol import SingleTurn
from grpo_roc_jax.engine.table import BlockLedger, Full
from grpo_roc_jax.model.pool import IN_PLACE, PoolSize, allocate, cache_orders, enlarge
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from tests.helpers.engine_checks import assert_same
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, STOPS, FakeTools, make_requests, one_rollout, run

SMALL = replace(ROLLOUT, block=8, kv_start=32)


def test_sizes_are_those_of_whole_arenas_or_doubled():
    size = PoolSize(128, 64, 1)
    assert [grown.blocks for grown in size.growing(3, IN_PLACE)] == [4, 8, 16, 32, 64, 128]
    assert [grown.blocks for grown in size.growing(3, ("ksh", "ksh"))] == [3, 6, 12, 24, 48, 96, 128]
    assert size.growing(128, IN_PLACE) == size.growing(128, ("ksh", "ksh")) == (size,)
    for orders in (IN_PLACE, ("skh", "skh")):
        *_, last = size.growing(1, orders)
        assert last == size, "the last one is all of it"


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_what_a_pool_holds_stays_when_it_grows(platform):
    orders, full = cache_orders(platform), PoolSize(12, 4, 2, shared=2)
    for small, large in zip(full.growing(3, orders), full.growing(3, orders)[1:], strict=False):
        pool = allocate(MODEL, small, jnp.float32, orders).map(lambda leaf, _: leaf + jnp.arange(leaf.shape[0]).mean())
        grown = jax.jit(enlarge, static_argnames="arenas")(pool, large.arenas(orders))
        wanted = allocate(MODEL, large, jnp.float32, orders)
        assert jax.tree.structure(grown) == jax.tree.structure(wanted)
        for layer, before in zip(grown.layers, pool.layers, strict=True):
            joined, known = (
                jnp.concatenate([arena[0] for arena in part]) if platform == "cpu" else part[0][0]
                for part in (layer, before)
            )
            np.testing.assert_array_equal(joined[: len(known)], known)
            assert not joined[len(known) :].any() and len(joined) == large.blocks


@pytest.mark.parametrize(("before", "after", "common"), [(0, 0, 0), (4, 4, 4), (4, 7, 7)])
def test_new_blocks_are_given_after_the_old_ones(before, after, common):
    """Where all first blocks can be shared with a second row, the new ones may be or not."""
    ledger = BlockLedger(4, 2, before)
    first = ledger.open(np.zeros(1, np.int32), 0)
    ledger.grow(first, 8)
    with pytest.raises(Full):
        ledger.grow(first, 9)
    ledger.extend(7, after)
    assert (ledger.free, ledger.used, ledger.count) == (3, 4, 7)
    ledger.grow(first, 14)
    assert first.blocks[4:] == [4, 5, 6]
    ledger.seal(first, np.arange(14, dtype=np.int32), 0)
    second = ledger.open(np.arange(15, dtype=np.int32), 0)
    assert second.blocks == first.blocks[:common]


def test_rows_are_those_of_a_cache_allocated_at_once():
    """All rows are admitted in the end and none is evicted; the second run begins with the size of the first."""
    requests, model = make_requests(4, 3), replace(MODEL, layers=1)  # every size is compiled
    params = jax.device_put(random_params(model, seed=4))
    full_engine, engine = (
        make_engine(model, replace(SMALL, kv_start=start), SamplingConfig(), STOPS, seed=11)
        for start in (0, SMALL.kv_start)
    )
    wanted, _ = full_engine.run(full_engine.publish(params, 5), requests, FakeTools(requests))
    sampler = engine.publish(params, 5)
    assert engine.programs.size.blocks < engine.programs.largest_size.blocks
    for again in (False, True):
        before = engine.programs.size.blocks
        rollouts, stats = engine.run(sampler, requests, FakeTools(requests))
        assert_same(wanted, rollouts)
        assert stats.evictions == 0
        assert (engine.programs.size.blocks > before) is not again
    names = [cost.name for cost in engine.programs.costs]
    assert names.count("grow") >= 2 and names.count("decode/6") == 2, "it grew at admission and while rows decoded"


@pytest.mark.slow
def test_a_cache_grows_on_every_shard(params):
    requests = make_requests(4, 3)
    wanted, _, _ = run(params, requests)
    mesh = make_mesh(ShardingConfig(data=2, tensor=2), jax.devices()[:4])
    engine = make_engine(MODEL, replace(SMALL, slots=4, kv_start=64), SamplingConfig(), STOPS, mesh, seed=11)
    rollouts, _ = engine.run(engine.publish(params, 5), requests, FakeTools(requests))
    assert_same(wanted, rollouts)
    assert "grow" in [cost.name for cost in engine.programs.costs]


def test_a_dialogue_of_one_row_takes_what_it_needs(params):
    """As a chat: one slot that may hold 4,096 tokens, layers that share their programs. A short answer keeps the first
    size, a prompt of 200 tokens makes the cache grow once or twice."""
    settings = RolloutConfig(slots=1, narrow=(), max_prompt_tokens=3072, max_response_tokens=1024, kv_start=128)
    engine = make_engine(MODEL, settings, SamplingConfig(), STOPS, seed=11, shares_layers=True)
    sampler = engine.publish(params, 0)
    assert engine.programs.size.shared == 0, "nobody to share a prompt with"
    short, long = (np.resize(np.arange(8, 97, dtype=np.int32), n) for n in (20, 200))
    sizes = []
    for prompt in (short, long, short):
        engine.run(sampler, [one_rollout(0, prompt, 20)], SingleTurn())
        sizes.append(engine.programs.size.blocks * settings.block)
    assert sizes == [128, 256, 256]
