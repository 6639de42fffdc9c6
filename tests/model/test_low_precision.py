"""Numbers in int8 and float8: what is stored, and what attention reads from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.low_precision import exact, plain_layer, quantized_layer, rounded, scaled_orders
from grpo_roc_jax.model.pool import (
    PoolSize,
    PoolWriter,
    allocate,
    cache_orders,
    copy_blocks,
    readers_of,
    token_places,
)

DTYPES = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}


def test_numbers_by_hand():
    """Scales 2.54 / 127 and 1 (all zeros); halves go to the even neighbor."""
    stored, scale = rounded(jnp.array([[2.54, -1.0, 0.05], [0.0, 0.0, 0.0]]), 1, jnp.int8)
    np.testing.assert_allclose(scale, [0.02, 1.0], rtol=1e-6)
    np.testing.assert_array_equal(stored, [[127, -50, 2], [0, 0, 0]])
    stored, scale = rounded(jnp.array([448.0, -17.0, 1.0]), 0, jnp.float8_e4m3fn)
    assert scale == 1
    np.testing.assert_array_equal(stored.astype(jnp.float32), [448.0, -16.0, 1.0], "3 bits after the first")


def test_a_matrix_has_a_scale_for_each_output():
    rng = np.random.default_rng(0)
    layer = {"wq": rng.normal(size=(6, 2, 3)), "wo": rng.normal(size=(2, 3, 6)), "mlp_norm": np.ones(6)}
    stored = quantized_layer({name: jnp.asarray(leaf, jnp.float32) for name, leaf in layer.items()}, 8)
    assert stored["wq"].scales.shape == (1, 2, 3) and stored["wo"].scales.shape == (1, 1, 6)
    assert stored["wo"].codes.dtype == jnp.int8 and stored["mlp_norm"].dtype == jnp.float32
    back = plain_layer(stored, jnp.float32)
    assert back.keys() == layer.keys()
    np.testing.assert_allclose(back["wq"], layer["wq"], atol=np.abs(layer["wq"]).max() / 254 + 1e-6)
    np.testing.assert_allclose(stored["wo"].scales[0, 0], np.abs(layer["wo"]).max(axis=(0, 1)) / 127, rtol=1e-6)


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "int8"), ("gpu", "float8"), ("tpu", "int8")])
def test_attention_reads_what_rounding_leaves(platform, dtype):
    """A span, a copy of its block to another row, then a token of both rows: as over a cache of rounded numbers."""
    config = ModelConfig(d_model=16, layers=1, heads=4, kv_heads=2, head_dim=8, vocab_size=11)
    orders, stored = cache_orders(platform), DTYPES[dtype]
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 8, n, 8)), jnp.float32) for n in (4, 2, 2))
    token = [jnp.asarray(rng.normal(size=(2, 1, n, 8)), jnp.float32) for n in (4, 2, 2)]
    table = jnp.array([[1, 2, 4], [3, 2, 5]], jnp.int32)

    def near(x):
        numbers, scale = rounded(x, 3, stored)
        return numbers.astype(jnp.float32) * scale[..., None]

    def run(pool, change):
        writer, none = PoolWriter(pool, config), jnp.zeros(1, jnp.int32)
        span = writer.attend_span(0, table[:1], none, none, none + 7)(q, change(k), change(v))
        pool = copy_blocks(writer.pool(), jnp.array([[1], [3]]), jnp.full((2, 1), 9))
        active, position = jnp.ones(2, bool), jnp.array([7, 6], jnp.int32)
        writer = PoolWriter(pool, config)
        places = token_places(pool, position, active, table, readers_of(pool, table, active))
        return span[:, :7], writer.attend_token(0, places)(token[0], *map(change, token[1:])), writer.pool()

    size = PoolSize(6, 4, 2, shared=2)
    few = allocate(config, size, jnp.float32, scaled_orders(orders), stored=stored)
    assert {leaf.dtype for leaf in jax.tree.leaves(few.layers)} == {jnp.dtype(stored), jnp.dtype(jnp.float32)}
    run = jax.jit(run, static_argnums=1)
    got, wanted = run(few, lambda x: x), run(allocate(config, size, jnp.float32, orders), near)
    for part, other in zip(got[:2], wanted[:2], strict=True):
        np.testing.assert_allclose(part, other, atol=2e-6)
    for part, other in zip(got[2].layers[0], wanted[2].layers[0], strict=True):
        for value, plain in zip(exact(part, few.orders, jnp.float32), other, strict=True):
            np.testing.assert_allclose(value, plain, atol=1e-6)
