"""Attention over packed rows, for training and scoring. Attention to the cache is in `pool`.

`make_attention` returns one of several implementations with the signature of `attend_reference`. Keys, values and
segment ids cover whole rows [B,S]. The queries are those of `columns`, by default all in order; `parallel` gives each
device a part of them. The reference materializes the scores, and the tests compare every faster path with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_roc_jax.model.attention_mask import MASKED, SAVED, first_key_blocks, in_reach, packed_mask, soft_cap
from grpo_roc_jax.shapes import Array, Float, Int


def attend_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    segment_ids: Int[Array, "B S"],
    window: Int[Array, ""] | None = None,
    columns: Int[Array, " T"] | None = None,
    *,
    cap: float = 0.0,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention with materialized float32 scores [B,K,N/K,T,S]. The scores `sinks` of the heads take part in
    the softmax and bring no value."""
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * H**-0.5
    scores = soft_cap(scores, cap)
    scores = jnp.where(packed_mask(segment_ids, window, columns)[:, None, None], scores, MASKED)
    if sinks is not None:
        empty = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, K, N // K, 1, 1), (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, empty], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, N, H)


def make_attention(
    name: str,
    length: int,
    platform: str,
    *,
    parts: int = 1,
    windows: Sequence[int] = (),
    cap: float = 0.0,
) -> Callable[..., Array]:
    """`attend(q, k, v, segment_ids, window=None, columns=None) -> context [B,T,N,H]` for rows of that length.

    Args:
        name: As in `UpdateConfig.attention`.
        length: S, tokens of a row.
        platform: Platform it will run on.
        parts: Devices that share the queries of a row, each with two runs of them (`parallel.columns_of`).
        windows: Window of each layer, 0 for none; empty if no layer has one.
        cap: Soft cap of the scores, 0 for none.

    Raises:
        ValueError: no path has that name, or the platform or path cannot run it.
    """
    name = usual_path(length, platform) if name == "auto" else name
    if name == "blocked":
        return partial(attend_blocked, AttentionBlocks(block_size(length, parts, BLOCKS.get(platform, 512)), cap))
    if name == "splash":
        from grpo_roc_jax.model.attention_tpu import make_splash  # an experimental library, imported only if used

        return make_splash(length, platform, parts=parts, windows=windows, cap=cap)
    if name == "cudnn" and cap:
        raise ValueError(
            f"update.attention = 'cudnn' with model.extras.attention_cap = {cap}: the kernel caps no scores; take "
            "auto, blocked or reference"
        )
    paths = {"reference": partial(attend_reference, cap=cap), "cudnn": attend_cudnn}
    if name not in paths:
        raise ValueError(f"update.attention = {name!r}; must be one of auto, blocked, splash, {', '.join(paths)}")
    return lambda *inputs, **more: checkpoint_name(paths[name](*inputs, **more), SAVED)


BLOCKS = {"cpu": 128}
"""Most queries in a block, by platform; other platforms take 512, since accelerators need larger matrices."""


def usual_path(length: int, platform: str) -> str:
    """The path that `auto` takes without measuring. On a CPU the blocked loop was faster from two blocks on."""
    return "blocked" if length >= 2 * BLOCKS.get(platform, 512) else "reference"


def block_size(length: int, parts: int, limit: int) -> int:
    """Queries in a block: at most `limit`. If devices share a row, it divides the length of each of their runs."""
    if parts == 1:
        return min(limit, length)
    run = length // (2 * parts)
    return next(size for size in range(min(limit, run), 0, -1) if run % size == 0)


def attend_cudnn(
    q: Array, k: Array, v: Array, segment_ids: Array, window: Array | None = None, columns: Array | None = None
) -> Array:
    """cuDNN's fused attention through JAX's public interface, which takes segments only as a materialized mask.

    The mask is already causal; `is_causal` lets the kernel skip the masked half.
    """
    mask = packed_mask(segment_ids, window, columns)[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=columns is None, implementation="cudnn")


@dataclass(frozen=True)
class AttentionBlocks:
    """Static settings of `attend_blocked`."""

    size: int
    """Queries, and keys, in a block."""
    cap: float = 0.0
    """Soft cap of the scores, 0 for none."""


def attend_blocked(
    blocks: AttentionBlocks,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    window: Array | None = None,
    columns: Array | None = None,
    *,
    sinks: Array | None = None,
) -> Array:
    """Attention by one block of queries and one block of keys at a time, in plain XLA.

    The loop over keys starts at the block that holds the earliest key which any of the queries can see, in any row, and
    ends at the diagonal. The work therefore grows with the sum of squared segment lengths instead of T^2. The backward
    pass recomputes the scores from q, k and the logsumexp, so no [T,S] array exists (arXiv:2205.14135). On padding the
    result is finite but undefined. If `columns` is given, the block size divides T and S, and each block of queries
    covers consecutive columns that start at a multiple of the block size.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    q, k, v, segment_ids = (_pad(x, blocks.size) for x in (q.reshape(B, T, K, N // K, H), k, v, segment_ids))
    diagonal = jnp.arange(q.shape[1] // blocks.size) if columns is None else columns[:: blocks.size] // blocks.size
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(K, N // K)
    out = _blocked(blocks, q, k, v, segment_ids, window, diagonal, sinks)
    return out[:, :T].reshape(B, T, N, H)


def _pad(x: Array, block: int) -> Array:
    """Pads the second axis with zeros to a multiple of the block."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)) + ((0, 0),) * (x.ndim - 2))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(
    blocks: AttentionBlocks,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    window: Array | None,
    diagonal: Array,
    sinks: Array | None,
) -> Array:
    """q [B,T,K,G,H], k and v [B,S,K,H] with T and S multiples of the block; the context has the shape of q. Query
    block i has the columns of key block diagonal[i]. `sinks` [K,G] are scores without keys."""
    return _blocked_fwd(blocks, q, k, v, segment_ids, window, diagonal, sinks)[0]


