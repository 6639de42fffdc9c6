"""The parts of a training step, in the order the loop calls them: roll out, make batches, update."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.method.config import needs_reference, needs_scores
from grpo_roc_jax.method.edit import HINT, behind_plain_prompts
from grpo_roc_jax.method.methods import (
    renormalised,
    resample_group,
    scoring_rows,
    subset,
    supervised_rows,
    train_rows,
)
from grpo_roc_jax.method.plan import sampling_temperature
from grpo_roc_jax.method.plugin import load_part
from grpo_roc_jax.method.resample import Selection
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.method.waves import explanation_weight
from grpo_roc_jax.metrics import aggregate
from grpo_roc_jax.offload import held_bytes, to_device, to_host
from grpo_roc_jax.pack import Placement, TrainBatch, TrainRow, pack, unpack, worst_case_micro_batches
from grpo_roc_jax.rounds import Round, draw_problems, run_round
from grpo_roc_jax.run_state import Run
from grpo_roc_jax.sample import Sampled
from grpo_roc_jax.sharding import row_shards, shard_batch
from grpo_roc_jax.stages import Stages
from grpo_roc_jax.statistics import rollout_metrics, selection_metrics
from grpo_roc_jax.types import Group, Metrics, Problem
from grpo_roc_jax.update import UpdateStep, make_score, make_update_step


@dataclass(frozen=True, eq=False)
class Programs:
    """The jitted functions of a run, by the temperature of the policy they train, and the shape they compile for."""

    update_steps: Mapping[float, UpdateStep]
    scores: Mapping[float, Callable[[Any, TrainBatch], tuple[Any, Any]]]
    micro_batches: int
    """Worst case of one optimiser step."""
    offload: bool
    """Whether moments come from the host's memory for the update and go back behind it."""


@dataclass(frozen=True, eq=False)
class Selected:
    """What a step sampled and what selection made of it; one entry of `sampled` a wave of rollouts."""

    sampled: list[Sampled] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    """As selection saw them: merged, one a problem."""
    selections: list[Selection] = field(default_factory=list)
    outside: list[Group] = field(default_factory=list)
    """Scored trajectories that waves left out of the groups; see `rounds.Round`."""
    plan: Metrics = field(default_factory=dict)
    """Figures of the planner, summed over rounds."""

    def add(self, found: Round, selections: Sequence[Selection]) -> None:
        """Takes a round in."""
        self.sampled.extend(found.waves)
        self.groups.extend(found.groups)
        self.selections.extend(selections)
        self.outside.extend(found.outside)
        numbers = {
            "plan/waves": float(len(found.waves)),
            "plan/outside": float(sum(group.size for group in found.outside)),
            "plan/explained": float(sum(group.size for group in found.explanations)),
            "plan/skipped": float(found.skipped),
            "time/plan_s": found.plan_s,
        }
        for name, value in numbers.items():
            self.plan[name] = self.plan.get(name, 0.0) + value

    def metrics(self) -> Metrics:
        """Figures of sampling and selection over all rounds of the step."""
        counts: dict[str, int] = {}
        for sampled in self.sampled:
            for status, number in sampled.counts.items():
                counts[status] = counts.get(status, 0) + number
        engine = aggregate([s.stats.metrics() for s in self.sampled], [s.stats.requests for s in self.sampled])
        found = rollout_metrics(self.groups, counts) | selection_metrics(self.groups, self.selections)
        return engine | found | self.plan


def make_programs(config: Config, stages: Stages) -> Programs:
    """The jitted functions of this configuration; they compile at first use."""
    temperatures = config.plan.temperatures or (config.sampling.temperature,)
    make_update = lambda t: make_update_step(  # noqa: E731
        stages.model,
        config.loss,
        config.optim,
        stages.update,
        stages.mesh,
        temperature=t,
        lora=config.lora,
        base=stages.base,
    )
    return Programs(
        {t: make_update(t) for t in temperatures},
        {t: make_score(stages.model, stages.update, stages.mesh, temperature=t) for t in temperatures},
        worst_case_micro_batches(
            most_rows(config), config.rollout.max_row_tokens, config.batch, row_shards(stages.mesh)
        ),
        config.optim.offload,
    )


