"""Rotary positions and attention over packed rows; the decode-time attention lives with its cache.

`attend_packed` is the one entry for training and scoring. The reference path materialises the scores; it is what
every faster path is held to.
"""

import jax
import jax.numpy as jnp

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
    angles = positions[..., None].astype(jnp.float32) * frequencies
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
    return same & causal


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
