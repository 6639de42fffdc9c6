"""Attention over the cache by the ragged paged attention kernel for TPUs that ships with JAX (Pallas).

The kernel reads a row's pages by a table. Rows of our cache are contiguous, so a page is a run of columns of one slot,
and the table follows from the slot: with keys and values of a column side by side (`kv_cache.PAGED`) the cache is seen
as pages by a reshape that moves nothing. A row costs what it has written, in whole pages, and not what it might hold.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.transformer import compute_dtype
from grpo_roc_jax.shapes import Array, Float, Int, checked

PAGE_COLUMNS, PAGE_BYTES = 512, 2 << 20
"""Largest page. Each is one transfer of contiguous memory, two of them under way, beside 16 MiB of fast memory; small
ones waste less behind a row's end."""
DECODE_QUERIES, SPAN_QUERIES = 8, 32
"""Queries that share a block. Those of other rows are computed and dropped, so decoding takes few; 32 is the least in
the kernel's own table, which was made for spans."""


def check_paged(config: ModelConfig, platform: str, tensor: int = 1) -> None:
    """Refuses what the kernel does not take.

    Args:
        config: Of the model.
        platform: Of the devices.
        tensor: Devices that share the heads of a row.

    Raises:
        ValueError: naming what was found and what is wanted.
    """
    remedy = "; set rollout.attention xla"
    if platform != "tpu":
        raise ValueError(f"rollout.attention = 'paged' on {platform}: the kernel is for TPUs{remedy}")
    dtype = compute_dtype(config)
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"rollout.attention = 'paged' in {dtype}: bfloat16 or float32 is wanted{remedy}")
    if config.head_dim % 128:
        raise ValueError(
            f"rollout.attention = 'paged' with model.head_dim = {config.head_dim}: multiples of 128 are wanted{remedy}"
        )
    heads, packing = 2 * config.kv_heads // tensor, 4 // dtype.itemsize
    tiles = heads // packing
    if config.kv_heads % tensor or heads % packing or not (tiles in (1, 2, 4) or tiles % 8 == 0):
        raise ValueError(
            f"rollout.attention = 'paged' with model.kv_heads = {config.kv_heads} over {tensor} devices: 1, 2 or 4 a "
            f"device, or a multiple of {4 * packing}, are wanted in {dtype}{remedy}"
        )


def page_columns(capacity: int, column_bytes: int) -> int:
    """Columns of a page: the largest divisor of the capacity within the bounds above."""
    most = min(PAGE_COLUMNS, max(1, PAGE_BYTES // column_bytes))
    return max(size for size in range(1, most + 1) if capacity % size == 0)


@checked
def attend_pages(
    q: Float[Array, "n T N H"],
    leaf: Float[Array, "B S C H"],
    rows: Int[Array, " n"],
    seen: Int[Array, " n"],
    *,
    window: int = 0,
    mesh: Mesh | None = None,
) -> Float[Array, "n T N H"]:
    """Softmax attention of the T queries of each listed row, the last of which sees its first `seen` columns and each
    before it one less; under a positive `window` the last that many of these only.

    Args:
        q: Queries.
        leaf: Heads of keys and values in turn.
        rows: Rows of `leaf`; one beyond the last reads the last.
        seen: At least T.
        window: See above.
        mesh: Of the cache, whose heads lie over `tensor`; rows are whole, or split by a `shard_map` around this.
    """
    attend = partial(_attend_here, window=window)
    if mesh is None:
        return attend(q, leaf, rows, seen)
    # The kernel is a closed box to XLA, which cannot split it over axes that are left to it.
    around = jax.sharding.get_abstract_mesh()
    left = set(mesh.axis_names) - set(around.manual_axes)
    heads = "tensor" if "tensor" in left else None
    split = P(None, None, heads, None)
    return jax.shard_map(
        attend,
        mesh=mesh if around.empty else None,
        in_specs=(split, split, P(), P()),
        out_specs=split,
        axis_names=left,
        check_vma=False,
    )(q, leaf, rows, seen)


def _attend_here(q: Array, leaf: Array, rows: Array, seen: Array, *, window: int) -> Array:
    """`attend_pages` with the heads of one device."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    n, T, N, H = q.shape
    B, S, C, _ = leaf.shape
    page = page_columns(S, C * H * leaf.dtype.itemsize)
    first = jnp.minimum(rows, B - 1).astype(jnp.int32) * (S // page)
    out = ragged_paged_attention(
        q.reshape(n * T, N, H),
        leaf.reshape(B * (S // page), page, C, H),
        seen.astype(jnp.int32),
        first[:, None] + jnp.arange(S // page, dtype=jnp.int32)[None],
        jnp.arange(n + 1, dtype=jnp.int32) * T,
        jnp.full(1, n, jnp.int32),
        sm_scale=H**-0.5,
        sliding_window=window or None,
        num_kv_pages_per_block=1,
        num_queries_per_block=min(n * T, DECODE_QUERIES if T == 1 else SPAN_QUERIES),
    )
    return out.reshape(q.shape)
