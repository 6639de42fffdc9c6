"""Training parameters to sampling parameters, once a step, and the canary that proves they are the current ones."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.experts import mix_experts
from grpo_roc_jax.model.kv_cache import CacheWriter, allocate
from grpo_roc_jax.model.transformer import (
    Params,
    cast_params,
    compute_dtype,
    final_hidden,
    forward,
    param_axes,
    unembed,
)
from grpo_roc_jax.rollout.decode import run_layers
from grpo_roc_jax.shapes import Array
from grpo_roc_jax.sharding import place_host, process_mesh

PROBE_TOKENS = 32
"""Length of the probe: enough for every layer's attention to matter, little enough to cost nothing."""


class StaleWeightsError(RuntimeError):
    """The published parameters are not the ones given: sampling with them would be silently off-policy."""


@dataclass(frozen=True, eq=False)
class SamplerParams:
    """What the engine samples with: one dict per layer, in the compute dtype, on the devices of this process."""

    params: Params
    version: int
    """Training step of the parameters; written on every token drawn."""
    canary: float
    """Largest difference of the probe's log-probabilities to the training forward, nats."""


def unstack(params: Params, config: ModelConfig) -> Params:
    """Copies in the compute dtype, layers as a tuple: slicing stacked weights in every step would copy them all."""
    params = cast_params(params, compute_dtype(config))
    # Without the copy an unchanged leaf would be the caller's own array, deleted when the update donates it.
    copy = partial(jnp.array, copy=True)
    layers = tuple({name: copy(leaf[i]) for name, leaf in params["layers"].items()} for i in range(config.layers))
    return {name: copy(leaf) for name, leaf in params.items() if name != "layers"} | {"layers": layers}


def sampler_shardings(config: ModelConfig, mesh: Mesh, pairs: Iterable[str] = ()) -> Params:
    """Heads, hidden width or experts, and vocabulary over `tensor` where they divide; copies along the other axes.

    Args:
        config: Of the model.
        mesh: Of the sampler.
        pairs: Names of low-rank leaves beside those of the model; they are small and lie everywhere.
    """
    tensor = mesh.shape.get("tensor", 1)
    sizes = {"heads": config.heads, "kv_heads": config.kv_heads, "vocab": config.vocab_size}
    sizes |= {"experts": config.experts} if config.experts else {"mlp": config.d_ff}

    def place(axes: tuple[str | None, ...]) -> NamedSharding:
        split = [name in sizes and tensor > 1 and sizes[name] % tensor == 0 for name in axes]
        return NamedSharding(mesh, P(*("tensor" if yes else None for yes in split)))

    axes = param_axes(config)
    layer = {name: place(logical[1:]) for name, logical in axes["layers"].items()}
    layer |= {name: NamedSharding(mesh, P()) for name in pairs}
    return {name: place(logical) for name, logical in axes.items() if name != "layers"} | {
        "layers": tuple(dict(layer) for _ in range(config.layers))
    }


def localise(leaf: Array, mesh: Mesh) -> Array:
    """The part of the array on the devices of this process, which are `mesh` and hold all of it between them."""
    if leaf.is_fully_addressable:
        return leaf
    place = NamedSharding(mesh, leaf.sharding.spec)
    return jax.make_array_from_single_device_arrays(leaf.shape, place, [s.data for s in leaf.addressable_shards])


def probe_tokens(config: ModelConfig) -> np.ndarray:
    """Fixed ids spread over the vocabulary, int32[1,T]."""
    return (np.arange(PROBE_TOKENS, dtype=np.int64) * 7919 % config.vocab_size).astype(np.int32)[None]


def training_probe(params: Params, tokens: Array, config: ModelConfig) -> Array:
    """Log-probabilities of the probe by the training forward, computed in float32 from the rounded weights."""
    exact = replace(config, compute_dtype="float32")
    params = cast_params(cast_params(params, compute_dtype(config)), jnp.float32)
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = forward(params, tokens, positions, jnp.ones_like(tokens), exact)
    return _next_logprobs(params, hidden, tokens)


