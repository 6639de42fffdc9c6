"""What the programs of a run need, by formulas instead of a compiler.

Arguments are those of the programs, by their shapes. The formulas leave out the compiler's scratch memory.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.programs import COPIES
from grpo_roc_jax.learner.loss import head_of
from grpo_roc_jax.learner.pack import rows_per_micro_batch
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.delta import token_flops
from grpo_roc_jax.model.experts import BY_EXPERT
from grpo_roc_jax.model.low_precision import is_quantized
from grpo_roc_jax.model.sharding import (
    AXES,
    check_processes,
    check_slices,
    device_bytes,
    process_count,
    processes_together,
    row_shards,
    slot_shards,
)
from grpo_roc_jax.model.transformer import Params, layer_shapes, layers_with
from grpo_roc_jax.planner.arguments import batch_like, numbers_held
from grpo_roc_jax.planner.hlo_cost import between_slices
from grpo_roc_jax.planner.links import axis_shares
from grpo_roc_jax.planner.roofline import Needs, Work
from grpo_roc_jax.planner.topology import Topology
from grpo_roc_jax.run.policy import frozen_like, memory_parts, parameter_count, sampled_like, trained_like


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
        return parts | ({"teacher": device_bytes(frozen_like(self.teacher, self.mesh))} if self.teacher else {})


FILL = 0.9
"""Share of packed rows that is assumed to hold tokens; first-fit decreasing reaches it on lengths as rollouts have."""


def abstract_mesh(config: Config, topology: Topology) -> AbstractMesh:
    """The trainer's mesh with no devices.

    Raises:
        ValueError: the product of the axes is not the number of chips, `data` does not divide over the slices, or the
            devices of a process form no block.
    """
    shape = config.sharding.shape(topology.chips)
    check_slices(shape[0], topology.slices)
    check_processes(shape, topology.processes)
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
    """Parameters of the matrix products that a token takes part in: all but the embedding tables and the experts that
    were not chosen."""
    total = parameter_count(model) - layer_table(model)
    if not model.tie_embeddings:
        total -= model.vocab_size * model.d_model
    if model.experts.count:
        layers = len(layers_with("router", model))
        experts = 3 * layers * model.experts.count * model.d_model * model.d_ff
        total -= experts * (1 - model.experts.per_token / model.experts.count)
    return float(total)


def layer_table(model: ModelConfig) -> int:
    """Numbers of the embedding with a row for each token and layer, which is looked up and not multiplied."""
    return model.vocab_size * model.layers * model.extras.layer_embed


def update_flops(config: Config, model: ModelConfig, tokens: float, length: float) -> float:
    """FLOPs of forward, backward and recomputation over so many tokens in trajectories of that length.

    With P parameters in products: 2 P a token forward, 2 P for the gradient of the inputs and 2 P for that of the
    parameters. With rematerialization come 2 P again for the layers but their last products, whose results nobody
    needs, and for the unembedding where its logits are not stored. The frozen weights of an adapter have no gradient,
    while the A parameters of the adapter take all of these products. Attention takes 2 products of 2 FLOPs over
    length/2 keys forward, 5 of them backward, and the 2 again under `full`. Recurrent layers take `delta.token_flops`
    forward, twice that backward, and it again with rematerialization.
    """
    remat, shapes, head = config.update.remat, layer_shapes(model), model.vocab_size * model.d_model
    active, share = active_parameters(model), 1.0
    if model.experts.count:
        share = model.experts.per_token / model.experts.count
    last = sum(
        len(layers_with(name, model)) * math.prod(shapes[name][0]) * (share if name == "w_down" else 1.0)
        for name in ("w_down", "d_down", "s_down")
        if name in shapes
    )
    again = 0.0 if remat == "none" else active - head - last
    again += 0.0 if head_of(config.update, model).stores_logits else head
    products = 6 * active + 2 * again
    if config.lora.rank:
        products += (6.0 if remat == "none" else 8.0) * parameter_count(model, config.lora) - 2 * active
    scores = 9 if remat == "full" else 7
    recurrent = {"none": 3.0}.get(remat, 4.0) * recurrent_flops(model, config.batch.row_length)
    return tokens * (products + scores * model.attention_width * length + recurrent)


def itemsize_of(model: ModelConfig) -> int:
    """Bytes of a number of the compute dtype on accelerators."""
    return 4 if model.compute_dtype == "float32" else 2


def recurrent_flops(model: ModelConfig, length: int) -> float:
    """FLOPs a token of all recurrent layers; see `delta.token_flops`."""
    return token_flops(model.delta, length) * (model.layers - sum(model.attends)) if model.delta else 0.0


def estimate(deployment: Deployment) -> list[Needs]:
    """What one device needs for the weight sync, an append, a decode chunk and the update of all micro-batches."""
    config, mesh, parts = deployment.config, deployment.mesh, deployment.memory_parts()
    runs_on = bool(config.rollout.step_limit.lag)
    moments = 0.0 if config.optim.offload and not runs_on else parts["moments"]
    scoring = parts.get("reference", 0.0) + parts.get("teacher", 0.0)
    base = parts.get("frozen weights", 0.0)
    sampled, copy = sampled_like(config, deployment.model, mesh)  # the copy is made in each step
    resident = parts["masters"] + moments + scoring + base - (device_bytes(sampled) - copy)
    sync = Needs(
        "weight_sync",
        arguments=parts["masters"] + base,
        results=copy,
        resident=moments + scoring + (parts["cache"] if runs_on else 0.0),
        traffic=parts["masters"] + 2 * copy,
        collectives=_collective("all-gather", copy, mesh.shape["fsdp"] * mesh.shape["sequence"], 1.0),
    )
    programs = [
        sync,
        *_estimate_sampling(deployment, parts["cache"], sampled, resident),
        _estimate_update(deployment, parts),
    ]
    links = axis_shares(mesh, deployment.topology)
    for needs in programs:
        for name, entry in needs.collectives.items():
            entry["links"] = links[name.partition(" over ")[2]]
    return programs


TABLES = ("embed", "layer_embed", "unembed")
"""Parameters with a row for each token: of the embeddings rows are looked up, and only decoding makes logits."""


def append_reads(sampler: Params, model: ModelConfig) -> Params:
    """The sampler's parameters that an append reads whole. Layers that share keys write none."""
    ends = {name: leaf for name, leaf in sampler.items() if name not in TABLES}
    return ends | {"layers": sampler["layers"][: model.layers - model.windows.shared_layers]}


