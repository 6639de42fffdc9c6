"""Where the weights of a run come from: random initialization, a published checkpoint, or one of these with an adapter.

Under `lora: low_rank` only the adapter is trained, saved and restored. The weights that it adapts are loaded once,
layer by layer in the compute dtype, and shared by trainer and sampler.
"""

import ctypes
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.publish import published_like, sampler_config, unstack
from grpo_roc_jax.learner.learner import full_params
from grpo_roc_jax.learner.loss import USUAL_CHUNK, UpdateConfig
from grpo_roc_jax.learner.offload import to_host
from grpo_roc_jax.learner.pack import BatchConfig, rows_per_micro_batch
from grpo_roc_jax.learner.update import (
    FULL,
    OptimConfig,
    TrainState,
    init_train_state,
    init_trained,
    start_train_state,
    state_like,
    trained_shardings,
)
from grpo_roc_jax.method.compose import needs_reference
from grpo_roc_jax.model.choose import describe_choice
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import find_model, load_params
from grpo_roc_jax.model.delta import kept_bytes, row_bytes
from grpo_roc_jax.model.lora import Lora
from grpo_roc_jax.model.low_precision import DTYPES, quantized_layer, split_all, stored_bytes
from grpo_roc_jax.model.parallel import choose_attention, paths
from grpo_roc_jax.model.pool import PoolSize, shard_bytes
from grpo_roc_jax.model.sharding import (
    Mesh,
    device_bytes,
    param_shardings,
    place_host,
    place_shapes,
    platform_of,
    process_count,
    replicate_key,
    row_shards,
    slot_shards,
)
from grpo_roc_jax.model.transformer import Params, cast_params, compute_dtype, init_params
from grpo_roc_jax.record.checkpoint import restore_params
from grpo_roc_jax.settings.cli import ConfigError, config_errors
from grpo_roc_jax.settings.files import local_path


@dataclass(frozen=True, eq=False)
class PolicyModel:
    """The model that is trained and sampled, on its devices."""

    model: ModelConfig
    """Model configuration, with its shape read from `model.path` and its `vocab_size` resolved."""
    mesh: Mesh
    base: Params | None = None
    """The frozen weights that the trained adapter belongs to; None when all parameters are trained."""
    lora: Lora = FULL

    def full(self, trained: Params) -> Params:
        """The parameters of the policy, from the parameters of the training state."""
        return full_params(self.base, trained, self.lora)

    def portable(self, trained: Params, *, here: bool = True) -> Params | None:
        """What another process needs of the training state's parameters to sample, as NumPy arrays: the adapter, or all
        parameters in the compute dtype, to which `Engine.publish` casts them too.

        If the mesh spans several processes, all must call this; those with `here` get the arrays, the others None.
        """
        if not self.mesh.is_multi_process:
            return jax.device_get(trained if self.lora.rank else cast_params(trained, compute_dtype(self.model)))
        as_cast = partial(cast_params, dtype=compute_dtype(self.model))
        like = trained if self.lora.rank else jax.eval_shape(as_cast, trained)
        fetch = partial(fetched, mesh=self.mesh, here=here)
        arrays = jax.tree_util.tree_map_with_path(lambda path, *leaves: fetch(path, *leaves), trained, like)
        return arrays if here else None

    def placed(self, portable: Params) -> Params:
        """The result of `portable` on the devices of this model."""
        return jax.device_put(portable, trained_shardings(self.model, self.mesh, self.lora))


@cache
def copies_everywhere(mesh: Mesh) -> Callable[..., jax.Array]:
    """A program that casts an array, or one layer of stacked ones, and copies it to all devices of the mesh."""

    def copy(leaf: jax.Array, layer: jax.Array | None, dtype: Any) -> jax.Array:
        return (leaf if layer is None else leaf[layer]).astype(dtype)

    return jax.jit(copy, static_argnames="dtype", out_shardings=NamedSharding(mesh, P()))


def fetched(path: tuple[Any, ...], leaf: jax.Array, like: Any, *, mesh: Mesh, here: bool) -> np.ndarray | None:
    """An array of several processes in the dtype of `like`, as a NumPy array of those with `here`; all must call this.
    Stacked layers are fetched one by one, since each device has room for one of them besides its share."""
    copy, dtype = copies_everywhere(mesh), like.dtype

    def take(layer: jax.Array | None) -> np.ndarray | None:
        part = jax.block_until_ready(copy(leaf, layer, dtype=dtype))  # the next one takes its memory
        return np.asarray(part.addressable_data(0)) if here else None

    if path[0].key != "layers":
        return take(None)
    array = np.empty(leaf.shape, dtype) if here else None
    for i in range(len(leaf)):
        part = take(place_host(np.int32(i), NamedSharding(mesh, P())))
        if array is not None:
            array[i] = part
    return array


