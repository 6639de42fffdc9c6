"""The paged kernel against the XLA path in Pallas' interpret mode, and compiled for a TPU topology."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.model.block_attention import Limits, attend_window
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.paged import attend_table, check_paged
from grpo_roc_jax.model.pool import in_turn
from grpo_roc_jax.model.sharding import ShardingConfig, make_mesh
from tests.helpers.interpreted import interpreted  # noqa: F401

CONFIG = ModelConfig(d_model=16, layers=1, heads=4, kv_heads=2, head_dim=128, vocab_size=11, compute_dtype="float32")
S, K, H = 16, 2, 128


def cached(rows, dtype=jnp.float32):
    """Keys and values of three pages a row, apart and in turn, and the table of the rows."""
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(3 * rows, S, K, H)), dtype) for _ in range(2))
    return k, v, in_turn(k, v), jnp.asarray(rng.permutation(3 * rows).reshape(rows, 3), jnp.int32)


def by_xla(q, k, v, table, seen, *, window=0, cap=0.0):
    def gather(pages):
        return k[pages], v[pages]

    return attend_window(q, gather, table, seen[:, None] - 1, ("skh", "skh"), Limits(window, cap))


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
    *pages, table = cached(10, dtype)
    k, v, leaf = (page[:, :, :n] for page, n in zip(pages, (heads, heads, 2 * heads), strict=True))
    q = queries(10, 1, dtype=dtype)[:, :, : 2 * heads]
    got = attend_table(q, leaf, table, seen, **limits)
    wanted = by_xla(q, k, v, table, seen, **limits)
    assert got.dtype == wanted.dtype == dtype
    np.testing.assert_allclose(np.float32(got), np.float32(wanted), atol=bound)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_heads_and_rows_over_devices():
    """The engine's `shard_map` splits rows, the one around the kernel splits heads."""
    mesh = make_mesh(ShardingConfig(data=2, tensor=2), jax.devices()[:4])
    k, v, leaf, _ = cached(4)
    table = jnp.asarray([[3, 0, 5], [4, 2, 1], [9, 6, 8], [11, 7, 10]], jnp.int32)  # two rows in each half of the pages
    q, seen = queries(4, 1), jnp.array([1, 20, 48, 33], jnp.int32)
    wanted = by_xla(q, k, v, table, seen)

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    def attend(q, leaf, table, seen):
        return attend_table(q, leaf, table, seen, mesh=mesh)

    split = jax.shard_map(
        attend, mesh=mesh, in_specs=(P("data"),) * 4, out_specs=P("data"), axis_names={"data"}, check_vma=False
    )
    local = put(table % 6, "data")
    got = jax.jit(split)(put(q, "data"), put(leaf, "data", None, "tensor", None), local, put(seen, "data"))
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    alone = make_mesh(ShardingConfig(tensor=2), jax.devices()[:2])
    got = jax.jit(lambda *x: attend_table(*x, mesh=alone))(q, np.asarray(leaf), table, seen)
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 64}, "model.head_dim = 64: must be a multiple of 128"),
        ({"kv_heads": 3, "heads": 3}, r"kv_heads = 3 over 1 devices: must be 1, 2 or 4 a device, or a multiple of 8"),
        ({"compute_dtype": "float16"}, "in float16: must be bfloat16 or float32"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(change, message):
    model = replace(CONFIG, compute_dtype="bfloat16")
    for heads in (1, 2, 4, 8, 16, 24):
        check_paged(replace(model, kv_heads=heads, heads=heads), "tpu")
    check_paged(replace(model, kv_heads=8, heads=8), "tpu", tensor=8)
    with pytest.raises(ValueError, match=message):
        check_paged(replace(model, **change), "tpu")
    with pytest.raises(ValueError, match="on cpu: the kernel is for TPUs"):
        check_paged(model, "cpu")
