"""Attention to the cache by the ragged paged attention kernel for TPUs that ships with JAX (Pallas).

The kernel finds the pages of a row through a table; a page is a block of the pool, with keys and values of a column
side by side (`pool.PAGED`). The cost of a row follows the columns written, in whole pages.
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
"""Most columns, and bytes, of the pages that are read together. Two such reads are in flight at a time within 16 MiB of
fast memory."""
DECODE_QUERIES, SPAN_QUERIES = 8, 32
"""Queries in a block. A block computes and drops queries of other rows, so decoding uses few; 32 is the smallest size
in the kernel's own table, which is tuned for spans."""


def check_paged(config: ModelConfig, platform: str, tensor: int = 1) -> None:
    """Checks that the kernel supports the model on a platform where `tensor` devices share the heads of a row.

    Raises:
        ValueError: It does not; the message gives the value and the constraint.
    """
    remedy = "; set rollout.attention xla"
    if platform != "tpu":
        raise ValueError(f"rollout.attention = 'paged' on {platform}: the kernel is for TPUs{remedy}")
    if config.extras.sinks:
        raise ValueError(
            f"rollout.attention = 'paged' with model.extras.sinks: the kernel has no scores without keys{remedy}"
        )
    if config.windows.chunked:
        raise ValueError(f"rollout.attention = 'paged' with model.windows.chunked: the kernel has no chunks{remedy}")
    dtype = compute_dtype(config)
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"rollout.attention = 'paged' in {dtype}: must be bfloat16 or float32{remedy}")
    for kv_heads, width in dict.fromkeys(config.attention_heads):
        if width % 128:
            raise ValueError(
                f"rollout.attention = 'paged' with model.head_dim = {width}: must be a multiple of 128{remedy}"
            )
        heads, packing = 2 * kv_heads // tensor, 4 // dtype.itemsize
        tiles = heads // packing
        if kv_heads % tensor or heads % packing or not (tiles in (1, 2, 4) or tiles % 8 == 0):
            raise ValueError(
                f"rollout.attention = 'paged' with model.kv_heads = {kv_heads} over {tensor} devices: must be 1, 2 "
                f"or 4 a device, or a multiple of {4 * packing}, in {dtype}{remedy}"
            )


@checked
def attend_table(
    q: Float[Array, "n T N H"],
    pages: Float[Array, "P S C H"],
    table: Int[Array, "n W"],
    seen: Int[Array, " n"],
    *,
    window: int = 0,
    cap: float = 0.0,
    mesh: Mesh | None = None,
) -> Float[Array, "n T N H"]:
    """Softmax attention of the T queries of each row to its first `seen` columns, which lie in the pages of the table.
    The last query sees all of them, each query before it one less; with a positive `window` only the last `window`
    ones.

    Args:
        q: Queries of n rows.
        pages: The pool of one layer, whose heads alternate between keys and values.
        table: Pages of each row. An entry that is no page reads an arbitrary page.
        seen: At least T, and at most the columns of the table.
        window: Number of columns that a query sees; 0 for all.
        cap: Soft cap of the scores, 0 for none.
        mesh: Mesh of the pool, whose heads are split over `tensor`; pages are replicated, or split by an enclosing
            `shard_map`.
    """
    attend = partial(_attend_here, window=window, cap=cap)
    if mesh is None:
        return attend(q, pages, table, seen)
    # XLA cannot partition the kernel over automatic mesh axes.
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
    )(q, pages, table, seen)


def _attend_here(q: Array, pages: Array, table: Array, seen: Array, *, window: int, cap: float) -> Array:
    """`attend_table` with the heads of one device."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    n, T, N, H = q.shape
    P, S, C, _ = pages.shape
    together = min(PAGE_COLUMNS, PAGE_BYTES // (C * H * pages.dtype.itemsize)) // S
    out = ragged_paged_attention(
        q.reshape(n * T, N, H),
        pages,
        seen.astype(jnp.int32),
        jnp.clip(table, 0, P - 1).astype(jnp.int32),
        jnp.arange(n + 1, dtype=jnp.int32) * T,
        jnp.full(1, n, jnp.int32),
        sm_scale=H**-0.5,
        sliding_window=window or None,
        soft_cap=cap or None,
        num_kv_pages_per_block=max(1, min(together, table.shape[1])),
        num_queries_per_block=min(n * T, DECODE_QUERIES if T == 1 else SPAN_QUERIES),
    )
    return out.reshape(q.shape)
