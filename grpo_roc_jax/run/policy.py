"""Where a run's weights come from: random numbers, a published checkpoint, or one of these with an adapter.

Under `lora: low_rank` the adapter alone is trained, saved and restored; the weights it adapts are loaded once, layer
by layer in the compute dtype, and shared by trainer and sampler.
"""

import ctypes
import math
import os
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from grpo_roc_jax.config import Config
from grpo_roc_jax.learner.learner import full_params
from grpo_roc_jax.learner.loss import USUAL_CHUNK, UpdateConfig
from grpo_roc_jax.learner.offload import to_host
from grpo_roc_jax.learner.pack import BatchConfig, rows_per_micro_batch
from grpo_roc_jax.learner.update import (
    FULL,
    TrainState,
    init_train_state,
    init_trained,
    start_train_state,
    trained_shardings,
)
from grpo_roc_jax.method.compose import needs_reference
from grpo_roc_jax.model.choose import describe_choice
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import find_model, load_params
from grpo_roc_jax.model.delta import kept_bytes, row_bytes
from grpo_roc_jax.model.lora import Lora
from grpo_roc_jax.model.low_precision import MATRICES, stored_bytes
from grpo_roc_jax.model.parallel import choose_attention, paths
from grpo_roc_jax.model.sharding import (
    Mesh,
    param_shardings,
    place_shapes,
    platform_of,
    replicate_key,
    row_shards,
    slot_shards,
)
from grpo_roc_jax.model.transformer import Params, compute_dtype, init_params, layer_shapes, layers_with
from grpo_roc_jax.record.checkpoint import restore_params
from grpo_roc_jax.rollout.publish import sampler_config, unstack
from grpo_roc_jax.settings.cli import ConfigError, config_errors


@dataclass(frozen=True, eq=False)
class PolicyModel:
    """The model that is trained and sampled, on its devices."""

    model: ModelConfig
    """With its shape from `model.path` and `vocab_size` resolved."""
    mesh: Mesh
    base: Params | None = None
    """The weights that the trained adapter belongs to; None when all parameters are trained."""
    lora: Lora = FULL

    def full(self, trained: Params) -> Params:
        """The parameters of the policy from those of the training state."""
        return full_params(self.base, trained, self.lora)


@cache
def measured_attention(
    update: UpdateConfig, batch: BatchConfig, segment: int, model: ModelConfig, mesh: Mesh
) -> tuple[str, dict[str, float]]:
    """(path of attention in the update; measured seconds of each candidate, see `choose_attention`), once a process."""
    names = paths(model, batch.row_length, mesh) if update.attention == "auto" else (update.attention,)
    rows = rows_per_micro_batch(batch, row_shards(mesh))
    return choose_attention(names, model, batch.row_length, rows, segment, mesh)


def attention_of(config: Config, policy: PolicyModel) -> tuple[str, dict[str, float]]:
    """`measured_attention` of a run."""
    # Prompts and responses half as long as they may be, as plans take them too.
    segment = -(-config.rollout.max_row_tokens // 2)
    return measured_attention(config.update, config.batch, segment, policy.model, policy.mesh)


def update_settings(config: Config, policy: PolicyModel) -> UpdateConfig:
    """The settings of the update with its path of attention named."""
    return replace(config.update, attention=attention_of(config, policy)[0])


def describe_attention(config: Config, policy: PolicyModel) -> str:
    """The path of attention in the update, with the measured times if there was a choice."""
    return "attention of the update: " + describe_choice(
        attention_of(config, policy), "milliseconds a layer and micro-batch, forward and backward", 1e3, 2
    )


def frozen_weights(config: Config, model: ModelConfig, mesh: Mesh) -> Params | None:
    """The weights that an adapter belongs to, in the compute dtype, as a tuple of layers; None without one."""
    if not config.lora.rank:
        return None
    shardings = param_shardings(model, mesh)
    if config.model.path:
        folder = find_model(config.model.path)
        return load_params(folder, model, shardings, dtype=compute_dtype(model), stacked=False)
    key = replicate_key(jax.random.key(config.seed), mesh)
    stacked = jax.jit(partial(init_params, config=model), out_shardings=shardings)(key)
    return jax.jit(partial(unstack, config=model))(stacked)


@config_errors()
def initial_state(config: Config, model: ModelConfig, mesh: Mesh) -> TrainState:
    """The training state at step 0, at rest: the published parameters at `model.path`, or random ones, or a fresh
    adapter.

    Raises:
        ConfigError: The published parameters cannot be read.
    """
    if config.model.path and not config.lora.rank:
        params = load_params(find_model(config.model.path), model, param_shardings(model, mesh))
        return at_rest(config, start_train_state(params, model, config.optim, mesh, donate=True))
    return at_rest(config, init_train_state(jax.random.key(config.seed), model, config.optim, mesh, config.lora))


def at_rest(config: Config, state: TrainState) -> TrainState:
    """The state as it is kept between two updates; see `optim.offload`."""
    return state.replace(opt_state=to_host(state.opt_state)) if config.optim.offload else state


def split_checkpoint(path: str) -> tuple[Path, int | None]:
    """(directory of a run, step) from that directory, its `checkpoints`, or one of these; no step means the newest.

    Raises:
        ConfigError: there is no run.
    """
    place = Path(path)
    name = place.name.removeprefix("step_")
    step = int(name) if name.isdigit() else None
    run = place.parent.parent if step is not None else place.parent if place.name == "checkpoints" else place
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} holds no config.yaml; name the directory of a run")
    return run, step


