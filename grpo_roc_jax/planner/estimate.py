"""What the programs of a run need, by formulas instead of a compiler.

Arguments are those of the programs, by their shapes. The formulas leave out the compiler's scratch memory.
"""

from dataclasses import dataclass

from jax.sharding import AbstractMesh, AxisType, Mesh

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.programs import COPIES
from grpo_roc_jax.learner.pack import rows_per_micro_batch
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.delta import token_flops
from grpo_roc_jax.model.sharding import AXES, check_slices, process_count, processes_together, row_shards, slot_shards
from grpo_roc_jax.model.transformer import layers_with
from grpo_roc_jax.planner.arguments import batch_like, device_bytes, trained_like
from grpo_roc_jax.planner.hlo_cost import between_slices
from grpo_roc_jax.planner.links import axis_shares
from grpo_roc_jax.planner.roofline import Needs, Work
from grpo_roc_jax.planner.topology import Topology
from grpo_roc_jax.run.policy import matrix_count, memory_parts, parameter_count


@dataclass(frozen=True, eq=False)
class Deployment:
    """A run on a pod: what a plan is made for."""

    config: Config
    model: ModelConfig
    mesh: Mesh | AbstractMesh
    topology: Topology
    work: Work
    teacher: ModelConfig | None = None
    """The other model that scores the rollouts, if there is one."""

    def memory_parts(self) -> dict[str, float]:
        parts = memory_parts(self.config, self.model, self.mesh, self.topology.processes)
        if self.teacher is None:
            return parts
        itemsize = 4 if self.teacher.compute_dtype == "float32" else 2
        shared = self.mesh.shape["fsdp"] * self.mesh.shape["sequence"] * self.mesh.shape["tensor"]
        return parts | {"teacher": itemsize * parameter_count(self.teacher) / shared}


FILL = 0.9
"""Share of packed rows that is assumed to hold tokens; first-fit decreasing reaches it on lengths as rollouts have."""


def abstract_mesh(config: Config, topology: Topology) -> AbstractMesh:
    """The trainer's mesh with no devices.

    Raises:
        ValueError: the product of the axes is not the number of chips, or `data` does not divide over the slices.
    """
    shape = config.sharding.shape(topology.chips)
    check_slices(shape[0], topology.slices)
    return AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def processes_of(mesh: Mesh | AbstractMesh, topology: Topology) -> int:
    """Number of processes, from the compiler's description of the slice, or else from the table of chips."""
    return topology.processes if isinstance(mesh, AbstractMesh) else process_count(mesh)


