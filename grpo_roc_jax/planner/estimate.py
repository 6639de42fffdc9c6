"""What the programs of a run need, by formulas instead of a compiler, and what to change when they do not fit.

The formulas leave out the compiler's scratch memory: keep a tenth of the memory free.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

from grpo_roc_jax.config import Config
from grpo_roc_jax.learner.pack import rows_per_micro_batch
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.delta import token_flops
from grpo_roc_jax.model.sharding import AXES, row_shards, slot_shards
from grpo_roc_jax.planner.roofline import GB, Needs, Work
from grpo_roc_jax.planner.topology import FRACTION, MOST_OF_A_GPU, Topology
from grpo_roc_jax.run.policy import memory_parts, parameter_count


@dataclass(frozen=True, eq=False)
class Deployment:
    """A run on a pod: what a plan is made for."""

    config: Config
    model: ModelConfig
    mesh: Mesh | AbstractMesh
    topology: Topology
    work: Work
    teacher: ModelConfig | None = None
    """Of the other model that scores the rollouts."""

    def memory_parts(self) -> dict[str, float]:
        parts = memory_parts(self.config, self.model, self.mesh, self.topology.processes)
        if self.teacher is None:
            return parts
        itemsize = 4 if self.teacher.compute_dtype == "float32" else 2
        shared = self.mesh.shape["fsdp"] * self.mesh.shape["sequence"] * self.mesh.shape["tensor"]
        return parts | {"teacher": itemsize * parameter_count(self.teacher) / shared}


def active_parameters(model: ModelConfig) -> float:
    """Parameters of the matrix products that a token takes part in: all but the embedding table and the experts that
    were not chosen."""
    total = parameter_count(model)
    if not model.tie_embeddings:
        total -= model.vocab_size * model.d_model
    if model.experts.count:
        experts = 3 * model.layers * model.experts.count * model.d_model * model.d_ff
        total -= experts * (1 - model.experts.per_token / model.experts.count)
    return float(total)


def update_flops(config: Config, model: ModelConfig, tokens: float, length: float) -> float:
    """FLOPs of forward, backward and recomputation over so many tokens in trajectories of that length.

    With P parameters in products: 2 P a token forward, 4 P backward, and 2 P again with rematerialization. Attention
    takes 2 products of 2 FLOPs over length/2 keys forward, 5 of them backward, and the 2 again under `full`. Recurrent
    layers take `delta.token_flops` forward, twice that backward, and it again with rematerialization.
    """
    remat = config.update.remat
    products = (6.0 if remat == "none" else 8.0) * active_parameters(model)
    passes = 9 if remat == "full" else 7
    recurrent = {"none": 3.0}.get(remat, 4.0) * recurrent_flops(model, config.batch.row_length)
    return tokens * (products + passes * sum(model.attends) * model.heads * model.head_dim * length + recurrent)


def recurrent_flops(model: ModelConfig, length: int) -> float:
    """FLOPs a token of all recurrent layers; see `delta.token_flops`."""
    return token_flops(model.delta, length) * (model.layers - sum(model.attends)) if model.delta else 0.0


def estimate(deployment: Deployment) -> list[Needs]:
    """What one device needs for the weight sync, an append, a decode chunk and the update of all micro-batches."""
    config, model, mesh, work = deployment.config, deployment.model, deployment.mesh, deployment.work
    parts = deployment.memory_parts()
    _, fsdp, sequence, tensor = (mesh.shape[axis] for axis in AXES)
    runs_on = bool(config.rollout.step_limit.lag)
    moments = 0.0 if config.optim.offload and not runs_on else parts["moments"]
    scoring = parts.get("reference", 0.0) + parts.get("teacher", 0.0)
    resident = parts["masters"] + moments + scoring
    sampler = parts.get("sampler", 0.0) + parts.get("frozen weights", 0.0)
    active = active_parameters(model)
    rows = max(1, work.slots * work.samplers // slot_shards(mesh))
    length = work.prompt + work.response
    attention = 4 * sum(model.attends) * model.heads * model.head_dim * length / tensor
    attention += recurrent_flops(model, 1) / tensor
    shares = max(1, work.append_rows // 8)
    cached = {"arguments": sampler + parts["cache"], "results": parts["cache"], "aliased": parts["cache"]}
    return [
        Needs(
            "weight_sync",
            arguments=parts["masters"],
            results=parts.get("sampler", 0.0),
            resident=moments + scoring + parts.get("frozen weights", 0.0) + (parts["cache"] if runs_on else 0.0),
            traffic=parts["masters"] + 2 * sampler,
            collectives=_collective("all-gather", sampler, fsdp * sequence, 1.0),
        ),
        Needs(
            "append",
            **cached,
            resident=resident,
            # One device computes `append_rows` divided among groups of 8.
            flops=(2 * active + recurrent_flops(model, work.prompt))
            / tensor
            * config.rollout.prompt_append
            * (work.append_rows / shares),
            traffic=sampler,
            fixed_traffic=sampler,
        ),
        Needs(
            "decode",
            **cached,
            temporaries=3 * 4.0 * rows * model.vocab_size / tensor,
            resident=resident,
            flops=work.chunk * rows * (2 * active / tensor + attention),
            traffic=work.chunk * (sampler + parts["cache"]),
            fixed_flops=work.chunk * rows * 2 * active / tensor,
            fixed_traffic=work.chunk * sampler,
            collectives=_collective("all-reduce", 4.0 * rows * model.d_model, tensor, 2.0 * model.layers * work.chunk),
        ),
        _estimate_update(deployment, parts),
    ]


def _estimate_update(deployment: Deployment, parts: dict[str, float]) -> Needs:
    config, model, mesh, work = deployment.config, deployment.model, deployment.mesh, deployment.work
    data, fsdp, sequence, tensor = (mesh.shape[axis] for axis in AXES)
    shared, trainer = fsdp * sequence, parts["masters"] + parts["moments"]
    tokens = work.micro_rows // row_shards(mesh) * work.row_length // sequence
    micro = work.micro_batches / work.updates
    kept = parts["cache"] + parts.get("sampler", 0.0) if config.rollout.step_limit.lag else 0.0
    # Weights are gathered before each use (forward, backward) and their gradients scattered; heads are summed over
    # `tensor`. Keys and values of whole rows are gathered over `sequence` in both passes, their gradients scattered.
    weights = 2 * parameter_count(model) / tensor
    residual = tokens * model.d_model * 4.0
    keys = 2 * 2.0 * sum(model.attends) * sequence * tokens * model.kv_heads * model.head_dim / tensor
    return Needs(
        "update",
        resident=parts.get("reference", 0.0) + parts.get("teacher", 0.0) + kept,
        arguments=trainer,
        results=trainer,
        aliased=trainer,
        temporaries=2 * parts["gradients"] + parts["layers kept"] + parts["logits"] + weights / model.layers,
        flops=micro * update_flops(config, model, tokens, work.prompt + work.response) / tensor,
        traffic=micro * 4 * weights + 3 * trainer,
        collectives=_collective("all-gather", weights, shared, 2 * micro)
        | _collective("reduce-scatter", 2 * weights, shared, micro)
        | _collective("all-gather", keys, sequence, 2 * micro, "sequence")
        | _collective("reduce-scatter", keys, sequence, micro, "sequence")
        # Over `tensor` the residual stream, gathered and scattered twice a layer; over `data` the gradients.
        | _collective("all-reduce", 2 * residual * model.layers, tensor, 2 * micro, "tensor")
        | _collective("all-reduce", weights / shared, data, micro, "data"),
    )


def _collective(kind: str, size: float, group: int, runs: float, axis: str = "") -> dict[str, dict[str, float]]:
    if group == 1:
        return {}
    share = (group - 1) / group * (2 if kind == "all-reduce" else 1)
    return {f"{kind} over {axis}" if axis else kind: {"runs": runs, "bytes": size * runs, "moved": size * share * runs}}


# ---- what to change ------------------------------------------------------------------------------------------------


def advice(deployment: Deployment, programs: Sequence[Needs]) -> list[str]:
    """One line for each program that does not fit, with the settings that would make room, the cheapest first."""
    found, chip = [], deployment.topology.chip
    for needs in programs:
        if needs.fits(chip):
            continue
        over = "" if needs.refused else f", {(needs.total - chip.usable_bytes) / GB:.1f} GB too much"
        found.append(f"{needs.name}{over}: " + "; ".join(_remedies(deployment, needs)))
    return found


def _remedies(deployment: Deployment, needs: Needs) -> list[str]:
    model, mesh, topology = deployment.model, deployment.mesh, deployment.topology
    kind, chips = needs.name.split("/")[0], topology.chips
    fsdp, sequence, tensor = (mesh.shape[axis] for axis in AXES[1:])
    within = min(topology.chip.chips_per_process, chips)
    wider = [t for t in (2, 4, 8) if tensor < t <= within and model.kv_heads % t == 0 and chips % t == 0]
    remedies = _update_remedies(deployment) if kind == "update" else _offload_moments(deployment, needs)
    if not needs.refused and needs.total <= MOST_OF_A_GPU * topology.chip.memory_bytes:
        remedies.insert(0, f"{FRACTION}={MOST_OF_A_GPU} (JAX takes {topology.chip.share:.0%} of a GPU)")
    if kind in ("decode", "append", "copy"):
        remedies += _fewer_slots(deployment, needs)
    if fsdp * sequence * tensor < chips:
        remedies.append(f"sharding.fsdp up to {chips // (sequence * tensor)} (masters and moments over more devices)")
    if wider:
        remedies.append(f"sharding.tensor {wider[0]} (the sampler's weights and the cache over more devices)")
    return remedies or ["more chips, or chips with more memory"]


def _update_remedies(deployment: Deployment) -> list[str]:
    config, mesh = deployment.config, deployment.mesh
    fsdp, sequence, tensor = (mesh.shape[axis] for axis in AXES[1:])
    remedies = []
    if rows_per_micro_batch(config.batch, row_shards(mesh)) > row_shards(mesh):
        remedies.append(f"batch.rows {row_shards(mesh)} (one row a device)")
    if config.batch.row_length > config.rollout.max_row_tokens:
        remedies.append(f"batch.row_length {config.rollout.max_row_tokens} (the longest trajectory)")
    if config.update.remat != "full":
        remedies.append("update.remat full")
    if config.batch.row_length % (4 * sequence) == 0 and 2 * sequence * fsdp * tensor <= deployment.topology.chips:
        remedies.append(f"sharding.sequence {2 * sequence} (each row over {2 * sequence} devices)")
    if config.optim.moment_dtype == "float32":
        remedies.append("optim.moment_dtype bfloat16")
    return remedies


def _offload_moments(deployment: Deployment, needs: Needs) -> list[str]:
    """Offloading, where the resident moments are enough to make room."""
    moments = deployment.memory_parts()["moments"]
    too_little = not needs.refused and needs.total - moments > deployment.topology.chip.usable_bytes
    if deployment.config.optim.offload or too_little:
        return []
    return [f"optim.offload True (moments, {moments / GB:.1f} GB, in host memory while sampling)"]


def _fewer_slots(deployment: Deployment, needs: Needs) -> list[str]:
    """The number of slots whose largest cache would fit."""
    slots, topology = deployment.config.rollout.slots, deployment.topology
    if needs.refused:
        return [f"rollout.slots below {slots}"]
    cache = deployment.memory_parts()["cache"]
    room = topology.chip.usable_bytes - (needs.total - cache)
    shards = max(1, slot_shards(deployment.mesh) // topology.processes)
    fitting = math.floor(slots * room / cache / shards) * shards
    return [f"rollout.slots {fitting}"] if fitting > 0 else []
