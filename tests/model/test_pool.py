"""A pool of blocks against rows that lie side by side, in the layouts of all platforms, with shared and scattered
tables."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.model.config import ModelConfig, SlidingWindows, SomeExtras
from grpo_roc_jax.model.pool import (
    IN_PLACE,
    PoolSize,
    PoolWriter,
    allocate,
    cache_orders,
    copy_blocks,
    readers_of,
    token_places,
)

CONFIG = ModelConfig(d_model=16, layers=2, heads=4, kv_heads=2, head_dim=8, vocab_size=11)
LIMITED = replace(CONFIG, windows=SlidingWindows((5, 0)), extras=SomeExtras(attention_cap=1.5))
SIZE = PoolSize(blocks=45, columns=4, slots=5, shared=4)
B, K, H, W, C = 5, 2, 8, 6, 4
NONE = SIZE.blocks
CPU, GPU, TPU = map(cache_orders, ("cpu", "gpu", "tpu"))
LAYOUTS = pytest.mark.parametrize("orders", [CPU, GPU, TPU], ids="-".join)
SLOW = [pytest.param(orders, LIMITED, marks=pytest.mark.slow) for orders in (GPU, TPU)]
"""Limits on what is read are those of one layout as of another."""
EACH = pytest.mark.parametrize(
    ("orders", "config"), [(CPU, CONFIG), (GPU, CONFIG), (TPU, CONFIG), (CPU, LIMITED), *SLOW]
)


def filled(orders, size=SIZE):
    """A pool of random numbers, and its keys and values as [L,N,C,K,H]."""
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, CONFIG.layers, size.blocks, C, K, H)).astype(np.float32)
    pool = allocate(CONFIG, size, jnp.float32, orders)

    def arena(layer, part):
        start, end = part.start, part.start + part.blocks
        leaves = zip((k, v), orders, strict=True)
        return tuple(jnp.asarray(np.einsum(f"nskh->n{order}", leaf[layer, start:end])) for leaf, order in leaves)

    layers = tuple(tuple(arena(layer, part) for part in pool.arenas) for layer in range(CONFIG.layers))
    assert jax.tree.map(jnp.shape, layers) == jax.tree.map(jnp.shape, pool.layers)
    return pool.replace(layers=layers), k, v


def unfilled(pool, layer):
    """Keys and values [N,C,K,H] of a layer."""
    leaves = [zip(pool.orders, arena, strict=True) for arena in pool.layers[layer]]
    parts = [[np.einsum(f"n{order}->nskh", np.asarray(leaf)) for order, leaf in arena] for arena in leaves]
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def attend_slowly(q, k, v, columns, *, window=0, cap=0.0):
    """q [T,N,H] of one row, k and v [S,K,H]: loops over queries and heads."""
    out = np.zeros(q.shape)
    for t, n in np.ndindex(q.shape[:2]):
        kv, last = n // (q.shape[1] // k.shape[1]), int(columns[t]) + 1
        first = max(0, last - window) if window else 0
        scores = k[first:last, kv] @ q[t, n] / np.sqrt(q.shape[-1])
        scores = cap * np.tanh(scores / cap) if cap else scores
        p = np.exp(scores - scores.max())
        out[t, n] = (p / p.sum()) @ v[first:last, kv]
    return out


TABLE = np.array(
    [
        [1, 0, 44, 2, NONE, NONE],  # blocks 0 and 1 have four readers, in another order than they lie
        [1, 0, 7, NONE, NONE, NONE],
        [1, 0, 9, 31, 20, 5],
        [1, 0, 6, NONE, NONE, NONE],
        [30, NONE, NONE, NONE, NONE, NONE],
    ],
    np.int32,
)
POSITION = np.array([13, 8, 23, 9, 0], np.int32)
ACTIVE = np.array([True, True, True, False, True])


def test_arenas_grow_with_the_blocks_of_a_slot():
    assert [tuple(arena) for arena in SIZE.arenas(IN_PLACE)] == [
        (0, 4, 8),
        (4, 10, 1),
        (14, 10, 1),
        (24, 20, 1),
        (44, 1, 1),
    ]
    assert [tuple(arena) for arena in SIZE.arenas(("ksh", "ksh"))] == [(0, 45, 1)]
    assert allocate(CONFIG, SIZE, jnp.float32, IN_PLACE, shards=3).layers[0][0][0].shape == (12, K, H, C)


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
        readers = readers_of(pool, table, active)
        assert bool(readers) is (orders[:2] == IN_PLACE and not few)
        places = token_places(pool, position, active, table, readers)
        writer = PoolWriter(pool, config)
        out = [writer.attend_token(layer, places)(q, new_k, new_v) for layer in range(2)]
        return out, writer.pool()

    out, after = run(pool)
    assert np.isfinite(out[0]).all()
    for layer in range(2):
        wanted_k, wanted_v = k[layer].copy(), v[layer].copy()
        for b in np.flatnonzero(ACTIVE):
            at = TABLE[b, POSITION[b] // C], POSITION[b] % C
            wanted_k[at], wanted_v[at] = new_k[b, 0], new_v[b, 0]
        for got, wanted in zip(unfilled(after, layer), (wanted_k, wanted_v), strict=True):
            np.testing.assert_array_equal(got, wanted)
        window, cap = (config.layer_windows or (0, 0))[layer], config.extras.attention_cap
        for b in np.flatnonzero(ACTIVE):
            blocks = TABLE[b][TABLE[b] != NONE]
            row = (part[blocks].reshape(-1, K, H) for part in (wanted_k, wanted_v))
            wanted = attend_slowly(q[b], *row, POSITION[b : b + 1], window=window, cap=cap)
            np.testing.assert_allclose(out[layer][b], wanted, atol=1e-5)


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
        writer = PoolWriter(pool, config)
        return writer.attend_span(0, table, rows, start, length)(*new), writer.pool()

    got, after = run(pool, table, rows, start, length, q, new_k, new_v)
    wanted_k, wanted_v = k[0].copy(), v[0].copy()
    window, cap = (config.layer_windows or (0,))[0], config.extras.attention_cap
    for i in range(2):
        columns = start[i] + np.arange(length[i])
        at = table[i, columns // C], columns % C
        wanted_k[at], wanted_v[at] = new_k[i, : length[i]], new_v[i, : length[i]]
        blocks = table[i][table[i] != NONE]
        row = (part[blocks].reshape(-1, K, H) for part in (wanted_k, wanted_v))
        wanted = attend_slowly(q[i, : length[i]], *row, columns, window=window, cap=cap)
        np.testing.assert_allclose(got[i, : length[i]], wanted, atol=1e-5)
    for part, wanted in zip(unfilled(after, 0), (wanted_k, wanted_v), strict=True):
        np.testing.assert_array_equal(part, wanted)


@LAYOUTS
def test_blocks_are_copied_between_arenas(orders):
    pool, k, _ = filled(orders)
    source, target = np.array([0, 44, 44, 7]), np.array([44, 3, 5, NONE])
    source[0] = 20
    nothing = jnp.zeros((2, 1), jnp.int32)
    copied = jax.jit(copy_blocks, donate_argnums=0)(pool, jnp.asarray([source[1:], target[1:]]), nothing)
    expected = k[1].copy()
    expected[[3, 5]] = expected[44]
    np.testing.assert_array_equal(unfilled(copied, 1)[0], expected)
