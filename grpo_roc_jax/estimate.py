"""The needs of a run's programs by formulas, where no compiler is at hand, and what to change when they do not fit.

Scratch memory of the compiler is not in the formulas: leave a tenth of the memory free.
"""

import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from grpo_roc_jax.config import Config
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.transformer import init_params
from grpo_roc_jax.policy import memory_parts, parameter_count
from grpo_roc_jax.roofline import GB, Needs, Work
from grpo_roc_jax.sharding import AXES, row_shards, slot_shards
from grpo_roc_jax.topology import Topology

AnyMesh = Mesh | AbstractMesh


def active_parameters(model: ModelConfig) -> float:
    """Parameters of matrix products that a token goes through: the embedding is a lookup, experts are chosen."""
    total = parameter_count(lambda: init_params(jax.random.key(0), model))
    if not model.tie_embeddings:
        total -= model.vocab_size * model.d_model
    if model.experts:
        experts = 3 * model.layers * model.experts * model.d_model * model.d_ff
        total -= experts * (1 - model.experts_per_token / model.experts)
    return float(total)


def update_flops(config: Config, model: ModelConfig, tokens: float, length: float) -> float:
    """FLOPs of forward, backward and recomputation over so many tokens in trajectories of that length.

    2 P forward, 4 P backward and 2 P again under remat, for P parameters in products; attention takes 2 products of 2
    FLOPs over length/2 keys forward, 5 of them backward, and the 2 again under `full`.
    """
    remat = config.update.remat
    products = {"none": 6.0, "attention": 8.0, "full": 8.0}[remat] * active_parameters(model)
    passes = 9 if remat == "full" else 7
    return tokens * (products + passes * model.layers * model.heads * model.head_dim * length)