def sampling_probe(params: Params, tokens: Array, config: ModelConfig, mesh: Mesh | None = None) -> Array:
    """The same by the engine's layers and cache."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
    T = tokens.shape[1]
    zero, length = jnp.zeros(1, jnp.int32), jnp.full(1, T, jnp.int32)
    writer = CacheWriter(allocate(config, 1, T, jnp.float32, ("khs", "ksh")), config.layer_windows)
    attends = [writer.attend_span(i, zero, zero, length, fresh=False, scatter=False) for i in range(config.layers)]
    x = run_layers(params, tokens, jnp.arange(T)[None], attends, config, partial(mix_experts, mesh=mesh, rows=()))
    return _next_logprobs(params, final_hidden(params, x, config), tokens)


def _next_logprobs(params: Params, hidden: Array, tokens: Array) -> Array:
    logprobs = jax.nn.log_softmax(unembed(params, hidden)[:, :-1], axis=-1)
    return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]


class Publisher:
    """Compiled once, called once a step: `publish(params, version) -> SamplerParams`.

    The mesh is the trainer's. Every process gets a whole copy of the parameters on its own devices, by one program that
    casts, unstacks and moves them; `tensor` never reaches beyond a process (`sharding.make_mesh`).
    """

    def __init__(self, config: ModelConfig, mesh: Mesh | None, tolerance: float):
        self._config, self._mesh, self._tolerance = config, mesh, tolerance
        self._local = process_mesh(mesh, jax.process_index()) if mesh is not None and mesh.is_multi_process else mesh
        places = None if mesh is None else sampler_shardings(config, mesh)
        self._unstack = jax.jit(partial(unstack, config=config), out_shardings=places)
        everywhere = NamedSharding(mesh, P()) if mesh is not None and mesh.is_multi_process else None
        self._training = jax.jit(partial(training_probe, config=config), out_shardings=everywhere)
        self._sampling = jax.jit(partial(sampling_probe, config=config, mesh=self._local))

    def publish(self, params: Params, version: int) -> SamplerParams:
        """Casts, unstacks and moves the parameters, then compares the probe's log-probabilities.

        Raises:
            StaleWeightsError: they differ by more than `rollout.canary_tolerance`.
        """
        published = self.convert(params)
        tokens = probe_tokens(self._config)
        with jax.default_matmul_precision("highest"):
            wanted = self._read(self._training, params, tokens)
            got = self._read(self._sampling, published, tokens)
        difference = float(np.max(np.abs(wanted - got)))
        if not difference <= self._tolerance:
            raise StaleWeightsError(
                f"version {version}: the sampler's probe log-probabilities differ from the training forward by "
                f"{difference:.3g} nats, at most {self._tolerance:.3g} is wanted (rollout.canary_tolerance); the "
                "published parameters are stale, mixed up or wrongly cast"
            )
        return SamplerParams(published, version, difference)

    def convert(self, params: Params) -> Params:
        """The parameters in the sampler's layout, dtype and place; copies, except where layers come one by one.

        Those are frozen weights with their adapter (`model.lora.attach`): nothing donates the weights, and a copy of
        them would be the largest array there is.
        """
        frozen = isinstance(params["layers"], tuple)
        published = cast_params(params, compute_dtype(self._config)) if frozen else self._unstack(params)
        if self._mesh is None:
            return jax.device_put(published, jax.devices()[0])
        if frozen:
            pairs = [name for name in published["layers"][0] if "_lora_" in name]
            published = jax.device_put(published, sampler_shardings(self._config, self._mesh, pairs))
        return jax.tree.map(lambda leaf: localise(leaf, self._local), published)

    def published_like(self, params: Params) -> Params:
        """Shapes and places of what `convert` makes of parameters, on the devices of this process."""
        frozen = isinstance(params["layers"], tuple)
        change = partial(cast_params, dtype=compute_dtype(self._config)) if frozen else self._unstack
        shapes = jax.eval_shape(change, params)
        if self._local is None:
            return shapes
        pairs = [name for name in shapes["layers"][0] if "_lora_" in name]
        like = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)  # noqa: E731
        return jax.tree.map(like, shapes, sampler_shardings(self._config, self._local, pairs))

    def lower(self, params: Params) -> Iterator[tuple[str, jax.stages.Lowered]]:
        """(name, program) of the hand-over and of both sides of the canary, from shapes.

        Frozen weights with an adapter are moved leaf by leaf, by no program.
        """
        published = self.published_like(params)
        tokens = probe_tokens(self._config)
        if not isinstance(params["layers"], tuple):
            yield "hand_over", self._unstack.lower(params)
        with jax.default_matmul_precision("highest"):
            yield "canary_trainer", self._training.lower(params, self._tokens_like(params, tokens))
            yield "canary_sampler", self._sampling.lower(published, self._tokens_like(published, tokens))

    @staticmethod
    def _tokens_like(params: Params, tokens: np.ndarray) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=_everywhere(params))

    def _read(self, probe, params: Params, tokens: np.ndarray) -> np.ndarray:
        probed = probe(params, place_host(tokens, _everywhere(params)))
        return np.asarray(jax.device_get(probed if probed.is_fully_addressable else probed.addressable_data(0)))


def _everywhere(params: Params) -> Any:
    """Where the parameters are, replicated, so that one program of the probe serves every layout."""
    sharding = jax.tree.leaves(params)[0].sharding
    return NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else sharding
