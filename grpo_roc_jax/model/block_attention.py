"""Attention to rows whose keys and values lie in blocks of a pool, scattered and partly shared.

`merge_blocks` multiplies blocks in their place: blocks are the batch axis of two products, the queries of the rows that
read a block are gathered, and the results are merged by row as in an online softmax. Nothing depends on how many blocks
a row might have. `attend_window` gathers the blocks of each row instead, a few at a time up to the longest row; it
serves spans, and single tokens where no kernel reads blocks.

Letters besides those of `shapes`: W blocks of a row at most, C columns of a block, n blocks, M readers of a block,
G query heads of a key head.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_roc_jax.model.attention_mask import MASKED, soft_cap
from grpo_roc_jax.shapes import Array, Float, Int

WINDOW_COLUMNS = 512
"""Columns that `attend_window` gathers at a time."""


class Arena(NamedTuple):
    """A range of consecutive blocks of a pool, stored in arrays of its own."""

    start: int
    """Index of its first block."""
    blocks: int
    readers: int
    """Number of rows that are multiplied with a block at a time: 1 if no block has several readers."""


class Readers(NamedTuple):
    """The rows that read the blocks of an arena; fixed during a chunk."""

    rows: Array
    """int32[n,R]: rows that read each block, B for none; R is a multiple of `Arena.readers`."""
    first: Array
    """int32[n]: column of the first token of the block."""
    passes: Array
    """int32[]: number of passes of `Arena.readers` rows each; 0 for an arena without readers."""


def within(arena: Arena, blocks: Array) -> Array:
    """Block numbers relative to the arena. Blocks of other arenas get numbers beyond its last block."""
    inside = (blocks >= arena.start) & (blocks < arena.start + arena.blocks)
    return jnp.where(inside, blocks - arena.start, arena.blocks)


def find_readers(arenas: Sequence[Arena], table: Int[Array, "B W"], active: Array, columns: int) -> tuple[Readers, ...]:
    """The readers of every arena's blocks, from the active rows of the table. Entry i of a row is its i-th block."""
    B, W = table.shape
    flat = jnp.where(active[:, None], table, -1).reshape(-1)
    rows = jnp.arange(B * W, dtype=jnp.int32) // W
    firsts = jnp.arange(B * W, dtype=jnp.int32) % W * columns
    all_readers = []
    for arena in arenas:
        at, n, M = within(arena, flat), arena.blocks, arena.readers
        first = jnp.zeros(n, jnp.int32).at[at].set(firsts, mode="drop")
        order = jnp.argsort(at, stable=True) if M > 1 else jnp.arange(B * W)
        at = at[order]
        rank = jnp.arange(B * W) - jnp.searchsorted(at, at) if M > 1 else jnp.zeros(B * W, jnp.int32)
        readers = jnp.full((n, -(-B // M) * M if M > 1 else 1), B, jnp.int32)
        readers = readers.at[at, rank].set(rows[order], mode="drop")
        most = jnp.max(jnp.where(at < n, rank + 1, 0))
        all_readers.append(Readers(readers, first, ((most + M - 1) // M).astype(jnp.int32)))
    return tuple(all_readers)


class Limits(NamedTuple):
    """What a query sees of the columns up to its own."""

    window: int
    """Only the last `window` columns; 0 for all."""
    cap: float
    """Soft cap of the scores, 0 for none."""
    chunked: bool = False
    """Whether windows are chunks: a query sees only columns of its own multiple of `window`."""

    def seen(self, queries: Int[Array, "..."], columns: Int[Array, "..."]) -> Array:
        """Whether a query in one column sees another; the arrays broadcast."""
        distance = queries - columns
        if not self.window:
            return distance >= 0
        if self.chunked:
            return (distance >= 0) & (queries // self.window == columns // self.window)
        return (distance >= 0) & (distance < self.window)


class Partial(NamedTuple):
    """Softmax attention of each row over some of its columns. The last row collects what belongs to no row."""

    top: Float[Array, "B K G"]
    total: Float[Array, "B K G"]
    context: Float[Array, "B K G H"]


def no_partial(q: Float[Array, "B T N H"], kv_heads: int, sinks: Float[Array, " N"] | None = None) -> Partial:
    """Attention to no column; with `sinks`, to a score of each head that brings no value."""
    B, _, N, H = q.shape
    shape = (B + 1, kv_heads, N // kv_heads)
    return Partial(*_first_scores(shape, sinks), jnp.zeros((*shape, H)))


def _first_scores(shape: tuple[int, ...], sinks: Array | None) -> tuple[Array, Array]:
    """(largest score, sum of exp(score - largest)) [B,K,G,...] before any column."""
    if sinks is None:
        return jnp.full(shape, MASKED), jnp.zeros(shape)
    by_head = sinks.astype(jnp.float32).reshape(1, *shape[1:3], *(1,) * (len(shape) - 3))
    return jnp.broadcast_to(by_head, shape), jnp.ones(shape)


def merge_blocks(
    partial: Partial,
    q: Float[Array, "B 1 N H"],
    position: Int[Array, " B"],
    leaves: Sequence[Array],
    readers: Readers,
    layout: tuple[Arena, tuple[str, ...]],
    limits: Limits,
) -> Partial:
    """Adds the columns in the blocks of an arena to `partial`, up to the position of each row. `layout` has the axis
    orders of its keys and values."""
    (keys, values), (arena, orders) = leaves, layout
    K, C = (values.shape[1 + orders[1].index(axis)] for axis in "ks")
    B, _, N, H = q.shape
    n, M, G = arena.blocks, arena.readers, N // K
    queries = jnp.pad(q.reshape(B, K, G, H), ((0, 1), (0, 0), (0, 0), (0, 0)))
    positions = jnp.pad(position, (0, 1), constant_values=-1)
    columns = readers.first[:, None] + jnp.arange(C, dtype=jnp.int32)[None]

    def visit(i: Array | int, partial: Partial) -> Partial:
        rows = jax.lax.dynamic_slice_in_dim(readers.rows, i * M, M, axis=1)
        read_queries = queries[rows].transpose(0, 2, 1, 3, 4).reshape(n, K, M * G, H)
        scores = (
            jnp.einsum(f"bkmh,b{orders[0]}->bkms", read_queries, keys, preferred_element_type=jnp.float32) * H**-0.5
        )
        seen = limits.seen(positions[rows][:, :, None], columns[:, None])
        scores = soft_cap(scores, limits.cap).reshape(n, K, M, G, C)
        scores = jnp.where(seen[:, None, :, None], scores, MASKED)
        top = partial.top.at[rows].max(scores.max(axis=-1).transpose(0, 2, 1, 3))
        weights = jnp.exp(scores - top[rows].transpose(0, 2, 1, 3)[..., None])
        context = jnp.einsum(
            f"bkms,b{orders[1]}->bkmh",
            weights.astype(values.dtype).reshape(n, K, M * G, C),
            values,
            preferred_element_type=jnp.float32,
        )
        rescale = jnp.exp(partial.top - top)
        total = (partial.total * rescale).at[rows].add(weights.sum(axis=-1).transpose(0, 2, 1, 3))
        context = context.reshape(n, K, M, G, H).transpose(0, 2, 1, 3, 4)
        return Partial(top, total, (partial.context * rescale[..., None]).at[rows].add(context))

    return visit(0, partial) if M == 1 else jax.lax.fori_loop(0, readers.passes, visit, partial)


def finish_partial(partial: Partial, q: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """The context of every row; finite for rows that see nothing."""
    total = jnp.maximum(partial.total[:-1], jnp.finfo(jnp.float32).tiny)
    return (partial.context[:-1] / total[..., None]).astype(q.dtype).reshape(q.shape)


def attend_window(
    q: Float[Array, "B T N H"],
    gather: Callable[[Array], Sequence[Array]],
    table: Int[Array, "B W"],
    columns: Int[Array, "B T"],
    orders: tuple[str, ...],
    limits: Limits,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention in which the query in column c of its row sees columns 0..c of the blocks in the table.

    Args:
        q: Queries.
        gather: Blocks [B,P] -> keys and values [B,P,...] in these orders.
        table: Blocks of each row.
        columns: Columns of the queries.
        orders: See `pool.Orders`.
        limits: Window and soft cap.
        sinks: Scores of the heads that take part in the softmax and bring no value.
    """
    B, T, N, H = q.shape
    values = jax.eval_shape(gather, table[:, :1])[1]
    K, C = (values.shape[2 + orders[1].index(axis)] for axis in "ks")
    G, W = N // K, table.shape[1]
    # Blocks whose columns come last lie side by side only after a transpose of the keys, so they are read one by one.
    P = 1 if orders[0][-1] == "s" else min(W, max(1, WINDOW_COLUMNS // C))
    table = jnp.pad(table, ((0, 0), (0, -W % P)), constant_values=-1)
    row_queries = q.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)

    def visit(i: Array | int, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, context = state
        keys, values = gather(jax.lax.dynamic_slice_in_dim(table, i * P, P, axis=1))
        scores = (
            jnp.einsum(f"bkmh,bp{orders[0]}->bkmps", row_queries, keys, preferred_element_type=jnp.float32) * H**-0.5
        )
        seen = limits.seen(columns[:, :, None], (i * P * C + jnp.arange(P * C, dtype=jnp.int32))[None, None])
        scores = soft_cap(scores, limits.cap).reshape(B, K, G, T, P * C)
        scores = jnp.where(seen[:, None, None], scores, MASKED).reshape(B, K, G * T, P * C)
        new = jnp.maximum(top, scores.max(axis=-1))
        weights, rescale = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
        added = jnp.einsum(
            f"bkmps,bp{orders[1]}->bkmh",
            weights.astype(values.dtype).reshape(B, K, G * T, P, C),
            values,
            preferred_element_type=jnp.float32,
        )
        return new, total * rescale + weights.sum(axis=-1), context * rescale[..., None] + added

    top, total = (part.reshape(B, K, G * T) for part in _first_scores((B, K, G, T), sinks))
    state = top, total, jnp.zeros((B, K, G * T, H))
    pieces = jnp.max(columns) // (P * C) + 1
    _, total, context = visit(0, state) if W <= P else jax.lax.fori_loop(0, pieces, visit, state)
    context = (context / total[..., None]).astype(q.dtype)
    return context.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
