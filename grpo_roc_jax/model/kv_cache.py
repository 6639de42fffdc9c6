"""The cache of keys and values: allocate, write, attend, share a prompt, change the capacity.

Each layer has two arrays (keys and values) or one array of both; a recurrent layer has its `delta.Memory`. They are not
stacked over layers: a scan that carries a stacked cache copies it every step, and so does slicing it. The rows B are
the leading axis; the order of columns, heads and head width depends on the platform (`cache_orders`) or on the kernel
that reads the cache (`PAGED`). Every function writes before it reads, since reading a donated array and then writing it
makes XLA copy all of it.

The cache does not know the lengths of its rows; callers pass positions. Columns at or after a row's position hold stale
values, which the next write replaces. They are finite, so masking them by a large negative score is enough. The memory
of a recurrent layer has no columns: it belongs to the position after the last write to its row. A write at column 0
starts from an empty memory.
"""

from collections.abc import Callable
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from grpo_roc_jax.model import delta
from grpo_roc_jax.model.attention_mask import MASKED, soft_cap
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.paged import attend_pages
from grpo_roc_jax.shapes import Array, Float, Int, checked

Orders = tuple[str, ...]
"""Order of the axes of keys and of values after the row axis: k (heads), s (columns), h (head width). An array of both
has the letter c for its heads, which alternate between keys and values."""

PAGED: Orders = ("sch",)
"""For the kernel of `paged`: keys and values of a column are contiguous."""


def cache_orders(platform: str) -> Orders:
    """The order that a platform reads and writes without moving the cache.

    On a CPU the columns of keys come last, which makes the score product of one query several times cheaper. On a TPU
    the columns come first, as its scatter needs them: in any other order the compiler copies the whole cache into this
    order at the start of every chunk and back at its end, as `grpo_roc_jax.plan` shows.
    """
    return {"cpu": ("khs", "ksh"), "tpu": ("skh", "skh")}.get(platform, ("ksh", "ksh"))


@flax.struct.dataclass
class KVCache:
    """Keys and values of each layer, or one array of both: [B, ...] with the other axes in these orders."""

    layers: tuple[tuple[Array, ...], ...]
    orders: Orders = flax.struct.field(pytree_node=False)
    recurrent: tuple[int, ...] = flax.struct.field(pytree_node=False, default=())
    """Layers with a `delta.Memory` instead, in `delta.ORDERS`."""

    @property
    def slots(self) -> int:
        return self.layers[0][0].shape[0]

    @property
    def capacity(self) -> int:
        first = next(layer for i, layer in enumerate(self.layers) if i not in self.recurrent)
        return first[0].shape[1 + self.orders[0].index("s")]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.layers))

    def map(self, change: Callable[[Array, str], Array]) -> "KVCache":
        """The cache with `change(array, order)` applied to every array."""
        orders = [delta.ORDERS if i in self.recurrent else self.orders for i in range(len(self.layers))]
        layers = [zip(*layer, strict=True) for layer in zip(self.layers, orders, strict=True)]
        return self.replace(layers=tuple(tuple(change(leaf, order) for leaf, order in layer) for layer in layers))


def allocate(config: ModelConfig, slots: int, capacity: int, dtype: jnp.dtype, orders: Orders) -> KVCache:
    """A cache of zeros. It is never uninitialized, since a NaN would survive the mask."""
    sizes = {"k": config.kv_heads, "c": 2 * config.kv_heads, "s": capacity, "h": config.head_dim}
    shapes = [(slots, *(sizes[axis] for axis in order)) for order in orders]
    layers = tuple(
        tuple(jnp.zeros(shape, dtype) for shape in shapes)
        if attends
        else tuple(delta.empty_memory(config.windows, slots, dtype))
        for attends in config.attends
    )
    return KVCache(layers, orders, tuple(i for i, attends in enumerate(config.attends) if not attends))


def resize(cache: KVCache, capacity: int) -> KVCache:
    """The cache cut to its first `capacity` columns, or extended to that many with zeros."""
    old = cache.capacity

    def change(leaf: Array, order: str) -> Array:
        if "s" not in order:
            return leaf
        axis = 1 + order.index("s")
        if capacity <= old:
            return jax.lax.slice_in_dim(leaf, 0, capacity, axis=axis)
        padding = [(0, 0)] * leaf.ndim
        padding[axis] = (0, capacity - old)
        return jnp.pad(leaf, padding)

    return cache.map(change)