@cache
def measured_attention(
    update: UpdateConfig, batch: BatchConfig, segment: int, model: ModelConfig, mesh: Mesh
) -> tuple[str, dict[str, float]]:
    """(attention path of the update, measured seconds of each candidate); see `choose_attention`. Measured once a
    process."""
    names = paths(model, batch.row_length, mesh) if update.attention == "auto" else (update.attention,)
    rows = rows_per_micro_batch(batch, row_shards(mesh))
    return choose_attention(names, model, batch.row_length, rows, segment, mesh)


def attention_of(config: Config, policy: PolicyModel) -> tuple[str, dict[str, float]]:
    """`measured_attention` for the settings of a run."""
    # Prompts and responses at half their maximum lengths, as plans assume too.
    segment = -(-config.rollout.max_row_tokens // 2)
    return measured_attention(config.update, config.batch, segment, policy.model, policy.mesh)


def update_settings(config: Config, policy: PolicyModel) -> UpdateConfig:
    """The settings of the update with a definite attention path."""
    return replace(config.update, attention=attention_of(config, policy)[0])


def describe_attention(config: Config, policy: PolicyModel) -> str:
    """The attention path of the update as text, with the measured times if there was a choice."""
    return "attention of the update: " + describe_choice(
        attention_of(config, policy), "milliseconds a layer and micro-batch, forward and backward", 1e3, 2
    )


def frozen_weights(config: Config, model: ModelConfig, mesh: Mesh) -> Params | None:
    """The frozen weights that an adapter belongs to, in the compute dtype and `lora.base_bits`, as a tuple of layers;
    None without an adapter."""
    if not config.lora.rank:
        return None
    shardings, bits = param_shardings(model, mesh), config.lora.base_bits
    if config.model.path:
        folder = find_model(config.model.path)
        return load_params(folder, model, shardings, dtype=compute_dtype(model), stacked=False, bits=bits)
    key = replicate_key(jax.random.key(config.seed), mesh)
    stacked = jax.jit(partial(init_params, config=model), out_shardings=shardings)(key)
    base = jax.jit(partial(unstack, config=model))(stacked)
    if bits == 16:
        return base
    shardings_by_layer = jax.tree.map(lambda leaf: leaf.sharding, frozen_like(model, mesh, bits)["layers"])
    layers = zip(base["layers"], shardings_by_layer, strict=True)
    quantized = partial(quantized_layer, bits=bits)
    return base | {"layers": tuple(jax.jit(quantized, out_shardings=sharding)(layer) for layer, sharding in layers)}


@config_errors()
def initial_state(config: Config, model: ModelConfig, mesh: Mesh) -> TrainState:
    """The training state at step 0, as it is stored between updates: the published parameters at `model.path`, random
    ones, or a fresh adapter.

    Raises:
        ConfigError: The published parameters cannot be read.
    """
    if config.model.path and not config.lora.rank:
        params = load_params(find_model(config.model.path), model, param_shardings(model, mesh))
        return at_rest(config, start_train_state(params, model, config.optim, mesh, donate=True))
    return at_rest(config, init_train_state(jax.random.key(config.seed), model, config.optim, mesh, config.lora))


def at_rest(config: Config, state: TrainState) -> TrainState:
    """The state as it is stored between two updates; see `optim.offload`."""
    return state.replace(opt_state=to_host(state.opt_state)) if config.optim.offload else state


def split_checkpoint(path: str) -> tuple[Path, int | None]:
    """(directory of a run, step) from a run directory, its `checkpoints` folder, or one checkpoint. The step is None,
    for the newest checkpoint, unless `path` names one.

    Raises:
        ConfigError: There is no run at `path`.
    """
    path_given = local_path(path)
    name = path_given.name.removeprefix("step_")
    is_run = (path_given / "config.yaml").is_file()  # of a name such as `runs/roc/0`
    step = int(name) if name.isdigit() and not is_run else None
    run = path_given.parent if path_given.name == "checkpoints" else path_given
    run = run if step is None else path_given.parent.parent
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} holds no config.yaml; name the directory of a run")
    return run, step