def most_rows(config: Config) -> int:
    """Rows that one optimiser step can have."""
    group, plan = config.group, config.plan
    groups = math.ceil(group.problems / config.batch.updates)
    rows = groups * group.size
    if plan.budget != "uniform" and config.resample.method == "none":
        count = config.resample.sampled(group.size)
        whole = count * group.problems
        largest = min(max(plan.most_rollouts, count), whole - min(plan.least_rollouts, count) * (group.problems - 1))
        # The groups of one round share its budget; those of several rounds may all be large ones.
        rows = groups * largest if group.refills else min(whole, groups * largest)
    if plan.hints == "explain":
        rows += (1 + group.refills) * group.problems * plan.replace
    return rows


def temperature_of(config: Config, state: AlgoState) -> float:
    """Sampling temperature of this step's rollouts, and so of the policy that its update trains."""
    planned = sampling_temperature(config.plan.temperatures, state.temperature_stage)
    return config.sampling.temperature if planned is None else planned


def roll_out(config: Config, stages: Stages, run: Run) -> Selected:
    """Samples, scores and selects until the buffer holds a step's groups, or the refills are used up."""
    sampler = stages.engine.publish(stages.full(run.train.params), run.step)
    rng, plan_rng = np.random.default_rng([config.seed, run.step]), np.random.default_rng([config.seed, run.step, 2])
    selected = Selected()
    run.explanations = []
    for index in range(1 + config.group.refills):
        problems = draw_problems(config, run.stream, run.method, plan_rng)
        first = index * config.group.problems
        waiting, run.carried = run.carried, []
        found = run_round(
            stages, sampler, problems, run.method, plan_rng, step=run.step, first_index=first, carried=waiting
        )
        run.carried = found.carried
        begun = time.perf_counter()
        selections = [resample_group(group, config, run.method, rng) for group in found.groups]
        run.buffer.add(subset(g, s) for g, s in zip(found.groups, selections, strict=True) if s.kept)
        run.sampled += found.sampled
        run.explanations += found.explanations
        selected.add(found, selections)
        selected.plan["time/select_s"] = selected.plan.get("time/select_s", 0.0) + time.perf_counter() - begun
        if len(run.buffer) >= config.group.problems:
            break
    return selected


@dataclass(frozen=True, eq=False)
class Batch:
    """The rows of one optimiser step, and the same packed and on the mesh."""

    rows: list[TrainRow]
    """One a trajectory; supervised rows of the same step are packed behind them."""
    packed: TrainBatch
    placement: Placement
    temperature: float
    """Of the policy that is trained."""
    signal: float = 0.0
    """Share of the rows with an advantage other than 0; a step without any learns nothing from rewards."""
    seconds: float = 0.0
    """Spent on advantages and weights."""
    again: Callable[[], "Batch"] | None = None
    """Makes it anew right before its step, where advantages depend on what the steps before it have changed."""


@dataclass(frozen=True, eq=False)
class Policy:
    """What a custom part of the loss may ask of the policy it is about to train."""

    stages: Stages
    trained: Any
    """Parameters of the training state; `stages.full` makes those of the policy of them."""
    score: Callable[[Any, Sequence[Group]], list[np.ndarray]]
    """(parameters like `trained`, groups) -> float32[T] of log-probabilities for each trajectory."""


def make_batches(
    config: Config, stages: Stages, programs: Programs, run: Run, groups: Sequence[Group], custom: dict[str, Any]
) -> list[Batch]:
    """One packed batch on the mesh for each optimiser step of this rollout batch; none where nothing trains.

    Rows need not be what was sampled: Guide-GRPO trains hinted responses behind the plain prompt, ExPO adds
    explanations as supervised rows, all in the first optimiser step, where the policy is the one that scored them.
    """
    explained, run.explanations = run.explanations, []
    extra = explanation_rows(config, stages, programs, run, explained) if explained else []
    if not groups:
        return [on_mesh(config, stages, programs, run, [], extra)] if extra else []
    groups = as_trained(config, stages, groups)
    rows, seconds = scored_rows(config, stages, programs, run, groups, custom)
    begun = time.perf_counter()
    parts = split_rows(rows, groups, config.batch.updates)
    if len(parts) > 1:
        parts = [renormalised(part, rows, config.loss) for part in parts]
    seconds += time.perf_counter() - begun
    batches = [on_mesh(config, stages, programs, run, part, [] if i else extra) for i, part in enumerate(parts)]
    if config.advantage.score != "none":
        whole = parts_of(groups, config.batch.updates)
        remade = partial(remade_batch, config, stages, programs, run, custom)
        batches[1:] = [replace(b, again=partial(remade, g)) for b, g in zip(batches[1:], whole[1:], strict=True)]
    return [replace(batches[0], seconds=seconds), *batches[1:]]


