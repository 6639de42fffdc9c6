"""A pool of blocks against rows that lie side by side: all layouts, few bits, and the paged kernel, interpreted."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.model import pool as pools
from grpo_roc_jax.model.block_attention import Limits, attend_window
from grpo_roc_jax.model.config import ModelConfig, SlidingWindows, SomeExtras
from grpo_roc_jax.model.low_precision import exact, rounded, scaled_orders
from grpo_roc_jax.model.paged import attend_table
from tests.helpers.engine_checks import interpreted  # noqa: F401

CONFIG = ModelConfig(d_model=16, layers=2, heads=4, kv_heads=2, head_dim=8, vocab_size=11)
LIMITED = replace(CONFIG, windows=SlidingWindows((5, 0)), extras=SomeExtras(attention_cap=1.5))
SIZE = pools.PoolSize(blocks=45, columns=4, slots=5, shared=4)
B, K, H, W, C = 5, 2, 8, 6, 4
NONE = SIZE.blocks
CPU, GPU, TPU = map(pools.cache_orders, ("cpu", "gpu", "tpu"))
EACH = pytest.mark.parametrize("orders, config", [*((orders, CONFIG) for orders in (CPU, GPU, TPU)), (CPU, LIMITED)])


def filled(orders):
    """A pool of random numbers, and its keys and values as [L,N,C,K,H]."""
    k, v = np.random.default_rng(0).normal(size=(2, CONFIG.layers, SIZE.blocks, C, K, H)).astype(np.float32)
    pool = pools.allocate(CONFIG, SIZE, jnp.float32, orders)

    def arena(layer, part):
        own = slice(part.start, part.start + part.blocks)
        leaves = zip((k, v), orders, strict=True)
        return tuple(jnp.asarray(np.einsum(f"nskh->n{order}", leaf[layer, own])) for leaf, order in leaves)

    layers = tuple(tuple(arena(layer, part) for part in pool.arenas) for layer in range(CONFIG.layers))
    assert jax.tree.map(jnp.shape, layers) == jax.tree.map(jnp.shape, pool.layers)
    return pool.replace(layers=layers), k, v


def unfilled(pool, layer):
    """Keys and values [N,C,K,H] of a layer."""
    leaves = [zip(pool.orders, arena, strict=True) for arena in pool.layers[layer]]
    parts = [[np.einsum(f"n{order}->nskh", np.asarray(leaf)) for order, leaf in arena] for arena in leaves]
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def write_and_attend(q, k, v, new_k, new_v, blocks, columns, config, layer):
    """The context of one row: q [T,N,H] at those columns, whose keys and values are written into the blocks."""
    blocks, window, cap = blocks[blocks != NONE], (config.layer_windows or (0, 0))[layer], config.extras.attention_cap
    at = blocks[columns // C], columns % C
    k[at], v[at] = new_k, new_v
    k, v = (part[blocks].reshape(-1, K, H) for part in (k, v))
    out = np.zeros(q.shape)
    for t, n in np.ndindex(q.shape[:2]):
        kv, last = n // (q.shape[1] // k.shape[1]), int(columns[t]) + 1
        first = max(0, last - window) if window else 0
        scores = k[first:last, kv] @ q[t, n] / np.sqrt(q.shape[-1])
        scores = cap * np.tanh(scores / cap) if cap else scores
        p = np.exp(scores - scores.max())
        out[t, n] = (p / p.sum()) @ v[first:last, kv]
    return out


ROWS = [1, 0, 44, 2], [1, 0, 7], [1, 0, 9, 31, 20, 5], [1, 0, 6], [30]
"""Blocks 0 and 1 have four readers, in another order than they lie."""
TABLE = np.array([row + [NONE] * (W - len(row)) for row in ROWS], np.int32)
POSITION = np.array([13, 8, 23, 9, 0], np.int32)
ACTIVE = np.array([True, True, True, False, True])


@EACH
@pytest.mark.parametrize("few", [False, True])
def test_a_token_of_each_row(orders, config, few, monkeypatch):
    """Rows of one column, of whole blocks and of six; the fourth row is idle, and nothing of it is written. The blocks
    of few rows are gathered in any order."""
    monkeypatch.setattr("grpo_roc_jax.model.pool.READ_IN_PLACE", 0 if few else 4)
    monkeypatch.setattr("grpo_roc_jax.model.pool.SHARED_READERS", 2)  # blocks with more readers take several passes
    monkeypatch.setattr("grpo_roc_jax.model.block_attention.WINDOW_COLUMNS", 8)
    pool, k, v = filled(orders)
    rng = np.random.default_rng(1)
    q, new_k, new_v = (rng.normal(size=(B, 1, n, H)).astype(np.float32) for n in (4, K, K))
    table, position, active = jnp.asarray(TABLE), jnp.asarray(POSITION), jnp.asarray(ACTIVE)

    @jax.jit
    def run(pool):
        readers = pools.readers_of(pool, table, active)
        assert bool(readers) is (orders[:2] == pools.IN_PLACE and not few)
        places, writer = pools.token_places(pool, position, active, table, readers), pools.PoolWriter(pool, config)
        out = [writer.attend_token(layer, places)(q, new_k, new_v) for layer in range(2)]
        return out, writer.pool()

    out, after = run(pool)
    assert np.isfinite(out[0]).all()
    for layer in range(2):
        cached = k[layer].copy(), v[layer].copy()
        for b in np.flatnonzero(ACTIVE):
            row = new_k[b], new_v[b], TABLE[b], POSITION[b : b + 1]
            np.testing.assert_allclose(out[layer][b], write_and_attend(q[b], *cached, *row, config, layer), atol=1e-5)
        for got, wanted in zip(unfilled(after, layer), cached, strict=True):
            np.testing.assert_array_equal(got, wanted)


@EACH
def test_a_span_attends_to_the_row_and_to_itself_and_padding_is_dropped(orders, config, monkeypatch):
    monkeypatch.setattr("grpo_roc_jax.model.block_attention.WINDOW_COLUMNS", 8)
    pool, k, v = filled(orders)
    rng = np.random.default_rng(5)
    rows, start, length = np.array([2, 4, B]), np.array([10, 0, 0]), np.array([6, 3, 0])
    q, new_k, new_v = (rng.normal(size=(3, 6, n, H)).astype(np.float32) for n in (4, K, K))
    table = np.concatenate([TABLE, np.full((1, W), NONE, np.int32)])[rows]

    @jax.jit
    def run(pool, table, rows, start, length, *new):
        writer = pools.PoolWriter(pool, config)
        return writer.attend_span(0, table, rows, start, length)(*new), writer.pool()

    got, after = run(pool, table, rows, start, length, q, new_k, new_v)
    cached = k[0].copy(), v[0].copy()
    for i, n in enumerate(length[:2]):
        row = new_k[i, :n], new_v[i, :n], table[i], start[i] + np.arange(n)
        np.testing.assert_allclose(got[i, :n], write_and_attend(q[i, :n], *cached, *row, config, 0), atol=1e-5)
    for part, wanted in zip(unfilled(after, 0), cached, strict=True):
        np.testing.assert_array_equal(part, wanted)


def test_numbers_by_hand():
    """Scales 2.54 / 127 and 1 (all zeros); halves go to the even neighbor."""
    stored, scale = rounded(jnp.array([[2.54, -1.0, 0.05], [0.0, 0.0, 0.0]]), 1, jnp.int8)
    np.testing.assert_allclose(scale, [0.02, 1.0], rtol=1e-6)
    np.testing.assert_array_equal(stored, [[127, -50, 2], [0, 0, 0]])


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "int8"), ("gpu", "float8"), ("tpu", "int8")])
def test_attention_reads_what_rounding_leaves(platform, dtype):
    """A span, a copy of its block to another row, then a token of both rows: as over a cache of rounded numbers."""
    config, orders = replace(CONFIG, layers=1), pools.cache_orders(platform)
    stored = jnp.int8 if dtype == "int8" else jnp.float8_e4m3fn
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 8, n, 8)), jnp.float32) for n in (4, 2, 2))
    token = [jnp.asarray(rng.normal(size=(2, 1, n, 8)), jnp.float32) for n in (4, 2, 2)]
    table = jnp.array([[1, 2, 4], [3, 2, 5]], jnp.int32)

    def near(x):
        numbers, scale = rounded(x, 3, stored)
        return numbers.astype(jnp.float32) * scale[..., None]

    def run(pool, change):
        writer, none = pools.PoolWriter(pool, config), jnp.zeros(1, jnp.int32)
        span = writer.attend_span(0, table[:1], none, none, none + 7)(q, change(k), change(v))
        pool = pools.copy_blocks(writer.pool(), jnp.array([[1], [3]]), jnp.full((2, 1), 9))
        active, position = jnp.ones(2, bool), jnp.array([7, 6], jnp.int32)
        writer = pools.PoolWriter(pool, config)
        places = pools.token_places(pool, position, active, table, pools.readers_of(pool, table, active))
        return span[:, :7], writer.attend_token(0, places)(token[0], *map(change, token[1:])), writer.pool()

    run, size = jax.jit(run, static_argnums=1), pools.PoolSize(6, 4, 2, shared=2)
    few = pools.allocate(config, size, jnp.float32, scaled_orders(orders), stored=stored)
    assert {leaf.dtype for leaf in jax.tree.leaves(few.layers)} == {jnp.dtype(stored), jnp.dtype(jnp.float32)}
    many = pools.allocate(config, size, jnp.float32, orders)
    (*got, after), (*wanted, plain) = run(few, lambda x: x), run(many, near)
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-6), got, wanted)
    values = tuple(exact(part, few.orders, jnp.float32) for part in after.layers[0])
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), values, plain.layers[0])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("dtype", "heads", "limits", "bound"),
    [("float32", 1, {"window": 7, "cap": 1.5}, 1e-5), pytest.param("bfloat16", 2, {}, 0.02, marks=pytest.mark.slow)],
)
def test_a_token_of_each_row_by_the_paged_kernel(dtype, heads, limits, bound):
    """More rows than a block of queries holds, of one column, of whole pages, and of all columns."""
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(30, 16, heads, 128)), dtype) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(10, 1, 2 * heads, 128)), dtype)
    table = jnp.asarray(rng.permutation(30).reshape(10, 3), jnp.int32)
    seen = jnp.array([1, 5, 16, 17, 40, 48, 2, 31, 33, 1], jnp.int32)
    bounds = Limits(limits.get("window", 0), limits.get("cap", 0.0))
    wanted = attend_window(q, lambda pages: (k[pages], v[pages]), table, seen[:, None] - 1, ("skh", "skh"), bounds)
    got = attend_table(q, pools.in_turn(k, v), table, seen, **limits)
    assert got.dtype == wanted.dtype == dtype
    np.testing.assert_allclose(np.float32(got), np.float32(wanted), atol=bound)
