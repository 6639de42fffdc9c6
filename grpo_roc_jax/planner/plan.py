"""Plan a run for a pod that is not attached: `grpo-roc plan CONFIG.yaml --topology v5p:4x4x4`.

The programs of training are compiled for that pod from shapes alone: the weight sync with its check, the decode chunk,
the appends and the update. Their memory, collectives and FLOPs are read from the compiled code, and `planner.roofline`
turns them into lower bounds on the time of a step. Without a compiler for the pod the same figures come from formulas
(`planner.estimate`).
"""

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.engine import make_engine
from grpo_roc_jax.learner.loss import UpdateConfig
from grpo_roc_jax.learner.update import TrainState, make_update_step
from grpo_roc_jax.method.compose import needs_reference, teacher_of
from grpo_roc_jax.method.distillation import SelfTeacher
from grpo_roc_jax.model.block_attention import WINDOW_COLUMNS
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.convert import find_model, is_here, read_published, resolve_config, with_replay
from grpo_roc_jax.model.experts import check_grouped
from grpo_roc_jax.model.paged import check_paged
from grpo_roc_jax.model.parallel import FUSED, paths
from grpo_roc_jax.model.published import read_config
from grpo_roc_jax.model.sharding import (
    ShardingConfig,
    device_bytes,
    make_mesh,
    platform_of,
    process_mesh,
    processes_together,
    slice_of,
)
from grpo_roc_jax.model.transformer import Params, layer_shapes, layers_with
from grpo_roc_jax.planner.arguments import batch_like
from grpo_roc_jax.planner.estimate import Deployment, abstract_mesh, estimate, fixed_parts, processes_of, work_of
from grpo_roc_jax.planner.hlo import parse_hlo
from grpo_roc_jax.planner.hlo_cost import largest_gather, read_cost
from grpo_roc_jax.planner.hlo_loops import check_loops
from grpo_roc_jax.planner.known_shapes import KNOWN_SHAPES
from grpo_roc_jax.planner.links import Torus, torus_of
from grpo_roc_jax.planner.roofline import Needs, Work, kind_of, program_lines, step_lines, step_times
from grpo_roc_jax.planner.schedules import schedule_lines, simulate_schedules
from grpo_roc_jax.planner.suggest import advice, slot_lines, suggest
from grpo_roc_jax.planner.topology import (
    FRACTION,
    Chip,
    Topology,
    has_compiler,
    parse_topology,
    topology_devices,
)
from grpo_roc_jax.record.run_dir import versions
from grpo_roc_jax.run.components import check_layout, fit_length, resolve_model, resolve_text
from grpo_roc_jax.run.learning import find_teacher
from grpo_roc_jax.run.policy import frozen_like, parameter_count, policy_like, sampled_like, trained_like
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.settings.files import read_json_object
from grpo_roc_jax.text.tokenizer import load_tokenizer


def chosen_stages(config: Config, name: str) -> list[Config]:
    """The configurations of all stages, or of the one of that name; each has the stage in its name.

    Raises:
        ConfigError: There is no such stage.
    """
    if not config.stages:
        if name:
            raise ConfigError(f"--stage {name}: {config.name} has no stages; leave the option out")
        return [config]
    pairs = zip(config.stages, config.staged(), strict=True)
    stages = [
        replace(staged, name=f"{config.name}, {stage.name}") for stage, staged in pairs if name in ("", stage.name)
    ]
    if not stages:
        raise ConfigError(f"--stage {name}: must be one of {', '.join(stage.name for stage in config.stages)}")
    return stages