def load_trained(
    checkpoints: Path, model: ModelConfig, mesh: Mesh, lora: Lora, step: int | None = None
) -> tuple[int, Params]:
    """(training step, what is trained) of the newest valid checkpoint, or of that step, laid out on the mesh.

    Raises:
        ConfigError: There is none, or it is of another model.
    """
    shapes = jax.eval_shape(lambda: init_trained(jax.random.key(0), model, lora))
    found = restore_params(checkpoints, place_shapes(shapes, trained_shardings(model, mesh, lora)), step=step)
    if found is None:
        which = "" if step is None else f" of step {step}"
        raise ConfigError(f"{checkpoints} holds no valid checkpoint{which}; name the directory of a run that saved one")
    return found


def frozen_like(model: ModelConfig, mesh: Mesh) -> Params:
    """Shapes and places of `frozen_weights`, with nothing loaded."""
    shapes = jax.eval_shape(lambda: unstack(init_params(jax.random.key(0), model), model))
    stacked = param_shardings(model, mesh)
    layer = {name: NamedSharding(mesh, P(*place.spec[1:])) for name, place in stacked["layers"].items()}
    layers = tuple({name: layer[name] for name in held} for held in shapes["layers"])
    return place_shapes(shapes, stacked | {"layers": layers})


def memory_parts(config: Config, model: ModelConfig, mesh: Mesh, processes: int = 1) -> dict[str, float]:
    """Bytes of what a device holds at most, by arithmetic from the settings. A compute dtype `auto` counts as bfloat16,
    as on accelerators; `memory_lines` puts in its place what this machine computes in.

    Counted are masters, AdamW's moments, the reference policy, gradients, the sampler's weights, the cache at its
    largest, what the backward pass keeps of each layer, and the logits of one chunk with their gradient. XLA's own
    scratch comes on top. The frozen weights of an adapter stay in every program; the sampler reads the same arrays,
    unless `fsdp` or `sequence` splits them, which makes it gather a copy.
    """
    compute = 4 if model.compute_dtype == "float32" else 2
    total = parameter_count(model)
    trained = parameter_count(model, config.lora)
    spared = (compute - 1) * matrix_count(model) if config.rollout.weight_dtype == "int8" else 0
    sequence, tensor = mesh.shape["sequence"], mesh.shape["tensor"]
    spread = mesh.shape["fsdp"] * sequence * tensor
    per_token, per_row = cache_bytes(sampler_config(model, mesh), compute, config.rollout.cache_dtype)
    shards = -(-slot_shards(mesh) // processes)  # of a process
    rollout, slots = config.rollout, -(-config.rollout.slots // shards)
    tokens = (
        rows_per_micro_batch(config.batch, row_shards(mesh)) / row_shards(mesh) * config.batch.row_length / sequence
    )
    kept = 4 * model.d_model
    if config.update.remat in ("attention", "auto"):
        kept += compute * model.heads * model.head_dim
    elif config.update.remat == "none":
        kept += _activations(config, model, compute)
    columns = min(config.update.vocab_chunk or USUAL_CHUNK, model.vocab_size)
    copied = not config.lora.rank or spread > tensor
    return {
        "masters": 4 * trained / spread,
        "moments": (8 if config.optim.moment_dtype == "float32" else 6) * trained / spread,
        **({"reference": 4 * trained / spread} if needs_reference(config) else {}),
        "gradients": 4 * trained / spread,
        **({"frozen weights": compute * total / spread} if config.lora.rank else {}),
        **({"sampler": (compute * total - spared) / tensor} if copied else {}),
        "cache": (per_token * rollout.shard_blocks(shards) * rollout.block + per_row * slots) / tensor,
        "layers kept": tokens * model.layers * kept / tensor,
        "logits": 3 * 4 * tokens * columns / spread,
    }


def cache_bytes(model: ModelConfig, compute: int, stored: str = "full") -> tuple[int, int]:
    """Bytes of the cache (a token, a row), with so many bytes for a number of the compute dtype; `stored` is
    `RolloutConfig.cache_dtype`."""
    attends = sum(model.attends)
    per_row = (model.layers - attends) * row_bytes(model.delta, compute) if model.delta else 0
    return 2 * attends * model.kv_heads * stored_bytes(stored, model.head_dim, compute), per_row


def _activations(config: Config, model: ModelConfig, compute: int) -> int:
    """Bytes a token and layer that the backward pass reads besides the layer's input when nothing is recomputed."""
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    width = model.d_ff * max(1, model.experts.per_token)
    kept = 4 * model.d_model + compute * (2 * model.d_model + 2 * heads + 2 * kv + 3 * width)
    # Where attention goes block by block, its scores are not kept; short rows take the reference.
    scores = config.update.attention == "reference" or (
        config.update.attention == "auto" and config.batch.row_length < 256
    )
    if model.delta:
        kept += round(kept_bytes(model.delta) * (1 - sum(model.attends) / model.layers))
    return kept + (4 * model.heads * config.batch.row_length if scores else 0)


def memory_lines(config: Config, model: ModelConfig, mesh: Mesh) -> list[str]:
    """`memory_parts` as text, in the dtype that the devices of the mesh compute in. On a CPU a further line says what
    the process takes."""
    model = replace(model, compute_dtype=compute_dtype(model).name)
    parts = memory_parts(config, model, mesh)
    total = parameter_count(model)
    trained = parameter_count(model, config.lora)
    compute = compute_dtype(model).itemsize
    per_token, per_row = cache_bytes(sampler_config(model, mesh), compute, config.rollout.cache_dtype)
    whole = sum(parts.values())
    runs_on = bool(config.rollout.step_limit.lag)
    if config.optim.offload and not runs_on:  # moments are here when the sampler's weights and the cache are not
        whole -= min(parts["moments"], parts.get("sampler", 0.0) + parts["cache"])
    unit, size, form = ("GB", 1e9, ".2f") if whole >= 1e9 else ("MB", 1e6, ".1f")
    away = {"moments": " (with the host while sampling)"} if config.optim.offload and not runs_on else {}
    said = ", ".join(f"{name} {part / size:{form}}{away.get(name, '')}" for name, part in parts.items())
    many = f"{total / 1e9:.3f} billion" if total >= 1e8 else f"{total / 1e6:.3f} million"
    return [
        f"model: {many} parameters, {trained / 1e6:.1f} million of them trained; {per_token / 1e3:.1f} kB of cache a "
        "token" + (f" and {per_row / 1e6:.1f} MB a row" if per_row else ""),
        *(process_lines(whole + parts["gradients"], model, mesh) if platform_of(mesh) == "cpu" else []),
        f"memory a device, {unit}: {said}; together {whole / size:{form}} of {mesh.size} device"
        f"{'s' if mesh.size > 1 else ''}",
    ]


COMPILING, COMPILING_LAYER = 280e6, 5e6
"""Bytes that stay with the process after all programs of a run are compiled, and for each layer: 320 MB for 8 layers
of width 512 and 420 MB for the 30 of SmolLM2-135M (jax 0.10.2)."""


def process_lines(devices: float, model: ModelConfig, mesh: Mesh) -> list[str]:
    """The memory of a process whose devices are CPUs; `devices` are the bytes of each of them, with the gradients of a
    micro-batch besides their sum. Elsewhere these take the place of the sampler's weights and the cache; here what is
    freed of those mostly stays with the process."""
    held, now = devices * len(mesh.local_devices), resident_bytes()
    compiling = COMPILING + COMPILING_LAYER * model.layers
    said = f"devices {held / 1e6:.0f}, interpreter and libraries {now / 1e6:.0f}, compilation {compiling / 1e6:.0f}"
    return [f"memory of this process at most, MB: {said}; together {(held + now + compiling) / 1e6:.0f}"]


def matrix_count(model: ModelConfig) -> int:
    """Numbers of the layers' matrices that `rollout.low_precision.weights` stores in fewer bits."""
    sizes = ((name, math.prod(shape)) for name, (shape, _) in layer_shapes(model).items() if name in MATRICES)
    return sum(size * len(layers_with(name, model)) for name, size in sizes)


@cache
def parameter_count(model: ModelConfig, lora: Lora | None = None) -> int:
    """Parameters of a model, or those that are trained where `lora` is given; nothing is made."""

    def init() -> Params:
        key = jax.random.key(0)
        return init_params(key, model) if lora is None else init_trained(key, model, lora)

    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(init)))


M_ARENA_MAX = -8
"""Of glibc's `malloc.h`."""


def few_arenas() -> None:
    """Lets the threads of this process share two arenas of glibc's heap, unless MALLOC_ARENA_MAX says otherwise.

    Each save of a checkpoint starts threads. With an arena for each of them freed memory is scattered, and the process
    grows by 0.5 MB with each of the first forty saves.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(M_ARENA_MAX, 2)


def resident_bytes(key: str = "VmRSS") -> int:
    """The memory that this process takes now, or at most so far with `VmHWM`; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
