"""The compiled programs of the engine: a set fixed by the configuration, compiled ahead of time and counted.

Every call goes through a table of executables. A program that is missing there is compiled and counted in
`compilations`, so no compilation goes unnoticed. On a mesh each data shard runs on its own slots, by `shard_map` over
the row axes: there are no collectives between shards, and each shard leaves a chunk when its own rows have stopped. XLA
partitions the heads.

`SharedPrograms` run over the devices of several processes, one of which leads. Every call of a program passes `run`,
with its arrays still on the host. The leader sends the call to the others first, and each of these makes it with its
own part of the weights, the pool and the slots. Reports are replicated, so the leader reads its own copy.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.engine.by_layer import LayerProgram, LayerPrograms, append_by_layer, copy_by_layer, decode_by_layer
from grpo_roc_jax.engine.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.engine.decode import (
    ChunkReport,
    ChunkSettings,
    SamplerModel,
    Slots,
    append,
    append_packed,
    decode_chunk,
    decode_steered,
    empty_patch,
    init_slots,
    spans_of,
    tiles_of,
)
from grpo_roc_jax.model.choose import fastest
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.experts import mix_experts
from grpo_roc_jax.model.low_precision import DTYPES, scaled_orders
from grpo_roc_jax.model.paged import check_paged
from grpo_roc_jax.model.pool import (
    PAGED,
    BlockPool,
    Orders,
    PoolSize,
    PoolWriter,
    allocate,
    cache_orders,
    copy_blocks,
    enlarge,
    head_axes,
    tile_count,
    tile_width,
    token_places,
)
from grpo_roc_jax.model.sharding import SLOTS, place_host, platform_of
from grpo_roc_jax.model.transformer import Params, compute_dtype, layer_weights
from grpo_roc_jax.process.progress import phase
from grpo_roc_jax.shapes import Array

COPIES = 8
"""Blocks, and rows of recurrent layers, that one call copies on each shard."""


@lru_cache
def first_calls(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """For each number of tokens up to twice the longest of the rising `lengths`: the longest of the calls that take so
    many tokens in least time, if a call of n takes as long as n + `CALL_TOKENS`."""
    times, firsts = [0], [0]
    for tokens in range(1, 2 * lengths[-1] + 1):
        time_of = {n: n + CALL_TOKENS + times[max(0, tokens - n)] for n in reversed(lengths)}
        firsts.append(min(time_of, key=time_of.__getitem__))
        times.append(time_of[firsts[-1]])
    return tuple(firsts)


@dataclass(frozen=True)
class ProgramCost:
    """Compile time and memory of a program."""

    name: str
    seconds: float
    """Seconds that tracing, lowering and compiling took."""
    temp_bytes: int
    """Scratch memory of a call per device. If it exceeds the size of the cache, a donation did not take effect."""
    cache_bytes: int = 0
    """Bytes of the cache that it works on, for comparison."""
    total_bytes: int = 0
    """Arguments, scratch, and results that do not reuse the memory of an argument, per device."""


def program_cost(name: str, started_s: float, executable: jax.stages.Compiled, cache_bytes: int = 0) -> ProgramCost:
    """The cost of a program just compiled.

    Args:
        name: The name of the program in tables.
        started_s: `time.perf_counter()` before it was lowered or compiled.
        executable: Gives its memory; 0 if the backend does not report it.
        cache_bytes: See `ProgramCost`.
    """
    seconds, memory = time.perf_counter() - started_s, executable.memory_analysis()
    if memory is None:
        return ProgramCost(name, seconds, 0, cache_bytes)
    scratch, shared = memory.temp_size_in_bytes, memory.alias_size_in_bytes
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes - shared + scratch
    return ProgramCost(name, seconds, scratch, cache_bytes, total)


@dataclass(frozen=True, eq=False)
class ProgramCall:
    """A program and its arguments, which may be shapes only for `SamplerPrograms.lower`."""

    key: tuple
    """The name, and the sizes that distinguish programs of that name."""
    function: Callable
    arguments: tuple
    specs: tuple
    """Partition spec of each argument over the shards; None for replicated."""
    out: Any
    donate: tuple[int, ...] = ()
    by_layer: Callable | None = None
    """The same from parts (`by_layer.LayerPrograms`, *arguments); None for programs without layers."""


READ_TOKENS = 512
"""Tokens of an append from which its products surely take longer than reading the weights: FLOP/s over bytes/s is 240
on TPU v5e and 295 on H100. Shorter appends cost about the same however many rows they have."""


LAYER_WEIGHTS = 2 << 20
"""Weights of a layer that a token is multiplied with, from which layers share an executable on a CPU. A call from the
host takes some 0.1 ms. With 3.5 million weights (SmolLM2-135M) a layer takes 2.5 ms for 8 rows, and decoding is as fast
as unrolled; with one million and 32 rows a step takes a fifth longer than unrolled."""
PACK = 256
"""Tokens of the longest pack. From there on a product of this many rows is as fast as one of twice as many."""
CALL_TOKENS = 16
"""Tokens that an append could hold more of in the time that a further call takes, which reads all weights once more."""


class SamplerPrograms:
    """The executables by name and sizes, and the placement of their arrays."""

    read_tokens = READ_TOKENS
    """Tokens of an append from which programs for further numbers of rows are worth their compilation."""
    measure = staticmethod(fastest)
    """Returns the name of the fastest of some calls, and the seconds of each."""

    def __init__(
        self,
        model: ModelConfig,
        rollout: RolloutConfig,
        sampling: SamplingConfig,
        stop_ids: tuple[int, ...],
        vocab_size: int | None,
        mesh: Mesh | None,
        shares_layers: bool | None = None,
        platform: str | None = None,
    ):
        self.model, self.rollout = model, rollout
        self.mesh, self.platform = mesh, platform or platform_of(mesh)
        self.row_axes = tuple(axis for axis in SLOTS if mesh is not None and axis in mesh.shape)
        self.shards = math.prod(mesh.shape[axis] for axis in self.row_axes) if mesh is not None else 1
        on_cpu = self.platform == "cpu"
        if rollout.attention == "paged":
            self._check_paged()
        self.packs = on_cpu and not rollout.append_rows and not model.delta
        """Whether appends hold the tokens of several rows side by side (`decode.append_packed`)."""
        rows = rollout.append_rows or (1 if on_cpu else 8)
        self.append_rows = tuple(dict.fromkeys((*(n for n in (1, 2, 4, 8) if n < rows), rows)))
        self.settings = ChunkSettings(sampling, rollout.chunk, stop_ids, vocab_size)
        per_shard = rollout.slots // self.shards
        blocks = rollout.shard_blocks(self.shards)
        # Where blocks are multiplied in their place, prompts of several rows have blocks of their own.
        sharable = -(-per_shard // 4) * ((rollout.max_prompt_tokens - 1) // rollout.block)
        sharable = min(sharable, blocks // 2) if on_cpu and per_shard > 1 else 0
        self.largest_size = PoolSize(blocks, rollout.block, per_shard, sharable)
        """The largest size that the pool of a shard can reach; see `grow`."""
        self._grown = 0
        parts = {-(-per_shard // part) for part in rollout.narrow}
        self.widths = (*sorted(width for width in parts if 4 <= width < per_shard), per_shard)
        large = on_cpu and (mesh is None or mesh.size == 1) and layer_weights(model) >= LAYER_WEIGHTS
        self.outputs_first = large and rollout.weight_dtype == "full"
        """Whether the weights come as `model.outputs_first` says."""
        self.shares_layers = large if shares_layers is None else shares_layers
        """Whether all layers of a kind share an executable (`engine.by_layer`)."""
        # `_on_mesh` splits the rows; within a shard the experts are split.
        self._sampler = SamplerModel(model, partial(mix_experts, mesh=mesh, rows=()), mesh, self.outputs_first)
        self.compiled: dict[tuple, Any] = {}
        """The executables, by the key of their calls and the number of blocks of the pool."""
        self._parts: dict[tuple, LayerProgram] = {}
        self.costs: list[ProgramCost] = []

    @property
    def compilations(self) -> int:
        """Number of programs compiled so far."""
        return len(self.costs)

    @cached_property
    def attention(self) -> tuple[str, dict[str, float]]:
        """(path of attention to the cache, `xla` or `paged`; measured seconds of each per layer and token, if any)."""
        if self.rollout.attention != "auto":
            return self.rollout.attention, {}
        # Devices of a topology to compile for cannot be measured.
        if self.platform != "tpu" or jax.default_backend() != "tpu" or self.rollout.cache_dtype != "full":
            return "xla", {}
        try:
            self._check_paged()
        except ValueError:
            return "xla", {}
        layouts = {"xla": cache_orders("tpu"), "paged": PAGED}
        name, seconds = self.measure({name: self._timed_attention(orders) for name, orders in layouts.items()})
        return name, {name: took / self.rollout.chunk for name, took in seconds.items()}

    @property
    def orders(self) -> Orders:
        """Axis order of the cache, which depends on the path that reads it."""
        orders = PAGED if self.attention[0] == "paged" else cache_orders(self.platform)
        return orders if self.rollout.cache_dtype == "full" else scaled_orders(orders)

    @property
    def _tensor(self) -> int:
        """Devices that share the heads of a shard."""
        return 1 if self.mesh is None else self.mesh.shape.get("tensor", 1)

    @property
    def _appends_per_chunk(self) -> int:
        """Appends of a shard for a chunk of decoding where rows use all of their turns and of their budget."""
        rollout, pieces = self.rollout, -(-self.rollout.max_prompt_tokens // self._append_shapes()[-1][1])
        appends = (pieces + rollout.max_turns - 1) * -(-self.largest_size.slots // self.append_rows[-1])
        return -(-appends * rollout.chunk // rollout.max_response_tokens)

    def _check_paged(self) -> None:
        check_paged(self.model, self.platform, self._tensor)

    def _timed_attention(self, orders: Orders) -> Callable[[], Array]:
        """Attention and cache writes of one layer in a chunk and in the appends that come with it, over rows of half of
        the greatest length."""
        model, slots, size = self.model, self.rollout.slots, self.largest_size
        kv_heads, width = model.attention_heads[0]
        n, T = self._append_shapes()[-1]
        dtype, attends = compute_dtype(model), model.attends.index(True)

        def make() -> BlockPool:
            pool = allocate(model, size, dtype, orders, self.shards)
            return pool.replace(layers=(pool.layers[attends],), recurrent=())

        pool = self.run(ProgramCall(("timed pool", orders), make, (), (), self._rows(0)))
        q = self.place(np.zeros((slots, 1, model.heads, width), dtype), *self._rows(0))
        half = self.rollout.table_width * size.columns // 2
        positions = self.place(np.full(slots, half, np.int32), *self._rows(0))
        table = np.arange(slots * self.rollout.table_width, dtype=np.int32) % size.blocks
        table = self.place(table.reshape(slots, -1), *self._rows(0))
        span = self.place(np.zeros((self.shards * n, T, model.heads, width), dtype), *self._rows(0))

        def chunk(pool: BlockPool, q: Array, positions: Array, table: Array, span: Array) -> tuple[BlockPool, ...]:
            def step(i: Array, state: tuple[BlockPool, Array]) -> tuple[BlockPool, Array]:
                writer, new = PoolWriter(state[0], model, self.mesh), q[:, :, :kv_heads]
                places = token_places(pool, positions + i, jnp.ones(positions.shape, bool), table, ())
                return writer.pool(), state[1] + writer.attend_token(0, places)(q + state[1], new, new)

            def append(i: Array, state: tuple[BlockPool, Array]) -> tuple[BlockPool, Array]:
                writer, new = PoolWriter(state[0], model, self.mesh), span[:, :, :kv_heads]
                rows, full = jnp.arange(n, dtype=jnp.int32) % positions.size, jnp.full(n, T, jnp.int32)
                attend = writer.attend_span(0, table[rows], rows, jnp.maximum(positions[rows] - T, 0), full)
                return writer.pool(), state[1] + attend(span + state[1], new, new)

            pool, out = jax.lax.fori_loop(0, self.rollout.chunk, step, (pool, jnp.zeros_like(q)))
            return *jax.lax.fori_loop(0, self._appends_per_chunk, append, (pool, jnp.zeros_like(span))), out

        def call() -> tuple[Array, ...]:
            nonlocal pool
            specs, arguments = (self._rows(0),) * 5, (pool, q, positions, table, span)
            pool, *out = self.run(ProgramCall(("timed", orders), chunk, arguments, specs, specs[:3], (0,)))
            return tuple(out)

        return call

    def place(self, value: np.ndarray, *spec: Any) -> Array:
        """An explicit transfer to the devices, with a partition spec."""
        if self.mesh is None:
            return jax.device_put(value, jax.devices()[0])
        return jax.device_put(value, NamedSharding(self.mesh, P(*spec)))

    def new_pool(self) -> BlockPool:
        """A pool of zeros, allocated on the devices."""
        return self.run(ProgramCall(("allocate",), self._allocate, (), (), self._rows(0)))

    def _allocate(self) -> BlockPool:
        stored = DTYPES.get(self.rollout.cache_dtype)
        return allocate(self.model, self.size, compute_dtype(self.model), self.orders, self.shards, stored)

    @property
    def shared_blocks(self) -> int:
        """Ids of blocks below it may be in several rows."""
        return self.size.shared if self.platform == "cpu" else self.size.blocks

    @property
    def size(self) -> PoolSize:
        """The size of the pool of a shard, as it is allocated now."""
        return self._sizes[self._grown] if self.rollout.kv_start else self.largest_size

    @cached_property
    def _sizes(self) -> tuple[PoolSize, ...]:
        """What the pool grows through."""
        return self.largest_size.growing(self.rollout.first_blocks(self.shards), self.orders)

    @property
    def can_grow(self) -> bool:
        return self.size.blocks < self.largest_size.blocks

    def grow(self, pool: BlockPool) -> BlockPool:
        """The pool with more blocks, as `rollout.kv_start` says; it is donated. Pools allocated from now on have the
        same size. Programs are compiled for it when they are called."""
        arguments, specs = (pool,), (self._rows(0),)
        self._grown += 1
        function = partial(enlarge, arenas=self.size.arenas(self.orders))
        return self.run(ProgramCall(("grow",), function, arguments, specs, specs[0], (0,)))

    def new_slots(self) -> Slots:
        return self.run(ProgramCall(("slots",), partial(init_slots, self.rollout.slots), (), (), self._rows(0)))

    def width(self, live: int) -> int:
        """Rows per shard of the smallest decode program for that many live rows."""
        return next(width for width in self.widths if width >= live)

    def decode(
        self, params: Params, pool: BlockPool, slots: Slots, patch: Array, table: Array, width: int
    ) -> tuple[BlockPool, Slots, ChunkReport]:
        """See `decode_chunk`; donates pool and slots. `width` is one of `widths`; no shard has more active rows. Block
        numbers in the table [slots, W] are local to a shard."""
        return self.run(self._decode_call(params, pool, slots, patch, table, width))

    def decode_steered(
        self, params: Params, pool: BlockPool, slots: Slots, patch: Array, table: Array, *steering: Array, width: int
    ) -> tuple[BlockPool, Slots, ChunkReport]:
        """`decode` with the fields of `steering.Steering`; compiled when it is first called."""
        return self.run(self._decode_call(params, pool, slots, patch, table, width, steering))

    def _decode_call(
        self,
        params: Params,
        pool: BlockPool,
        slots: Slots,
        patch: Array,
        table: Array,
        width: int,
        steering: tuple[Array, ...] = (),
    ) -> ProgramCall:
        sized = {"model": self._sampler, "settings": replace(self.settings, rows=width)}
        routes = self._rows(3) if self.model.experts.replay else None
        top = self._rows(2) if steering and steering[4].shape[1] else None
        report = ChunkReport(*(self._rows(axis) for axis in (1, 1, 1, 0, 0)), routes=routes, top=top)
        specs = (*(self._rows(0) for _ in steering[:-1]), *(P() for _ in steering[-1:]))
        return ProgramCall(
            ("steered", width, steering[1].shape[1], steering[4].shape[1]) if steering else ("decode", width),
            partial(decode_steered if steering else decode_chunk, **sized),
            (params, pool, slots, patch, table, *steering),
            (None, self._rows(0), self._rows(0), self._rows(1), self._rows(0), *specs),
            (self._rows(0), self._rows(0), report),
            donate=(1, 2),
            by_layer=partial(decode_by_layer, **sized),
        )

    def append(self, params: Params, pool: BlockPool, tokens: Array, table: Array, where: Array) -> BlockPool:
        """See `decode.append`; tokens [shards x n, T], table [shards x n, W], `where` [3, shards x n]; slots and blocks
        are local to a shard."""
        return self.run(self._append_call(params, pool, tokens, table, where))

    def _append_call(self, params: Params, pool: BlockPool, tokens: Array, table: Array, where: Array) -> ProgramCall:
        name = ("append", tokens.shape[0] // self.shards, tokens.shape[1])
        return ProgramCall(
            name,
            partial(append, model=self._sampler),
            (params, pool, tokens, table, where),
            (None, self._rows(0), self._rows(0), self._rows(0), self._rows(1)),
            self._rows(0),
            donate=(1,),
            by_layer=partial(append_by_layer, name=name, arrange=spans_of, model=self._sampler),
        )

    def append_packed(self, params: Params, pool: BlockPool, tokens: Array, table: Array, tiles: Array) -> BlockPool:
        """See `decode.append_packed`; tokens [3, shards x N], table [shards x J, W], tiles [2, shards x J]; numbers of
        tokens and blocks are local to a shard. N is one of `pack_lengths`."""
        return self.run(self._pack_call(params, pool, tokens, table, tiles))

    def _pack_call(self, params: Params, pool: BlockPool, tokens: Array, table: Array, tiles: Array) -> ProgramCall:
        name = ("append", tokens.shape[1] // self.shards)
        return ProgramCall(
            name,
            partial(append_packed, model=self._sampler),
            (params, pool, tokens, table, tiles),
            (None, self._rows(0), self._rows(1), self._rows(0), self._rows(1)),
            self._rows(0),
            donate=(1,),
            by_layer=partial(append_by_layer, name=name, arrange=tiles_of, model=self._sampler),
        )

    def copy(self, pool: BlockPool, blocks: Array, rows: Array) -> BlockPool:
        """See `pool.copy_blocks`; both [2, shards x COPIES], local to a shard."""
        return self.run(self._copy_call(pool, blocks, rows))

    def _copy_call(self, pool: BlockPool, blocks: Array, rows: Array) -> ProgramCall:
        specs = (self._rows(0), self._rows(1), self._rows(1))
        by_layer = partial(copy_by_layer, config=self.model)
        return ProgramCall(("copy",), copy_blocks, (pool, blocks, rows), specs, specs[0], (0,), by_layer)

    def warmup(self, params: Params) -> list[ProgramCost]:
        """Compiles every program that a run can need and runs each once on idle rows, so that running out of memory
        happens here. Returns the programs that were new."""
        known = len(self.costs)
        pool, slots = self.new_pool(), self.new_slots()
        B, D, W = self.rollout.slots, self.shards, self.rollout.table_width
        patch = self.place(empty_patch(B), *self._rows(1))
        # Every entry of the table is beyond the last block, so nothing is written.
        table = partial(np.full, fill_value=self.largest_size.blocks, dtype=np.int32)
        zeros = partial(np.zeros, dtype=np.int32)
        for N in self.pack_lengths if self.packs else ():
            J = tile_count(N)
            tokens = np.full((3, D * N), J * tile_width(N), np.int32)  # places of padding
            tokens[:2] = 0
            arrays = (self.place(array, *self._rows(axis)) for axis, array in ((1, tokens), (0, table((D * J, W)))))
            pool = self.append_packed(params, pool, *arrays, self.place(zeros((2, D * J)), *self._rows(1)))
        for n, T in () if self.packs else self._append_shapes():
            arrays = (self.place(array, *self._rows(0)) for array in (zeros((D * n, T)), table((D * n, W))))
            pool = self.append(params, pool, *arrays, self.place(zeros((3, D * n)), *self._rows(1)))
        none = self.place(table((2, D * COPIES)), *self._rows(1))
        pool = self.copy(pool, none, none)
        for width in self.widths:
            pool, slots, _ = self.decode(params, pool, slots, patch, self.place(table((B, W)), *self._rows(0)), width)
        return self.costs[known:]

    def largest(self, params: Params) -> Iterator[ProgramCall]:
        """Calls of the programs with shapes instead of arrays: the decode chunks (all rows last), the longest append,
        and the copy of blocks.

        Args:
            params: Shape, dtype and sharding of the sampler's parameters.
        """
        int32 = partial(self._like, dtype=np.int32)
        pool, rows, W = self.pool_like(), self.append_rows[-1] * self.shards, self.rollout.table_width
        slots = jax.tree.map(
            lambda leaf: self._like(leaf.shape, leaf.dtype, self._rows(0)),
            jax.eval_shape(partial(init_slots, self.rollout.slots)),
        )
        patch = int32(empty_patch(self.rollout.slots).shape, spec=self._rows(1))
        table = int32((self.rollout.slots, W), spec=self._rows(0))
        for width in self.widths:
            yield self._decode_call(params, pool, slots, patch, table, width)
        if self.packs:
            N, J = (self.shards * n for n in (self.pack_lengths[-1], tile_count(self.pack_lengths[-1])))
            tokens, tiles = (int32(shape, spec=self._rows(1)) for shape in ((3, N), (2, J)))
            yield self._pack_call(params, pool, tokens, int32((J, W), spec=self._rows(0)), tiles)
        else:
            tokens, table = (int32((rows, n), spec=self._rows(0)) for n in (self._append_shapes()[-1][1], W))
            yield self._append_call(params, pool, tokens, table, int32((3, rows), spec=self._rows(1)))
        copies = int32((2, self.shards * COPIES), spec=self._rows(1))
        yield self._copy_call(pool, copies, copies)

    def pool_like(self) -> BlockPool:
        """Shapes and shardings of the pool."""
        shapes = jax.eval_shape(self._allocate)
        return self._each_leaf(shapes, lambda leaf, spec: self._like(leaf.shape, leaf.dtype, spec))

    def _like(self, shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        sharding = None if self.mesh is None else NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    @cached_property
    def pack_lengths(self) -> tuple[int, ...]:
        """Tokens of the programs that append packed rows."""
        lengths, most = self.rollout.append_lengths, self.largest_size.slots * self.rollout.max_prompt_tokens
        return (*lengths, PACK) if lengths[-1] < PACK <= most else lengths

    def pack_length(self, tokens: int) -> int:
        """Tokens of the next call where so many are to be written."""
        return first_calls(self.pack_lengths)[min(tokens, 2 * self.pack_lengths[-1])]

    def append_width(self, rows: int, length: int) -> int:
        """Rows of the smallest program that appends that many rows of a padded length."""
        return next(n for n, T in self._append_shapes() if length == T and n >= rows)

    def _append_shapes(self) -> list[tuple[int, int]]:
        """(rows, padded length) of every append; besides one row and all of them, there are the numbers in between
        from `read_tokens` tokens on."""
        room, ends = self.rollout.table_width * self.rollout.block, (1, self.append_rows[-1])
        shapes = itertools.product(self.append_rows, self.rollout.append_lengths)
        return [(n, T) for n, T in shapes if room >= T and (n in ends or n * T >= self.read_tokens)]

    def _rows(self, axis: int) -> P:
        """The spec of an array whose `axis` is split over the shards."""
        return P(*([None] * axis), self.row_axes or None)

    def _each_leaf(self, pool: BlockPool, change: Callable[[Any, P], Any]) -> BlockPool:
        """The pool with `change(leaf, spec)` applied to every leaf: blocks over the shards, heads over `tensor` as
        `pool.head_axes` says."""
        split = head_axes(self.model, self._tensor)

        def spec(order: str) -> P:
            return P(self.row_axes or None, *(split.get(axis) for axis in order))

        return pool.map(lambda leaf, order: change(leaf, spec(order)))

    def run(self, call: ProgramCall) -> Any:
        """The results of a call; its program is compiled at the first call of its key."""
        key = call.key, None if call.key == ("slots",) else self.size.blocks
        executable = self.compiled.get(key)
        if executable is None:
            name = "/".join(map(str, call.key))
            with phase(f"compiling {name}", once=True):
                executable = self.compiled[key] = self._compile(call, name)
        return executable(*call.arguments)

    def lower(self, call: ProgramCall) -> jax.stages.Lowered:
        """The program for the shapes and shardings of the arguments, not yet compiled."""
        jitted = jax.jit(self._on_mesh(call.function, call.arguments, call.specs, call.out), donate_argnums=call.donate)
        return jitted.lower(*call.arguments)

    def _compile(self, call: ProgramCall, name: str) -> Any:
        start = time.perf_counter()
        cache_bytes = sum(argument.nbytes for argument in call.arguments if isinstance(argument, BlockPool))
        if call.by_layer is not None and self.shares_layers:
            parts = LayerPrograms(self._parts, preparing=True)
            call.by_layer(parts, *call.arguments)
            costs = [program_cost(name, start, part.executable) for part in parts.used.values()]
            # The parts run one after the other; each of them has a layer of the cache and of the weights at most.
            largest = max(costs, key=lambda cost: cost.total_bytes)
            self.costs.append(replace(largest, cache_bytes=cache_bytes))
            return partial(call.by_layer, LayerPrograms(self._parts, preparing=False))
        executable = self.lower(call).compile()
        self.costs.append(program_cost(name, start, executable, cache_bytes // self.shards))
        return executable

    def _on_mesh(self, function: Callable, arguments: tuple, specs: tuple, out: Any) -> Callable:
        if self.mesh is None:
            return function
        if not arguments or self.shards == 1:
            return self._constrained(function, out)
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(P() if spec is None else spec for spec in specs),
            out_specs=out,
            axis_names=set(self.row_axes),
            check_vma=False,
        )
        return self._constrained(mapped, out)

    def _constrained(self, function: Callable, out: Any) -> Callable:
        """The function with constrained output shardings, so that the output of a call can be the input of the next."""

        def hold(leaf: Array, spec: P) -> Array:
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, spec))

        def pin(value: Any, spec: Any) -> Any:
            if isinstance(value, BlockPool):
                return self._each_leaf(value, hold)
            if spec is None or isinstance(spec, P):
                return jax.tree.map(lambda leaf: hold(leaf, spec), value)
            return type(spec)(*(pin(getattr(value, name), part) for name, part in vars(spec).items()))

        def run(*arguments: Any) -> Any:
            result = function(*arguments)
            if isinstance(out, tuple) and not isinstance(out, P):
                return tuple(pin(value, spec) for value, spec in zip(result, out, strict=True))
            return pin(result, out)

        return run


class SharedPrograms(SamplerPrograms):
    """Programs on a mesh of several processes."""

    send: Callable[[tuple], None] | None = None
    """Takes (key, host arrays) of each call while this process leads; None while all make the same calls by themselves,
    as for `warmup`."""

    def place(self, value: np.ndarray, *spec: Any) -> np.ndarray:
        """The array itself: `run` places it when it has been sent."""
        return value

    def run(self, call: ProgramCall) -> Any:
        if self.send is not None:
            self.send((call.key, [value for value in call.arguments if isinstance(value, np.ndarray)]))
        pairs = zip(call.arguments, call.specs, strict=True)
        placed = (
            place_host(value, NamedSharding(self.mesh, spec)) if isinstance(value, np.ndarray) else value
            for value, spec in pairs
        )
        return super().run(replace(call, arguments=tuple(placed)))

    def repeat(self, params: Params, calls: Iterable[tuple[tuple, list[np.ndarray]]]) -> None:
        """Makes the calls that the leader sent."""
        pool = slots = None
        for (name, *sizes), arrays in calls:
            if name == "allocate":
                pool = None  # the pool before is freed first
                pool = self.new_pool()
            elif name == "slots":
                slots = self.new_slots()
            elif name == "grow":
                pool = self.grow(pool)
            elif name == "append":
                pool = (self.append if len(sizes) == 2 else self.append_packed)(params, pool, *arrays)
            elif name == "copy":
                pool = self.copy(pool, *arrays)
            else:
                decode = self.decode if name == "decode" else self.decode_steered
                pool, slots, _ = decode(params, pool, slots, *arrays, width=sizes[0])