def load_trained(
    checkpoints: Path, model: ModelConfig, mesh: Mesh, lora: Lora, step: int | None = None
) -> tuple[int, Params]:
    """(training step, trained parameters) of the newest valid checkpoint, or of the given step, laid out on the mesh.

    Raises:
        ConfigError: There is no such checkpoint, or it belongs to another model.
    """
    shapes = jax.eval_shape(lambda: init_trained(jax.random.key(0), model, lora))
    restored = restore_params(checkpoints, place_shapes(shapes, trained_shardings(model, mesh, lora)), step=step)
    if restored is None:
        which = "" if step is None else f" of step {step}"
        raise ConfigError(f"{checkpoints} holds no valid checkpoint{which}; name the directory of a run that saved one")
    return restored


def frozen_like(model: ModelConfig, mesh: Mesh | AbstractMesh, bits: int = 16) -> Params:
    """Shapes and shardings of `frozen_weights`, without loading anything. A published model that keeps its own blocks
    may have other scales."""
    shapes = jax.eval_shape(lambda: unstack(init_params(jax.random.key(0), model), model))
    stacked = param_shardings(model, mesh)
    layer = {name: NamedSharding(mesh, P(*sharding.spec[1:])) for name, sharding in stacked["layers"].items()}
    layers = tuple({name: layer[name] for name in leaves} for leaves in shapes["layers"])
    if bits < 16:
        quantized = jax.eval_shape(
            lambda layers: tuple(quantized_layer(layer, bits) for layer in layers), shapes["layers"]
        )
        shapes |= {"layers": quantized}
        layers = split_all(layers, quantized)
    return place_shapes(shapes, stacked | {"layers": layers})


def trained_like(config: Config, model: ModelConfig, mesh: Mesh | AbstractMesh) -> tuple[TrainState, Params | None]:
    """Shapes and shardings of (training state, weights that its adapter belongs to or None)."""
    return _trained_like(config.optim, config.lora, model, mesh)


@lru_cache(64)
def _trained_like(
    optim: OptimConfig, lora: Lora, model: ModelConfig, mesh: Mesh | AbstractMesh
) -> tuple[TrainState, Params | None]:
    return state_like(model, optim, mesh, lora), frozen_like(model, mesh, lora.base_bits) if lora.rank else None


def policy_like(lora: Lora, state: TrainState, base: Params | None) -> Params:
    """The parameters of the policy, see `learner.full_params`; pairs lie as their stacks do."""
    if base is None:
        return state.params
    shapes = jax.eval_shape(partial(full_params, lora=lora), base, state.params)
    pairs = {
        name: NamedSharding(leaf.sharding.mesh, P(*leaf.sharding.spec[1:]))
        for name, leaf in state.params["layers"].items()
    }
    layers = tuple(
        {
            name: pairs[name] if name in pairs else jax.tree.map(lambda leaf: leaf.sharding, leaves[name])
            for name in layer
        }
        for layer, leaves in zip(shapes["layers"], base["layers"], strict=True)
    )
    ends = {name: leaf.sharding for name, leaf in base.items() if name != "layers"}
    return place_shapes(shapes, ends | {"layers": layers})


def sampled_like(config: Config, model: ModelConfig, mesh: Mesh | AbstractMesh) -> tuple[Params, float]:
    """(shapes and shardings of the sampler's parameters, bytes of them on a device that it does not share with the
    trainer). On a mesh of several processes each samples on its own part, where a device holds as much."""
    return _sampled_like(config.lora, config.rollout.weight_dtype, model, mesh)


@lru_cache(64)
def _sampled_like(lora: Lora, weights: str, model: ModelConfig, mesh: Mesh | AbstractMesh) -> tuple[Params, float]:
    policy = policy_like(lora, *_trained_like(OptimConfig(), lora, model, mesh))
    sampled = published_like(policy, model, mesh, weights)
    return sampled, device_bytes(sampled) - shared_bytes(policy, sampled)


def shared_bytes(policy: Params, sampled: Params) -> float:
    """Bytes on a device of the sampler's parameters that are the trainer's arrays: frozen weights of the same dtype and
    layout (`publish.Publisher.convert`)."""
    if not isinstance(policy["layers"], tuple) or jax.tree.structure(policy) != jax.tree.structure(sampled):
        return 0.0

    def layout(leaf: Any) -> tuple[tuple[str, ...], ...]:
        shape = leaf.sharding.mesh.shape
        parts = [(part,) if isinstance(part, str) else part or () for part in leaf.sharding.spec]
        parts = [tuple(axis for axis in part if shape[axis] > 1) for part in parts]
        return (*parts, *[()] * (len(leaf.shape) - len(parts)))

    pairs = zip(jax.tree.leaves(policy), jax.tree.leaves(sampled), strict=True)
    return device_bytes([leaf for leaf, other in pairs if leaf.dtype == other.dtype and layout(leaf) == layout(other)])


