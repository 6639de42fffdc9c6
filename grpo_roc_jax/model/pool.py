"""The cache of keys and values: a pool of blocks, with functions that write to it, copy blocks and attend to it.

Each layer has two arrays (keys and values) or one array of both, with the blocks as the leading axis; a recurrent layer
has its `delta.Memory` with a row for each slot instead, and a layer that shares keys has none. Arrays are not stacked
over layers: a scan that carries a stacked cache copies it every step, and so does slicing it. The order of columns,
heads and head width depends on the platform (`cache_orders`) or on the kernel that reads the pool (`PAGED`). Every
function writes before it reads, since reading a donated array and then writing it makes XLA copy all of it.

The blocks of each row are listed in a table int32[B,W] on the host (`engine.table`): entry i has the columns from i *
size on. An entry that is not the number of a block means none; writes to it are dropped. Columns at or after a row's
position hold stale values, which the next write replaces; they are finite, so masking them is enough. The memory of a
recurrent layer belongs to the position after the last write to its row; a write at column 0 starts from an empty one.

On a CPU a layer's blocks are in several arenas, each with arrays of its own. Attention to one token multiplies all
blocks of an arena without moving them, and skips arenas that no row uses. A step of few rows gathers their blocks.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_roc_jax.model import delta
from grpo_roc_jax.model.block_attention import (
    Arena,
    Limits,
    Partial,
    Readers,
    attend_window,
    find_readers,
    finish_partial,
    merge_blocks,
    no_partial,
    within,
)
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.low_precision import exact, rounded, scaled_orders
from grpo_roc_jax.model.paged import attend_table
from grpo_roc_jax.shapes import Array, Float, Int

Orders = tuple[str, ...]
"""Order of the axes of keys and of values after the block axis: k (heads), s (columns), h (head width). An array of
both has the letter c for its heads, which alternate between keys and values. With `low_precision.scaled_orders` their
scales follow."""

IN_PLACE: Orders = ("khs", "ksh")
"""Order for `merge_blocks`: with the columns of keys last, the score product of one query is several times cheaper."""
PAGED: Orders = ("sch",)
"""Order for the kernel of `paged`: keys and values of a column are contiguous."""
SHARED_READERS = 8
"""Rows that are multiplied at a time with a block of the arena whose blocks are shared."""
READ_IN_PLACE = 4
"""How many times as many blocks the pool must have as a decode step can read, for the step to copy the blocks it reads.

