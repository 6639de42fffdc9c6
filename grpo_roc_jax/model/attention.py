"""Attention over packed rows; the decode-time attention lives with its cache.

`make_attention` names the paths for training and scoring, all of the form `attend(q, k, v, segment_ids, window=None,
columns=None)`: keys, values and segment ids are those of whole rows [B,S], and the queries stand in `columns` of them:
all of them in order unless said otherwise (`parallel` gives each device a part of them). The reference materialises the
scores; it is what every faster path is held to.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from grpo_roc_jax.model.sums import NARROW, Sums
from grpo_roc_jax.shapes import Array, Bool, Float, Int, checked

MASKED = -1e30
"""Score of a forbidden pair: finite, so that a row with no allowed key gives finite garbage instead of NaN."""


@checked
def packed_mask(
    segment_ids: Int[Array, "B S"], window: Int[Array, ""] | None = None, columns: Int[Array, " T"] | None = None
) -> Bool[Array, "B T S"]:
    """True where the query in column t may see key s: s <= t within one segment, and t - s < window where that is
    positive.

    Segment 0 is padding and sees only itself.
    """
    at = jnp.arange(segment_ids.shape[1])
    own = segment_ids if columns is None else jnp.take(segment_ids, columns, axis=1)
    same = own[:, :, None] == segment_ids[:, None, :]
    return same & in_reach(at if columns is None else columns, at, window)[None]


def in_reach(queries: Int[Array, " T"], keys: Int[Array, " S"], window: Array | None) -> Bool[Array, "T S"]:
    """True where a key's column is not after the query's and, given a positive window, near enough before it."""
    distance = queries[:, None] - keys[None]
    if window is None:
        return distance >= 0
    return (distance >= 0) & ((distance < window) | (window <= 0))


def attend_reference(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    segment_ids: Int[Array, "B S"],
    window: Int[Array, ""] | None = None,
    columns: Int[Array, " T"] | None = None,
    *,
    sums: Sums = NARROW,
) -> Float[Array, "B T N H"]:
    """Softmax attention with materialised float32 scores [B,K,N/K,T,S]."""
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H)
    scores = sums.einsum("btkgh,bskh->bkgts", grouped, k, jnp.float32) * H**-0.5
    scores = jnp.where(packed_mask(segment_ids, window, columns)[:, None, None], scores, MASKED)
    weights = sums.softmax(scores).astype(v.dtype)
    return sums.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, N, H)


SAVED = "attention"
"""Checkpoint name of what the remat policy `attention` keeps: the context and, where scores come in blocks, its
logsumexp."""


def make_attention(
    name: str,
    length: int,
    platform: str | None = None,
    *,
    parts: int = 1,
    windows: Sequence[int] = (),
    sums: Sums = NARROW,
) -> Callable[..., Array]:
    """`attend(q, k, v, segment_ids, window=None, columns=None) -> context [B,T,N,H]` for rows of that length.

    Args:
        name: As in `UpdateConfig.attention`.
        length: S, tokens of a row.
        platform: Of the devices it will run on; None for those of this process.
        parts: Devices that share the queries of a row, each with two runs of them (`parallel.columns_of`).
        windows: Those of the model's layers, 0 for none; empty where no layer has one.
        sums: Wide ones are for the reference only: the others add up by blocks.

    Raises:
        ValueError: no path of that name, or one that cannot run there.
    """
    platform = platform or jax.default_backend()
    name = usual_path(length, platform, sums) if name == "auto" else name
    if sums.wide and name in ("blocked", "splash", "cudnn"):
        raise ValueError(
            f"update.attention = {name} adds up by blocks, which model.sums = float64 is to make no matter; take "
            "update.attention auto or reference, or model.sums float32"
        )
    if name == "blocked":
        return partial(attend_blocked, block_size(length, parts, BLOCKS.get(platform, 512)))
    if name == "splash":
        from grpo_roc_jax.model.attention_tpu import make_splash  # an experimental library, loaded where it is wanted

        return make_splash(length, platform, parts=parts, windows=windows)
    paths = {"reference": partial(attend_reference, sums=sums), "cudnn": attend_cudnn}
    if name not in paths:
        raise ValueError(f"update.attention = {name!r}; one of auto, blocked, splash, {', '.join(paths)} is wanted")
    return lambda *inputs: checkpoint_name(paths[name](*inputs), SAVED)


BLOCKS = {"cpu": 128}
"""Queries of a block at most, by platform; accelerators want larger matrices than 128."""


def usual_path(length: int, platform: str, sums: Sums = NARROW) -> str:
    """What `auto` takes where nothing is measured: two blocks are where the loop begins to win on CPU (measured)."""
    return "blocked" if length >= 2 * BLOCKS.get(platform, 512) and not sums.wide else "reference"


def block_size(length: int, parts: int, limit: int) -> int:
    """Queries of a block: at most `limit`, and where devices share a row a divisor of each of their runs."""
    if parts == 1:
        return min(limit, length)
    run = length // (2 * parts)
    return next(size for size in range(min(limit, run), 0, -1) if run % size == 0)


def attend_cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    segment_ids: Int[Array, "B S"],
    window: Int[Array, ""] | None = None,
    columns: Int[Array, " T"] | None = None,
) -> Float[Array, "B T N H"]:
    """cuDNN's fused attention through the public interface, which takes segments as a materialised mask only.

    The mask says already that no query sees a later key; said again outright, the kernel leaves that half out.
    """
    mask = packed_mask(segment_ids, window, columns)[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=columns is None, implementation="cudnn")


def attend_blocked(
    block: int,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    segment_ids: Int[Array, "B S"],
    window: Int[Array, ""] | None = None,
    columns: Int[Array, " T"] | None = None,
) -> Float[Array, "B T N H"]:
    """The reference, one block of queries against one block of keys at a time, in plain XLA.

    The loop over keys runs from the block where the oldest of the queries' segments or windows begins, in any row, to
    the diagonal: the work follows the sum of squared segment lengths instead of T^2. The backward pass rebuilds the
    scores from q, k and the logsumexp, so that no [T,S] exists (arXiv:2205.14135). On padding the result is finite
    and otherwise undefined. Given `columns`, the block divides T and S and the columns of each block follow each other
    from a multiple of it.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    pad = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)) + ((0, 0),) * (x.ndim - 2))  # noqa: E731
    q, k, v, segment_ids = pad(q.reshape(B, T, K, N // K, H)), pad(k), pad(v), pad(segment_ids)
    diagonal = jnp.arange(q.shape[1] // block) if columns is None else columns[::block] // block
    out = _blocked(block, q, k, v, segment_ids, window, diagonal)
    return out[:, :T].reshape(B, T, N, H)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(
    block: int, q: Array, k: Array, v: Array, segment_ids: Array, window: Array | None, diagonal: Array
) -> Array:
    """q [B,T,K,G,H], k and v [B,S,K,H] with T and S multiples of the block; the context has the shape of q. Query
    block i stands where key block diagonal[i] does."""
    return _blocked_fwd(block, q, k, v, segment_ids, window, diagonal)[0]


def first_key_blocks(segment_ids: Int[Array, "B S"], block: int, window: Array | None = None) -> Int[Array, " J"]:
    """For the block of queries beside each block of keys, the first block of keys that any of them, in any row, can
    see."""
    B, S = segment_ids.shape
    at = jnp.arange(S, dtype=jnp.int32)[None]
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
    """Masked float32 scores [B,K,G,block,block] of a block of queries, already cut, which stands where key block i
    does, against key block j."""
    scores = jnp.einsum("btkgh,bskh->bkgts", q, _cut(k, j, block), preferred_element_type=jnp.float32)
    same = _cut(segment_ids, i, block)[:, :, None] == _cut(segment_ids, j, block)[:, None, :]
    at = jnp.arange(block)
    reach = in_reach(i * block + at, j * block + at, window)
    return jnp.where((same & reach[None])[:, None, None], scores * q.shape[-1] ** -0.5, MASKED)


def _blocked_fwd(
    block: int, q: Array, k: Array, v: Array, segment_ids: Array, window: Array | None, diagonal: Array
) -> tuple:
    B, T, K, G, H = q.shape
    first = first_key_blocks(segment_ids, block, window)

    def queries(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, lse = carry
        q_i, at = _cut(q, i, block), diagonal[i]

        def keys(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, context = carry
            scores = _block_scores(q_i, k, segment_ids, window, at, j, block)
            new_top = jnp.maximum(top, scores.max(-1))
            p, old = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            seen = jnp.einsum(
                "bkgts,bskh->bkgth", p.astype(v.dtype), _cut(v, j, block), preferred_element_type=jnp.float32
            )
            return new_top, total * old + p.sum(-1), context * old[..., None] + seen

        zeros = jnp.zeros((B, K, G, block), jnp.float32)
        start = (zeros + MASKED, zeros, jnp.zeros((*zeros.shape, H), jnp.float32))
        top, total, context = jax.lax.fori_loop(first[at], at + 1, keys, start)
        context = jnp.moveaxis(context / total[..., None], 3, 1)
        return _paste(out, context, i), _paste(lse, top + jnp.log(total), i, axis=3)

    empty = (jnp.zeros(q.shape, v.dtype), jnp.zeros((B, K, G, T), jnp.float32))
    out, lse = jax.lax.fori_loop(0, T // block, queries, empty)
    out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
    return out, (q, k, v, segment_ids, window, diagonal, out, lse)


def _blocked_bwd(block: int, kept: tuple[Array, ...], d_out: Array) -> tuple:
    """dS = P (dO V^T - rowsum(dO O)); dQ = dS K, dK = dS^T Q, dV = P^T dO, with P = exp(S - lse)."""
    q, k, v, segment_ids, window, diagonal, out, lse = kept
    first = first_key_blocks(segment_ids, block, window)
    delta = jnp.einsum("btkgh,btkgh->bkgt", d_out, out, preferred_element_type=jnp.float32)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def queries(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        d_q, d_k, d_v = carry
        q_i, d_i, at = _cut(q, i, block), _cut(d_out, i, block), diagonal[i]
        lse_i, delta_i = _cut(lse, i, block, axis=3), _cut(delta, i, block, axis=3)

        def keys(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_qi, d_k, d_v = carry
            p = jnp.exp(_block_scores(q_i, k, segment_ids, window, at, j, block) - lse_i[..., None])
            d_p = product("btkgh,bskh->bkgts", d_i, _cut(v, j, block))
            d_s = (p * (d_p - delta_i[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
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
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), None, None, None


_blocked.defvjp(_blocked_fwd, _blocked_bwd)