def memory_parts(config: Config, model: ModelConfig, mesh: Mesh | AbstractMesh, processes: int = 0) -> dict[str, float]:
    """Largest number of bytes that each part takes on a device. A compute dtype `auto` counts as bfloat16, as on
    accelerators; `memory_lines` uses the compute dtype of this machine instead.

    Counted are the master parameters, AdamW's moments, the reference policy, gradients, the sampler's weights and the
    cache at its largest, all from the shapes and shardings of their arrays; then, estimated from the settings, what the
    backward pass keeps of each layer, and the logits of one chunk with their gradient. XLA's own scratch memory comes
    on top. The frozen weights of an adapter stay in every program; of the sampler's weights those are counted that are
    not the same arrays.

    Args:
        config: Configuration of the run.
        model: Model configuration.
        mesh: Mesh of the trainer, which may span several processes.
        processes: Their number, since each has a cache of `rollout.slots`; 0 counts them by the devices.

    Raises:
        ValueError: the mesh does not split the model evenly.
    """
    model = replace(model, compute_dtype="bfloat16") if model.compute_dtype == "auto" else model
    dtype = compute_dtype(model)
    compute = dtype.itemsize
    state, base = trained_like(config, model, mesh)
    trained, copied = device_bytes(state.params), sampled_like(config, model, mesh)[1]
    sequence, tensor = mesh.shape["sequence"], mesh.shape["tensor"]
    shards = -(-slot_shards(mesh) // (processes or process_count(mesh)))  # of a process
    rollout, slots = config.rollout, -(-config.rollout.slots // shards)
    pool, stored = PoolSize(rollout.shard_blocks(shards), rollout.block, slots), DTYPES.get(rollout.cache_dtype)
    tokens = (
        rows_per_micro_batch(config.batch, row_shards(mesh)) / row_shards(mesh) * config.batch.row_length / sequence
    )
    kept_bytes_per_layer = 4 * model.d_model + compute * model.extras.layer_embed
    if config.update.remat in ("attention", "auto"):
        kept_bytes_per_layer += compute * model.attention_width // max(1, sum(model.attends))
    elif config.update.remat == "none":
        kept_bytes_per_layer += _activations(config, model, compute)
    columns = min(config.update.vocab_chunk or USUAL_CHUNK, model.vocab_size)
    return {
        "masters": trained,
        "moments": device_bytes(state.opt_state),
        **({"reference": trained} if needs_reference(config) else {}),
        "gradients": trained,
        **({} if base is None else {"frozen weights": device_bytes(base)}),
        **({"sampler": copied} if copied else {}),
        "cache": shard_bytes(sampler_config(model, mesh), pool, dtype, tensor, stored),
        "layers kept": tokens * model.layers * kept_bytes_per_layer / tensor,
        "logits": 3 * 4 * tokens * columns / (mesh.shape["fsdp"] * sequence * tensor),
    }


def cache_bytes(model: ModelConfig, compute: int, stored: str = "full") -> tuple[int, int]:
    """Bytes of the cache as (per token, per row). `compute` is the number of bytes of the compute dtype, `stored` is
    `RolloutConfig.cache_dtype`."""
    attends = sum(model.attends)
    per_row = (model.layers - attends) * row_bytes(model.delta, compute) if model.delta else 0
    return 2 * sum(heads * stored_bytes(stored, width, compute) for heads, width in model.cached_heads), per_row


def _activations(config: Config, model: ModelConfig, compute: int) -> int:
    """Bytes per token and layer that the backward pass reads in addition to the layer's input when nothing is
    recomputed."""
    attends = sum(model.attends)
    heads, kv = model.attention_width // attends, model.key_columns // attends
    width = model.d_ff * max(1, model.experts.per_token) + model.experts.shared
    if model.windows.shared_ff:
        width += (model.windows.shared_ff - model.d_ff) * model.windows.shared_layers // model.layers
    activation_bytes = 4 * model.d_model + compute * (2 * model.d_model + 2 * heads + 2 * kv + 3 * width)
    # Blockwise attention does not store its scores; short rows use the reference implementation, which does.
    scores = config.update.attention == "reference" or (
        config.update.attention == "auto" and config.batch.row_length < 256
    )
    if model.delta:
        activation_bytes += round(kept_bytes(model.delta) * (1 - sum(model.attends) / model.layers))
    return activation_bytes + (4 * model.heads * config.batch.row_length if scores else 0)


def memory_lines(config: Config, model: ModelConfig, mesh: Mesh) -> list[str]:
    """`memory_parts` as text, in the dtype that the devices of the mesh compute in. On a CPU a further line estimates
    the memory of the process."""
    model = replace(model, compute_dtype=compute_dtype(model).name)
    parts = memory_parts(config, model, mesh)
    total = parameter_count(model)
    trained = parameter_count(model, config.lora)
    compute = compute_dtype(model).itemsize
    per_token, per_row = cache_bytes(sampler_config(model, mesh), compute, config.rollout.cache_dtype)
    all_parts = sum(parts.values())
    runs_on = bool(config.rollout.step_limit.lag)
    if (
        config.optim.offload and not runs_on
    ):  # the moments are on the device only while the sampler's weights and the cache are not
        all_parts -= min(parts["moments"], parts.get("sampler", 0.0) + parts["cache"])
    unit, size, form = ("GB", 1e9, ".2f") if all_parts >= 1e9 else ("MB", 1e6, ".1f")
    away = {"moments": " (with the host while sampling)"} if config.optim.offload and not runs_on else {}
    listed = ", ".join(f"{name} {part / size:{form}}{away.get(name, '')}" for name, part in parts.items())
    many = f"{total / 1e9:.3f} billion" if total >= 1e8 else f"{total / 1e6:.3f} million"
    share = "all" if trained == total else f"{trained / 1e6:.1f} million"
    return [
        f"model: {many} parameters, {share} of them trained; {per_token / 1e3:.1f} kB of cache a "
        "token" + (f" and {per_row / 1e6:.1f} MB a row" if per_row else ""),
        *(process_lines(all_parts + parts["gradients"], model, mesh) if platform_of(mesh) == "cpu" else []),
        f"memory a device, {unit}: {listed}; together {all_parts / size:{form}} of {mesh.size} device"
        f"{'s' if mesh.size > 1 else ''}",
    ]


COMPILING, COMPILING_LAYER = 280e6, 5e6
"""Bytes that stay with the process after all programs of a run are compiled, and bytes for each layer: 320 MB were
measured for 8 layers of width 512, and 420 MB for the 30 of SmolLM2-135M (jax 0.10.2)."""


def process_lines(devices: float, model: ModelConfig, mesh: Mesh) -> list[str]:
    """The memory of a process whose devices are CPUs.

    Here most of the memory that the sampler's weights and the cache took stays with the process after they are freed;
    on accelerators the gradients of a micro-batch reuse it.

    Args:
        devices: Bytes of each device, with the gradients of a micro-batch in addition to their sum.
        model: Model configuration.
        mesh: Mesh of the update.
    """
    device_bytes, now = devices * len(mesh.local_devices), resident_bytes()
    compiling = COMPILING + COMPILING_LAYER * model.layers
    parts = {"devices": device_bytes, "interpreter and libraries": now, "compilation": compiling}
    listed = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in parts.items())
    return [f"memory of this process at most, MB: {listed}; together {sum(parts.values()) / 1e6:.0f}"]


def sum_bytes(tree: Any) -> int:
    """Bytes of all arrays, or of arrays of such shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@cache
def parameter_count(model: ModelConfig, lora: Lora | None = None) -> int:
    """Number of parameters of a model, or of the trained ones if `lora` is given. Allocates nothing."""

    def init() -> Params:
        key = jax.random.key(0)
        return init_params(key, model) if lora is None else init_trained(key, model, lora)

    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(init)))


M_ARENA_MAX = -8
"""Parameter number of `mallopt`, from glibc's `malloc.h`."""


def few_arenas() -> None:
    """Limits the threads of this process to two arenas of glibc's heap, unless MALLOC_ARENA_MAX is set.

    Each save of a checkpoint starts threads. With an arena for each thread, freed memory is fragmented and the process
    grows by 0.5 MB with each of the first forty saves.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(M_ARENA_MAX, 2)


def resident_bytes(key: str = "VmRSS") -> int:
    """Bytes of memory that this process takes now, or took at most with `VmHWM`; 0 where the system does
    not report it."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