With fewer, `merge_blocks` reads them where they lie, which takes as long for few rows as for all, since it multiplies
every block of an arena. A layer of 3 key heads and 512 blocks of 64 columns, copied or read in place: 0.5 and 4 ms for
4 rows, 1.9 and 5.5 for 16, 4.6 and 4.9 for 32, 8.6 and 6.8 for 64 (two CPU cores)."""
TILE = 32
"""Most tokens of a row that attend together where the tokens of several rows are packed."""


def cache_orders(platform: str) -> Orders:
    """The axis order that a platform reads and writes without moving the cache.

    On a TPU the columns come first, as its scatter needs them: in any other order the compiler copies the whole cache
    into this order at the start of every chunk and back at its end, as `planner.plan` shows.
    """
    return {"cpu": IN_PLACE, "tpu": ("skh", "skh")}.get(platform, ("ksh", "ksh"))


class PoolSize(NamedTuple):
    """Sizes of the pool of a shard."""

    blocks: int
    columns: int
    """Columns of a block."""
    slots: int
    shared: int = 0
    """Number of blocks at the start that several rows may hold at once; used on a CPU only."""

    def arenas(self, orders: Orders) -> tuple[Arena, ...]:
        """One arena; in `IN_PLACE` order first the shared blocks, then 2, 2, 4, 8, ... blocks for each slot."""
        if orders[:2] != IN_PLACE:
            return (Arena(0, self.blocks, 1),)
        parts = [Arena(0, self.shared, SHARED_READERS)] if self.shared else []
        start, step = self.shared, 2 * self.slots
        while start < self.blocks:
            size = min(step, self.blocks - start)
            parts.append(Arena(start, size, 1))
            start, step = start + size, start + size - self.shared
        return tuple(parts)

    def growing(self, first: int, orders: Orders) -> tuple["PoolSize", ...]:
        """Sizes from one with at least `first` blocks up to this one. Each has all arenas of the previous one plus
        another, or twice the blocks in a single arena."""
        if orders[:2] == IN_PLACE:
            ends = [arena.start + arena.blocks for arena in self.arenas(orders)]
        else:
            ends = [min(first << i, self.blocks) for i in range(self.blocks.bit_length() + 1)]
        ends = sorted({end for end in ends if end >= min(first, self.blocks)})
        return tuple(self._replace(blocks=end) for end in ends)


@flax.struct.dataclass
class BlockPool:
    """Arrays of each layer and arena: [n, ...] with the other axes in these orders."""

    layers: tuple[tuple[tuple[Array, ...], ...], ...]
    """A recurrent layer has one entry, its `delta.Memory`; a layer that reads the keys of another has none."""
    orders: Orders = flax.struct.field(pytree_node=False)
    arenas: tuple[Arena, ...] = flax.struct.field(pytree_node=False)
    columns: int = flax.struct.field(pytree_node=False)
    """Columns of a block."""
    recurrent: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    """Layers with a `delta.Memory`, in `delta.ORDERS`."""

    @property
    def blocks(self) -> int:
        """Number of blocks in all arenas."""
        return sum(arena.blocks for arena in self.arenas)

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.layers))

    def map(self, change: Callable[[Array, str], Array]) -> "BlockPool":
        """The pool with `change(array, order)` applied to every array."""
        return self._each(lambda i, leaf, order: change(leaf, order))

    def map_memory(self, change: Callable[..., Array], *others: "BlockPool") -> "BlockPool":
        """The pool with `change(array, *arrays of others)` applied to the memory of recurrent layers."""
        layers = tuple(
            jax.tree.map(change, *(pool.layers[i] for pool in (self, *others))) if i in self.recurrent else layer
            for i, layer in enumerate(self.layers)
        )
        return self.replace(layers=layers)

    def _each(self, change: Callable[[int, Array, str], Array]) -> "BlockPool":
        orders = [delta.ORDERS if i in self.recurrent else self.orders for i in range(len(self.layers))]
        layers = tuple(
            tuple(tuple(change(i, *pair) for pair in zip(arena, orders[i], strict=True)) for arena in layer)
            for i, layer in enumerate(self.layers)
        )
        return self.replace(layers=layers)


def allocate(
    config: ModelConfig,
    size: PoolSize,
    dtype: jnp.dtype,
    orders: Orders,
    shards: int = 1,
    stored: jnp.dtype | None = None,
) -> BlockPool:
    """A pool of zeros for each of the shards. It is never uninitialized, since a NaN would survive the mask. `stored`
    is the dtype of keys and values where the orders have scales."""
    heads = iter(config.cached_heads)
    arenas = size.arenas(orders)
    dtypes = [stored] * 2 + [jnp.float32] * 2 if len(orders) == 4 else [dtype] * len(orders)

    def layer(index: int) -> tuple[tuple[Array, ...], ...]:
        if config.key_layers[index] != index:
            return ()
        if not config.attends[index]:
            return (tuple(delta.empty_memory(config.windows, shards * size.slots, dtype)),)
        kv_heads, width = next(heads)
        sizes = {"k": kv_heads, "c": 2 * kv_heads, "s": size.columns, "h": width}
        return tuple(
            tuple(
                jnp.zeros((shards * arena.blocks, *(sizes[axis] for axis in order)), kind)
                for order, kind in zip(orders, dtypes, strict=True)
            )
            for arena in arenas
        )

    recurrent = tuple(i for i, attends in enumerate(config.attends) if not attends)
    return BlockPool(tuple(map(layer, range(config.layers))), orders, arenas, size.columns, recurrent)


def head_axes(config: ModelConfig, tensor: int) -> dict[str, str]:
    """Axis letter -> mesh axis, for the axes of the cache that are split over heads: those that `tensor` divides."""
    heads = dict.fromkeys("kc", math.gcd(*(kv_heads for kv_heads, _ in config.attention_heads)))
    heads |= {"n": config.windows.key_heads} if config.delta else {}
    return {axis: "tensor" for axis, count in heads.items() if tensor > 1 and count % tensor == 0}


@lru_cache(64)
def shard_bytes(
    config: ModelConfig, size: PoolSize, dtype: jnp.dtype, tensor: int, stored: jnp.dtype | None = None
) -> int:
    """Bytes of a shard's pool on each of the devices that share its heads. The order of axes does not change them."""
    orders, split = cache_orders("tpu"), head_axes(config, tensor)
    orders = orders if stored is None else scaled_orders(orders)
    pool = jax.eval_shape(partial(allocate, config, size, dtype, orders, 1, stored))

    def held(leaf: jax.ShapeDtypeStruct, order: str) -> int:
        return math.prod(leaf.shape) * leaf.dtype.itemsize // (tensor if set(order) & set(split) else 1)

    return sum(jax.tree.leaves(pool.map(held).layers))


