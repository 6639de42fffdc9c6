"""Weight sync: training parameters to sampling parameters, once a step, with a check that they agree.

The check compares the log-probabilities of a fixed sequence of probe tokens, computed by the training forward pass from
the masters and by the engine's layers from the published parameters.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.engine.by_layer import Leaves, layer_kinds, run_layer, split_ends, start_layers
from grpo_roc_jax.engine.decode import SamplerModel
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.experts import mix_experts
from grpo_roc_jax.model.low_precision import is_quantized, plain_layer, quantized_layer, split_all
from grpo_roc_jax.model.outputs_first import turned, turned_layer
from grpo_roc_jax.model.pool import IN_PLACE, PoolSize, Spans, allocate
from grpo_roc_jax.model.rotary import Rope, rope_names
from grpo_roc_jax.model.sharding import head_copies, place_host, place_shapes, process_mesh
from grpo_roc_jax.model.transformer import (
    Execution,
    Params,
    cast_params,
    compute_dtype,
    final_hidden,
    forward,
    layer_shapes,
    layers_with,
    param_axes,
    take_rows,
    unembed,
)
from grpo_roc_jax.process.progress import phase
from grpo_roc_jax.shapes import Array

PROBE_TOKENS = 32
"""Length of the probe: long enough that attention matters in every layer, and short enough to be cheap."""


class StaleWeightsError(RuntimeError):
    """The published parameters differ from the trained ones; sampling with them would be off-policy."""


class NonFiniteWeightsError(ArithmeticError):
    """The trained parameters give log-probabilities that are not finite."""


@dataclass(frozen=True, eq=False)
class SamplerParams:
    """The parameters that the engine samples with: one dict per layer, compute dtype, on the devices that this process
    samples with."""

    params: Params
    version: int
    """Training step of the parameters; recorded with every sampled token."""
    check_gap: float
    """Largest difference between the probe's log-probabilities of sampler and trainer, in nats."""


def sampler_config(config: ModelConfig, mesh: Mesh | AbstractMesh | None) -> ModelConfig:
    """The model as it is sampled from: with repeated heads where `sharding.head_copies` says so, so that the cache is
    split over all devices of a row."""
    copies = head_copies(config, mesh.shape.get("tensor", 1)) if mesh is not None else 1
    if config.windows.full_kv_heads:
        windows = replace(config.windows, full_kv_heads=copies * config.windows.full_kv_heads)
        config = replace(config, windows=windows)
    return replace(config, kv_heads=copies * config.kv_heads)


def repeat_heads(layer: dict[str, Array], config: ModelConfig, copies: int) -> dict[str, Array]:
    """A layer with each of its key-value heads repeated."""
    axes = {name: axes.index("kv_heads") for name, (_, axes) in layer_shapes(config).items() if "kv_heads" in axes}
    return {name: jnp.repeat(leaf, copies, axes[name]) if name in axes else leaf for name, leaf in layer.items()}


@dataclass(frozen=True)
class Published:
    """How the sampler's parameters differ from the trainer's."""

    weights: str = "full"
    """Dtype of the layers' matrices: the compute dtype, or int8."""
    copies: int = 1
    """How often each key-value head is repeated."""
    outputs_first: bool = False
    """Whether matrices in the compute dtype are `model.outputs_first.OutputsFirst`."""


PLAIN = Published()


def copied(params: Params, config: ModelConfig) -> Params:
    """Copies in the compute dtype. Uncopied, an unchanged leaf would be the caller's array, which is deleted when the
    update donates it."""
    return jax.tree.map(partial(jnp.array, copy=True), cast_params(params, compute_dtype(config)))


def sampled_layer(
    leaves: dict[str, Array], index: Array | None, config: ModelConfig, form: Published
) -> dict[str, Array]:
    """One layer as it is sampled from, copied: of leaves stacked over the layers that have them, where `index` holds
    each leaf's place, else of the leaves as they are."""
    layer = leaves if index is None else {name: leaves[name][index[i]] for i, name in enumerate(sorted(leaves))}
    layer = copied(layer, config)
    layer = repeat_heads(layer, config, form.copies) if form.copies > 1 else layer
    if form.weights == "int8":
        return quantized_layer(layer, 8)
    return turned_layer(layer) if form.outputs_first else layer