def plan(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """The report on one configuration."""
    topology = parse_topology(options.topology)
    if options.suggest:  # whatever the mesh and the slots of the recipe: any pod has these; `sequence` is not searched
        slots = math.ceil(config.rollout.slots / topology.chips) * topology.chips
        sharding = ShardingConfig(sequence=config.sharding.sequence)
        config = replace(config, sharding=sharding, rollout=replace(config.rollout, slots=slots))
    arithmetic = options.arithmetic or not has_compiler(topology)
    only, longest = chosen_programs(options.programs, arithmetic), config.rollout.max_response_tokens
    if not 0 <= options.mean_response <= longest:
        raise ConfigError(
            f"--mean_response {options.mean_response:g}; must be at most rollout.max_response_tokens = {longest}, or 0 "
            "for half of that"
        )
    deployment = deployment_of(config, topology, options.model_shape, arithmetic, options.mean_response)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if options.suggest:
        if ignored := [name for name in ("simulate", "traces", "programs") if getattr(options, name)]:
            raise ConfigError(f"--suggest compares settings and reads no --{ignored[0]}; plan one of them with it")
        return describe_suggestions(deployment, say)
    programs = needs_of(deployment, only, say)
    report = describe(deployment, programs, only)
    if options.simulate or options.traces:
        simulated = simulate_schedules(config, deployment.work, programs, topology.chip, options.traces)
        report |= {"simulated": simulated, "lines": report["lines"] + schedule_lines(simulated)}
    return report


ESTIMATED = ("weight_sync", "append", "decode", "update")
"""Kinds of programs that formulas know."""
COMPILED = (*ESTIMATED, "weight_check_trainer", "weight_check_sampler", "copy")
"""Kinds of programs that are compiled."""


def chosen_programs(names: str, arithmetic: bool) -> tuple[str, ...]:
    """The kinds of programs that `--programs` names; none: all.

    Raises:
        ConfigError: There are no such programs.
    """
    known, chosen = ESTIMATED if arithmetic else COMPILED, tuple(names.split(",")) if names else ()
    if unknown := [name for name in chosen if name not in known]:
        how = "by arithmetic they are" if arithmetic else "must be of"
        raise ConfigError(f"--programs {names}: there is no {unknown[0]!r}; {how} {', '.join(known)}")
    return chosen


def describe_suggestions(deployment: Deployment, say: Callable[[str], Any]) -> dict[str, Any]:
    """The fastest settings that fit, by arithmetic; where the pod has a compiler, those of them whose decoding and
    update do as compiled, in the order of the times that these have."""
    config, topology = deployment.config, deployment.topology
    best, how = suggest(deployment), "by arithmetic"
    if not by_arithmetic(deployment) and best:
        compiled, how = [], "as compiled"
        for suggestion in best:
            mesh = planned_mesh(suggestion.deployment.config, topology, False)
            work = work_of(suggestion.deployment.config, mesh, topology, deployment.work.response)
            real = replace(suggestion.deployment, mesh=mesh, work=work)
            say(f"compiling {suggestion.settings}")
            programs = {needs.name: needs for needs in suggestion.programs}
            needed = compile_programs(real, ("decode", "update"), say)
            programs |= {kind_of(needs.name): needs for needs in needed if not needs.name.startswith(COMPARED)}
            compiled.append(replace(suggestion, programs=tuple(programs.values())))
        best = sorted(
            (suggestion for suggestion in compiled if suggestion.fits), key=lambda suggestion: suggestion.seconds
        )
    lines = [f"{config.name} on {topology.name} ({how}): the fastest that fit, at most one for each mesh"]
    for rank, suggestion in enumerate(best, 1):
        first, *yaml = suggestion.lines()
        lines += [f"{rank}. {first}", *yaml]
    if not best:
        lines += ["nothing fits", *advice(deployment, estimate(deployment))]
    suggested = [{"settings": suggestion.settings, "step_s": suggestion.seconds} for suggestion in best]
    return {"plan": config.name, "topology": topology.name, "fits": bool(best), "suggested": suggested, "lines": lines}


def deployment_of(config: Config, topology: Topology, shape: str, arithmetic: bool, response: float) -> Deployment:
    """The run on the pod.

    Args:
        config: Configuration of the run.
        topology: The pod to plan for.
        shape: A key of `KNOWN_SHAPES` or the path of a `config.json`, a model directory or a GGUF file, for a
            `model.path` that is not on this machine.
        arithmetic: Use formulas, which compile nothing and work for any topology.
        response: Mean tokens of a response; 0 means half of the longest.

    Raises:
        TopologyError: there is no compiler for the topology.
        ValueError: settings that do not fit each other.
    """
    model = model_of(config, shape)
    mesh = planned_mesh(config, topology, arithmetic)
    check_layout(config, model, mesh, "tpu" if topology.chip.tpu else "gpu", processes_of(mesh, topology))
    if config.rollout.attention == "paged":
        check_paged(model, "tpu" if topology.chip.tpu else "gpu", mesh.shape["tensor"])
    work = work_of(config, mesh, topology, response)
    return Deployment(
        config, model, mesh, topology, work, teacher_model(config, model.vocab_size if config.model.path else 0)
    )


def by_arithmetic(deployment: Deployment) -> bool:
    """Whether formulas stand in for the compiler."""
    return isinstance(deployment.mesh, AbstractMesh)


def needs_of(deployment: Deployment, only: tuple[str, ...], say: Callable[[str], Any]) -> list[Needs]:
    """What the programs of a step need.

    Args:
        deployment: What to plan.
        only: Kinds of programs to compile (weight_sync, weight_check_trainer, weight_check_sampler, decode, append,
            copy, update); none: all.
        say: Called with progress.
    """
    if by_arithmetic(deployment):
        return [needs for needs in estimate(deployment) if not only or needs.name in only]
    return list(compile_programs(deployment, only, say))


def model_of(config: Config, shape: str) -> ModelConfig:
    """The shape of the model, in the dtype that accelerators compute in.

    Raises:
        ValueError: the model is neither on this machine nor a known one.
    """
    name = shape or config.model.path
    if name in KNOWN_SHAPES:
        model = with_replay(KNOWN_SHAPES[name], config.model)
    elif shape and (is_here(shape) or Path(shape).is_file()):
        published = read_published(find_model(shape)) if is_here(shape) else read_json_object(Path(shape))
        model = with_replay(read_config(published, config.model.ignore_keys), config.model)
    elif shape:
        raise ValueError(f"--model_shape {shape!r} is no file; known are {', '.join(KNOWN_SHAPES)}")
    elif config.model.path and not is_here(config.model.path):
        raise ValueError(
            f"model.path = {config.model.path!r} is neither a directory or GGUF file here nor a known model; give "
            f"--model_shape, one of {', '.join(KNOWN_SHAPES)} or a config.json"
        )
    else:
        model = resolve_config(config.model)
    dtype = config.model.compute_dtype
    model = replace(model, compute_dtype="bfloat16" if dtype == "auto" else dtype)
    if not model.vocab_size:
        model = resolve_model(model, load_tokenizer(resolve_text(config)))
    return fit_length(model, config.rollout.max_row_tokens)


def teacher_model(config: Config, rows: int = 0) -> ModelConfig | None:
    """The shape of the other model that scores the rollouts; None without one. `rows`: see `load_tokenizer`.

    Raises:
        ValueError: it is neither on this machine nor a known one.
    """
    part = teacher_of(config)
    if part is None or isinstance(part, SelfTeacher):
        return None
    if part.path in KNOWN_SHAPES:
        return replace(KNOWN_SHAPES[part.path], compute_dtype="bfloat16")
    teacher = find_teacher(config, load_tokenizer(resolve_text(config), rows))
    return teacher and teacher[1]


def planned_mesh(config: Config, topology: Topology, arithmetic: bool) -> Mesh | AbstractMesh:
    """The trainer's mesh over the devices of the topology, or an abstract mesh for plans by arithmetic.

    Raises:
        ValueError: the product of the axes is not the number of chips, or `data` does not divide over the slices.
    """
    if not arithmetic:
        return make_mesh(config.sharding, topology_devices(topology))
    return abstract_mesh(config, topology)


# ---- by the compiler -----------------------------------------------------------------------------------------------


def compile_programs(deployment: Deployment, only: tuple[str, ...], say: Callable[[str], Any]) -> Iterator[Needs]:
    """The needs of every program of a step, compiled for the mesh; see `Needs.refused` for those that do not fit."""
    config, model, mesh, work = deployment.config, deployment.model, deployment.mesh, deployment.work
    state, base = trained_like(config, model, mesh)
    policy = policy_like(config.lora, state, base)
    engine = make_engine(model, config.rollout, config.sampling, [0], mesh, seed=config.seed)
    sampled, copied = sampled_like(config, model, mesh)
    teacher = device_bytes(frozen_like(deployment.teacher, mesh)) if deployment.teacher else 0.0
    cache = deployment.memory_parts()["cache"]
    resident = resident_bytes(config, state, policy, (device_bytes(sampled), copied), teacher, cache)
    alone = one_process(mesh, deployment.topology)
    local = policy if alone is mesh else policy_like(config.lora, *trained_like(config, model, alone))

    def needs_by(path: str) -> Iterator[Needs]:
        rollout = replace(config.rollout, attention=path)
        sampler = make_engine(model, rollout, config.sampling, [0], alone, seed=config.seed)
        programs = [*engine.lower(policy)] if alone is not mesh else []
        programs = [(name, part) for name, part in programs if kind_of(name) in SHARED]
        programs += [program for program in sampler.lower(local) if alone is mesh or kind_of(program[0]) not in SHARED]
        for name, lowered in programs:
            kind = kind_of(name)
            if only and kind not in only:
                continue
            if path != paths_taken[0] and kind not in BY_PATH:
                continue
            on = mesh if kind in SHARED else alone
            slices = slices_of(mesh) if kind in SHARED else ()
            torus = torus_of(on, deployment.topology)
            needs = read_needs(name, lowered, resident[kind], loops_of(kind, work), say, slices, torus)
            yield replace(needs, **fixed_parts(kind, sampled, model, work))

    paths_taken = cache_paths(config, model, alone)
    yield from chosen_path({path: [*needs_by(path)] for path in paths_taken}, deployment.topology.chip)
    if only and "update" not in only:
        return
    frozen = () if base is None else (base,)
    trip_counts = [work.micro_batches / work.updates, attention_trip_count(work)]
    temperature = config.sampling.temperature
    for name, update in update_paths(config.update):
        step = make_update_step(
            model, config.surrogate, config.optim, update, mesh, temperature=temperature, lora=config.lora
        )
        lowered = step.lower(state, batch_like(config, mesh, model), *frozen)
        torus = torus_of(mesh, deployment.topology)
        yield read_needs(name, lowered, resident["update"], trip_counts, say, slices_of(mesh), torus)


BY_PATH = ("decode", "append")
"""Kinds of programs that attend to the cache."""


def cache_paths(config: Config, model: ModelConfig, mesh: Mesh) -> tuple[str, ...]:
    """The paths of attention to the cache that a run on these devices chooses from."""
    if config.rollout.attention != "auto" or config.rollout.cache_dtype != "full":
        return (config.rollout.attention,)
    try:
        check_paged(model, platform_of(mesh), mesh.shape["tensor"])
    except ValueError:
        return ("xla",)
    return "xla", "paged"


def chosen_path(by_path: Mapping[str, Sequence[Needs]], chip: Chip) -> Iterator[Needs]:
    """The programs of sampling with the path of attention whose largest decode chunk has the lowest bound; those of the
    other one are named as not taken."""

    def seconds(path: str) -> float:
        decodes = [needs for needs in by_path[path] if kind_of(needs.name) == "decode"]
        return math.inf if not decodes or decodes[-1].refused else decodes[-1].seconds(chip)

    best = min(by_path, key=seconds)
    needs_by_name = {needs.name: needs for needs in by_path[best]}
    for needs in next(iter(by_path.values())):  # the first path has the programs that do not attend to the cache too
        yield needs_by_name.get(needs.name, needs)
    for path, programs in by_path.items():
        if path != best:
            yield from (
                replace(needs, name=f"{COMPARED}{needs.name} by {path}")
                for needs in programs
                if kind_of(needs.name) in BY_PATH
            )


def slices_of(mesh: Mesh) -> tuple[int, ...]:
    """The slice of each device of the mesh; empty if there is one only."""
    slices = tuple(slice_of(device) for device in mesh.devices.flat)
    return slices if len(set(slices)) > 1 else ()


def loops_of(kind: str, work: Work) -> list[float]:
    """Trip counts of the open loops of a program of sampling: the steps of a chunk, and the windows of a full row."""
    windows = float(math.ceil(work.columns / WINDOW_COLUMNS))
    return [windows] if kind == "append" else [float(work.chunk), windows]


COMPARED = "not taken: "
"""Prefix of the names of programs that are shown for comparison only."""


def update_paths(update: UpdateConfig) -> list[tuple[str, UpdateConfig]]:
    """(name, settings) of the configured update and, if its attention is a kernel, of the same in plain XLA."""
    paths = [("update", update)]
    if update.attention in FUSED.values():
        paths.append((f"{COMPARED}update by blocked", replace(update, attention="blocked")))
    return paths


SHARED = ("weight_sync", "weight_check_trainer")
"""Programs that all processes run together. Each process runs the others on its own devices."""


def one_process(mesh: Mesh, topology: Topology) -> Mesh:
    """The mesh of the sampler of one process, or of those that sample as one. The compiler needs it on a slice of its
    own for programs that run there alone. With one process it is the whole mesh."""
    if not mesh.is_multi_process:
        return mesh
    part, together = process_mesh(mesh, 0), processes_together(mesh)
    if part.size == mesh.size:
        return mesh
    wide, high, deep = topology.host_bounds()
    flat = (2 * wide, high * together // 2) if together >= 4 else (wide, high * together)
    grid = (wide, high, deep * together) if len(topology.grid) == 3 else flat
    devices = topology_devices(replace(topology, grid=grid, slices=1))
    if len(devices) != part.size:
        return part
    return Mesh(np.array(devices).reshape(part.devices.shape), part.axis_names, axis_types=part.axis_types)


def resident_bytes(
    config: Config,
    state: TrainState,
    policy: Params,
    sampler: tuple[float, float],
    teacher: float = 0.0,
    cache: float = 0.0,
) -> dict[str, float]:
    """Program -> bytes that the run holds on a device meanwhile but does not pass to the program.

    The sampler's weights and the cache exist during rollouts and are freed before the update; reference and teacher
    stay, and so do the frozen weights of an adapter. Where rollouts run on, the cache stays too, and the weights until
    the next ones are made.

    Args:
        config: Configuration of the run.
        state: Shapes of the training state.
        policy: Shapes of the trainer's parameters.
        sampler: Bytes of the sampler's parameters, and of those among them that are not the trainer's arrays.
        teacher: Bytes of the other model that scores.
        cache: Bytes of the cache.
    """
    runs_on = bool(config.rollout.step_limit.lag)
    cache_bytes = cache if runs_on else 0.0
    params, trained = device_bytes(policy), device_bytes(state.params)
    reference = teacher + (trained if needs_reference(config) else 0.0)
    state_bytes = (
        device_bytes(state.replace(opt_state=()) if config.optim.offload and not runs_on else state) + reference
    )
    sampled, gathered = sampler
    # The programs of the sampler are given what it shares with the trainer.
    trainer = state_bytes + (params - trained) - (sampled - gathered)
    return {
        "weight_sync": state_bytes - trained + gathered + cache_bytes,
        "weight_check_trainer": state_bytes - trained + gathered + cache_bytes,
        "weight_check_sampler": trainer + cache_bytes,
        "decode": trainer,
        "append": trainer,
        "copy": trainer + sampled,
        "update": reference + cache_bytes + (gathered if runs_on else 0.0),
    }


def attention_trip_count(work: Work) -> float:
    """Mean number of key blocks that a query block visits in `attention.attend_blocked`, for a mean trajectory."""
    return max(1.0, min(work.row_length, work.prompt + work.response) / (2 * 512))


def read_needs(
    name: str,
    lowered: jax.stages.Lowered,
    resident: float,
    trip_counts: Sequence[float],
    say: Callable[[str], Any],
    slices: tuple[int, ...] = (),
    torus: Torus | None = None,
) -> Needs:
    """Compiles one program and reads what it needs; `trip_counts` as in `hlo_cost.read_cost`, `slices` those of the
    devices in the order of the mesh, where there are several, and `torus` their chips.

    Raises:
        ValueError: See `check_loops`.
    """
    begun = time.perf_counter()
    say(f"compiling {name}")
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = next((line for line in str(error).splitlines() if "hbm" in line), str(error).splitlines()[0])
        return Needs(name, resident=resident, refused=message.strip()[:300], compile_s=time.perf_counter() - begun)
    memory = compiled.memory_analysis()
    program = replace(parse_hlo(compiled.as_text()), slices=slices, torus=torus)
    check_loops(program, jax.tree.leaves(compiled.input_shardings), name)
    cost, gather = read_cost(program, trip_counts), largest_gather(program)
    return Needs(
        name,
        arguments=memory.argument_size_in_bytes,
        results=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        resident=resident,
        flops=cost.flops,
        traffic=cost.traffic,
        collectives=cost.by_kind(),
        kernels=cost.kernels,
        largest_gather=gather.bytes if gather else 0.0,
        gathered_from=gather.source if gather else "",
        compile_s=time.perf_counter() - begun,
    )


# ---- the report ----------------------------------------------------------------------------------------------------


def gather_limit(model: ModelConfig) -> float:
    """Bytes of the largest array that may be gathered at once: one layer or the embedding, in float32."""
    sizes = {name: np.prod(shape) for name, (shape, _) in layer_shapes(model).items()}
    layers = [sum(size for name, size in sizes.items() if i in layers_with(name, model)) for i in range(model.layers)]
    return 4.0 * max(*layers, model.vocab_size * model.d_model)


def open_lines(config: Config, model: ModelConfig, mesh: Mesh) -> list[str]:
    """The choice that a run makes by measurement, for which the plan takes the first candidate."""
    names = paths(model, config.batch.row_length, mesh) if config.update.attention == "auto" else ("",)
    line = f"planned with {names[0]}; a run times {' and '.join(names)} at its start and takes the faster"
    return [f"update.attention auto: {line} (--update.attention {names[-1]} plans that)"] if len(names) > 1 else []


def path_lines(programs: Sequence[Needs], chip: Chip) -> list[str]:
    """Which path of attention to the cache was planned with, where a run chooses it by measurement."""
    others = [needs for needs in programs if needs.name.startswith(f"{COMPARED}decode")]
    if not others:
        return []
    name, _, other = others[-1].name.removeprefix(COMPARED).partition(" by ")
    chosen = next(needs for needs in programs if needs.name == name)
    path = "paged" if other == "xla" else "xla"
    times = f"{1e3 * chosen.seconds(chip):.1f} ms a chunk at least, {1e3 * others[-1].seconds(chip):.1f} by {other}"
    return [
        f"rollout.attention auto: planned with {path} ({times}); a run times both and takes the faster. By "
        "xla the blocks of a row are copied side by side before they are multiplied: read, written and read again"
    ]


def expert_lines(model: ModelConfig, topology: Topology) -> list[str]:
    """What a run on this machine would be refused for; see `check_grouped`."""
    try:
        check_grouped(model, "tpu" if topology.chip.tpu else "gpu", os.environ.get("XLA_FLAGS", ""))
    except ValueError as error:
        return [f"a run is refused: {error}"]
    return []


def gather_line(programs: Sequence[Needs], limit: float) -> str:
    """The largest gather of all programs, as text."""
    largest = max(programs, key=lambda needs: needs.largest_gather)
    return (
        f"largest gather: {largest.largest_gather / 1e9:.3f} GB in {largest.name} ({largest.gathered_from}); one "
        f"layer, or the embedding, in float32 is {limit / 1e9:.3f} GB"
    )


def describe(deployment: Deployment, programs: list[Needs], only: tuple[str, ...]) -> dict[str, Any]:
    """The report as plain values, with its text under `lines`."""
    config, model, mesh, work = deployment.config, deployment.model, deployment.mesh, deployment.work
    topology, chip, limit = deployment.topology, deployment.topology.chip, gather_limit(model)
    arithmetic = by_arithmetic(deployment)
    times = step_times(programs, work, chip)
    run_by_config = [needs for needs in programs if not needs.name.startswith(COMPARED)]
    gathering = [needs.name for needs in run_by_config if needs.largest_gather > limit]
    fits = all(needs.fits(chip) for needs in run_by_config) and not gathering
    count = parameter_count(model)
    how = "by arithmetic" if arithmetic else "as compiled"
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items())
    processes = processes_of(mesh, topology)
    together = processes_together(mesh, processes)
    team = f", {together} of which sample as one and have slots in common" if together > 1 else ""
    reserved = "" if chip.tpu else f" (of which JAX takes {chip.share:.0%}: {FRACTION})"
    lines = [
        f"{config.name} on {topology.name} ({how}): {count / 1e9:.3f} billion parameters, mesh {axes}, "
        f"{processes} processes{team}",
        f"a chip has {chip.memory_bytes / 1e9:.0f} GB{reserved}, {chip.flops / 1e12:.0f} TFLOP/s, "
        f"{chip.memory_rate / 1e9:.0f} GB/s, {chip.link_rate / 1e9:.0f} GB/s of links ({chip.source})",
        *program_lines(programs, chip),
        *(step_lines(times, work, topology.chips) if times else []),
        *([] if arithmetic else [gather_line(run_by_config, limit), *open_lines(config, model, mesh)]),
        *path_lines(programs, chip),
        *[f"{name} gathers more than that at once" for name in gathering],
        *expert_lines(model, topology),
        ("fits" if fits else "DOES NOT FIT") + (f" ({', '.join(only)} alone)" if only else ""),
        *slot_lines(config, work),
        *([] if fits else advice(deployment, run_by_config)),
    ]
    return {
        "plan": config.name,
        "topology": topology.name,
        "how": how,
        "fits": fits,
        "only": list(only),
        "mesh": dict(mesh.shape),
        "processes": processes,
        "parameters": count,
        "chip": asdict(chip),
        "model": asdict(model),
        "work": asdict(work) | {"decode_steps": work.decode_steps, "micro_batches": work.micro_batches},
        "programs": [asdict(needs) | {"total": needs.total, "times_s": needs.times(chip)} for needs in programs],
        "step_s": asdict(times) | {"total": times.total, "tokens_per_s": work.tokens / times.total} if times else None,
        "gather_limit_bytes": limit,
        "versions": {"python": platform.python_version()} | versions(("jax", "jaxlib", "libtpu")),
        "lines": lines,
    }
