"""Every program of a configuration, compiled before the first step: `python -m grpo_roc_jax.train CONFIG --preflight`.

Weights, optimiser state and caches are made as in a run, so what does not fit in memory fails here. With JAX's
compilation cache switched on the run that follows finds its programs there.
"""

import time
from collections.abc import Iterator, Sequence

import jax

from grpo_roc_jax.config import Config
from grpo_roc_jax.method.config import needs_reference, needs_scores
from grpo_roc_jax.pack import pack
from grpo_roc_jax.policy import initial_state
from grpo_roc_jax.rollout.programs import ProgramCost, program_cost
from grpo_roc_jax.sharding import row_shards, shard_batch
from grpo_roc_jax.stages import Stages, make_stages
from grpo_roc_jax.step import make_programs
from grpo_roc_jax.update import make_update_program, state_like

MIB = 2**20


def preflight(config: Config) -> list[ProgramCost]:
    """The programs of sampling, of the update and, where the method wants scores, of the scoring pass, all compiled.

    Raises:
        ConfigError: Parts that do not fit each other.
    """
    with make_stages(config) as stages:
        state = initial_state(config, stages.model, stages.mesh)
        sampler = stages.engine.publish(stages.full(state.params), 0)
        costs = stages.engine.warmup(sampler)
        for name, lowered in _training_programs(config, stages, state):
            start = time.perf_counter()
            costs.append(program_cost(name, start, lowered.compile()))
        return costs


def _training_programs(config: Config, stages: Stages, state) -> Iterator[tuple[str, jax.stages.Lowered]]:
    programs, shards = make_programs(config, stages), row_shards(stages.mesh)
    batch = shard_batch(pack([], config.batch, programs.micro_batches, shards)[0], stages.mesh)
    base = () if stages.base is None else (stages.base,)
    if config.optim.offload:  # as the update finds it
        like = state_like(stages.model, config.optim, stages.mesh, config.lora)
        state = state.replace(opt_state=like.opt_state)
    scored = needs_scores(config.advantage, config.loss) or needs_reference(config.loss)
    scored = scored or config.plan.hints == "explain"
    for temperature, score in programs.scores.items():
        update = make_update_program(
            stages.model,
            config.loss,
            config.optim,
            stages.update,
            stages.mesh,
            temperature=temperature,
            lora=config.lora,
        )
        yield f"update/{temperature:g}", update.lower(state, batch, *base)
        if scored:
            yield f"score/{temperature:g}", score.lower(stages.full(state.params), batch)


def preflight_lines(costs: Sequence[ProgramCost]) -> list[str]:
    """A table of the programs and, last, their number, seconds and largest memory."""
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
