"""The paged kernel against the XLA path in Pallas' interpret mode, and compiled for a TPU topology."""

from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import interpreted  # noqa: F401
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.model.config import ModelConfig, SlidingWindows
from grpo_roc_jax.model.kv_cache import PAGED, CacheWriter, allocate, attend_rows, fork, in_turn, resize
from grpo_roc_jax.model.paged import attend_pages, check_paged, page_columns
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh

CONFIG = ModelConfig(d_model=16, layers=1, heads=4, kv_heads=2, head_dim=128, vocab_size=11, compute_dtype="float32")
S, K, H = 48, 2, 128


def cached(rows, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(rows, S, K, H)), dtype) for _ in range(2))
    return k, v, in_turn(k, v)


def queries(*shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(1).normal(size=(*shape, 4, H)), dtype)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("dtype", "heads", "limits", "bound"),
    [
        ("float32", 1, {"window": 7, "cap": 1.5}, 1e-5),
        pytest.param("bfloat16", 2, {}, 0.02, marks=pytest.mark.slow),
    ],
)
def test_a_token_of_each_row_as_by_xla(dtype, heads, limits, bound):
    """More rows than a block of queries holds, of one column, of whole pages, and of all columns."""
    seen = jnp.array([1, 5, 16, 17, 40, 48, 2, 31, 33, 1], jnp.int32)
    k, v, leaf = (whole[:, :, :n] for whole, n in zip(cached(10, dtype), (heads, heads, 2 * heads), strict=True))
    q = queries(10, 1, dtype=dtype)[:, :, : 2 * heads]
    with mock.patch("grpo_roc_jax.model.paged.PAGE_COLUMNS", 16):
        got = attend_pages(q, leaf, jnp.arange(10), seen, **limits)
    wanted = attend_rows(q, k, v, seen[:, None] - 1, ("skh", "skh"), **limits)
    assert got.dtype == wanted.dtype == dtype
    np.testing.assert_allclose(np.float32(got), np.float32(wanted), atol=bound)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_a_cache_in_turn_writes_and_reads_as_one_of_pairs():
    """A span appended to two rows and to none (beyond the last), then a token per row; fork and resize in between."""
    k, v, leaf = cached(3)
    paged = allocate(CONFIG, 3, S, jnp.float32, PAGED).replace(layers=((leaf,),))
    pairs = allocate(CONFIG, 3, S, jnp.float32, ("skh", "skh")).replace(layers=((k, v),))
    rows, start, length = jnp.array([2, 0, 3]), jnp.array([20, 3, 0]), jnp.array([5, 3, 0])
    rng = np.random.default_rng(2)
    span = [jnp.asarray(rng.normal(size=(3, 5, n, H)), jnp.float32) for n in (4, K, K)]
    token = [jnp.asarray(rng.normal(size=(3, 1, n, H)), jnp.float32) for n in (4, K, K)]
    model, found = replace(CONFIG, windows=SlidingWindows((6,))), []
    for cache in (paged, pairs):
        writer = CacheWriter(cache, model)
        spans = writer.attend_span(0, rows, start, length, fresh=False, scatter=True)(*span)
        cache = resize(fork(writer.cache(), jnp.int32(2), jnp.array([1, 0, 0]), jnp.int32(1), scatter=True), 64)
        writer = CacheWriter(cache, model)
        tokens = writer.attend_token(0, jnp.array([6, 25, 25]), jnp.array([True, False, True]))(*token)
        found.append((spans[0], spans[1, :3], tokens, writer.cache()))
    (*paged_out, paged), (*pairs_out, pairs) = found
    for got, wanted in zip(paged_out, pairs_out, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    np.testing.assert_array_equal(paged.layers[0][0], in_turn(*pairs.layers[0]))
    assert (
        (paged.capacity, paged.slots, paged.nbytes)
        == (pairs.capacity, pairs.slots, pairs.nbytes)
        == (64, 3, 4 * 2 * 3 * 64 * K * H)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_heads_and_rows_over_devices():
    """The engine's `shard_map` splits rows, the one around the kernel splits heads."""
    mesh = make_mesh(ShardingConfig(data=2, tensor=2), jax.devices()[:4])
    k, v, leaf = cached(4)
    q, seen = queries(4, 1), jnp.array([1, 20, 48, 33], jnp.int32)
    wanted = attend_rows(q, k, v, seen[:, None] - 1, ("skh", "skh"))

    def place(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    leaf = place(leaf, "data", None, "tensor", None)

    def own(q, leaf, seen):
        return attend_pages(q, leaf, jnp.arange(q.shape[0]), seen, mesh=mesh)

    split = jax.shard_map(
        own, mesh=mesh, in_specs=(P("data"),) * 3, out_specs=P("data"), axis_names={"data"}, check_vma=False
    )
    got = jax.jit(split)(place(q, "data"), leaf, place(seen, "data"))
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    alone = make_mesh(ShardingConfig(tensor=2), jax.devices()[:2])
    got = jax.jit(lambda *x: attend_pages(*x, mesh=alone))(q, np.asarray(leaf), jnp.arange(4), seen)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_heads_in_turn():
    k, v = np.arange(12).reshape(1, 2, 3, 2), -np.arange(12).reshape(1, 2, 3, 2)
    both = np.asarray(in_turn(jnp.asarray(k), jnp.asarray(v)))
    np.testing.assert_array_equal(both[:, :, 0::2], k)
    np.testing.assert_array_equal(both[:, :, 1::2], v)


def test_pages_divide_the_capacity_and_fit():
    assert page_columns(1312, 2 * 8 * 128 * 2) == 328  # a quarter
    assert page_columns(2048, 2 * 8 * 128 * 2) == 512
    assert page_columns(2048, 2 * 8 * 128 * 4) == 256  # 2 MiB
    assert page_columns(10288, 512) == 16  # 16 x 643, a prime


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_dim": 64}, "model.head_dim = 64: must be a multiple of 128"),
        (
            {"kv_heads": 3, "heads": 3},
            r"kv_heads = 3 over 1 devices: must be 1, 2 or 4 a device, or a multiple of 8",
        ),
        ({"compute_dtype": "float16"}, "in float16: must be bfloat16 or float32"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(change, said):
    model = replace(CONFIG, compute_dtype="bfloat16")
    for heads in (1, 2, 4, 8, 16, 24):
        check_paged(replace(model, kv_heads=heads, heads=heads), "tpu")
    check_paged(replace(model, kv_heads=8, heads=8), "tpu", tensor=8)
    with pytest.raises(ValueError, match=said):
        check_paged(replace(model, **change), "tpu")
    with pytest.raises(ValueError, match="on cpu: the kernel is for TPUs"):
        check_paged(model, "cpu")
