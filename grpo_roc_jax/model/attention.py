"""Attention over packed rows; the decode-time attention lives with its cache.

`make_attention` names the paths for training and scoring. The reference materialises the scores; it is what every
faster path is held to.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_roc_jax.shapes import Array, Bool, Float, Int, checked

MASKED = -1e30
"""Score of a forbidden pair: finite, so that a row with no allowed key gives finite garbage instead of NaN."""


@checked
def packed_mask(segment_ids: Int[Array, "B T"], window: Int[Array, ""] | None = None) -> Bool[Array, "B T T"]:
    """True where query t may see key s: s <= t within one segment, and t - s < window where that is positive.

    Segment 0 is padding and sees only itself.
    """
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    at = jnp.arange(segment_ids.shape[1])
    return same & in_reach(at, at, window)[None]


def in_reach(queries: Int[Array, " T"], keys: Int[Array, " S"], window: Array | None) -> Bool[Array, "T S"]:
    """True where a key's column is not after the query's and, given a positive window, near enough before it."""
    distance = queries[:, None] - keys[None]
    if window is None:
        return distance >= 0
    return (distance >= 0) & ((distance < window) | (window <= 0))


def attend_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
    window: Int[Array, ""] | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention with materialised float32 scores [B,K,N/K,T,T]."""
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * H**-0.5
    scores = jnp.where(packed_mask(segment_ids, window)[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, N, H)


SAVED = "attention"
"""Checkpoint name of what the remat policy `attention` keeps: the context and, in `blocked`, its logsumexp."""


def make_attention(name: str, length: int, platform: str | None = None) -> Callable[..., Array]:
    """`attend(q, k, v, segment_ids, window=None) -> context [B,T,N,H]` for rows of that length.

    Args:
        name: As in `UpdateConfig.attention`.
        length: Tokens of a row.
        platform: Of the devices it will run on; None for those of this process.

    Raises:
        ValueError: no path of that name.
    """
    # Two blocks are where the loop begins to win on CPU (measured); accelerators want larger matrices.
    block = 128 if (platform or jax.default_backend()) == "cpu" else 512
    if name == "auto":
        name = "blocked" if length >= 2 * block else "reference"
    if name == "blocked":
        return partial(attend_blocked, min(block, length))
    paths = {"reference": attend_reference, "cudnn": attend_cudnn}
    if name not in paths:
        raise ValueError(f"update.attention = {name!r}; one of auto, blocked, {', '.join(paths)} is wanted")
    return lambda *inputs: checkpoint_name(paths[name](*inputs), SAVED)


def attend_cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
    window: Int[Array, ""] | None = None,
) -> Float[Array, "B T N H"]:
    """cuDNN's fused attention through the public interface, which takes segments as a materialised mask only."""
    mask = packed_mask(segment_ids, window)[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn")


def attend_blocked(
    block: int,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
    window: Int[Array, ""] | None = None,
) -> Float[Array, "B T N H"]:
    """The reference, one block of queries against one block of keys at a time, in plain XLA.

    The loop over keys runs from the block where the oldest of the queries' segments or windows begins, in any row, to
    the diagonal: the work follows the sum of squared segment lengths instead of T^2. The backward pass rebuilds the
    scores from q, k and the logsumexp, so that no [T,T] exists (arXiv:2205.14135). On padding the result is finite
    and otherwise undefined.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    pad = lambda x: jnp.pad(x, ((0, 0), (0, -T % block)) + ((0, 0),) * (x.ndim - 2))  # noqa: E731
    out = _blocked(block, pad(q.reshape(B, T, K, N // K, H)), pad(k), pad(v), pad(segment_ids), window)
    return out[:, :T].reshape(B, T, N, H)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(block: int, q: Array, k: Array, v: Array, segment_ids: Array, window: Array | None) -> Array:
    """q [B,T,K,G,H], k and v [B,T,K,H] with T a multiple of the block; the context has the shape of q."""
    return _blocked_fwd(block, q, k, v, segment_ids, window)[0]


def first_key_blocks(segment_ids: Int[Array, "B T"], block: int, window: Array | None = None) -> Int[Array, " I"]:
    """For each block of queries the first block of keys that any of them, in any row, can see."""
    B, T = segment_ids.shape
    at = jnp.arange(T, dtype=jnp.int32)[None]
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    # Padding begins everywhere: rows without trajectories must not make the others look back.
    start = jax.lax.cummax(jnp.where(begins | (segment_ids == 0), at, 0), axis=1)
    if window is not None:
        start = jnp.where(window > 0, jnp.maximum(start, at - window + 1), start)
    return start.reshape(B, -1, block)[:, :, 0].min(0) // block


def _cut(x: Array, index: Array, block: int, axis: int = 1) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, index * block, block, axis)


def _paste(whole: Array, part: Array, index: Array, axis: int = 1) -> Array:
    start = index * part.shape[axis]
    return jax.lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), start, axis)


def _block_scores(
    q: Array, k: Array, segment_ids: Array, window: Array | None, i: Array, j: Array, block: int
) -> Array:
    """Masked float32 scores [B,K,G,block,block] of query block i, already cut, against key block j."""
    scores = jnp.einsum("btkgh,bskh->bkgts", q, _cut(k, j, block), preferred_element_type=jnp.float32)
    same = _cut(segment_ids, i, block)[:, :, None] == _cut(segment_ids, j, block)[:, None, :]
    at = jnp.arange(block)
    reach = in_reach(i * block + at, j * block + at, window)
    return jnp.where((same & reach[None])[:, None, None], scores * q.shape[-1] ** -0.5, MASKED)


def _blocked_fwd(block: int, q: Array, k: Array, v: Array, segment_ids: Array, window: Array | None) -> tuple:
    B, T, K, G, H = q.shape
    first = first_key_blocks(segment_ids, block, window)

    def queries(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, lse = carry
        q_i = _cut(q, i, block)

        def keys(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, context = carry
            scores = _block_scores(q_i, k, segment_ids, window, i, j, block)
            new_top = jnp.maximum(top, scores.max(-1))
            p, old = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            seen = jnp.einsum(
                "bkgts,bskh->bkgth", p.astype(v.dtype), _cut(v, j, block), preferred_element_type=jnp.float32
            )
            return new_top, total * old + p.sum(-1), context * old[..., None] + seen

        zeros = jnp.zeros((B, K, G, block), jnp.float32)
        start = (zeros + MASKED, zeros, jnp.zeros((*zeros.shape, H), jnp.float32))
        top, total, context = jax.lax.fori_loop(first[i], i + 1, keys, start)
        context = jnp.moveaxis(context / total[..., None], 3, 1)
        return _paste(out, context, i), _paste(lse, top + jnp.log(total), i, axis=3)

    empty = (jnp.zeros(q.shape, v.dtype), jnp.zeros((B, K, G, T), jnp.float32))
    out, lse = jax.lax.fori_loop(0, T // block, queries, empty)
    out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
    return out, (q, k, v, segment_ids, window, out, lse)


def _blocked_bwd(block: int, kept: tuple[Array, ...], d_out: Array) -> tuple:
    """dS = P (dO V^T - rowsum(dO O)); dQ = dS K, dK = dS^T Q, dV = P^T dO, with P = exp(S - lse)."""
    q, k, v, segment_ids, window, out, lse = kept
    first = first_key_blocks(segment_ids, block, window)
    delta = jnp.einsum("btkgh,btkgh->bkgt", d_out, out, preferred_element_type=jnp.float32)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def queries(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        d_q, d_k, d_v = carry
        q_i, d_i = _cut(q, i, block), _cut(d_out, i, block)
        lse_i, delta_i = _cut(lse, i, block, axis=3), _cut(delta, i, block, axis=3)

        def keys(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_qi, d_k, d_v = carry
            p = jnp.exp(_block_scores(q_i, k, segment_ids, window, i, j, block) - lse_i[..., None])
            d_p = product("btkgh,bskh->bkgts", d_i, _cut(v, j, block))
            d_s = (p * (d_p - delta_i[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
            d_kj = product("bkgts,btkgh->bskh", d_s, q_i)
            d_vj = product("bkgts,btkgh->bskh", p.astype(v.dtype), d_i)
            d_k = _paste(d_k, _cut(d_k, j, block) + d_kj, j)
            d_v = _paste(d_v, _cut(d_v, j, block) + d_vj, j)
            return d_qi + product("bkgts,bskh->btkgh", d_s, _cut(k, j, block)), d_k, d_v

        start = (jnp.zeros(q_i.shape, jnp.float32), d_k, d_v)
        d_qi, d_k, d_v = jax.lax.fori_loop(first[i], i + 1, keys, start)
        return _paste(d_q, d_qi, i), d_k, d_v

    empty = (jnp.zeros(q.shape, q.dtype), jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    d_q, d_k, d_v = jax.lax.fori_loop(0, q.shape[1] // block, queries, empty)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None, None


_blocked.defvjp(_blocked_fwd, _blocked_bwd)