def decode_reads(sampler: Params) -> Params:
    """The sampler's parameters that a decode step reads whole."""
    ends = {name: leaf for name, leaf in sampler.items() if name not in TABLES}
    return ends | {"unembed": sampler.get("unembed", sampler["embed"])}


def _split_experts(parameters: Any) -> tuple[list[Any], list[Any]]:
    """(leaves that every token is multiplied with, those of experts) of the sampler's parameters."""
    named = jax.tree_util.tree_flatten_with_path(parameters, is_leaf=is_quantized)[0]
    chosen = [getattr(path[-1], "key", "") in BY_EXPERT and leaf.ndim == 3 for path, leaf in named]
    leaves = [(leaf, expert) for (_, leaf), expert in zip(named, chosen, strict=True)]
    return [leaf for leaf, expert in leaves if not expert], [leaf for leaf, expert in leaves if expert]


def products(parameters: Any, model: ModelConfig) -> float:
    """FLOPs of a device for the products of one token with the sampler's parameters; of experts with the chosen ones,
    spread evenly over the devices."""
    plain, experts = _split_experts(parameters)
    share = model.experts.per_token / model.experts.count if model.experts.count else 0.0
    return 2 * (numbers_held(plain) + share * numbers_held(experts))


def fixed_parts(kind: str, sampler: Params, model: ModelConfig, work: Work) -> dict[str, float]:
    """The work of a compiled program of sampling that does not depend on the lengths of rows: each decode step and each
    append reads the matrices of all layers once, and multiplies a token of every slot by them. Experts are left out,
    since few may be chosen, and the unembedding if it is the embedding, of which a lookup reads little."""
    if kind == "append":  # no logits
        return {"fixed_traffic": device_bytes(_split_experts(append_reads(sampler, model)["layers"])[0])}
    if kind != "decode":
        return {}
    leaves = _split_experts([sampler["layers"], sampler.get("unembed", ())])[0]
    flops = numbers_held(leaves) * 2 * work.slots / work.shards
    return {"fixed_traffic": work.chunk * device_bytes(leaves), "fixed_flops": work.chunk * flops}


