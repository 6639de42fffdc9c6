"""The steps of a plan under several schedules: what they cost, which rows they have, and a table of `simulate`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.planner.roofline import Needs, Work, kind_of, weight_sync_seconds
from grpo_roc_jax.planner.simulate import Costs, Machine, RowGroups, RowLife, RowTurn, StepSchedule, simulate
from grpo_roc_jax.planner.topology import Chip
from grpo_roc_jax.record.trace import read_trace
from grpo_roc_jax.types import Trajectory


def compiled_costs(programs: Sequence[Needs], work: Work, chip: Chip) -> Costs | None:
    """Lower bounds on the costs of a process's engine, from compiled programs; None if one is missing or does not fit.

    A decode step reads the weights, and of the cache what rows hold; it computes every slot. An append reads the
    weights and computes its tokens; what it reads of the cache is left out. Shards work side by side.
    """
    programs_by_kind = {kind_of(needs.name): needs for needs in programs}
    if any(
        name not in programs_by_kind or programs_by_kind[name].refused
        for name in ("weight_sync", "append", "decode", "update")
    ):
        return None
    decode, append, update = (programs_by_kind[name] for name in ("decode", "append", "update"))
    rate, rows = chip.memory_rate, work.slots / work.shards
    fixed = min(decode.fixed_traffic, decode.traffic)
    written = work.append_rows * (work.append_length or work.prompt)
    trained = work.micro_batches / work.updates * work.micro_rows * work.row_length * work.fill
    return Costs(
        step=(fixed / rate + decode.times(chip)["links"]) / work.chunk,
        row=0.0,
        column=(decode.traffic - fixed) / rate / work.chunk / (rows * work.columns) / work.shards,
        compute_row=decode.flops / chip.flops / work.chunk / work.slots,
        append=append.fixed_traffic / rate,
        token=append.flops / chip.flops / written,
        publish=weight_sync_seconds(programs, chip),
        trained_token=update.seconds(chip) / trained,
    )


def drawn_groups(work: Work, longest: int, turns: int, seed: int) -> Callable[[int], RowGroups]:
    """Rows of log-normal lengths with the mean response of `work`, of up to so many turns, each with a tool that takes
    0.05 to 5 s; a problem's rows differ less than those of different problems.

    Args:
        work: Has the numbers of problems and rows.
        longest: Tokens of a response at most.
        turns: At most; longer rows have more of them.
        seed: Seed of the draws.
    """
    per_group = work.sampled // work.problems

    def groups(step: int) -> RowGroups:
        rng = np.random.default_rng((seed, step))
        hard = rng.normal(0.0, 0.4, (work.problems, 1))
        lengths = np.exp(hard + rng.normal(0.0, 0.5, (work.problems, per_group)))
        lengths = np.clip(lengths / np.exp((0.4**2 + 0.5**2) / 2) * work.response, 8, longest).astype(int)
        groups_of_step = []
        for row in lengths:
            lives = []
            for length in row.tolist():
                parts = max(1, min(turns, round(turns * length / longest)))
                waits = np.exp(rng.uniform(np.log(0.05), np.log(5.0), parts))
                observed = min(64, length // (2 * parts)) if parts > 1 else 0
                sampled = (length - observed * (parts - 1)) // parts
                lives.append(
                    RowLife(
                        int(work.prompt),
                        tuple(
                            RowTurn(sampled, observed, float(wait)) if i + 1 < parts else RowTurn(sampled)
                            for i, wait in enumerate(waits)
                        ),
                    )
                )
            groups_of_step.append(tuple(lives))
        return groups_of_step

    return groups


def traced_groups(run_dir: str) -> Callable[[int], RowGroups]:
    """The rows of a run's own trajectories, step by step and from the first again after the last.

    Raises:
        ValueError: there are none.
    """
    steps: dict[int, dict[int, list[RowLife]]] = {}
    for record in read_trace(run_dir):
        if record.group >= 0:
            steps.setdefault(record.step, {}).setdefault(record.group, []).append(life_of(record.trajectory))
    if not steps:
        raise ValueError(f"{run_dir} has no trajectories; run it with log.traces, or leave --traces out")
    groups = [tuple(tuple(rows) for rows in steps[step].values()) for step in sorted(steps)]
    return lambda step: groups[step % len(groups)]


def life_of(trajectory: Trajectory) -> RowLife:
    """The turns of a trajectory with the times that its calls took."""
    turns = []
    starts = [*(turn.start for turn in trajectory.turns), trajectory.length]
    for turn, following in zip(trajectory.turns, starts[1:], strict=True):
        waited = max((result.queue_ms + result.wall_ms for result in turn.results), default=0.0) / 1e3
        turns.append(RowTurn(turn.end - turn.start, following - turn.end, waited))
    return RowLife(trajectory.prompt_length, tuple(turns))


STEPS, SKIPPED, ENGINES = 4, 4, 4
"""Simulated steps, those before them, and engines at most; more engines have rows like these."""
SCHEDULES: dict[str, tuple[int, StepSchedule]] = {
    "whole rows reserved": (1, StepSchedule(whole_rows=True)),
    "blocks": (1, StepSchedule()),
    "blocks, twice the slots": (2, StepSchedule()),
    "blocks, twice the slots, lag 1": (2, StepSchedule(lag=1)),
    "blocks, twice the slots, lag 2": (2, StepSchedule(lag=2)),
    "blocks, three times the slots, lag 1": (3, StepSchedule(lag=1)),
    "blocks, twice the slots, lag 1, stealing": (2, StepSchedule(lag=1, stealing=True)),
}
"""Name -> slots, in those of the configuration, and the schedule."""
APART = {
    "a quarter trains apart, lag 1": (1, 1),
    "a quarter trains apart, lag 2": (1, 2),
    "half trains apart, lag 1": (2, 1),
    "half trains apart, lag 2": (2, 2),
}
"""Name -> processes out of four that only train while the others only sample (`rollout.samplers`), and the lag."""


def simulate_schedules(
    config: Config, work: Work, programs: Sequence[Needs], chip: Chip, traces: str = ""
) -> dict[str, dict[str, Any]]:
    """Name of a schedule -> `Simulated` as plain values. The cache has the size of the configuration's under each.

    Args:
        config: Configuration of the run.
        work: The work of a step.
        programs: Compiled for `chip`, or estimated.
        chip: See there.
        traces: A run whose rows are taken; empty draws them, see `drawn_groups`.

    Raises:
        ValueError: a program is missing, or the traces are.
    """
    costs = compiled_costs(programs, work, chip)
    if costs is None:
        raise ValueError("--simulate needs weight_sync, append, decode and update, and that they fit: drop --programs")
    engines = min(work.samplers, ENGINES)
    part = replace(work, problems=max(1, work.problems * engines // work.samplers), samplers=engines)
    part = replace(part, sampled=part.problems * (work.sampled // work.problems))
    costs = replace(costs, trained_token=costs.trained_token * work.sampled / part.sampled)
    rollout = config.rollout
    groups = drawn_groups(part, rollout.max_response_tokens, rollout.max_turns, config.seed)
    machine = Machine(
        engines=engines,
        slots=work.slots,
        chunk=work.chunk,
        blocks=work.shards * (rollout.shard_blocks(work.shards) + -(-rollout.append_lengths[0] // rollout.block)),
        block=rollout.block,
        longest=rollout.max_row_tokens,
        append_lengths=rollout.append_lengths,
        append_rows=work.append_rows,
    )
    simulated = {}
    for name, (factor, schedule) in SCHEDULES.items():
        if schedule.stealing and engines == 1:
            continue
        room, share = replace(machine, slots=factor * work.slots), work.kept / work.sampled
        drawn = traced_groups(traces) if traces else groups
        result = simulate(drawn, room, costs, schedule, STEPS, skipped=SKIPPED, kept=share)
        figures = {"slots": room.slots, "tokens_per_s": result.tokens_per_s * work.sampled / part.sampled}
        simulated[name] = asdict(result) | figures
    for name, (trainers, lag) in APART.items() if engines == ENGINES else ():
        schedule = StepSchedule(lag=lag, stealing=True, apart=True)
        room = replace(machine, engines=engines - trainers, slots=2 * work.slots)
        slower = replace(costs, trained_token=costs.trained_token * engines / trainers)
        drawn = traced_groups(traces) if traces else groups
        result = simulate(drawn, room, slower, schedule, STEPS, skipped=SKIPPED, kept=work.kept / work.sampled)
        figures = {"slots": room.slots, "tokens_per_s": result.tokens_per_s * work.sampled / part.sampled}
        simulated[name] = asdict(result) | figures
    return simulated


def schedule_lines(simulated: dict[str, dict[str, Any]]) -> list[str]:
    """A table of `simulate_schedules`."""
    lines = [f"{'simulated (not measured)':44}{'s a step':>10}{'tokens/s':>10}{'live rows':>11}{'busy':>7}{'again':>8}"]
    for name, figures in simulated.items():
        seconds, again = sum(figures["seconds"]) / len(figures["seconds"]), figures["recomputed"] / figures["sampled"]
        lines.append(
            f"{name:44}{seconds:10,.1f}{figures['tokens_per_s']:10,.0f}{figures['live']:11,.1f}{figures['busy']:7.0%}"
            f"{again:8.1%}"
        )
    lines.append(
        "live rows: of a process, while it decodes; busy: share of the time in which its devices compute; again: "
        "tokens written a second time after a row gave up its blocks, beside the sampled ones"
    )
    if simulated.keys() & APART.keys():
        lines.append(
            "trains apart: that share of the processes only trains, the others only sample (rollout.samplers), with "
            "twice the slots and one queue; live rows and busy are those of the samplers"
        )
    return lines