def remade_batch(
    config: Config, stages: Stages, programs: Programs, run: Run, custom: dict[str, Any], groups: Sequence[Group]
) -> Batch:
    """The batch of these groups under the scores of the policy as it is now."""
    rows, seconds = scored_rows(config, stages, programs, run, groups, custom)
    return replace(on_mesh(config, stages, programs, run, rows), seconds=seconds)


def scored_rows(
    config: Config, stages: Stages, programs: Programs, run: Run, groups: Sequence[Group], custom: dict[str, Any]
) -> tuple[list[TrainRow], float]:
    """(the rows of these groups with the passes that the method wants, seconds of advantages and weights)."""
    scores = entropies = reference = None
    if needs_scores(config.advantage, config.loss):
        scores, entropies = score_groups(config, stages, programs, run, run.train.params, groups)
    if needs_reference(config.loss):
        reference, _ = score_groups(config, stages, programs, run, run.reference, groups)
    begun = time.perf_counter()
    rows = train_rows(
        groups,
        config,
        run.method,
        rng=np.random.default_rng([config.seed, run.step, 1]),
        scores=scores,
        reference=reference,
        entropies=entropies,
        custom_advantage=custom.get("advantage"),
        custom_shaping=custom.get("shaping"),
    )
    edit = custom.get("rows") or load_part("loss.custom", config.loss.custom)
    if edit is not None:
        score = lambda params, some: score_groups(config, stages, programs, run, params, some)[0]  # noqa: E731
        rows = checked_rows(edit(rows, groups, Policy(stages, run.train.params, score)), rows)
    return rows, time.perf_counter() - begun


def checked_rows(rows: Sequence[TrainRow], like: Sequence[TrainRow]) -> list[TrainRow]:
    """The rows of a custom part, or a ValueError that names what is wrong with them."""
    if [row.length for row in rows] != [row.length for row in like]:
        raise ValueError(f"loss.custom returned {len(rows)} rows; {len(like)} of the same lengths are wanted, in order")
    if not all(np.isfinite(row.weights).all() and np.isfinite(row.advantages).all() for row in rows):
        raise ValueError("loss.custom returned weights or advantages that are not finite")
    return list(rows)


def as_trained(config: Config, stages: Stages, groups: Sequence[Group]) -> Sequence[Group]:
    """The groups behind the prompts that the loss reads: hinted responses behind the plain one for Guide-GRPO."""
    if config.plan.hints != "guide":
        return groups
    hinted = [g.problem for g in groups if any(t.condition.startswith(HINT) for t in g.trajectories)]
    return behind_plain_prompts(groups, plain_prompts(stages, hinted))


def plain_prompts(stages: Stages, problems: Sequence[Problem]) -> dict[str, np.ndarray]:
    """Prompt ids by uid."""
    return {problem.uid: np.asarray(stages.chat.prompt_ids(problem), np.int32) for problem in problems}


def explanation_rows(
    config: Config, stages: Stages, programs: Programs, run: Run, explained: Sequence[Group]
) -> list[TrainRow]:
    """Supervised rows of successful explanations behind the plain prompt (ExPO)."""
    groups = behind_plain_prompts(explained, plain_prompts(stages, [group.problem for group in explained]))
    scores, _ = score_groups(config, stages, programs, run, run.train.params, groups)
    reference = None
    if needs_reference(config.loss):
        reference, _ = score_groups(config, stages, programs, run, run.reference, groups)
    weight = explanation_weight(config.plan, run.method.step)
    return supervised_rows(groups, scores, weight, config.loss.level, reference)


