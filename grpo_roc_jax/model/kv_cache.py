"""The cache of keys and values: allocate, write, attend, share a prompt, change the capacity.

A pair of arrays per layer, or one of both, not one stacked array: a scan over layers that carries the cache copies it
every step, and so does slicing a stacked one. Behind the rows B, the order of columns, heads and head width is chosen
by platform (`cache_orders`), or by the kernel that reads it (`PAGED`). Every function writes before it reads: reading a
donated array and then writing it makes XLA copy the whole of it.

The cache does not know its rows' lengths; callers pass positions. What lies at or after a row's position is garbage
that the next write replaces, and finite, so that masking it by a large negative score is enough.
"""

from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_roc_jax.model.attention import MASKED
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.paged import attend_pages
from grpo_roc_jax.model.sums import NARROW, Sums
from grpo_roc_jax.shapes import Array, Float, Int, checked

Orders = tuple[str, ...]
"""Order of the axes of keys and values behind the rows, in the letters k (heads), s (columns), h (head width); of one
array of both, whose heads (c) are those of keys and of values in turn."""

PAGED: Orders = ("sch",)
"""For the kernel of `paged`: what it reads of a column lies together."""


def cache_orders(platform: str) -> Orders:
    """The order that a platform reads and writes without moving the cache.

    A CPU: keys with columns last, which makes the score product of one query several times cheaper. A TPU: columns
    first, as its scatter wants them; in any other order the compiler copies the whole cache into this one at the start
    of every chunk and back at its end, which `grpo_roc_jax.plan` shows.
    """
    return {"cpu": ("khs", "ksh"), "tpu": ("skh", "skh")}.get(platform, ("ksh", "ksh"))


@flax.struct.dataclass
class KVCache:
    """Per layer: keys and values, or both in one, [B, ...] with their other axes in these orders."""

    layers: tuple[tuple[Array, ...], ...]
    orders: Orders = flax.struct.field(pytree_node=False)

    @property
    def slots(self) -> int:
        return self.layers[0][0].shape[0]

    @property
    def capacity(self) -> int:
        return self.layers[0][0].shape[1 + self.orders[0].index("s")]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.layers))

    def map(self, change: Callable[[Array, str], Array]) -> "KVCache":
        """The cache with every array changed, given its order."""
        each = lambda layer: tuple(change(leaf, order) for leaf, order in zip(layer, self.orders, strict=True))  # noqa: E731
        return self.replace(layers=tuple(map(each, self.layers)))


def allocate(config: ModelConfig, slots: int, capacity: int, dtype: jnp.dtype, orders: Orders) -> KVCache:
    """A cache of zeros (never uninitialised: a NaN there would survive the mask)."""
    sizes = {"k": config.kv_heads, "c": 2 * config.kv_heads, "s": capacity, "h": config.head_dim}
    shapes = [(slots, *(sizes[axis] for axis in order)) for order in orders]
    return KVCache(tuple(tuple(jnp.zeros(shape, dtype) for shape in shapes) for _ in range(config.layers)), orders)


def resize(cache: KVCache, capacity: int) -> KVCache:
    """The first `capacity` columns, or the whole followed by zeros."""
    old = cache.capacity

    def change(leaf: Array, order: str) -> Array:
        axis = 1 + order.index("s")
        if capacity <= old:
            return jax.lax.slice_in_dim(leaf, 0, capacity, axis=axis)
        padding = [(0, 0)] * leaf.ndim
        padding[axis] = (0, capacity - old)
        return jnp.pad(leaf, padding)

    return cache.map(change)


