"""Compiles every program of a configuration before a run: `python -m grpo_roc_jax.train CONFIG --preflight`.

Weights, optimizer state and caches are allocated as in a run, so a run that does not fit in memory fails here. With
JAX's compilation cache enabled, the run that follows finds its programs there.
"""

import time
from collections.abc import Iterator, Sequence

import jax

from grpo_roc_jax.config import Config
from grpo_roc_jax.learner.update import state_like
from grpo_roc_jax.method.compose import method_parts, needs_reference, needs_scores, teacher_of
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.rollout.programs import ProgramCost, program_cost
from grpo_roc_jax.run.components import Components, make_components
from grpo_roc_jax.run.learner import make_learner, update_program
from grpo_roc_jax.run.policy import initial_state

MIB = 2**20


def preflight(config: Config) -> list[ProgramCost]:
    """Compiles the programs of sampling, of the update and, if the method needs scores, of the scoring pass.

    Raises:
        ConfigError: settings that do not fit each other.
    """
    with make_components(config) as components:
        state = initial_state(config, components.model, components.mesh)
        sampler = components.engine.publish(components.full(state.params), 0)
        costs = components.engine.warmup(sampler)
        for name, lowered in _training_programs(config, components, state):
            start = time.perf_counter()
            costs.append(program_cost(name, start, lowered.compile()))
        return costs


def _training_programs(config: Config, components: Components, state) -> Iterator[tuple[str, jax.stages.Lowered]]:
    learner = make_learner(components)
    batch = learner.on_mesh([], config.sampling.temperature).packed
    base = () if components.base is None else (components.base,)
    if config.optim.offload:  # as the update finds it
        like = state_like(components.model, config.optim, components.mesh, config.lora)
        state = state.replace(opt_state=like.opt_state)
    teaches_itself = teacher_of(config) is not None and learner.teacher is None
    scored = needs_scores(config) or needs_reference(config) or teaches_itself
    scored = scored or config.plan.second.extra_rows > 0
    scored = scored or any(part.earlier((), AlgoState()) is not None for part in method_parts(config))
    yield "update", update_program(components).lower(state, batch, *base)
    if scored:
        yield "score", learner.score_batch.lower(components.full(state.params), batch)
    if learner.teacher is not None:
        yield "teacher", learner.teacher.score_batch.lower(learner.teacher.params, batch)


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
