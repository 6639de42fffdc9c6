"""Appends that pack the tokens of several rows: what they write, how rows are cut, and which calls are made."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.engine.decode import SamplerModel, append, append_packed
from grpo_roc_jax.engine.device_rows import PackTaker, Write
from grpo_roc_jax.engine.programs import CALL_TOKENS, first_calls
from grpo_roc_jax.engine.publish import unstack
from grpo_roc_jax.model.config import SlidingWindows
from grpo_roc_jax.model.pool import IN_PLACE, PoolSize, allocate, tile_count, tile_width
from grpo_roc_jax.model.transformer import init_params
from tests.engine.test_engine import assert_same
from tests.helpers.rollout_fakes import MODEL, ROLLOUT, make_requests, run, sharp_params

BLOCK, BLOCKS = 8, 40
NONE = BLOCKS


@pytest.fixture(scope="module")
def params():
    return sharp_params()


def pack(rows, N, width):
    """Arguments of `append_packed` for (ids, first column, blocks) of each row."""
    J, X = tile_count(N), tile_width(N)
    tokens, table, tiles = np.zeros((3, N), np.int32), np.full((J, width), NONE, np.int32), np.zeros((2, J), np.int32)
    tokens[2] = J * X
    at = tile = 0
    for ids, start, blocks in rows:
        for first in range(0, len(ids), X):
            part = ids[first : first + X]
            steps = np.arange(len(part))
            tokens[:, at : at + len(part)] = part, start + first + steps, tile * X + steps
            table[tile, : len(blocks)], tiles[:, tile] = blocks, (at, len(part))
            at, tile = at + len(part), tile + 1
    return tokens, table, tiles


@pytest.mark.parametrize("model", [MODEL, replace(MODEL, windows=SlidingWindows((6, 0)))], ids=["all", "windows"])
def test_a_pack_writes_what_each_row_would_alone(model):
    """Rows that begin and that go on, longer than a tile and of one token, in blocks of all arenas; a pack is half
    padding."""
    rng, width = np.random.default_rng(0), 7
    weights = unstack(init_params(jax.random.key(0), model), model)
    size = PoolSize(BLOCKS, BLOCK, 4, shared=4)
    empty = allocate(model, size, jnp.float32, IN_PLACE)
    pool = empty.map(lambda leaf, _: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32))
    lengths, starts = (41, 1, 7, 12), (0, 13, 8, 3)
    blocks = rng.permutation(BLOCKS)[: 4 * width].reshape(4, width)
    rows = [
        (rng.integers(0, 97, n).astype(np.int32), start, own)
        for n, start, own in zip(lengths, starts, blocks, strict=True)
    ]
    packed = jax.jit(append_packed, static_argnames="model")(
        weights, pool, *pack(rows, 128, width), SamplerModel(model)
    )
    alone = jax.jit(append, static_argnames="model")
    for slot, (ids, start, own) in enumerate(rows):
        where = np.array([[slot], [start], [len(ids)]], np.int32)
        pool = alone(weights, pool, np.resize(ids, (1, 44)), own[None].astype(np.int32), where, SamplerModel(model))
    for got, wanted in zip(jax.tree.leaves(packed), jax.tree.leaves(pool), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


@pytest.mark.parametrize("lengths", [(16, 32, 64, 128, 256), (16, 256), (7,), (1, 200)])
def test_the_calls_take_least_time_of_all(lengths):
    """Against all combinations of up to a few calls."""
    firsts, counts = first_calls(lengths), [1, 6, 16, 17, 40, 63, 88, 100]
    for tokens in (n for n in counts if n < len(firsts)):
        left, time = tokens, 0
        while left > 0:
            length = firsts[min(left, len(firsts) - 1)]
            left, time = left - length, time + length + CALL_TOKENS
        most = -(-tokens // lengths[0]) if len(lengths) == 1 else 5
        sets = (s for k in range(1, most + 1) for s in itertools.combinations_with_replacement(lengths, k))
        assert time <= min(sum(s) + CALL_TOKENS * len(s) for s in sets if sum(s) >= tokens), tokens


def test_a_pack_is_full_by_tokens_or_by_tiles():
    N = 128
    take = PackTaker(N)
    assert [take(Write(0, np.zeros(n, np.int32), 0)) for n in (100, 20, 20, 5)] == [
        (100,) * 2,
        (20,) * 2,
        (8,) * 2,
        None,
    ]
    take = PackTaker(N)
    assert [take(Write(0, np.zeros(1, np.int32), 0)) for _ in range(tile_count(N) + 1)][-2:] == [(1, 1), None]


def test_prompts_and_observations_of_several_rows_share_calls(params):
    """The same trajectories as with one row a call, in fewer calls, and each token is written once."""
    settings = replace(ROLLOUT, slots=16, append_lengths=(16, 64))
    requests = make_requests(8, 2)
    packed, stats, _ = run(params, requests, rollout=settings)
    alone, before, _ = run(params, requests, rollout=replace(settings, append_rows=1))
    assert_same(packed, alone)
    assert stats.prefilled_tokens == before.prefilled_tokens
    assert stats.appends < 0.6 * before.appends and stats.padded_tokens < before.padded_tokens


def test_a_prompt_longer_than_a_pack_is_written_in_pieces(params):
    requests = make_requests(3, 2)
    short = replace(ROLLOUT, append_lengths=(7,))
    rollouts, stats, _ = run(params, requests, rollout=short)
    wanted, _, _ = run(params, requests)
    assert_same(rollouts, wanted)
    assert stats.appends >= -(-stats.prefilled_tokens // 7)