def estimate(config: Config, model: ModelConfig, mesh: AnyMesh, topology: Topology, work: Work) -> list[Needs]:
    """Hand-over, append, decode chunk and update of all micro-batches, on one device."""
    parts = memory_parts(config, model, mesh, topology.processes)
    data, fsdp, sequence, tensor = (mesh.shape[axis] for axis in AXES)
    shared = fsdp * sequence
    trainer = parts["masters"] + parts["moments"]
    resting = 0.0 if config.optim.offload else parts["moments"]
    beside = parts["masters"] + resting
    sampler = parts.get("sampler", 0.0) + parts.get("frozen weights", 0.0)
    active = active_parameters(model)
    rows = max(1, work.slots * work.processes // slot_shards(mesh))
    written = max(config.rollout.append_lengths)
    micro_tokens = work.micro_rows // row_shards(mesh) * work.row_length // sequence
    micro = work.micro_batches / work.updates
    length = work.prompt + work.response
    # Weights are gathered before each use (forward, backward) and gradients scattered; heads add up over `tensor`. Keys
    # and values of whole rows are gathered over `sequence`, forward and again backward, and their gradients scattered.
    weights = 2 * parameter_count(lambda: init_params(jax.random.key(0), model)) / tensor
    residual = micro_tokens * model.d_model * 4.0
    keys = 2 * 2.0 * model.layers * sequence * micro_tokens * model.kv_heads * model.head_dim / tensor
    return [
        Needs(
            "hand_over",
            arguments=parts["masters"],
            results=parts.get("sampler", 0.0),
            beside=resting + parts.get("frozen weights", 0.0),
            traffic=parts["masters"] + 2 * sampler,
            collectives=_collective("all-gather", sampler, shared, 1.0),
        ),
        Needs(
            "append",
            arguments=sampler + parts["cache"],
            results=parts["cache"],
            aliased=parts["cache"],
            beside=beside,
            flops=2 * active / tensor * written * config_rows(work),
            traffic=sampler,
        ),
        Needs(
            "decode",
            arguments=sampler + parts["cache"],
            results=parts["cache"],
            aliased=parts["cache"],
            temporaries=3 * 4.0 * rows * model.vocab_size / tensor,
            beside=beside,
            flops=work.chunk
            * rows
            * (2 * active / tensor + 4 * model.layers * model.heads * model.head_dim * length / tensor),
            traffic=work.chunk * (sampler + parts["cache"]),
            collectives=_collective("all-reduce", 4.0 * rows * model.d_model, tensor, 2.0 * model.layers * work.chunk),
        ),
        Needs(
            "update",
            arguments=trainer,
            results=trainer,
            aliased=trainer,
            temporaries=2 * parts["gradients"] + parts["layers kept"] + parts["logits"] + weights / model.layers,
            flops=micro * update_flops(config, model, micro_tokens, length) / tensor,
            traffic=micro * 4 * weights + 3 * trainer,
            collectives=_collective("all-gather", weights, shared, 2 * micro)
            | _collective("reduce-scatter", 2 * weights, shared, micro)
            | _collective("all-gather", keys, sequence, 2 * micro, "sequence")
            | _collective("reduce-scatter", keys, sequence, micro, "sequence")
            # Over `tensor` the residual stream, gathered and scattered twice a layer; over `data` the gradients.
            | _collective("all-reduce", 2 * residual * model.layers, tensor, 2 * micro, "tensor")
            | _collective("all-reduce", weights / shared, data, micro, "data"),
        ),
    ]


def config_rows(work: Work) -> float:
    """Rows of an append that one device shares in."""
    return float(work.append_rows) / max(1, work.append_rows // 8)


def _collective(kind: str, size: float, group: int, runs: float, axis: str = "") -> dict[str, dict[str, float]]:
    if group == 1:
        return {}
    share = (group - 1) / group * (2 if kind == "all-reduce" else 1)
    return {f"{kind} over {axis}" if axis else kind: {"runs": runs, "bytes": size * runs, "moved": size * share * runs}}


# ---- what to change ------------------------------------------------------------------------------------------------


def advice(
    config: Config, model: ModelConfig, mesh: AnyMesh, topology: Topology, programs: Sequence[Needs]
) -> list[str]:
    """One line for each program that does not fit, with the settings that would make room, the cheapest first."""
    found = []
    for needs in programs:
        if needs.fits(topology.chip):
            continue
        kind = needs.name.split("/")[0]
        over = "" if needs.refused else f", {(needs.total - topology.chip.memory_bytes) / GB:.1f} GB too much"
        found.append(f"{needs.name}{over}: " + "; ".join(_remedies(kind, config, model, mesh, topology, needs)))
    return found


def _remedies(
    kind: str, config: Config, model: ModelConfig, mesh: AnyMesh, topology: Topology, needs: Needs
) -> list[str]:
    chip = topology.chip
    fsdp, sequence, tensor = (mesh.shape[axis] for axis in AXES[1:])
    within = min(chip.chips_per_process, topology.chips)
    wider = [t for t in (2, 4, 8) if tensor < t <= within and model.kv_heads % t == 0 and topology.chips % t == 0]
    remedies = []
    if kind != "update":
        remedies += _moments_away(config, mesh, model, topology, needs)
    if kind in ("decode", "append", "resize"):
        remedies += _fewer_slots(config, model, mesh, topology, needs)
    if kind == "update":
        if config.batch.rows > row_shards(mesh):
            remedies.append(f"batch.rows {row_shards(mesh)} (one row a device)")
        if config.batch.row_length > config.rollout.max_row_tokens:
            remedies.append(f"batch.row_length {config.rollout.max_row_tokens} (the longest trajectory)")
        if config.update.remat != "full":
            remedies.append("update.remat full")
        if config.batch.row_length % (4 * sequence) == 0 and 2 * sequence * fsdp * tensor <= topology.chips:
            remedies.append(f"sharding.sequence {2 * sequence} (each row over {2 * sequence} devices)")
        if config.optim.moment_dtype == "float32":
            remedies.append("optim.moment_dtype bfloat16")
    if fsdp * sequence * tensor < topology.chips:
        remedies.append(
            f"sharding.fsdp up to {topology.chips // (sequence * tensor)} (masters and moments over more devices)"
        )
    if wider:
        remedies.append(f"sharding.tensor {wider[0]} (the sampler's weights and the cache over more devices)")
    return remedies or ["more chips, or chips with more memory"]


def _moments_away(config: Config, mesh: AnyMesh, model: ModelConfig, topology: Topology, needs: Needs) -> list[str]:
    """Offloading, where the moments lie beside the program and leave room enough when they go."""
    moments = memory_parts(config, model, mesh, topology.processes)["moments"]
    if config.optim.offload or (not needs.refused and needs.total - moments > topology.chip.memory_bytes):
        return []
    return [f"optim.offload True (moments, {moments / GB:.1f} GB, with the host while sampling)"]


def _fewer_slots(config: Config, model: ModelConfig, mesh: AnyMesh, topology: Topology, needs: Needs) -> list[str]:
    """The slots whose largest cache would leave room for the rest."""
    if needs.refused:
        return [f"rollout.slots below {config.rollout.slots}"]
    cache = memory_parts(config, model, mesh, topology.processes)["cache"]
    copies = 2 if needs.name.startswith("resize") else 1
    room = topology.chip.memory_bytes - (needs.total - copies * cache)
    shards = max(1, slot_shards(mesh) // topology.processes)
    slots = math.floor(config.rollout.slots * room / (copies * cache) / shards) * shards
    return [f"rollout.slots {slots}"] if slots > 0 else []