def enlarge(pool: BlockPool, arenas: tuple[Arena, ...]) -> BlockPool:
    """The pool extended to these arenas, the first of which are its present ones; a single arena becomes longer. New
    blocks are zeros."""

    def zeros(leaf: Array, blocks: int) -> Array:
        return jnp.zeros((blocks, *leaf.shape[1:]), leaf.dtype)

    def extended(layer: tuple[tuple[Array, ...], ...]) -> tuple[tuple[Array, ...], ...]:
        if not layer:
            return ()
        (*_, last), more = layer, arenas[len(pool.arenas) :]
        if len(arenas) == len(pool.arenas) == 1:
            added = arenas[0].blocks - pool.arenas[0].blocks
            return (tuple(jnp.concatenate([leaf, zeros(leaf, added)]) for leaf in last),)
        return (*layer, *(tuple(zeros(leaf, arena.blocks) for leaf in last) for arena in more))

    layers = (layer if i in pool.recurrent else extended(layer) for i, layer in enumerate(pool.layers))
    return pool.replace(layers=tuple(layers), arenas=arenas)


def copy_blocks(pool: BlockPool, blocks: Int[Array, "2 n"], rows: Int[Array, "2 n"], first: int = 0) -> BlockPool:
    """Copies blocks from sources to targets, and the memory of recurrent layers from row to row.

    No target may be a source; a target that is no block (or row) is dropped. The pool may hold only the layers from
    `first` on.
    """
    layers = list(pool.layers)
    for i, layer in enumerate(layers):
        if not layer:
            continue
        if first + i in pool.recurrent:
            layers[i] = jax.tree.map(lambda leaf: leaf.at[rows[1]].set(_take(leaf, rows[0]), mode="drop"), layer)
            continue
        read = [_gather(pool.arenas, leaves, blocks[0]) for leaves in zip(*layer, strict=True)]

        def put(arena: Arena, *leaves: Array, read: list[Array] = read) -> tuple[Array, ...]:
            at = within(arena, blocks[1])
            return tuple(leaf.at[at].set(new, mode="drop") for leaf, new in zip(leaves, read, strict=True))

        layers[i] = tuple(
            _if_any(pool.arenas, arena, blocks[1], partial(put, arena), leaves)
            for arena, leaves in zip(pool.arenas, layer, strict=True)
        )
    return pool.replace(layers=tuple(layers))


def _take(leaf: Array, rows: Array) -> Array:
    return jnp.take(leaf, rows, axis=0, mode="clip")


def _gather(arenas: tuple[Arena, ...], leaves: tuple[Array, ...], blocks: Array) -> Array:
    """Blocks of a pool [*blocks.shape, ...]; zeros where there is no such block."""
    if len(arenas) == 1:
        return _take(leaves[0], blocks)
    shape = jax.ShapeDtypeStruct((*blocks.shape, *leaves[0].shape[1:]), leaves[0].dtype)
    result = jnp.zeros(shape.shape, shape.dtype)
    for arena, leaf in zip(arenas, leaves, strict=True):
        at = within(arena, blocks)

        def read(result: Array, leaf: Array, at: Array, arena: Arena = arena) -> Array:
            inside = (at < arena.blocks).reshape(*at.shape, *(1,) * (leaf.ndim - 1))
            return jnp.where(inside, _take(leaf, at), result)

        result = jax.lax.cond(jnp.any(at < arena.blocks), read, lambda result, leaf, at: result, result, leaf, at)
    return result


