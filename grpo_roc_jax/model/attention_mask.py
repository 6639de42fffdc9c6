"""Which keys a query of a packed row may see, and the cap of its scores. Shared by all implementations of attention."""

import jax
import jax.numpy as jnp

from grpo_roc_jax.shapes import Array, Bool, Int, checked

SAVED = "attention"
"""Checkpoint name of the arrays that the remat policy `attention` saves: the context and, in the blocked path, the
logsumexp."""

MASKED = -1e30
"""Score of a masked pair. It is finite, so that a row without any allowed key gives finite values instead of NaN."""


@checked
def packed_mask(
    segment_ids: Int[Array, "B S"], window: Int[Array, ""] | None = None, columns: Int[Array, " T"] | None = None
) -> Bool[Array, "B T S"]:
    """True where the query in column t may see key s: both in one segment, s <= t, and t - s < window if the window is
    positive.

    Segment 0 is padding and sees only itself.
    """
    at = jnp.arange(segment_ids.shape[1])
    query_segments = segment_ids if columns is None else jnp.take(segment_ids, columns, axis=1)
    same = query_segments[:, :, None] == segment_ids[:, None, :]
    return same & in_reach(at if columns is None else columns, at, window)[None]


def in_reach(queries: Int[Array, " T"], keys: Int[Array, " S"], window: Array | None) -> Bool[Array, "T S"]:
    """True where a key's column is not after the query's and, if the window is positive, within the window."""
    distance = queries[:, None] - keys[None]
    if window is None:
        return distance >= 0
    return (distance >= 0) & ((distance < window) | (window <= 0))


def first_key_blocks(segment_ids: Int[Array, "B S"], block: int, window: Array | None = None) -> Int[Array, " J"]:
    """For each block of columns, the first block of keys that any of its queries can see, in any row."""
    B, S = segment_ids.shape
    at = jnp.arange(S, dtype=jnp.int32)[None]
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    # Every padding token starts a segment of its own, so rows without trajectories do not make the others look back.
    start = jax.lax.cummax(jnp.where(begins | (segment_ids == 0), at, 0), axis=1)
    if window is not None:
        start = jnp.where(window > 0, jnp.maximum(start, at - window + 1), start)
    return start.reshape(B, -1, block)[:, :, 0].min(0) // block


def soft_cap(scores: Array, cap: float) -> Array:
    """cap * tanh(scores / cap), which keeps them within +-cap (arXiv:2408.00118); unchanged at 0."""
    return cap * jnp.tanh(scores / cap) if cap else scores