def fork(cache: KVCache, source: Array, targets: Array, count: Array, *, scatter: bool) -> KVCache:
    """Copies row `source` onto rows `targets[:count]`; entries from `count` on are ignored.

    Args:
        cache: Donated by the caller, changed in place.
        source: Row to copy, int32[].
        targets: Rows to overwrite, int32[B].
        count: How many of them, int32[].
        scatter: One scatter per layer (accelerators) instead of a loop of row copies (CPU).
    """
    used = jnp.arange(targets.shape[0]) < count

    def copy(leaf: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(leaf, source, 1, axis=0)
        if scatter:
            rows = jnp.where(used, targets, leaf.shape[0])
            return leaf.at[rows].set(jnp.broadcast_to(row, (targets.shape[0], *leaf.shape[1:])), mode="drop")
        # The barrier keeps XLA from re-slicing the source inside the loop, which would make it copy the whole leaf.
        row = jax.lax.optimization_barrier(row)
        return jax.lax.fori_loop(
            0, count, lambda i, out: jax.lax.dynamic_update_slice_in_dim(out, row, targets[i], axis=0), leaf
        )

    return jax.tree.map(copy, cache)


class CacheWriter:
    """The cache while a forward pass rewrites it layer by layer: `attend_*` returns the context and stores the new
    arrays; `cache()` is the result. It exists while one function is traced and never outlives it."""

    def __init__(self, cache: KVCache, windows: Sequence[int] = (), mesh: Mesh | None = None, *, sums: Sums = NARROW):
        """`windows`: `ModelConfig.layer_windows`; `mesh`: of the cache, for kernels that XLA cannot split."""
        self._layers = list(cache.layers)
        self._cache = cache
        self._windows = windows or (0,) * len(cache.layers)
        self._mesh = mesh
        self._sums = sums

    def cache(self) -> KVCache:
        return self._cache.replace(layers=tuple(self._layers))

    def attend_token(
        self, layer: int, positions: Array, seen: Array | None = None, rows: Array | None = None
    ) -> Callable[[Array, Array, Array], Array]:
        """Attention of one new token per row, written at `positions` int32[n], to the first `seen` int32[n] columns: by
        default up to its own; fewer for rows whose result is not wanted.

        `rows` int32[n], all different, names the rows of the cache, in `PAGED` order only; what a row beyond the last
        writes is dropped. By default all, in order.
        """
        orders, window = self._cache.orders, self._windows[layer]
        seen = positions + 1 if seen is None else seen
        rows = jnp.arange(positions.shape[0]) if rows is None else rows

        def attend(q: Array, k: Array, v: Array) -> Array:
            write = lambda leaf, new, order: write_token(leaf, new, rows, positions, order)  # noqa: E731
            leaves = self._write(layer, k, v, write)
            if orders == PAGED:
                return attend_pages(q, *leaves, rows, seen, window=window, mesh=self._mesh)
            return attend_rows(q, *leaves, seen[:, None] - 1, orders, window=window, sums=self._sums)

        return attend

    def attend_span(
        self, layer: int, rows: Array, start: Array, length: Array, *, fresh: bool, scatter: bool
    ) -> Callable[[Array, Array, Array], Array]:
        """Attention of T new tokens per listed row, written from column `start`; `fresh` spans see only themselves.

        Args:
            layer: Which layer.
            rows: Rows of the cache, int32[n]; a row beyond the last is dropped (needs `scatter`).
            start: First column of each, int32[n]; start + T must not exceed the capacity.
            length: Tokens of each span that are real, int32[n].
            fresh: start is 0 for all rows, so nothing need be read back.
            scatter: Write by scatter instead of by dynamic-update-slice of the one row.
        """
        orders, window = self._cache.orders, self._windows[layer]

        def attend(q: Array, k: Array, v: Array) -> Array:
            T = q.shape[1]
            columns = start[:, None] + jnp.arange(T)[None]
            write = lambda leaf, new, order: write_span(leaf, new, rows, start, length, order, scatter=scatter)  # noqa: E731
            leaves = self._write(layer, k, v, write)
            if fresh:
                return attend_rows(q, k, v, columns, ("skh", "skh"), window=window, sums=self._sums)
            if orders == PAGED:
                return attend_pages(q, *leaves, rows, start + T, window=window, mesh=self._mesh)
            leaves = [_take_rows(leaf, rows, scatter) for leaf in leaves]
            return attend_rows(q, *leaves, columns, orders, window=window, sums=self._sums)

        return attend

    def _write(self, layer: int, k: Array, v: Array, write: Callable[[Array, Array, str], Array]) -> tuple[Array, ...]:
        """Stores what `write` makes of the layer's arrays with new keys and values [n,T,K,H], and returns it."""
        orders = self._cache.orders
        new = (k, v) if orders != PAGED else (in_turn(k, v),)
        parts = zip(self._layers[layer], new, orders, strict=True)
        self._layers[layer] = tuple(write(*part) for part in parts)
        return self._layers[layer]


def in_turn(k: Float[Array, "n T K H"], v: Float[Array, "n T K H"]) -> Float[Array, "n T C H"]:
    """Heads of keys and values in turn."""
    return jnp.stack([k, v], axis=3).reshape(*k.shape[:2], -1, k.shape[-1])


def write_token(
    leaf: Float[Array, "B X Y Z"],
    new: Float[Array, "n 1 K H"],
    rows: Int[Array, " n"],
    positions: Int[Array, " n"],
    order: str,
) -> Array:
    """`leaf` with `new[i]` in column `positions[i]` of row `rows[i]`, all of them different."""
    at = _columns_of(rows, positions, order)
    return leaf.at[at].set(new[:, 0].astype(leaf.dtype), unique_indices=True, mode="drop")


def _columns_of(rows: Array, columns: Array, order: str) -> tuple[Array | slice, ...]:
    """The index of these columns of these rows; what it takes out of a leaf ends with heads and head width."""
    return (rows, *(columns if axis == "s" else slice(None) for axis in order))


def write_span(
    leaf: Float[Array, "B X Y Z"],
    new: Float[Array, "n T K H"],
    rows: Int[Array, " n"],
    start: Int[Array, " n"],
    length: Int[Array, " n"],
    order: str,
    *,
    scatter: bool,
) -> Array:
    """`leaf` with `new[i]` in columns start[i], start[i]+1, ... of row rows[i].

    By scatter, padding (t >= length) and rows beyond the last are dropped. Without it n is 1 and padding is written
    too, behind the row's position, where the next write replaces it.
    """
    new = new.astype(leaf.dtype)
    if not scatter:
        block = new.transpose(0, *(1 + "skh".index(axis) for axis in order.replace("c", "k")))
        at = (rows[0], *(start[0] if axis == "s" else 0 for axis in order))
        return jax.lax.dynamic_update_slice(leaf, block, at)
    T = new.shape[1]
    columns = start[:, None] + jnp.arange(T)[None]
    capacity = leaf.shape[1 + order.index("s")]
    columns = jnp.where(jnp.arange(T)[None] < length[:, None], columns, capacity)
    return leaf.at[_columns_of(rows[:, None], columns, order)].set(new, mode="drop")


def _take_rows(leaf: Array, rows: Array, scatter: bool) -> Array:
    if scatter:
        return jnp.take(leaf, rows, axis=0, mode="clip")
    return jax.lax.dynamic_slice_in_dim(leaf, rows[0], 1, axis=0)


@checked
def attend_rows(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B X Y Z"],
    values: Float[Array, "B U V W"],
    columns: Int[Array, "B T"],
    orders: Orders,
    *,
    window: int = 0,
    sums: Sums = NARROW,
) -> Float[Array, "B T N H"]:
    """Softmax attention where the query in column c of its row sees columns 0..c; float32 scores [B,K,N/K,T,S].

    Under a positive `window` it sees the last that many of these only.

    The queries of a key head are the rows [N/K x T] of one matrix product: with their two axes kept apart XLA's CPU
    backend misses its fast product, which made a decode step at 1024 columns five times slower.
    """
    B, T, N, H = q.shape
    K, S = (values.shape[1 + orders[1].index(axis)] for axis in "ks")
    G = N // K
    rows = q.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    scores = sums.einsum(f"bkmh,b{orders[0]}->bkms", rows, keys, jnp.float32) * H**-0.5
    distance = columns[:, :, None] - jnp.arange(S)[None, None]
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    scores = jnp.where(seen[:, None, None], scores.reshape(B, K, G, T, S), MASKED)
    weights = sums.softmax(scores).astype(values.dtype).reshape(B, K, G * T, S)
    context = sums.einsum(f"bkms,b{orders[1]}->bkmh", weights, values)
    return context.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
