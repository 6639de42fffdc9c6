"""The programs of the engine with one executable for all layers of a kind, which the host calls layer by layer.

Unrolled, a program holds every layer once more, so that its compilation takes minutes for a deep model. A scan over
layers would copy their caches and weights in every step. Here the layers are arguments: nothing is copied, and compile
time does not depend on the depth. What it costs is a call from the host for each layer, so this is for devices that
the host calls quickly and for layers that take much longer than a call (see `programs.SamplerPrograms.shares_layers`).

Each function has the result of its namesake in `decode` or `pool`, and computes the same operations.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from grpo_roc_jax.engine.decode import (
    ChunkReport,
    ChunkSettings,
    SamplerModel,
    Slots,
    apply_patch,
    draw_tokens,
    empty_report,
    given_to_layers,
    narrow,
    narrow_steering,
    split_adapters,
    unfinished,
    widen,
)
from grpo_roc_jax.engine.steering import Steering
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.experts import recorded
from grpo_roc_jax.model.pool import (
    BlockPool,
    PoolWriter,
    Spans,
    Tiles,
    Tokens,
    copy_blocks,
    readers_of,
    token_places,
)
from grpo_roc_jax.model.rotary import Rope, rope_names, rotary_tables
from grpo_roc_jax.model.transformer import Params, block, embed, layers_with
from grpo_roc_jax.shapes import Array, Int

Leaves = tuple[tuple[Array, ...], ...]
"""The cache of one layer, see `BlockPool.layers`; where a layer shares keys, of the layer whose keys it reads."""


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """A part of a program, compiled."""

    executable: jax.stages.Compiled
    result: Any
    """Shapes of what it returns."""
    seconds: float
    """Seconds that tracing, lowering and compiling took."""


class LayerPrograms:
    """Runs the parts of programs by name; parts of one name have arguments of one shape. With `preparing` they are
    compiled instead, and return shapes."""

    def __init__(self, compiled: dict[tuple, LayerProgram], *, preparing: bool):
        self._compiled, self._preparing = compiled, preparing
        self.used: dict[tuple, LayerProgram] = {}
        """The programs that were prepared or called through this object."""

    def __call__(self, name: tuple, function: Callable, *arguments: Any, donate: tuple[int, ...] = ()) -> Any:
        if not self._preparing:
            return self._compiled[name].executable(*arguments)
        if name not in self._compiled:
            start = time.perf_counter()
            lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
            executable = lowered.compile()
            self._compiled[name] = LayerProgram(executable, lowered.out_info, time.perf_counter() - start)
        self.used[name] = self._compiled[name]
        return self._compiled[name].result

    def holds(self, flag: Array) -> bool:
        """A boolean on the device, as the host's; true while parts are prepared."""
        return self._preparing or bool(jax.device_get(flag))


def layer_kinds(config: ModelConfig) -> tuple[int, ...]:
    """For each layer, the index of the first layer that computes the same."""
    windows = config.layer_windows or (0,) * config.layers
    sparse = [i in layers_with("router", config) for i in range(config.layers)]
    shares = [source < i for i, source in enumerate(config.key_layers)]
    kinds = list(zip(windows, rope_names(config), config.attends, sparse, shares, strict=True))
    return tuple(map(kinds.index, kinds))


def split_ends(params: Params) -> Params:
    """The parameters without the layers."""
    return {name: leaf for name, leaf in params.items() if name != "layers"}


def start_layers(
    ends: Params, ids: Int[Array, "B T"], positions: Int[Array, "B T"], config: ModelConfig
) -> tuple[Array, dict[str, Rope], Params, tuple[Params, ...]]:
    """(residual stream before the first layer, rotary angles by name, what every layer gets in addition, what each
    layer gets)."""
    ids, beside = split_adapters(ends, ids)
    x = embed(ends, ids, config)
    return x, rotary_tables(positions, config), beside, given_to_layers(ends, ids, x, config)


def run_layer(
    layer: Params,
    leaves: Leaves,
    x: Array,
    rope: Rope,
    at: Tokens | Spans | Tiles,
    *,
    index: int,
    form: BlockPool,
    model: SamplerModel,
) -> tuple[Array, Leaves, list[Array]]:
    """(residual stream, cache, recorded experts) after layer `index`; `form` is the pool without layers. The cache of a
    layer that shares keys is that of another layer, which it leaves as it is."""
    config, chosen = model.config, []
    experts = recorded(model.experts, chosen) if config.experts.replay else model.experts
    writer = PoolWriter(form.replace(layers=(leaves,)), config, model.mesh, first=config.key_layers[index])
    x = block(layer, x, rope, writer.attend(index, at), config, experts)
    return x, writer.pool().layers[0], chosen


def _written(*arguments: Any, **settings: Any) -> Leaves:
    """The cache after a layer whose output nobody reads: only keys and values are computed."""
    return run_layer(*arguments, **settings)[1]