def _cut(x: Array, index: Array, block: int, axis: int = 1) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, index * block, block, axis)


def _paste(target: Array, part: Array, index: Array, axis: int = 1) -> Array:
    start = index * part.shape[axis]
    return jax.lax.dynamic_update_slice_in_dim(target, part.astype(target.dtype), start, axis)


def _block_scores(
    q: Array, k: Array, segment_ids: Array, window: Array | None, i: Array, j: Array, blocks: AttentionBlocks
) -> Array:
    """Masked float32 scores [B,K,G,block,block] of one block of queries against key block j. `q` holds that block only;
    its columns are those of key block i."""
    block = blocks.size
    scores = jnp.einsum("btkgh,bskh->bkgts", q, _cut(k, j, block), preferred_element_type=jnp.float32)
    scores = soft_cap(scores * q.shape[-1] ** -0.5, blocks.cap)
    same = _cut(segment_ids, i, block)[:, :, None] == _cut(segment_ids, j, block)[:, None, :]
    at = jnp.arange(block)
    reach = in_reach(i * block + at, j * block + at, window)
    return jnp.where((same & reach[None])[:, None, None], scores, MASKED)


def _blocked_fwd(
    blocks: AttentionBlocks,
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    window: Array | None,
    diagonal: Array,
    sinks: Array | None,
) -> tuple:
    B, T, K, G, H = q.shape
    block = blocks.size
    first = first_key_blocks(segment_ids, block, window)

    def queries(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, lse = carry
        q_i, at = _cut(q, i, block), diagonal[i]

        def keys(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, context = carry
            scores = _block_scores(q_i, k, segment_ids, window, at, j, blocks)
            new_top = jnp.maximum(top, scores.max(-1))
            p, old = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            seen = jnp.einsum(
                "bkgts,bskh->bkgth", p.astype(v.dtype), _cut(v, j, block), preferred_element_type=jnp.float32
            )
            return new_top, total * old + p.sum(-1), context * old[..., None] + seen

        zeros = jnp.zeros((B, K, G, block), jnp.float32)
        first_scores = (zeros + MASKED, zeros) if sinks is None else (zeros + sinks[None, :, :, None], zeros + 1.0)
        start = (*first_scores, jnp.zeros((*zeros.shape, H), jnp.float32))
        top, total, context = jax.lax.fori_loop(first[at], at + 1, keys, start)
        context = jnp.moveaxis(context / total[..., None], 3, 1)
        return _paste(out, context, i), _paste(lse, top + jnp.log(total), i, axis=3)

    empty = (jnp.zeros(q.shape, v.dtype), jnp.zeros((B, K, G, T), jnp.float32))
    out, lse = jax.lax.fori_loop(0, T // block, queries, empty)
    out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
    return out, (q, k, v, segment_ids, window, diagonal, sinks, out, lse)


def _blocked_bwd(blocks: AttentionBlocks, residuals: tuple[Array, ...], d_out: Array) -> tuple:
    """dS = P (dO V^T - rowsum(dO O)); dQ = dS K, dK = dS^T Q, dV = P^T dO, with P = exp(S - lse). A cap c multiplies dS
    by 1 - (S / c)^2."""
    block = blocks.size
    q, k, v, segment_ids, window, diagonal, sinks, out, lse = residuals
    first = first_key_blocks(segment_ids, block, window)
    delta = jnp.einsum("btkgh,btkgh->bkgt", d_out, out, preferred_element_type=jnp.float32)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def queries(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        d_q, d_k, d_v = carry
        q_i, d_i, at = _cut(q, i, block), _cut(d_out, i, block), diagonal[i]
        lse_i, delta_i = _cut(lse, i, block, axis=3), _cut(delta, i, block, axis=3)

        def keys(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_qi, d_k, d_v = carry
            scores = _block_scores(q_i, k, segment_ids, window, at, j, blocks)
            p = jnp.exp(scores - lse_i[..., None])
            d_p = product("btkgh,bskh->bkgts", d_i, _cut(v, j, block))
            d_s = p * (d_p - delta_i[..., None]) * q.shape[-1] ** -0.5
            if blocks.cap:  # masked scores lie far beyond the cap, and their p is 0
                d_s *= 1.0 - jnp.square(jnp.maximum(scores / blocks.cap, -1.0))
            d_s = d_s.astype(q.dtype)
            d_kj = product("bkgts,btkgh->bskh", d_s, q_i)
            d_vj = product("bkgts,btkgh->bskh", p.astype(v.dtype), d_i)
            d_k = _paste(d_k, _cut(d_k, j, block) + d_kj, j)
            d_v = _paste(d_v, _cut(d_v, j, block) + d_vj, j)
            return d_qi + product("bkgts,bskh->btkgh", d_s, _cut(k, j, block)), d_k, d_v

        start = (jnp.zeros(q_i.shape, jnp.float32), d_k, d_v)
        d_qi, d_k, d_v = jax.lax.fori_loop(first[at], at + 1, keys, start)
        return _paste(d_q, d_qi, i), d_k, d_v

    empty = (jnp.zeros(q.shape, q.dtype), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    d_q, d_k, d_v = jax.lax.fori_loop(0, q.shape[1] // block, queries, empty)
    # A sink has a value of zero, so its dS is -P rowsum(dO O).
    d_sinks = None if sinks is None else -jnp.sum(jnp.exp(sinks[None, :, :, None] - lse) * delta, axis=(0, 3))
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None, None, None, d_sinks


_blocked.defvjp(_blocked_fwd, _blocked_bwd)