def sampled_ends(ends: Params, config: ModelConfig, form: Published) -> Params:
    """The parameters outside of the layers as they are sampled from, copied."""
    ends = copied(ends, config)
    return ends | {"unembed": turned(ends["unembed"], 1)} if form.outputs_first and "unembed" in ends else ends


def layer_arguments(layers: Params, config: ModelConfig) -> Iterator[tuple[dict[str, Array], np.ndarray | None]]:
    """The first two arguments of `sampled_layer`, for each layer."""
    if isinstance(layers, tuple):
        yield from ((layer, None) for layer in layers)
        return
    places = {name: layers_with(name, config) for name in layers}
    for i in range(config.layers):
        weights = {name: leaf for name, leaf in layers.items() if i in places[name]}
        yield weights, np.array([places[name].index(i) for name in sorted(weights)], np.int32)


def unstack(params: Params, config: ModelConfig, form: Published = PLAIN) -> Params:
    """Copies in the sampler's dtypes, with layers as a tuple; slicing stacked weights in every step would copy them
    all."""
    layers = (sampled_layer(*of, config, form) for of in layer_arguments(params["layers"], config))
    return sampled_ends(split_ends(params), config, form) | {"layers": tuple(layers)}


def sampler_shardings(
    config: ModelConfig, mesh: Mesh | AbstractMesh, params: Params | None = None, weights: str = "full"
) -> Params:
    """Heads, hidden width or experts, and vocabulary are split over `tensor` if it divides them; replicated otherwise.

    Args:
        config: The configuration of the model.
        mesh: The mesh of the sampler.
        params: What is sampled from, or its shapes, where it has low-rank pairs or quantized matrices. Pairs are small
            and replicated.
        weights: See `Published`.
    """
    tensor = mesh.shape.get("tensor", 1)
    kv_heads = math.gcd(config.kv_heads, config.windows.full_kv_heads)
    width = math.gcd(config.d_ff, config.windows.shared_ff)
    sizes = {"heads": config.heads, "kv_heads": kv_heads, "vocab": config.vocab_size}
    sizes |= {"experts": config.experts.count} if config.experts.count else {"mlp": width}
    sizes |= {"delta_heads": config.windows.key_heads} if config.delta else {}

    def place(axes: tuple[str | None, ...]) -> NamedSharding:
        split = [name in sizes and tensor > 1 and sizes[name] % tensor == 0 for name in axes]
        return NamedSharding(mesh, P(*("tensor" if yes else None for yes in split)))

    axes = param_axes(config)
    layer = {name: place(logical[1:]) for name, logical in axes["layers"].items()}
    ends = {name: place(logical) for name, logical in axes.items() if name != "layers"}
    if params is None:
        shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _) in layer_shapes(config).items()}
        shapes = jax.eval_shape(partial(quantized_layer, bits=8), shapes) if weights == "int8" else shapes
        layers = [
            {name: leaf for name, leaf in shapes.items() if i in layers_with(name, config)}
            for i in range(config.layers)
        ]
    else:
        layers = params["layers"]
    everywhere = NamedSharding(mesh, P())
    if params is not None:
        ends = split_all({name: ends[name] for name in ends if name in params}, split_ends(params))
    return ends | {
        "layers": tuple(split_all({name: layer.get(name, everywhere) for name in leaves}, leaves) for leaves in layers)
    }


def shares_weights(params: Params, weights: str) -> bool:
    """Whether the sampler takes these arrays, cast to its dtype: frozen weights with their adapter, whose layers are a
    tuple (`model.lora.attach`)."""
    return isinstance(params["layers"], tuple) and weights == "full"


