"""The parts of a training step, in the order the loop calls them: roll out, make batches, update."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.method.config import needs_reference, needs_scores
from grpo_roc_jax.method.methods import renormalised, resample_group, scoring_rows, subset, train_rows
from grpo_roc_jax.method.resample import Selection
from grpo_roc_jax.metrics import aggregate
from grpo_roc_jax.pack import Placement, TrainBatch, TrainRow, pack, unpack, worst_case_micro_batches
from grpo_roc_jax.run_state import Run
from grpo_roc_jax.sample import Sampled, sample_groups
from grpo_roc_jax.sharding import row_shards, shard_batch
from grpo_roc_jax.stages import Stages
from grpo_roc_jax.statistics import rollout_metrics, selection_metrics
from grpo_roc_jax.types import Group, Metrics
from grpo_roc_jax.update import UpdateStep, make_score, make_update_step


@dataclass(frozen=True, eq=False)
class Programs:
    """The jitted functions of a run and the shape they are compiled for."""

    update_step: UpdateStep
    score: Callable[[Any, TrainBatch], tuple[Any, Any]]
    micro_batches: int
    """Worst case of one optimiser step."""


@dataclass(frozen=True, eq=False)
class Selected:
    """What a step sampled and what selection made of it; one entry of `sampled` a round of problems."""

    sampled: list[Sampled] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)

    def metrics(self) -> Metrics:
        """Figures of sampling and selection over all rounds of the step."""
        counts: dict[str, int] = {}
        for sampled in self.sampled:
            for status, number in sampled.counts.items():
                counts[status] = counts.get(status, 0) + number
        engine = aggregate([s.stats.metrics() for s in self.sampled], [s.stats.requests for s in self.sampled])
        return engine | rollout_metrics(self.groups, counts) | selection_metrics(self.groups, self.selections)


def make_programs(config: Config, stages: Stages) -> Programs:
    """The jitted functions of this configuration; they compile at first use."""
    temperature = config.sampling.temperature
    per_update = math.ceil(config.group.problems / config.batch.updates) * config.group.size
    return Programs(
        make_update_step(
            stages.model,
            config.loss,
            config.optim,
            config.update,
            stages.mesh,
            temperature=temperature,
            lora=config.lora,
            base=stages.base,
        ),
        make_score(stages.model, config.update, stages.mesh, temperature=temperature),
        worst_case_micro_batches(per_update, config.rollout.max_row_tokens, config.batch, row_shards(stages.mesh)),
    )


def roll_out(config: Config, stages: Stages, run: Run) -> Selected:
    """Samples, scores and selects until the buffer holds a step's groups, or the refills are used up."""
    sampler = stages.engine.publish(stages.full(run.train.params), run.step)
    rng = np.random.default_rng([config.seed, run.step])
    count = config.resample.sampled(config.group.size)
    selected = Selected()
    for round_index in range(1 + config.group.refills):
        problems = next(run.stream)
        sampled = sample_groups(
            stages, sampler, problems, count, step=run.step, first_index=round_index * config.group.problems
        )
        selections = [resample_group(group, config, run.method, rng) for group in sampled.groups]
        run.buffer.add(subset(g, s) for g, s in zip(sampled.groups, selections, strict=True) if s.kept)
        run.sampled += len(problems) * count
        selected.sampled.append(sampled)
        selected.groups.extend(sampled.groups)
        selected.selections.extend(selections)
        if len(run.buffer) >= config.group.problems:
            break
    return selected


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one optimiser step, and the same packed and on the mesh."""

    rows: list[TrainRow]
    packed: TrainBatch
    placement: Placement


def make_batches(
    config: Config, stages: Stages, programs: Programs, run: Run, groups: Sequence[Group], custom: dict[str, Any]
) -> list[Batch]:
    """One packed batch on the mesh for each optimiser step of this rollout batch; none without groups."""
    if not groups:
        return []
    scores = reference = None
    if needs_scores(config.advantage, config.loss):
        scores = score_groups(config, stages, programs, run.train.params, groups)
    if needs_reference(config.loss):
        reference = score_groups(config, stages, programs, run.reference, groups)
    rows = train_rows(
        groups,
        config,
        run.method,
        rng=np.random.default_rng([config.seed, run.step, 1]),
        scores=scores,
        reference=reference,
        custom_advantage=custom.get("advantage"),
        custom_shaping=custom.get("shaping"),
    )
    parts = split_rows(rows, groups, config.batch.updates)
    if len(parts) > 1:
        parts = [renormalised(part, rows, config.loss) for part in parts]
    return [on_mesh(config, stages, programs, part) for part in parts]


def split_rows(rows: Sequence[TrainRow], groups: Sequence[Group], parts: int) -> list[list[TrainRow]]:
    """The rows in `parts` runs of whole groups (fewer when there are fewer groups)."""
    edges = np.concatenate([[0], np.cumsum([group.size for group in groups])])
    cuts = [len(groups) * i // parts for i in range(parts + 1)]
    pieces = [list(rows[edges[low] : edges[high]]) for low, high in pairwise(cuts)]
    return [piece for piece in pieces if piece]


def on_mesh(config: Config, stages: Stages, programs: Programs, rows: list[TrainRow]) -> Batch:
    """The rows packed and on the devices."""
    packed, placement = pack(rows, config.batch, programs.micro_batches, row_shards(stages.mesh))
    return Batch(rows, shard_batch(packed, stages.mesh), placement)


def score_groups(
    config: Config, stages: Stages, programs: Programs, params: Any, groups: Sequence[Group]
) -> list[np.ndarray]:
    """float32[T] log-probabilities of every trajectory under what is trained, by the training forward."""
    policy = stages.full(params)
    rows = scoring_rows(groups, config.loss.level)
    logprobs: list[np.ndarray] = []
    for part in split_rows(rows, groups, config.batch.updates):
        batch = on_mesh(config, stages, programs, part)
        logprobs += unpack(jax.device_get(programs.score(policy, batch.packed)[0]), batch.placement)
    return logprobs


def take_update(run: Run, programs: Programs, batches: Sequence[Batch]) -> Metrics:
    """Takes the optimiser steps; metrics are means over them, the log-probability gap that of the first."""
    started = time.perf_counter()
    collected: list[Metrics] = []
    for batch in batches:
        with jax.transfer_guard("disallow"):
            run.train, metrics = programs.update_step(run.train, batch.packed)
        numbers = {name: float(value) for name, value in jax.device_get(metrics).items()}
        collected.append(numbers | {"update/fill": batch.placement.fill})
    if not collected:
        return {"update/skipped": 1.0, "time/update_s": 0.0}
    merged = {name: float(np.mean([metrics[name] for metrics in collected])) for name in collected[0]}
    # Later optimiser steps differ from the sampler by design; only the first one shows a mismatch.
    merged |= {name: value for name, value in collected[0].items() if name.startswith("loss/logprob_gap")}
    return merged | {"time/update_s": time.perf_counter() - started}