def work_of(config: Config, mesh: Mesh | AbstractMesh, topology: Topology, response: float) -> Work:
    """The work of a training step; prompts are taken to be half of the longest."""
    group, rollout = config.group, config.rollout
    processes = processes_of(mesh, topology)
    samplers = processes // processes_together(mesh, processes)
    return Work(
        problems=group.problems,
        sampled=group.problems * config.resample.sampled(group.size),
        kept=group.problems * group.size,
        prompt=rollout.max_prompt_tokens / 2,
        response=response or rollout.max_response_tokens / 2,
        samplers=samplers,
        slots=rollout.slots,
        chunk=rollout.chunk,
        append_rows=(rollout.append_rows or 8) * max(1, slot_shards(mesh) // samplers),
        micro_rows=rows_per_micro_batch(config.batch, row_shards(mesh)),
        row_length=config.batch.row_length,
        fill=FILL,
        updates=config.batch.updates.total,
        epochs=config.batch.updates.epochs,
        shards=max(1, slot_shards(mesh) // samplers),
        append_length=rollout.prompt_append,
        columns=rollout.table_width * rollout.block,
        copies=COPIES,
        longest=max(response, rollout.max_response_tokens),
        ahead=rollout.step_limit.lag,
    )


def active_parameters(model: ModelConfig) -> float:
    """Parameters of the matrix products that a token takes part in: all but the embedding table and the experts that
    were not chosen."""
    total = parameter_count(model)
    if not model.tie_embeddings:
        total -= model.vocab_size * model.d_model
    if model.experts.count:
        layers = len(layers_with("router", model))
        experts = 3 * layers * model.experts.count * model.d_model * model.d_ff
        total -= experts * (1 - model.experts.per_token / model.experts.count)
    return float(total)


def update_flops(config: Config, model: ModelConfig, tokens: float, length: float) -> float:
    """FLOPs of forward, backward and recomputation over so many tokens in trajectories of that length.

    With P parameters in products: 2 P a token forward, 2 P for the gradient of the inputs and 2 P for that of the
    parameters, and 2 P again with rematerialization. The frozen weights of an adapter have no gradient, while the A
    parameters of the adapter take all of these products. Attention takes 2 products of 2 FLOPs over length/2 keys
    forward, 5 of them backward, and the 2 again under `full`. Recurrent layers take `delta.token_flops` forward, twice
    that backward, and it again with rematerialization.
    """
    remat = config.update.remat
    passes = 6.0 if remat == "none" else 8.0
    products = passes * active_parameters(model)
    if config.lora.rank:
        products = (passes - 2.0) * active_parameters(model) + passes * parameter_count(model, config.lora)
    scores = 9 if remat == "full" else 7
    recurrent = {"none": 3.0}.get(remat, 4.0) * recurrent_flops(model, config.batch.row_length)
    return tokens * (products + scores * model.attention_width * length + recurrent)


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
    base = parts.get("frozen weights", 0.0)
    copy = parts.get("sampler", 0.0)  # made in each step; none where the sampler reads the weights of the adapter
    sampler = copy or base
    resident += base if copy else 0.0
    active = active_parameters(model)
    rows = max(1, work.slots * work.samplers // slot_shards(mesh))
    length = work.prompt + work.response
    attention = 4 * model.attention_width * length / tensor
    attention += recurrent_flops(model, 1) / tensor
    shares = max(1, work.append_rows // 8)
    cached = {"arguments": sampler + parts["cache"], "results": parts["cache"], "aliased": parts["cache"]}
    programs = [
        Needs(
            "weight_sync",
            arguments=parts["masters"] + base,
            results=copy,
            resident=moments + scoring + (parts["cache"] if runs_on else 0.0),
            traffic=parts["masters"] + 2 * copy,
            collectives=_collective("all-gather", copy, fsdp * sequence, 1.0),
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
    links = axis_shares(mesh, deployment.topology)
    for needs in programs:
        for name, entry in needs.collectives.items():
            axis = name.partition(" over ")[2] or ("tensor" if needs.name == "decode" else "")
            entry["links"] = links[axis]
    return programs


def _estimate_update(deployment: Deployment, parts: dict[str, float]) -> Needs:
    config, model, mesh, work = deployment.config, deployment.model, deployment.mesh, deployment.work
    data, fsdp, sequence, tensor = (mesh.shape[axis] for axis in AXES)
    shared, trained = fsdp * sequence, parameter_count(model, config.lora)
    state, base = trained_like(config, model, mesh)
    trainer, frozen = device_bytes(state), device_bytes(base)
    itemsize = 4 if model.compute_dtype == "float32" else 2
    tokens = work.micro_rows // row_shards(mesh) * work.row_length // sequence
    micro = work.micro_batches / work.updates
    runs_on = parts["cache"] + parts.get("sampler", 0.0) if config.rollout.step_limit.lag else 0.0
    # Weights are gathered before each use (forward, backward) and gradients of what is trained scattered. The layers of
    # frozen weights are no loop, so that the backward pass finds what the forward pass gathered; those in few bits are
    # dequantized and gathered in each pass. Heads are summed over `tensor`. Keys and values of whole rows are gathered
    # over `sequence` in both passes, their gradients scattered.
    weights = itemsize * parameter_count(model) / tensor
    pairs = itemsize * trained / tensor if config.lora.rank else 0.0
    passes, few_bits = 2 if config.update.remat == "none" else 3, config.lora.base_bits < 16
    gathered = weights if config.lora.rank and shared > 1 and not few_bits else weights / model.layers
    again = (passes - 1) * itemsize * matrix_count(model) / tensor if few_bits else 0.0
    read = parts["frozen weights"] * shared if few_bits else weights
    residual = tokens * model.d_model * 4.0
    keys = 2 * itemsize * sequence * tokens * model.key_columns / tensor
    return Needs(
        "update",
        resident=parts.get("reference", 0.0) + parts.get("teacher", 0.0) + runs_on,
        arguments=trainer + frozen + device_bytes(batch_like(config, mesh, model)),
        results=trainer,
        aliased=trainer,
        temporaries=2 * parts["gradients"] + parts["layers kept"] + parts["logits"] + gathered,
        flops=micro * update_flops(config, model, tokens, work.prompt + work.response) / tensor,
        traffic=micro * (4 * read + (0.0 if config.lora.rank else 4 * pairs)) + 3 * trainer,
        collectives=_collective("all-gather", weights + pairs + again, shared, (1 if config.lora.rank else 2) * micro)
        | _collective("reduce-scatter", 2 * (pairs or weights), shared, micro)
        | _collective("all-gather", keys, sequence, 2 * micro, "sequence")
        | _collective("reduce-scatter", keys, sequence, micro, "sequence")
        # Over `tensor` the residual stream, gathered and scattered twice a layer and once at its ends; over `data` the
        # gradients, added up by each part of it first (`update.accumulate`).
        | _collective("all-gather", (2 * model.layers + 1) * residual, tensor, passes * micro, "tensor")
        | _collective("reduce-scatter", (2 * model.layers + 1) * residual, tensor, passes * micro, "tensor")
        | _collective("all-reduce", parts["gradients"], data, 1.0, "data", deployment.topology.slices),
    )


def _collective(
    kind: str, size: float, group: int, runs: float, axis: str = "", slices: int = 1
) -> dict[str, dict[str, float]]:
    if group == 1 or not size:
        return {}
    share = (group - 1) / group * (2 if kind == "all-reduce" else 1)
    entry = {"runs": runs, "bytes": size * runs, "moved": size * share * runs}
    entry |= {"between": between_slices(kind, size, group, slices) * runs} if slices > 1 else {}
    return {f"{kind} over {axis}" if axis else kind: entry}