def published_like(
    params: Params, config: ModelConfig, mesh: Mesh | AbstractMesh | None, weights: str, *, outputs_first: bool = False
) -> Params:
    """Shapes, dtypes and shardings of what `Publisher.convert` makes of parameters of such shapes.

    Args:
        params: Shapes of the trainer's parameters.
        config: The configuration of the model that is trained.
        mesh: The mesh that is sampled on; None: one device.
        weights: See `Published`.
        outputs_first: See `Published`.
    """
    sampled = sampler_config(config, mesh)
    form = Published(weights, sampled.kv_heads // config.kv_heads, outputs_first)
    change = partial(unstack, config=config, form=form)
    if shares_weights(params, weights):
        change = partial(cast_params, dtype=compute_dtype(config))
    shapes = jax.eval_shape(change, params)
    return shapes if mesh is None else place_shapes(shapes, sampler_shardings(sampled, mesh, shapes))


def localize(leaf: Array, mesh: Mesh) -> Array:
    """The array on `mesh`, the devices that this process samples with, which hold all of it between them."""
    if leaf.is_fully_addressable:
        return leaf
    sharding = NamedSharding(mesh, leaf.sharding.spec)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [s.data for s in leaf.addressable_shards])


def probe_tokens(config: ModelConfig) -> np.ndarray:
    """Fixed ids from all over the vocabulary, int32[1,T]."""
    return (np.arange(PROBE_TOKENS, dtype=np.int64) * 7919 % config.vocab_size).astype(np.int32)[None]


def training_probe(params: Params, tokens: Array, config: ModelConfig, weights: str = "full") -> Array:
    """Log-probabilities of the probe by the training forward pass, in float32 from the rounded weights."""
    exact = replace(config, compute_dtype="float32")
    dtype = compute_dtype(config)
    rounded = cast_params(params, dtype)
    if weights == "int8":
        layers = unstack(params, config, Published(weights))["layers"]
        rounded |= {"layers": tuple(plain_layer(layer, jnp.float32) for layer in layers)}
    # The embedding of the layers is large; of it the rows of the probe are rounded.
    tables = {name: params[name] for name in ("layer_embed",) if name in params}
    params = cast_params(rounded, jnp.float32) | tables
    execution = Execution(look_up_wide=lambda table, ids: take_rows(table, ids).astype(dtype))
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = forward(params, tokens, positions, jnp.ones_like(tokens), exact, execution)
    return _next_logprobs(params, hidden, tokens, config)


def sampling_probe(params: Params, tokens: Array, config: ModelConfig, mesh: Mesh | None = None) -> Array:
    """Log-probabilities of the probe by the engine's layers and cache."""
    return _sampled_logprobs(params, tokens, config, mesh, lambda name, function, *arguments: function(*arguments))


class ProbeByLayer:
    """`sampling_probe` with one program for all layers of a kind, see `by_layer`."""

    def __init__(self, config: ModelConfig, mesh: Mesh | None):
        self._config, self._mesh = config, mesh
        self._compiled: dict[Any, Callable] = {}

    def __call__(self, params: Params, tokens: Array) -> Array:
        return _sampled_logprobs(params, tokens, self._config, self._mesh, self._call)

    def _call(self, name: Any, function: Callable, *arguments: Any) -> Any:
        if name not in self._compiled:
            self._compiled[name] = jax.jit(function)
        return self._compiled[name](*arguments)


def _sampled_logprobs(
    params: Params, tokens: Array, config: ModelConfig, mesh: Mesh | None, call: Callable[..., Any]
) -> Array:
    """`call(name, function, *arguments)` computes a part; those of one name are equal."""
    config = replace(config, compute_dtype="float32")
    model = SamplerModel(config, partial(mix_experts, mesh=mesh, rows=()))
    T = tokens.shape[1]
    pool = jax.eval_shape(partial(allocate, config, PoolSize(1, T, 1), jnp.float32, IN_PLACE))

    def exact(params: Params) -> Params:
        return jax.tree.map(
            lambda leaf: leaf if is_quantized(leaf) else leaf.astype(jnp.float32), params, is_leaf=is_quantized
        )

    def start(ends: Params, tokens: Array) -> tuple[Array, dict[str, Rope], tuple[Params, ...], Spans]:
        zero = jnp.zeros(1, jnp.int32)
        places = Spans(zero[None], zero, zero, zero + T)
        tables = {name: ends[name] for name in ("layer_embed",) if name in ends}  # cast after the lookup
        x, ropes, _, given = start_layers(exact(ends) | tables, tokens, jnp.arange(T)[None], config)
        return x, ropes, given, places

    def visit(index: int, layer: Params, x: Array, rope: Rope, places: Spans, *shared: Leaves) -> tuple[Array, Leaves]:
        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), pool.layers[index])
        (leaves,) = shared or (empty,)
        form = pool.replace(layers=())
        return run_layer(exact(layer), leaves, x, rope, places, index=index, form=form, model=model)[:2]

    def end(ends: Params, x: Array, tokens: Array) -> Array:
        ends = exact(ends)
        return _next_logprobs(ends, final_hidden(ends, x, config), tokens, config)

    ends, names = split_ends(params), rope_names(config)
    x, ropes, given, places = call("start", start, ends, tokens)
    sources, caches = config.key_layers, {}
    for i, (layer, kind) in enumerate(zip(params["layers"], layer_kinds(config), strict=True)):
        shared = (caches[sources[i]],) if sources[i] < i else ()
        x, leaves = call(kind, partial(visit, kind), layer | given[i], x, ropes[names[i]], places, *shared)
        caches |= {i: leaves} if i in sources[i + 1 :] else {}
    return call("end", end, ends, x, tokens)