def _if_any(
    arenas: tuple[Arena, ...],
    arena: Arena,
    blocks: Array,
    change: Callable[..., tuple[Array, ...]],
    leaves: tuple[Array, ...],
) -> tuple[Array, ...]:
    """`change(*leaves)` if any of the blocks is in the arena; else the leaves."""
    if len(arenas) == 1:
        return change(*leaves)
    used = jnp.any(within(arena, blocks) < arena.blocks)
    return jax.lax.cond(used, change, lambda *leaves: leaves, *leaves)


class Tokens(NamedTuple):
    """Where the new token of each row goes; the same for all layers."""

    position: Array
    """int32[B]: its column."""
    active: Array
    """bool[B]: rows whose result is used; nothing is written for the others."""
    table: Array
    """int32[B,W]."""
    block: Array
    """int32[B]: block of the new token; none for rows that are not active."""
    readers: tuple[Readers, ...] = ()
    rows: Array | None = None
    """int32[B]: slots of the rows, for recurrent layers; None if they are all slots in order."""


class Spans(NamedTuple):
    """Where T new tokens of each listed row go; the same for all layers."""

    table: Array
    """int32[n,W]: blocks of each row."""
    rows: Array
    """int32[n]: slots of the rows, for recurrent layers; writes to a slot beyond the last are dropped."""
    start: Array
    """int32[n]: first column of each span; start + T must not exceed the columns of the table."""
    length: Array
    """int32[n]: tokens of each span that are not padding; padding is not written."""


class Tiles(NamedTuple):
    """Where N packed tokens of several rows go, and the J tiles of at most X consecutive tokens of a row that attend
    together; the same for all layers. Letters in addition to those of `block_attention`."""

    block: Array
    """int32[N]: block of each token; none for padding."""
    column: Array
    """int32[N]: column of each token in its row."""
    place: Array
    """int32[N]: index of each token among the entries of all tiles; arbitrary for padding."""
    source: Array
    """int32[J,X]: the token of each entry of a tile; unused entries repeat the last token."""
    seen: Array
    """int32[J,X]: column of that token."""
    table: Array
    """int32[J,W]: blocks of the row of each tile."""