def split_rows(rows: Sequence[TrainRow], groups: Sequence[Group], parts: int) -> list[list[TrainRow]]:
    """The rows in `parts` runs of whole groups (fewer when there are fewer groups)."""
    edges = np.cumsum([0, *(sum(group.size for group in some) for some in parts_of(groups, parts))])
    return [list(rows[low:high]) for low, high in pairwise(edges)]


def parts_of(groups: Sequence[Group], parts: int) -> list[Sequence[Group]]:
    """The groups in at most `parts` runs, each with a row."""
    cuts = [len(groups) * i // parts for i in range(parts + 1)]
    pieces = [groups[low:high] for low, high in pairwise(cuts)]
    return [piece for piece in pieces if any(group.size for group in piece)]


def on_mesh(
    config: Config, stages: Stages, programs: Programs, run: Run, rows: list[TrainRow], extra: Sequence[TrainRow] = ()
) -> Batch:
    """The rows, and the supervised ones behind them, packed and on the devices."""
    both = [*rows, *extra]
    packed, placement = pack(both, config.batch, programs.micro_batches, row_shards(stages.mesh))
    signal = sum(bool(row.advantages.any()) for row in both) / max(len(both), 1)
    return Batch(rows, shard_batch(packed, stages.mesh), placement, temperature_of(config, run.method), signal)


def score_groups(
    config: Config, stages: Stages, programs: Programs, run: Run, params: Any, groups: Sequence[Group]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """float32[T] (log-probabilities, entropies) of every trajectory under these parameters, by the training forward."""
    policy = stages.full(params)
    rows = scoring_rows(groups, config.loss.level)
    logprobs: list[np.ndarray] = []
    entropies: list[np.ndarray] = []
    for part in split_rows(rows, groups, config.batch.updates):
        batch = on_mesh(config, stages, programs, run, part)
        score = programs.scores[batch.temperature]
        scored = jax.device_get(score(policy, batch.packed))
        for found, values in zip((logprobs, entropies), scored, strict=True):
            found += unpack(values, batch.placement)
    return logprobs, entropies


def take_update(run: Run, programs: Programs, batches: list[Batch]) -> Metrics:
    """Takes the optimiser steps; metrics are means over them, the log-probability gap that of the first. Batches that
    are made anew replace those of the list."""
    started = time.perf_counter()
    collected: list[Metrics] = []
    moved = move_moments(run, to_device, "to_device") if programs.offload and batches else {}
    for index, batch in enumerate(batches):
        if batch.again is not None:
            batch = batches[index] = batch.again()
        with jax.transfer_guard("disallow"):
            run.train, metrics = programs.update_steps[batch.temperature](run.train, batch.packed)
        numbers = {name: float(value) for name, value in jax.device_get(metrics).items()}
        collected.append(numbers | {"update/fill": batch.placement.fill, "update/signal": batch.signal})
    if not collected:
        return {"update/skipped": 1.0, "time/update_s": 0.0}
    if programs.offload:
        moved |= move_moments(run, to_host, "to_host")
    merged = {name: float(np.mean([metrics[name] for metrics in collected])) for name in collected[0]}
    # Later optimiser steps differ from the sampler by design; only the first one shows a mismatch.
    merged |= {name: value for name, value in collected[0].items() if name.startswith("loss/logprob_gap")}
    rows_s = sum(batch.seconds for batch in batches)
    return merged | moved | {"time/update_s": time.perf_counter() - started, "time/rows_s": rows_s}


def move_moments(run: Run, move: Callable[[Any], Any], name: str) -> Metrics:
    """Takes the optimiser's moments to another memory; bytes of this process's devices, and seconds."""
    begun = time.perf_counter()
    with jax.transfer_guard("disallow"):
        run.train = run.train.replace(opt_state=move(run.train.opt_state))
    seconds = time.perf_counter() - begun
    return {f"offload/{name}_bytes": float(held_bytes(run.train.opt_state)), f"time/offload_{name}_s": seconds}
