"""Rotary positions and attention over packed rows; the decode-time attention lives with its cache.

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
def rotary_angles(
    positions: Int[Array, "*B"], head_dim: int, theta: float
) -> tuple[Float[Array, "*B R"], Float[Array, "*B R"]]:
    """Cosine and sine of position times frequency, float32; computed once a step and shared by all layers.

    Source: arXiv:2104.09864, in the half-split layout of the published checkpoints.
    """
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.multiply.outer(positions.astype(jnp.float32), frequencies)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(
    x: Float[Array, "*B X H"], cos: Float[Array, "*B R"], sin: Float[Array, "*B R"]
) -> Float[Array, "*B X H"]:
    """Rotates the halves of each head; `cos` and `sin` have no head axis. Keeps the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@checked
def packed_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """True where query t may see key s: s <= t within one segment. Segment 0 is padding and sees only itself."""
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal = jnp.tril(jnp.ones((segment_ids.shape[1],) * 2, dtype=bool))
    return same & causal[None]


def attend_reference(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T N H"]:
    """Softmax attention with materialised float32 scores [B,K,N/K,T,T]."""
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * H**-0.5
    scores = jnp.where(packed_mask(segment_ids)[:, None, None], scores, MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, N, H)


SAVED = "attention"
"""Checkpoint name of what the remat policy `attention` keeps: the context and, in `blocked`, its logsumexp."""


def make_attention(name: str, length: int) -> Callable[[Array, Array, Array, Array], Array]:
    """`attend(q, k, v, segment_ids) -> context [B,T,N,H]` for rows of that length.

    Raises:
        ValueError: no path of that name.
    """
    block = block_size(length)
    if name == "auto":
        name = "blocked" if length > block else "reference"
    if name == "blocked":
        return lambda q, k, v, segment_ids: attend_blocked(block, q, k, v, segment_ids)
    paths = {"reference": attend_reference, "cudnn": attend_cudnn}
    if name not in paths:
        raise ValueError(f"update.attention = {name!r}; one of auto, blocked, {', '.join(paths)} is wanted")
    return lambda q, k, v, segment_ids: checkpoint_name(paths[name](q, k, v, segment_ids), SAVED)


def block_size(length: int) -> int:
    """Queries of a block: 128 (fastest on CPU, measured), more where the unrolled blocks would exceed 32."""
    return max(128, -(-length // (32 * 128)) * 128)


def attend_cudnn(
    q: Float[Array, "B T N H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T N H"]:
    """cuDNN's fused attention through the public interface, which takes segments as a materialised mask only."""
    mask = packed_mask(segment_ids)[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_blocked(
    block: int,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, "B T N H"]:
    """The reference, one static block of queries at a time against the keys up to the block's end.

    Half of the score matrix is never computed; the backward pass rebuilds the rest from q, k and the logsumexp
    (arXiv:2205.14135, in plain XLA).
    """
    return _blocked_fwd(block, q, k, v, segment_ids)[0]


def _blocks(length: int, block: int) -> list[tuple[int, int]]:
    return [(start, min(start + block, length)) for start in range(0, length, block)]


def _block_scores(q: Array, k: Array, segment_ids: Array, start: int, end: int) -> Array:
    """Masked float32 scores [B,K,G,end-start,end] of the queries start..end; `q` is grouped [B,T,K,G,H]."""
    scale = q.shape[-1] ** -0.5
    scores = jnp.einsum("btkgh,bskh->bkgts", q[:, start:end], k[:, :end], preferred_element_type=jnp.float32) * scale
    same = segment_ids[:, start:end, None] == segment_ids[:, None, :end]
    causal = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None]
    return jnp.where((same & causal[None])[:, None, None], scores, MASKED)


def _blocked_fwd(block: int, q: Array, k: Array, v: Array, segment_ids: Array) -> tuple:
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H)
    outputs, lses = [], []
    for start, end in _blocks(T, block):
        scores = _block_scores(grouped, k, segment_ids, start, end)
        top = scores.max(-1, keepdims=True)
        p = jnp.exp(scores - top)
        total = p.sum(-1, keepdims=True)
        p = (p / total).astype(v.dtype)
        outputs.append(jnp.einsum("bkgts,bskh->btkgh", p, v[:, :end]))
        lses.append((top + jnp.log(total))[..., 0])
    out = checkpoint_name(jnp.concatenate(outputs, axis=1).reshape(B, T, N, H), SAVED)
    lse = checkpoint_name(jnp.concatenate(lses, axis=-1), SAVED)
    return out, (q, k, v, segment_ids, out, lse)


def _blocked_bwd(block: int, kept: tuple[Array, ...], d_out: Array) -> tuple:
    """dS = P (dO V^T - rowsum(dO O)); dQ = dS K, dK = dS^T Q, dV = P^T dO, with P = exp(S - lse)."""
    q, k, v, segment_ids, out, lse = kept
    B, T, N, H = q.shape
    K = k.shape[2]
    group = lambda x: x.reshape(B, T, K, N // K, H)  # noqa: E731
    grouped, d_out = group(q), group(d_out)
    delta = jnp.einsum("btkgh,btkgh->bkgt", d_out, group(out), preferred_element_type=jnp.float32)
    d_k, d_v, d_q = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32), []
    for start, end in _blocks(T, block):
        queries, d_block = grouped[:, start:end], d_out[:, start:end]
        p = jnp.exp(_block_scores(grouped, k, segment_ids, start, end) - lse[..., start:end, None])
        d_p = jnp.einsum("btkgh,bskh->bkgts", d_block, v[:, :end], preferred_element_type=jnp.float32)
        d_s = (p * (d_p - delta[..., start:end, None]) * H**-0.5).astype(q.dtype)
        d_q.append(jnp.einsum("bkgts,bskh->btkgh", d_s, k[:, :end]))
        d_k = d_k.at[:, :end].add(jnp.einsum("bkgts,btkgh->bskh", d_s, queries, preferred_element_type=jnp.float32))
        d_v = d_v.at[:, :end].add(
            jnp.einsum("bkgts,btkgh->bskh", p.astype(v.dtype), d_block, preferred_element_type=jnp.float32)
        )
    d_q = jnp.concatenate(d_q, axis=1).reshape(q.shape)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


attend_blocked.defvjp(_blocked_fwd, _blocked_bwd)