def _next_logprobs(params: Params, hidden: Array, tokens: Array, config: ModelConfig) -> Array:
    logprobs = jax.nn.log_softmax(unembed(params, hidden, config)[:, :-1], axis=-1)
    return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]


def check_weights(weights: str, config: ModelConfig) -> None:
    """Checks that the sampler's weights can have this dtype, see `Published`.

    Raises:
        ValueError: int8 with experts.
    """
    if weights == "int8" and config.experts.count:
        raise ValueError(
            "rollout.low_precision.weights = int8 with experts, whose grouped products have no scales; set it to full"
        )


class Publisher:
    """`publish(params, version) -> SamplerParams`, compiled once and called once a step.

    The mesh is the trainer's. A program casts, unstacks and moves a layer, and runs for each of them: a program for all
    would have room for every layer twice, and takes half a minute to compile for 14 billion parameters. The devices
    that a process samples with (`sharding.process_mesh`) get a whole copy.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh | None,
        tolerance: float,
        weights: str = "full",
        *,
        by_layer: bool = False,
        outputs_first: bool = False,
    ):
        """`weights` and `outputs_first`: see `Published`; `by_layer`: layers share programs.

        Raises:
            ValueError: int8 with experts.
        """
        check_weights(weights, config)
        self._config, self._mesh, self._tolerance, self._weights = config, mesh, tolerance, weights
        self._sampled = sampler_config(config, mesh)
        self._form = Published(weights, self._sampled.kv_heads // config.kv_heads, outputs_first)
        self._local = process_mesh(mesh, jax.process_index()) if mesh is not None and mesh.is_multi_process else mesh
        move = partial(sampled_layer, config=config, form=self._form)
        move_ends = partial(sampled_ends, config=config, form=self._form)
        if mesh is None:
            self._move_ends = jax.jit(move_ends)
            self._moves = [jax.jit(move)] * config.layers
        else:
            places = sampler_shardings(self._sampled, mesh, weights=weights)
            self._move_ends = jax.jit(move_ends, out_shardings=split_ends(places))
            kinds = {frozenset(layer): layer for layer in places["layers"]}
            moves = {kind: jax.jit(move, out_shardings=shardings) for kind, shardings in kinds.items()}
            self._moves = [moves[frozenset(layer)] for layer in places["layers"]]
        everywhere, here = (NamedSharding(m, P()) if m and m.is_multi_process else None for m in (mesh, self._local))
        self._training = jax.jit(partial(training_probe, config=config, weights=weights), out_shardings=everywhere)
        self._sampling = jax.jit(partial(sampling_probe, config=self._sampled, mesh=self._local), out_shardings=here)
        self._probe = ProbeByLayer(self._sampled, self._local) if by_layer else self._sampling

    def publish(self, params: Params, version: int) -> SamplerParams:
        """Casts, unstacks and moves the parameters, then compares the log-probabilities of the probe.

        Raises:
            NonFiniteWeightsError: the trainer's are not finite.
            StaleWeightsError: they differ by more than `rollout.weight_check_tolerance`.
        """
        with phase("handing the weights to the sampler", routine=version > 0):
            published, trainer, sampler = self._probed(params)
        if not np.isfinite(trainer).all():
            raise NonFiniteWeightsError(
                f"the parameters after step {version} hold NaN or infinity, or overflow: the trainer's own "
                "log-probabilities of the probe are not finite"
            )
        difference = float(np.max(np.abs(trainer - sampler)))
        if not difference <= self._tolerance:
            raise StaleWeightsError(
                f"version {version}: the sampler's log-probabilities of the probe differ from the trainer's by "
                f"{difference:.3g} nats; must be at most rollout.weight_check_tolerance = {self._tolerance:.3g}. The "
                "published parameters are stale, mixed up or wrongly cast"
            )
        return SamplerParams(published, version, difference)

    def _probed(self, params: Params) -> tuple[Params, np.ndarray, np.ndarray]:
        """(published parameters, log-probabilities of the probe by the trainer's and by the sampler's programs)."""
        published, tokens = self.convert(params), probe_tokens(self._config)
        with jax.default_matmul_precision("highest"):
            trainer = self._read(self._training, params, tokens)
            return published, trainer, self._read(self._probe, published, tokens)

    def convert(self, params: Params) -> Params:
        """The parameters in the sampler's layout, dtype and sharding; copies, unless the layers are a tuple already.

        A tuple of layers is frozen weights with their adapter (`model.lora.attach`). Nothing donates those weights, and
        a copy would take the most memory of all.
        """
        frozen = shares_weights(params, self._weights)
        published = cast_params(params, compute_dtype(self._config)) if frozen else self._move(params)
        if self._mesh is None:
            return jax.device_put(published, jax.devices()[0])
        if frozen:
            published = jax.device_put(published, sampler_shardings(self._sampled, self._mesh, published))
        return jax.tree.map(lambda leaf: localize(leaf, self._local), published)

    def _move(self, params: Params) -> Params:
        """All parameters, cast, unstacked and moved."""
        beside = _everywhere(params)
        # Without a mesh the places stay uncommitted, as such parameters may be.
        put = partial(place_host, sharding=beside) if isinstance(beside, NamedSharding) else jax.device_put
        layers = zip(self._moves, layer_arguments(params["layers"], self._config), strict=True)
        moved = (move(leaves, jax.tree.map(put, at)) for move, (leaves, at) in layers)
        return self._move_ends(split_ends(params)) | {"layers": tuple(moved)}

    def published_like(self, params: Params) -> Params:
        """Shapes and shardings of the result of `convert`, on the devices of this process."""
        first = self._form.outputs_first
        return published_like(params, self._config, self._local, self._weights, outputs_first=first)

    def lower(self, params: Params) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """(name, program) of the weight sync and of both sides of the weight check, from shapes. `weight_sync/N` runs N
        times in a sync.

        Frozen weights with an adapter are moved leaf by leaf, without a program.
        """
        published = self.published_like(params)
        tokens = probe_tokens(self._config)
        if not shares_weights(params, self._weights):
            yield "weight_sync/1", self._move_ends.lower(split_ends(params))
            arguments = [*layer_arguments(params["layers"], self._config)]
            for move in dict.fromkeys(self._moves):
                alike = [of for of, other in zip(arguments, self._moves, strict=True) if other is move]
                leaves, at = alike[0]
                yield f"weight_sync/{len(alike)}", move.lower(leaves, jax.tree.map(partial(self._like, leaves), at))
        with jax.default_matmul_precision("highest"):
            yield "weight_check_trainer", self._training.lower(params, self._like(params, tokens))
            yield "weight_check_sampler", self._sampling.lower(published, self._like(published, tokens))

    @staticmethod
    def _like(params: Params, array: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=_everywhere(params))

    def _read(self, probe: Callable[[Params, Array], Array], params: Params, tokens: np.ndarray) -> np.ndarray:
        probed = probe(params, place_host(tokens, _everywhere(params)))
        return np.asarray(jax.device_get(probed if probed.is_fully_addressable else probed.addressable_data(0)))


def _everywhere(params: Params) -> Any:
    """Replicated over the devices of the parameters, so that one program of the probe serves every layout."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)  # those of NumPy have none
    if sharding is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    return NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else sharding
