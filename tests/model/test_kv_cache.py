"""The cache against slow loops, in the layouts of all platforms and both ways of writing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.kv_cache import (
    CacheWriter,
    allocate,
    attend_rows,
    cache_orders,
    fork,
    resize,
    write_span,
    write_token,
)

CONFIG = ModelConfig(d_model=16, layers=2, heads=4, kv_heads=2, head_dim=8, vocab_size=11)
B, K, H, S = 5, 2, 8, 12
LAYOUTS = pytest.mark.parametrize("orders", [cache_orders(name) for name in ("cpu", "gpu", "tpu")], ids="-".join)


def filled(orders, seed=0):
    """A cache of random numbers, and its keys and values as [L,B,S,K,H]."""
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, CONFIG.layers, B, S, K, H)).astype(np.float32)

    def ordered(leaf, order):
        return jnp.asarray(np.einsum(f"bskh->b{order}", leaf))

    empty = allocate(CONFIG, B, S, jnp.float32, orders)
    layers = tuple(tuple(map(ordered, pair, orders)) for pair in zip(k, v, strict=True))
    assert jax.tree.map(jnp.shape, layers) == jax.tree.map(jnp.shape, empty.layers)
    return empty.replace(layers=layers), k, v


def columns_first(leaf, order):
    """[B,S,K,H]."""
    return np.einsum(f"b{order}->bskh", np.asarray(leaf))


def attend_slowly(q, k, v, columns):
    """q [B,T,N,H], k and v [B,S,K,H]: loops over rows, queries and heads."""
    out = np.zeros(q.shape)
    for b, t, n in np.ndindex(q.shape[:3]):
        kv = n // (q.shape[2] // k.shape[2])
        last = int(columns[b, t]) + 1
        scores = k[b, :last, kv] @ q[b, t, n] / np.sqrt(q.shape[-1])
        p = np.exp(scores - scores.max())
        out[b, t, n] = (p / p.sum()) @ v[b, :last, kv]
    return out


@LAYOUTS
def test_attention_sees_the_columns_up_to_its_own(orders):
    cache, k, v = filled(orders)
    q = np.random.default_rng(1).normal(size=(B, 3, 4, H)).astype(np.float32)
    columns = np.array([[0, 1, 2], [3, 4, 5], [9, 10, 11], [0, 0, 0], [7, 2, 11]])
    got = attend_rows(jnp.asarray(q), *cache.layers[0], jnp.asarray(columns), orders)
    np.testing.assert_allclose(got, attend_slowly(q, k[0], v[0], columns), atol=1e-5)


@LAYOUTS
def test_write_token_changes_one_column_of_each_row(orders):
    cache, k, _ = filled(orders)
    new = np.random.default_rng(2).normal(size=(B, 1, K, H)).astype(np.float32)
    at = np.array([0, 11, 5, 12, 3])
    got = columns_first(
        write_token(cache.layers[1][0], jnp.asarray(new), orders[0], jnp.arange(len(at)), jnp.asarray(at)), orders[0]
    )
    expected = k[1].copy()
    for b in range(B):
        if at[b] < S:
            expected[b, at[b]] = new[b, 0]
    np.testing.assert_array_equal(got, expected)


@LAYOUTS
def test_write_span_by_scatter_drops_padding_and_foreign_rows(orders):
    cache, k, _ = filled(orders)
    new = np.random.default_rng(3).normal(size=(3, 4, K, H)).astype(np.float32)
    rows, start, length = np.array([4, B, 1]), np.array([2, 0, 9]), np.array([3, 4, 4])
    new, *places = map(jnp.asarray, (new, rows, start, length))
    leaf = write_span(cache.layers[0][0], new, orders[0], *places, scatter=True)
    expected = k[0].copy()
    expected[4, 2:5] = new[0, :3]
    expected[1, 9:12] = new[2, :3]
    np.testing.assert_array_equal(columns_first(leaf, orders[0]), expected)


@LAYOUTS
def test_write_span_by_slice_keeps_other_rows(orders):
    cache, k, _ = filled(orders)
    new = np.random.default_rng(4).normal(size=(1, 4, K, H)).astype(np.float32)

    def one(x):
        return jnp.array([x])

    leaf = write_span(cache.layers[0][0], jnp.asarray(new), orders[0], one(3), one(5), one(4), scatter=False)
    expected = k[0].copy()
    expected[3, 5:9] = new[0]
    np.testing.assert_array_equal(columns_first(leaf, orders[0]), expected)


@LAYOUTS
@pytest.mark.parametrize("scatter", [True, False], ids=["scatter", "loop"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_fork_copies_the_source_onto_the_first_targets(orders, scatter, count):
    cache, k, v = filled(orders)
    targets = np.array([4, 0, 2, 1, 1])
    run = jax.jit(fork, static_argnames="scatter", donate_argnums=0)
    forked = run(cache, jnp.int32(3), jnp.asarray(targets), jnp.int32(count), scatter=scatter)
    for layer in range(CONFIG.layers):
        for leaf, wanted, order in zip(forked.layers[layer], (k, v), orders, strict=True):
            expected = wanted[layer].copy()
            expected[targets[:count]] = expected[3]
            np.testing.assert_array_equal(columns_first(leaf, order), expected)


@LAYOUTS
def test_resize_keeps_what_fits_and_adds_zeros(orders):
    cache, k, v = filled(orders)
    grown = resize(cache, 20)
    assert grown.capacity == 20 and grown.slots == B and grown.nbytes == cache.nbytes * 20 // S
    for leaf, wanted, order in zip(grown.layers[1], (k, v), orders, strict=True):
        np.testing.assert_array_equal(columns_first(leaf, order)[:, :S], wanted[1])
        assert not columns_first(leaf, order)[:, S:].any()
    shrunk = resize(cache, 7)
    np.testing.assert_array_equal(columns_first(shrunk.layers[0][0], orders[0]), k[0][:, :7])


@LAYOUTS
@pytest.mark.parametrize("fresh", [True, False])
def test_a_span_attends_to_the_row_and_to_itself(orders, fresh):
    cache, k, v = filled(orders)
    rng = np.random.default_rng(5)
    q, new_k, new_v = (rng.normal(size=(2, 4, n, H)).astype(np.float32) for n in (4, K, K))
    rows, start = np.array([3, 0]), np.zeros(2, int) if fresh else np.array([5, 2])
    writer = CacheWriter(cache, CONFIG)
    attend = writer.attend_span(1, jnp.asarray(rows), jnp.asarray(start), jnp.full(2, 4), fresh=fresh, scatter=True)
    got = attend(*map(jnp.asarray, (q, new_k, new_v)))
    full_k, full_v = k[1][rows].copy(), v[1][rows].copy()
    for i in range(2):
        full_k[i, start[i] : start[i] + 4], full_v[i, start[i] : start[i] + 4] = new_k[i], new_v[i]
    columns = start[:, None] + np.arange(4)
    np.testing.assert_allclose(got, attend_slowly(q, full_k, full_v, columns), atol=1e-5)
    np.testing.assert_array_equal(columns_first(writer.cache().layers[1][0], orders[0])[rows], full_k)
    np.testing.assert_array_equal(writer.cache().layers[0][0], cache.layers[0][0])