def append_by_layer(
    parts: LayerPrograms,
    params: Params,
    pool: BlockPool,
    *arrays: Array,
    name: tuple,
    arrange: Callable[..., tuple[Array, Array, Spans | Tiles]],
    model: SamplerModel,
) -> BlockPool:
    """`decode.append` or `append_packed`, of the arguments that `arrange` (`spans_of`, `tiles_of`) takes. Layers that
    share keys add nothing to the cache, so they are left out."""
    config, form, layers = model.config, pool.replace(layers=()), list(pool.layers)
    kinds, ropes = layer_kinds(config), rope_names(config)

    def start(ends: Params, *arrays: Array) -> tuple[Any, ...]:
        ids, positions, at = arrange(form, *arrays)
        return *start_layers(ends, ids, positions, config), at

    name = (*name, pool.blocks)
    x, tables, beside, given, at = parts((*name, "start"), start, split_ends(params), *arrays)
    writing = config.layers - config.windows.shared_layers
    for i, layer in enumerate(params["layers"][:writing]):
        fixed, last = {"index": kinds[i], "form": form, "model": model}, i + 1 == writing
        function = partial(_written if last else run_layer, **fixed)
        result = parts(
            (*name, "last" if last else "layer", kinds[i]),
            function,
            layer | beside | given[i],
            layers[i],
            x,
            tables[ropes[i]],
            at,
            donate=(1,),
        )
        if last:
            layers[i] = result
        else:
            x, layers[i], _ = result
    return pool.replace(layers=tuple(layers))


def copy_by_layer(
    parts: LayerPrograms, pool: BlockPool, blocks: Int[Array, "2 n"], rows: Int[Array, "2 n"], *, config: ModelConfig
) -> BlockPool:
    """`pool.copy_blocks`."""
    form = pool.replace(layers=())

    def copy(leaves: Leaves, blocks: Array, rows: Array, *, index: int) -> Leaves:
        return copy_blocks(form.replace(layers=(leaves,)), blocks, rows, index).layers[0]

    forms = [(attends, i in config.full_layers) for i, attends in enumerate(config.attends)]
    firsts = [forms.index(form) for form in forms]
    layers = (
        parts(("copy", pool.blocks, first), partial(copy, index=first), leaves, blocks, rows, donate=(0,))
        if leaves
        else leaves
        for first, leaves in zip(firsts, pool.layers, strict=True)
    )
    return pool.replace(layers=tuple(layers))


def decode_by_layer(
    parts: LayerPrograms,
    params: Params,
    pool: BlockPool,
    slots: Slots,
    patch: Int[Array, "10 B"],
    table: Int[Array, "B W"],
    *steering: Array,
    model: SamplerModel,
    settings: ChunkSettings,
) -> tuple[BlockPool, Slots, ChunkReport]:
    """`decode.decode_chunk`, with `steering` `decode_steered`. The host waits for each step, to learn whether a row is
    left."""
    config, form, layers, ends = model.config, pool.replace(layers=()), list(pool.layers), split_ends(params)
    kinds, ropes = layer_kinds(config), rope_names(config)
    B = slots.token.shape[0]
    rows = settings.rows if 0 < settings.rows < B else B
    steered = Steering(*steering) if steering else None
    kind = ("steered", steered.tokens.shape[1], steered.places.shape[1]) if steered is not None else ("decode",)
    name, of_pool = (*kind, rows), (*kind, rows, pool.blocks)

    def start(slots: Slots, table: Array, steered: Steering | None) -> tuple[Any, ...]:
        at, part, few = narrow(slots, table, rows) if rows < B else (None, slots, table)
        steered = steered if at is None else narrow_steering(steered, at)
        report = empty_report(rows, config, settings, steered)
        readers = readers_of(form, few, part.active)
        more = unfinished(part, report, settings, steered)
        return at, jax.tree.map(jnp.copy, part), few, readers, report, more, steered

    def token(ends: Params, slots: Slots, table: Array, readers: Any, at: Array | None) -> tuple[Any, ...]:
        places = token_places(form, slots.position, slots.active, table, readers)._replace(rows=at)
        return *start_layers(ends, slots.token[:, None], slots.position[:, None], config), places

    def draw(
        ends: Params, x: Array, slots: Slots, report: ChunkReport, chosen: list[Array], steered: Steering | None
    ) -> tuple[Any, ...]:
        slots, report = draw_tokens(ends, x, slots, report, chosen, model, settings, steered)
        return slots, report, unfinished(slots, report, settings, steered)

    slots = parts(("patch",), apply_patch, slots, patch, donate=(0,))
    at, part, few, readers, report, more, steered = parts((*of_pool, "start"), start, slots, table, steered)
    for _ in range(settings.chunk):
        if not parts.holds(more):
            break
        x, tables, beside, given, places = parts((*of_pool, "token"), token, ends, part, few, readers, at)
        recorded_experts = []
        for i, layer in enumerate(params["layers"]):
            function = partial(run_layer, index=kinds[i], form=form, model=model)
            source = config.key_layers[i]
            arguments = layer | beside | given[i], layers[source], x, tables[ropes[i]], places
            x, layers[source], chosen = parts((*of_pool, "layer", kinds[i]), function, *arguments, donate=(1,))
            recorded_experts += chosen
        part, report, more = parts(
            (*name, "draw"), draw, ends, x, part, report, recorded_experts, steered, donate=(2, 3)
        )
    pool = pool.replace(layers=tuple(layers))
    if at is None:
        return pool, part, report
    return pool, *parts((*name, "end"), widen, slots, part, report, at, donate=(0,))