def fork(cache: KVCache, source: Array, targets: Array, count: Array, *, scatter: bool) -> KVCache:
    """Copies row `source` to the rows `targets[:count]`; later entries of `targets` are ignored.

    Args:
        cache: Donated by the caller and changed in place.
        source: Row to copy, int32[].
        targets: Rows to overwrite, int32[B].
        count: How many of them, int32[].
        scatter: Use one scatter per layer (accelerators) instead of a loop of row copies (CPU).
    """
    used = jnp.arange(targets.shape[0]) < count

    def copy(leaf: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(leaf, source, 1, axis=0)
        if scatter:
            rows = jnp.where(used, targets, leaf.shape[0])
            return leaf.at[rows].set(jnp.broadcast_to(row, (targets.shape[0], *leaf.shape[1:])), mode="drop")
        # Without the barrier XLA slices the source inside the loop, and then copies the whole leaf.
        row = jax.lax.optimization_barrier(row)
        return jax.lax.fori_loop(
            0, count, lambda i, out: jax.lax.dynamic_update_slice_in_dim(out, row, targets[i], axis=0), leaf
        )

    return jax.tree.map(copy, cache)


class CacheWriter:
    """A cache that a forward pass rewrites layer by layer.

    The functions from `attend_token` and `attend_span` return the context and store the new arrays; `cache()` returns
    the result. A writer lives only while one function is traced.
    """

    def __init__(self, cache: KVCache, config: ModelConfig, mesh: Mesh | None = None):
        """`mesh` is that of the cache, for kernels that XLA cannot partition."""
        self._layers = list(cache.layers)
        self._cache = cache
        self._windows = config.layer_windows or (0,) * config.layers
        self._cap = config.extras.attention_cap
        self._mesh = mesh

    def cache(self) -> KVCache:
        return self._cache.replace(layers=tuple(self._layers))

    def attend_token(
        self, layer: int, positions: Array, active: Array | None = None, rows: Array | None = None
    ) -> Callable[..., Array]:
        """`attend(q, k, v)` of one new token per row, which is written to column `positions` int32[n]; in a recurrent
        layer `recur(signals, conv)`.

        Args:
            layer: Which layer.
            positions: Column of each token.
            active: bool[n]: rows whose result is used; the memory of the others stays unchanged. By default all.
            rows: Rows of the cache, int32[n], all different; supported in `PAGED` order only. Writes to a row beyond
                the last are dropped. By default all rows in order.
        """
        active = jnp.ones(positions.shape, bool) if active is None else active
        if layer in self._cache.recurrent:
            return self._recur(layer, rows, positions, active.astype(jnp.int32))
        orders, limits = self._cache.orders, {"window": self._windows[layer], "cap": self._cap}
        seen = jnp.where(active, positions + 1, 1)
        rows = jnp.arange(positions.shape[0]) if rows is None else rows

        def attend(q: Array, k: Array, v: Array) -> Array:
            leaves = self._write(layer, k, v, partial(write_token, rows=rows, positions=positions))
            if orders == PAGED:
                return attend_pages(q, *leaves, rows, seen, **limits, mesh=self._mesh)
            return attend_rows(q, *leaves, seen[:, None] - 1, orders, **limits)

        return attend

    def attend_span(
        self, layer: int, rows: Array, start: Array, length: Array, *, fresh: bool, scatter: bool
    ) -> Callable[..., Array]:
        """`attend(q, k, v)` of T new tokens per listed row, which are written from column `start` on; in a recurrent
        layer `recur(signals, conv)`.

        Args:
            layer: Which layer.
            rows: Rows of the cache, int32[n]; writes to a row beyond the last are dropped (needs `scatter`).
            start: First column of each span, int32[n]; start + T must not exceed the capacity.
            length: Tokens of each span that are not padding, int32[n].
            fresh: All spans start at column 0, so nothing is read back from the cache.
            scatter: Write by scatter instead of by a dynamic-update-slice of the single row.
        """
        if layer in self._cache.recurrent:
            return self._recur(layer, rows, start, length, scatter=scatter)
        orders, limits = self._cache.orders, {"window": self._windows[layer], "cap": self._cap}

        def attend(q: Array, k: Array, v: Array) -> Array:
            T = q.shape[1]
            columns = start[:, None] + jnp.arange(T)[None]

            write = partial(write_span, rows=rows, start=start, length=length, scatter=scatter)
            leaves = self._write(layer, k, v, write)
            if fresh:
                return attend_rows(q, k, v, columns, ("skh", "skh"), **limits)
            if orders == PAGED:
                return attend_pages(q, *leaves, rows, start + T, **limits, mesh=self._mesh)
            leaves = [_take_rows(leaf, rows, scatter) for leaf in leaves]
            return attend_rows(q, *leaves, columns, orders, **limits)

        return attend

    def _recur(
        self, layer: int, rows: Array | None, start: Array, length: Array, *, scatter: bool = True
    ) -> Callable[[delta.Signals, Array], Array]:
        """The output of a recurrent layer for the first `length` of its new tokens; without `rows`, of all rows."""

        def put(leaf: Array, new: Array) -> Array:
            if rows is None:
                return new
            return leaf.at[rows].set(new, mode="drop") if scatter else _put_row(leaf, new, rows)

        def recur(signals: delta.Signals, conv: Array) -> Array:
            held = self._layers[layer]
            taken = held if rows is None else (_take_rows(leaf, rows, scatter) for leaf in held)
            context, new = delta.recur_cached(delta.Memory(*taken), start == 0, length, signals, conv)
            self._layers[layer] = tuple(put(*pair) for pair in zip(held, new, strict=True))
            return context

        return recur

    def _write(self, layer: int, k: Array, v: Array, write: Callable[[Array, Array, str], Array]) -> tuple[Array, ...]:
        """Stores and returns the layer's arrays after `write` put new keys and values [n,T,K,H] into them."""
        orders = self._cache.orders
        new = (k, v) if orders != PAGED else (in_turn(k, v),)
        parts = zip(self._layers[layer], new, orders, strict=True)
        self._layers[layer] = tuple(write(*part) for part in parts)
        return self._layers[layer]


def in_turn(k: Float[Array, "n T K H"], v: Float[Array, "n T K H"]) -> Float[Array, "n T C H"]:
    """One array of both, whose heads alternate between keys and values."""
    return jnp.stack([k, v], axis=3).reshape(*k.shape[:2], -1, k.shape[-1])


def write_token(
    leaf: Float[Array, "B X Y Z"],
    new: Float[Array, "n 1 K H"],
    order: str,
    rows: Int[Array, " n"],
    positions: Int[Array, " n"],
) -> Array:
    """`leaf` with `new[i]` in column `positions[i]` of row `rows[i]`; the rows are all different."""
    at = _columns_of(rows, positions, order)
    return leaf.at[at].set(new[:, 0].astype(leaf.dtype), unique_indices=True, mode="drop")


def _columns_of(rows: Array, columns: Array, order: str) -> tuple[Array | slice, ...]:
    """Index of these columns of these rows; the selected part ends with heads and head width."""
    return (rows, *(columns if axis == "s" else slice(None) for axis in order))


def write_span(
    leaf: Float[Array, "B X Y Z"],
    new: Float[Array, "n T K H"],
    order: str,
    rows: Int[Array, " n"],
    start: Int[Array, " n"],
    length: Int[Array, " n"],
    *,
    scatter: bool,
) -> Array:
    """`leaf` with `new[i]` in columns start[i], start[i]+1, ... of row rows[i].

    A scatter drops padding (t >= length) and rows beyond the last. Without it n is 1, and padding is written too: after
    the row's position, where the next write replaces it.
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


def _put_row(leaf: Array, new: Array, rows: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(leaf, new, rows[0], axis=0)


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
    cap: float = 0.0,
) -> Float[Array, "B T N H"]:
    """Softmax attention where the query in column c of its row sees columns 0..c, with float32 scores [B,K,N/K,T,S].

    With a positive `window` it sees only the last that many of them. `cap` is the soft cap of the scores, 0 for none.

    The queries of a key head are the rows [N/K x T] of one matrix product. With two separate axes XLA's CPU backend
    misses its fast matrix product, which made a decode step at 1024 columns five times slower.
    """
    B, T, N, H = q.shape
    K, S = (values.shape[1 + orders[1].index(axis)] for axis in "ks")
    G = N // K
    rows = q.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    scores = jnp.einsum(f"bkmh,b{orders[0]}->bkms", rows, keys, preferred_element_type=jnp.float32) * H**-0.5
    scores = soft_cap(scores, cap)
    distance = columns[:, :, None] - jnp.arange(S)[None, None]
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    scores = jnp.where(seen[:, None, None], scores.reshape(B, K, G, T, S), MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype).reshape(B, K, G * T, S)
    context = jnp.einsum(f"bkms,b{orders[1]}->bkmh", weights, values)
    return context.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
