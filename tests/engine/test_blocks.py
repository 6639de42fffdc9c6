"""Blocks of the cache on the host, and a cache that grows with its rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.engine.protocol import SingleTurn
from grpo_roc_jax.engine.table import BlockLedger, Chain, Full
from grpo_roc_jax.model.pool import IN_PLACE, PoolSize, allocate, cache_orders, enlarge
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from tests.helpers.engine_checks import assert_same
from tests.helpers.reference import random_params
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, STOPS, FakeTools, make_requests, one_rollout, run

SIZE = 4


def grown(count, columns, sharable=False, **ledger):
    blocks, chain = BlockLedger(count, SIZE, **ledger), Chain()
    blocks.grow(chain, columns, sharable=sharable)
    return blocks, chain


def test_a_prefix_is_found_by_whole_blocks_and_never_with_the_last_token():
    blocks, first = grown(6, 9)
    assert first.blocks == [0, 1, 2]
    blocks.seal(first, np.arange(9), version=1)
    assert first.sealed == 2
    second = blocks.open(np.arange(9), version=1)
    assert (second.blocks, second.sealed, second.known) == ([0, 1], 2, 8)
    assert blocks.open(np.arange(8), version=1).blocks == [0], "the token at 7 is the pending one"
    assert blocks.open(np.arange(9), version=2).blocks == []
    assert blocks.open(np.array([0, 1, 2, 3, 9, 9, 9, 9, 9]), version=1).blocks == [0]


def test_idle_blocks_are_found_until_room_is_needed_and_the_end_of_a_prefix_leaves_first():
    blocks, chain = grown(3, 8)
    blocks.seal(chain, np.arange(8), 0)
    blocks.close(chain)
    assert blocks.free == 3 and blocks.used == 0
    blocks.grow(chain, 8)
    assert chain.blocks == [2, 1]
    assert blocks.open(np.arange(9), 0).blocks == [0]


def test_a_fork_copies_the_block_in_which_it_ends_and_a_roll_back_what_another_row_has():
    blocks, chain = grown(3, 7)
    with pytest.raises(Full, match="2 blocks needed, 1 of 3 free"):
        blocks.grow(chain, 16)
    other, copies = blocks.fork(chain, 6)
    assert other.blocks == [0, 2] and copies == [(1, 2)]
    assert blocks.roll_back(other, 2) == [(0, 2)], "the block that leaves takes the copy"
    assert blocks.roll_back(chain, 6) == [] and chain.blocks == [0, 1]


def test_blocks_that_may_have_one_holder_are_copied_by_a_fork():
    blocks, chain = grown(8, 8, sharable=True, shared=2)
    blocks.grow(chain, 14)
    assert chain.blocks == [0, 1, 2, 3]
    other, copies = blocks.fork(chain, 14)
    assert other.blocks == [0, 1, 4, 5] and copies == [(2, 4), (3, 5)]
    blocks.seal(chain, np.arange(14), 0)
    assert blocks.open(np.arange(14), 0).blocks == [0, 1], "the third block has a holder"


class Memory:
    """What the device would hold, and the tokens that each chain must read."""

    def __init__(self, count, shared):
        self.blocks, self.cells = BlockLedger(count, SIZE, shared), np.full((count, SIZE), -1)
        self.rows: list[tuple[Chain, list[int], int]] = []

    def copy(self, copies):
        self.cells[[t for _, t in copies]] = self.cells[[s for s, _ in copies]]

    def write(self, chain, tokens, start):
        for column in range(start, len(tokens)):
            assert column >= chain.sealed * SIZE, "a sealed block is written"
            self.cells[chain.blocks[column // SIZE], column % SIZE] = tokens[column]

    def check(self):
        blocks, holders = self.blocks, np.zeros(self.blocks.count, int)
        for chain, tokens, _ in self.rows:
            assert len(set(chain.blocks)) == len(chain.blocks) and len(tokens) <= len(chain.blocks) * SIZE
            assert self.cells[chain.blocks].reshape(-1)[: len(tokens)].tolist() == tokens
            holders[chain.blocks] += 1
        assert holders.tolist() == blocks.holders and (holders[blocks.shared :] <= 1).all()
        assert blocks.used == np.count_nonzero(holders), "every other block can be taken, once"


@pytest.mark.parametrize("shared", [None, 8])
def test_acts_in_any_order_leave_every_row_its_tokens(shared):
    """10,000 acts, with all rows read after every tenth; tokens of two values, so that prefixes meet."""
    rng, memory, version, full = np.random.default_rng(0), Memory(24, shared), 0, 0
    blocks, rows = memory.blocks, memory.rows
    acts = "new", "more", "seal", "fork", "roll back", "close", "forget"
    for step, act in enumerate(rng.choice(acts, 10_000, p=[0.2, 0.4, 0.1, 0.1, 0.1, 0.099, 0.001])):
        at = int(rng.integers(len(rows))) if rows else None
        chain, tokens, born = rows[at] if rows else (None, [], 0)
        columns = int(rng.integers(0, len(tokens) + 1))
        before = [(chain, list(chain.blocks), chain.sealed) for chain, _, _ in rows]
        try:
            if act == "new":
                tokens = rng.integers(0, 2, rng.integers(1, 20)).tolist()
                chain = blocks.open(np.array(tokens), version)
                assert chain.known <= len(tokens) - 1
                rows.append((chain, tokens[: chain.known], version))
                blocks.grow(chain, len(tokens), sharable=bool(rng.integers(2)))
                memory.write(chain, tokens, chain.known)
                rows[-1] = (chain, tokens, version)
            elif act == "forget":
                version += 1
                blocks.forget()
            elif chain is None:
                continue
            elif act == "more":
                more = rng.integers(0, 2, rng.integers(0, 6)).tolist()
                blocks.grow(chain, len(tokens) + len(more))
                tokens += more
                memory.write(chain, tokens, len(tokens) - len(more))
            elif act == "seal" and born == version:
                blocks.seal(chain, np.array(tokens), version)
            elif act == "fork":
                fork, copies = blocks.fork(chain, columns)
                memory.copy(copies)
                rows.append((fork, tokens[:columns], born))
            elif act == "roll back":
                memory.copy(blocks.roll_back(chain, columns))
                del tokens[columns:]
            elif act == "close":
                blocks.close(rows.pop(at)[0])
        except Full:
            full += 1
            assert all((chain.blocks, chain.sealed) == (row_blocks, sealed) for chain, row_blocks, sealed in before)
            blocks.close(rows.pop(0)[0])
        if step % 10 == 0:
            memory.check()
    assert full > 100 and version > 2


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
            joined, known = (np.concatenate([arena[0] for arena in part]) for part in (layer, before))
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
    settings = replace(SMALL, kv_start=0), SMALL
    full_engine, engine = (make_engine(model, each, SamplingConfig(), STOPS, seed=11) for each in settings)
    wanted, _ = full_engine.run(full_engine.publish(params, 5), requests, FakeTools(requests))
    sampler = engine.publish(params, 5)
    assert engine.programs.size.blocks < engine.programs.largest_size.blocks
    for again in (False, True):
        before = engine.programs.size.blocks
        rollouts, stats = engine.run(sampler, requests, FakeTools(requests))
        assert_same(wanted, rollouts)
        assert stats.evictions == 0 and (engine.programs.size.blocks > before) is not again
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
