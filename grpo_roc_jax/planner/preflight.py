"""Compiles every program of a configuration before a run: `python -m grpo_roc_jax.train CONFIG --preflight`.

Weights, optimizer state and caches are allocated as in a run, so a run that does not fit in memory fails here. With
JAX's compilation cache enabled, the run that follows finds its programs there.
"""

import os
import time
from collections.abc import Iterator, Sequence

import jax

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.programs import ProgramCost, program_cost
from grpo_roc_jax.learner.group_learner import GroupLearner
from grpo_roc_jax.learner.pack import rows_per_micro_batch, worst_case_micro_batches
from grpo_roc_jax.learner.update import state_like
from grpo_roc_jax.method.compose import method_parts, needs_reference, needs_scores, teacher_of
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.sharding import Mesh, row_shards
from grpo_roc_jax.process.progress import phase
from grpo_roc_jax.run.choices import with_update
from grpo_roc_jax.run.components import check_components, make_parts, make_registry
from grpo_roc_jax.run.learning import make_learner, most_rows
from grpo_roc_jax.run.policy import initial_state, parameter_count

MIB = 2**20


def preflight(config: Config) -> list[ProgramCost]:
    """Compiles the programs of sampling, of the update and, if the method needs scores, of the scoring pass.

    Raises:
        ConfigError: settings that do not fit each other.
    """
    with make_parts(config) as (policy, sampling):
        config = with_update(config, policy.model, policy.mesh)  # as a run would choose now
        state, sampler = initial_state(config, policy.model, policy.mesh), sampling.sampler
        costs = sampler.engine.warmup(sampler.engine.publish(policy.full(state.params), 0))
        learner = make_learner(config, policy, sampler.chat)
        for name, lowered in _training_programs(config, learner, state):
            start = time.perf_counter()
            with phase(f"compiling {name}", once=True):
                costs.append(program_cost(name, start, lowered.compile()))
        return costs


def _training_programs(config: Config, groups: GroupLearner, state) -> Iterator[tuple[str, jax.stages.Lowered]]:
    learner = groups.learner
    batch = learner.on_mesh([], config.sampling.temperature).packed
    base = () if learner.base is None else (learner.base,)
    if config.optim.offload:  # as the update finds it
        like = state_like(learner.model, config.optim, learner.mesh, config.lora)
        state = state.replace(opt_state=like.opt_state)
    teaches_itself = teacher_of(config) is not None and groups.teacher is None
    scored = needs_scores(config) or needs_reference(config) or teaches_itself
    scored = scored or config.plan.second.extra_rows > 0
    scored = scored or any(part.earlier((), AlgoState()) is not None for part in method_parts(config))
    if learner.parts is None:
        yield "update", learner.update_program.lower(state, batch, *base)
    else:
        yield from learner.parts.lowered(state, batch, *base)
    if scored:
        yield "score", learner.score_batch.lower(learner.full(state.params), batch)
    if groups.teacher is not None:
        yield "teacher", groups.teacher.score_batch.lower(groups.teacher.params, batch)


def preflight_lines(costs: Sequence[ProgramCost]) -> list[str]:
    """A table of the programs; the last line gives their number, compile time and largest memory."""
    wide = max(len(cost.name) for cost in costs)
    lines = [f"{'program':<{wide}}  {'seconds':>8}  {'scratch MiB':>12}  {'total MiB':>12}"]
    for cost in costs:
        figures = f"{cost.seconds:8.2f}  {cost.temp_bytes / MIB:12.2f}  {cost.total_bytes / MIB:12.2f}"
        lines.append(f"{cost.name:<{wide}}  {figures}")
    largest = max(costs, key=lambda cost: cost.total_bytes)
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    of = f" of {limit / MIB:.0f}" if limit else ""
    seconds = sum(cost.seconds for cost in costs)
    return [
        *lines,
        f"{len(costs)} programs compiled in {seconds:.1f} s; the largest, {largest.name}, takes "
        f"{largest.total_bytes / MIB:.1f}{of} MiB of a device with its arguments",
    ]


TOKEN_BYTES = 4 + 1 + 4 + 4 + 8
"""Bytes of a token of a trajectory on the host: id, mask, log-probability, version, and its text."""
PACKED_BYTES = 9 * 4
"""Bytes of a token of a packed batch on its way to the device."""


def host_parts(config: Config, model: ModelConfig, mesh: Mesh) -> dict[str, float]:
    """Bytes of the host's memory that each part of a run takes at most, by arithmetic from the settings. The
    interpreter with its libraries, and compilation, come on top."""
    rows, tools = config.rollout.max_row_tokens, config.tools
    rounds = 1 + config.group.dynamic_sampling_rounds
    sampled = rounds * config.group.problems * config.resample.sampled(config.group.size)
    shards = row_shards(mesh)
    micro = worst_case_micro_batches(most_rows(config), rows, config.batch, shards)
    width = rows_per_micro_batch(config.batch, shards)
    moments = (8 if config.optim.moment_dtype == "float32" else 6) * parameter_count(model, config.lora)
    workers = tools.workers or os.cpu_count() or 1
    answer = config.reward.answer
    return {
        "trajectories of a step": sampled * rows * TOKEN_BYTES,
        "groups that wait": sampled * rows * TOKEN_BYTES,
        "packed batch": micro * width * config.batch.row_length * PACKED_BYTES,
        "checkpoint": moments + 4 * parameter_count(model, config.lora),
        **({"moments": moments} if config.optim.offload else {}),
        "programs of the policy": workers * tools.memory_mb * MIB,
        **({"sessions": tools.sessions * tools.memory_mb * MIB} if "jupyter_code" in tools.enabled else {}),
        **({"verifiers": answer.workers * answer.memory_mb * MIB} if answer else {}),
    }


def host_lines(config: Config) -> list[str]:
    """`host_parts` as text."""
    _, _, model, mesh, _ = check_components(config, make_registry(config))
    parts = host_parts(config, model, mesh)
    parts_in_mib = ", ".join(f"{name} {part / MIB:.1f}" for name, part in parts.items())
    return [f"memory of the host at most, MiB: {parts_in_mib}; together {sum(parts.values()) / MIB:.0f}"]