def tile_places(
    pool: BlockPool, columns: Int[Array, " N"], places: Int[Array, " N"], table: Int[Array, "J W"], spans: Array
) -> Tiles:
    """The `Tiles` of a pack. `spans` int32[2,J] has the first token and the number of tokens of each tile; the other
    arguments are as in `Tiles`, with indices beyond the last for padding."""
    first, count = spans
    J, X = len(first), tile_width(len(columns))
    tile = jnp.minimum(places // X, J - 1)
    block = table[tile, jnp.minimum(columns // pool.columns, table.shape[1] - 1)]
    within = jnp.minimum(jnp.arange(X, dtype=jnp.int32)[None], jnp.maximum(count - 1, 0)[:, None])
    source = first[:, None] + within
    return Tiles(
        jnp.where(places < J * X, block, -1),
        columns,
        jnp.minimum(places, J * X - 1),
        source,
        jnp.where(count[:, None] > 0, columns[source], 0),
        table,
    )


def tile_width(tokens: int) -> int:
    """Entries of a tile if `tokens` tokens are packed."""
    return min(TILE, tokens)


def tile_count(tokens: int) -> int:
    """Number of tiles for `tokens` packed tokens: one and a half times the number of full tiles, since the last tile of
    a row is rarely full. More tiles would make attention slower for every pack."""
    return max(2, 3 * tokens // (2 * TILE))


def token_places(pool: BlockPool, position: Array, active: Array, table: Array, readers: tuple[Readers, ...]) -> Tokens:
    """The `Tokens` of a decode step; `readers` from `readers_of`."""
    block = jnp.take_along_axis(table, (position // pool.columns)[:, None], axis=1, mode="clip")[:, 0]
    return Tokens(position, active, table, jnp.where(active, block, -1), readers)


def readers_of(pool: BlockPool, table: Array, active: Array) -> tuple[Readers, ...]:
    """What `merge_blocks` needs besides the pool, valid for as many steps as the table has room for.

    Empty where the step copies the blocks it reads: if its rows are few (`READ_IN_PLACE`), or in another order of axes.
    """
    few = READ_IN_PLACE * table.size <= sum(arena.blocks for arena in pool.arenas)
    return () if few or pool.orders[:2] != IN_PLACE else find_readers(pool.arenas, table, active, pool.columns)


class PoolWriter:
    """A pool that a forward pass rewrites layer by layer. A layer that shares keys reads those of an earlier layer, to
    which this pass has already written.

    The functions from `attend_token` and `attend_span` return the context and store the new arrays; `pool()` returns
    the result. A writer lives only while one function is traced.
    """

    def __init__(self, pool: BlockPool, config: ModelConfig, mesh: Mesh | None = None, first: int = 0):
        """`mesh` is the mesh of the pool, for kernels that XLA cannot partition. The pool may hold only the layers from
        `first` on."""
        self._layers, self._pool, self._mesh = dict(enumerate(pool.layers, first)), pool, mesh
        self._windows, self._sources = config.layer_windows or (0,) * config.layers, config.key_layers
        self._cap, self._chunked = config.extras.attention_cap, config.windows.chunked

    def pool(self) -> BlockPool:
        return self._pool.replace(layers=tuple(self._layers.values()))

    def _limits(self, layer: int) -> Limits:
        return Limits(self._windows[layer], self._cap, self._chunked)

    def attend(self, layer: int, at: Tokens | Spans | Tiles) -> Callable[..., Array]:
        """The function that a layer calls with the queries, keys and values (or signals) of these tokens."""
        if isinstance(at, Spans):
            return self.attend_span(layer, *at)
        return self.attend_tiles(layer, at) if isinstance(at, Tiles) else self.attend_token(layer, at)

    def attend_token(self, layer: int, at: Tokens) -> Callable[..., Array]:
        """`attend(q, k, v)` of one new token per row; in a recurrent layer `recur(signals, conv)`."""
        pool = self._pool
        if layer in pool.recurrent:
            return self._recur(layer, at.rows, at.position, at.active.astype(jnp.int32))
        limits, layer = self._limits(layer), self._sources[layer]

        def attend(q: Array, k: Array | None, v: Array | None, sinks: Array | None = None) -> Array:
            if at.readers:
                return self._merge(layer, at, q, k, v, limits, sinks)
            self._write(layer, k, v, at.block[:, None], at.position[:, None] % pool.columns)
            if pool.orders == PAGED:
                seen = jnp.where(at.active, at.position + 1, 1)
                return attend_table(
                    q, *self._layers[layer][0], at.table, seen, window=limits.window, cap=limits.cap, mesh=self._mesh
                )
            columns = jnp.where(at.active, at.position, 0)[:, None]
            return attend_window(q, self._reader(layer, q.dtype), at.table, columns, pool.orders[:2], limits, sinks)

        return attend

    def _merge(
        self, layer: int, at: Tokens, q: Array, k: Array | None, v: Array | None, limits: Limits, sinks: Array | None
    ) -> Array:
        """`merge_blocks` over the arenas that have readers, after the write of the new tokens."""
        pool, keys = self._pool, self._layers[layer][0][0]
        state = no_partial(q, keys.shape[1 + pool.orders[0].index("k")], sinks)
        self._write(layer, k, v, at.block[:, None], at.position[:, None] % pool.columns)
        for arena, readers, leaves in zip(pool.arenas, at.readers, self._layers[layer], strict=True):

            def visit(state: Partial, leaves: tuple[Array, ...], readers: Readers, arena: Arena = arena) -> Partial:
                exact_leaves, layout = exact(leaves, pool.orders, q.dtype), (arena, pool.orders[:2])
                return merge_blocks(state, q, at.position, exact_leaves, readers, layout, limits)

            arguments = state, leaves, readers
            if len(pool.arenas) == 1:
                state = visit(*arguments)
            else:
                state = jax.lax.cond(readers.passes > 0, visit, lambda state, *_: state, *arguments)
        return finish_partial(state, q)

    def attend_span(
        self, layer: int, table: Int[Array, "n W"], rows: Array, start: Array, length: Array
    ) -> Callable[..., Array]:
        """`attend(q, k, v)` of T new tokens per listed row, which are written from column `start` on; in a recurrent
        layer `recur(signals, conv)`. For the arguments see `Spans`."""
        pool = self._pool
        if layer in pool.recurrent:
            return self._recur(layer, rows, start, length)
        limits, layer = self._limits(layer), self._sources[layer]

        def attend(q: Array, k: Array | None, v: Array | None, sinks: Array | None = None) -> Array:
            step = jnp.arange(q.shape[1], dtype=jnp.int32)[None]
            columns = start[:, None] + step
            blocks = jnp.take_along_axis(table, columns // pool.columns, axis=1, mode="clip")
            self._write(layer, k, v, jnp.where(step < length[:, None], blocks, -1), columns % pool.columns)
            if pool.orders == PAGED:
                seen = start + q.shape[1]
                return attend_table(
                    q, *self._layers[layer][0], table, seen, window=limits.window, cap=limits.cap, mesh=self._mesh
                )
            return attend_window(q, self._reader(layer, q.dtype), table, columns, pool.orders[:2], limits, sinks)

        return attend

    def attend_tiles(self, layer: int, at: Tiles) -> Callable[..., Array]:
        """`attend(q, k, v)` of packed new tokens [1,N,...] of several rows."""
        pool, limits, layer = self._pool, self._limits(layer), self._sources[layer]

        def attend(q: Array, k: Array | None, v: Array | None, sinks: Array | None = None) -> Array:
            self._write(layer, k, v, at.block[None], at.column[None] % pool.columns)
            reader = self._reader(layer, q.dtype)
            context = attend_window(q[0][at.source], reader, at.table, at.seen, pool.orders[:2], limits, sinks)
            return context.reshape(-1, *q.shape[2:])[at.place][None]

        return attend

    def _reader(self, layer: int, dtype: jnp.dtype) -> Callable[[Array], tuple[Array, ...]]:
        """Keys and values of blocks."""
        pool, leaves = self._pool, [*zip(*self._layers[layer], strict=True)]
        return lambda blocks: exact(tuple(_gather(pool.arenas, part, blocks) for part in leaves), pool.orders, dtype)

    def _write(self, layer: int, k: Array | None, v: Array | None, blocks: Array, columns: Array) -> None:
        """Stores new keys and values [n,T,K,H], if the layer has its own, at these columns of these blocks, both
        int32[n,T]."""
        if k is None:
            return
        pool = self._pool
        new = (in_turn(k, v),) if pool.orders == PAGED else (k, v)
        if len(pool.orders) == 4:
            stored = self._layers[layer][0][0].dtype
            (k, k_scale), (v, v_scale) = (rounded(part, 3, stored) for part in new)
            new = (k, v, k_scale, v_scale)

        def put(arena: Arena, *leaves: Array) -> tuple[Array, ...]:
            return write_columns(leaves, new, pool.orders, within(arena, blocks), columns)

        self._layers[layer] = tuple(
            _if_any(pool.arenas, arena, blocks, partial(put, arena), leaves)
            for arena, leaves in zip(pool.arenas, self._layers[layer], strict=True)
        )

    def _recur(self, layer: int, rows: Array | None, start: Array, length: Array) -> Callable[..., Array]:
        """The output of a recurrent layer for the first `length` of its new tokens; without `rows`, of all rows."""

        def recur(signals: delta.Signals, conv: Array, space: delta.Space | None = None) -> Array:
            (memory,) = self._layers[layer]
            selected = memory if rows is None else (_take(leaf, rows) for leaf in memory)
            context, new = delta.recur_cached(delta.Memory(*selected), start == 0, length, signals, conv, space)
            if rows is not None:
                new = (leaf.at[rows].set(part, mode="drop") for leaf, part in zip(memory, new, strict=True))
            self._layers[layer] = (tuple(new),)
            return context

        return recur


def in_turn(k: Float[Array, "n T K H"], v: Float[Array, "n T K H"]) -> Float[Array, "n T C H"]:
    """One array of both, whose heads alternate between keys and values."""
    return jnp.stack([k, v], axis=3).reshape(*k.shape[:2], -1, k.shape[-1])


def write_columns(
    leaves: tuple[Array, ...], new: tuple[Array, ...], orders: Orders, blocks: Array, columns: Array
) -> tuple[Array, ...]:
    """The leaves with new[i,t] in a column of a block, both int32[n,T]; blocks beyond the last are dropped."""

    def write(leaf: Array, new: Array, order: str) -> Array:
        at = (blocks, *(columns if axis == "s" else slice(None) for axis in order))
        return leaf.at[at].set(new.astype(leaf.dtype), mode="drop")

    return tuple(write(*part) for part in zip(leaves, new, orders, strict=True))