def _estimate_sampling(deployment: Deployment, cache: float, sampled: Params, resident: float) -> list[Needs]:
    """An append and a decode chunk, with these bytes of the cache and of what is held, and these parameters."""
    model, mesh, work = deployment.model, deployment.mesh, deployment.work
    tensor, itemsize = mesh.shape["tensor"], itemsize_of(model)
    layers = model.layers
    rows = max(1, work.slots * work.samplers // slot_shards(mesh))
    attention = 4 * model.attention_width * (work.prompt + work.response) / tensor
    attention += recurrent_flops(model, 1) / tensor
    # One device computes `append_rows` divided among groups of 8.
    new_tokens = deployment.config.rollout.prompt_append * work.append_rows / max(1, work.append_rows // 8)
    # Added up over `tensor` are the two outputs of each layer, but not those of the last one in an append, which keeps
    # its own keys and values only, and the rows of both embeddings; all devices get the logits of a decode step. Dense
    # layers beside those with experts are whole on every device (`publish.sampler_shardings`).
    dense = layers_with("d_down", model) if model.experts.dense_ff else ()
    with_keys = layers - model.windows.shared_layers
    output, embedding = 4.0 * model.d_model, itemsize * (model.d_model + layers * model.extras.layer_embed)
    append_sums = new_tokens * (
        (2 * (with_keys - 1) - sum(layer < with_keys - 1 for layer in dense)) * output + embedding
    )
    decode_sums = rows * ((2 * layers - len(dense)) * output + embedding)
    reads, appended = decode_reads(sampled), append_reads(sampled, model)
    arguments = device_bytes(sampled) + cache
    common = {"arguments": arguments, "results": cache, "aliased": cache, "resident": resident}
    return [
        Needs(
            "append",
            **common,
            flops=(products(appended, model) + recurrent_flops(model, work.prompt) / tensor) * new_tokens,
            traffic=device_bytes(appended),
            fixed_traffic=device_bytes(appended),
            collectives=_collective("all-reduce", append_sums, tensor, 1.0, "tensor"),
        ),
        Needs(
            "decode",
            **common,
            temporaries=3 * 4.0 * rows * model.vocab_size / tensor,
            flops=work.chunk * rows * (products(reads, model) + attention),
            traffic=work.chunk * (device_bytes(reads) + model.key_reads * cache),
            fixed_flops=work.chunk * rows * products(reads, model),
            fixed_traffic=work.chunk * device_bytes(reads),
            collectives=_collective("all-reduce", decode_sums, tensor, work.chunk, "tensor")
            | _collective("all-gather", 4.0 * rows * model.vocab_size, tensor, work.chunk, "tensor"),
        ),
    ]


def _estimate_update(deployment: Deployment, parts: dict[str, float]) -> Needs:
    config, model, mesh, work = deployment.config, deployment.model, deployment.mesh, deployment.work
    data, fsdp, sequence, tensor = (mesh.shape[axis] for axis in AXES)
    shared = fsdp * sequence
    state, base = trained_like(config, model, mesh)
    trainer, frozen = device_bytes(state), device_bytes(base)
    tokens = work.micro_rows // row_shards(mesh) * work.row_length // sequence
    micro = work.micro_batches / work.updates
    runs_on = parts["cache"] + parts.get("sampler", 0.0) if config.rollout.step_limit.lag else 0.0
    itemsize, few_bits = itemsize_of(model), config.lora.base_bits < 16
    weights = itemsize * (parameter_count(model) - layer_table(model)) / tensor
    gathered = weights if config.lora.rank and shared > 1 and not few_bits else weights / model.layers
    table = itemsize * layer_table(model) / (shared * tensor)
    read = (parts["frozen weights"] - table) * shared if few_bits else weights
    return Needs(
        "update",
        resident=parts.get("reference", 0.0) + parts.get("teacher", 0.0) + runs_on,
        arguments=trainer + frozen + device_bytes(batch_like(config, mesh, model)),
        results=trainer,
        aliased=trainer,
        temporaries=2 * parts["gradients"] + parts["layers kept"] + parts["logits"] + gathered,
        flops=micro * update_flops(config, model, tokens, work.prompt + work.response) / tensor,
        traffic=micro * 4 * read + 3 * trainer,
        collectives=_weights_sent(deployment, tokens, micro)
        | _activations_sent(deployment, tokens, micro)
        # Gradients are added up by each part of `data` first (`update.accumulate`).
        | _collective("all-reduce", parts["gradients"], data, 1.0, "data", deployment.topology.slices),
    )


def _weights_sent(deployment: Deployment, tokens: float, micro: float) -> dict[str, dict[str, float]]:
    """What an update of so many micro-batches, with so many tokens on a device, sends over `fsdp` and `sequence`, which
    share the weights.

    Weights are gathered before each use (forward, backward) in the compute dtype, and gradients of what is trained are
    scattered; the lookup gathers the masters of the embedding and scatters their gradient. Frozen layers are no loop.
    On a TPU they are gathered in both passes too. Other compilers gather them once for all micro-batches, and again in
    each where the backward pass recomputes layers; so they gather dense layers before those with experts, which are no
    loop either. Matrices in few bits are dequantized and gathered in each pass; those of experts, but on a TPU, are
    gathered once, as they are stored.
    """
    config, model, mesh = deployment.config, deployment.model, deployment.mesh
    shared, tensor, itemsize = mesh.shape["fsdp"] * mesh.shape["sequence"], mesh.shape["tensor"], itemsize_of(model)
    weights, table = parameter_count(model) - layer_table(model), model.vocab_size * model.d_model / tensor
    weights *= itemsize / tensor
    looked_up = 0.0 if model.tie_embeddings else itemsize * table
    once = 0.0 if deployment.topology.chip.tpu else itemsize * _before_experts(model) / tensor
    gathers = 2 * once + micro * (2 * (weights - looked_up - once) + 4 * table)
    scatters = weights - looked_up + 4 * table
    if config.lora.rank:
        recomputes, few_bits = config.update.remat != "none", config.lora.base_bits < 16
        pairs = itemsize * parameter_count(model, config.lora) / tensor
        layers = weights - looked_up - itemsize * table
        ends = looked_up + 2 * itemsize * table
        if deployment.topology.chip.tpu:
            gathers = micro * ((2 + (few_bits and recomputes)) * layers + ends + 2 * pairs)
        else:
            stored = 0.0
            if few_bits and model.experts.count:
                experts = _split_experts(trained_like(config, model, mesh)[1])[1]
                stored, layers = device_bytes(experts) * shared, layers - itemsize * numbers_held(experts) * shared
            again = (2 + recomputes if few_bits else recomputes) * layers + recomputes * pairs
            gathers = micro * again + (not few_bits) * layers + ends + pairs + stored
        scatters = pairs
    rows, gradients = _layer_rows(deployment, tokens)
    return _collective("all-gather", gathers + micro * shared * gradients, shared, 1.0) | _collective(
        "reduce-scatter", scatters + shared * rows, shared, micro
    )


def _before_experts(model: ModelConfig) -> float:
    """Parameters of the dense layers before those with experts."""
    shapes = layer_shapes(model).items()
    dense = range(model.experts.dense_layers)
    return sum(math.prod(shape) * sum(i in dense for i in layers_with(name, model)) for name, (shape, _) in shapes)


def _layer_rows(deployment: Deployment, tokens: float) -> tuple[float, float]:
    """Bytes of the rows of the embedding of the layers that are exchanged for so many tokens, in float32 or in the
    dtype of frozen weights, and of their gradients."""
    config, model = deployment.config, deployment.model
    rows = tokens * model.layers * model.extras.layer_embed * (float(itemsize_of(model)) if config.lora.rank else 4.0)
    return rows, 0.0 if config.lora.rank else rows


def _activations_sent(deployment: Deployment, tokens: float, micro: float) -> dict[str, dict[str, float]]:
    """What an update of so many micro-batches, with so many tokens on a device, sends over `tensor` and `sequence`.

    Over `tensor` the inputs of the two blocks of a layer are gathered in each pass and the gradients of their outputs
    in the backward pass; outputs are added up and scattered, those of attention again where they are recomputed, and so
    are the gradients of inputs. At the ends are the embeddings and the hidden states before the unembedding. Where a
    token weighs its shared expert, the gradients of that and of the weight are gathered apart, and the output is
    recomputed. Over `sequence` keys and values of whole rows are gathered in each pass, their gradients scattered.
    """
    model, mesh, itemsize = deployment.model, deployment.mesh, itemsize_of(deployment.model)
    tensor, sequence = mesh.shape["tensor"], mesh.shape["sequence"]
    recomputes = deployment.config.update.remat != "none"
    weighed = len(layers_with("s_share", model)) if model.experts.shared_gate else 0
    inputs, outputs = (tokens * model.d_model * size for size in (itemsize, 4.0))
    gathered = 2 * (model.layers * (2 + recomputes) + weighed) * inputs + inputs + outputs
    scattered = ((2 + recomputes) * model.layers + recomputes * weighed) * outputs + 2 * model.layers * inputs
    scattered += 2 * outputs
    rows, gradients = _layer_rows(deployment, tokens)
    keys = 2 * itemsize * sequence * tokens * model.key_columns * model.key_reads / tensor
    return (
        _collective("all-gather", gathered + gradients, tensor, micro, "tensor")
        | _collective("reduce-scatter", scattered + rows, tensor, micro, "tensor")
        | _collective("all-gather", keys, sequence, (1 + recomputes) * micro, "sequence")
        | _collective("reduce-scatter", keys, sequence, micro, "sequence")
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
