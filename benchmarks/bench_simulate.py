"""Does the simulator predict how long rollouts take? Ten configurations of the engine, simulated and run.

The programs of each engine are timed alone: decode steps by rows and by the arenas of the cache that they read, appends
by length, copies of blocks. What the host adds to a chunk is the time that runs of other workloads spend outside of
programs and waits. Nothing is fitted. The ceiling is an error of 0; the target is at most 15 % in each of the ten.

A reference workload runs before and after each timing of an engine's programs and each run of a configuration. Its
seconds are the pace of the machine at the time, and costs are scaled from one pace to the other: only ratios in
alternation mean something.

    python benchmarks/bench_simulate.py --repeats 3     # five minutes on two idle cores

The engine's queue is that of the simulator; only times are predicted.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
from bench_rollout import Script, engine_for, environment, lognormal, one_rollout, prompts

from grpo_roc_jax.engine.config import RolloutConfig
from grpo_roc_jax.engine.decode import PATCH_FIELDS, empty_patch
from grpo_roc_jax.engine.programs import COPIES
from grpo_roc_jax.engine.protocol import RolloutStats
from grpo_roc_jax.model.pool import tile_count, tile_width
from grpo_roc_jax.planner.simulate import Costs, DecodeTimes, Machine, RowLife, RowTurn, StepSchedule, simulate

TARGET = 0.15
BASE = RolloutConfig(slots=32, narrow=(2, 4), max_prompt_tokens=64, max_response_tokens=576, append_lengths=(16, 64))
ENGINES = {
    (slots, chunk): replace(BASE, slots=slots, chunk=chunk) for slots, chunk in ((32, 8), (16, 8), (64, 8), (32, 16))
}
"""Rollout settings by slots and chunk."""

# Problems, rows of each, turns of a row at most, median tokens of a turn, seconds of a tool.
OTHERS = {
    "short rows": ((32, 8), (8, 8, 1, 24, 0.0)),
    "long rows": ((32, 8), (4, 8, 1, 300, 0.0)),
    "few rows": ((32, 8), (2, 4, 1, 200, 0.0)),
    "many prompts": ((32, 8), (96, 1, 1, 8, 0.0)),
    "turns": ((32, 8), (8, 8, 4, 40, 0.0)),
}
REFERENCE = OTHERS["few rows"]
PREDICTED = {
    "one turn": ((32, 8), (16, 8, 1, 60, 0.0)),
    "one turn, 16 slots": ((16, 8), (16, 8, 1, 60, 0.0)),
    "one turn, 64 slots": ((64, 8), (16, 8, 1, 60, 0.0)),
    "one turn, chunk 16": ((32, 16), (16, 8, 1, 60, 0.0)),
    "long rows": ((32, 8), (8, 8, 1, 200, 0.0)),
    "turns, fast tools": ((32, 8), (8, 16, 4, 40, 0.05)),
    "turns, slow tools": ((32, 8), (8, 8, 4, 40, 0.5)),
    "turns, 16 slots": ((16, 8), (8, 8, 4, 40, 0.2)),
    "turns, 64 slots": ((64, 8), (8, 16, 4, 40, 0.2)),
    "turns, chunk 16": ((32, 16), (8, 8, 4, 40, 0.2)),
}


def workload(problems: int, rows: int, turns: int, median: float, tool_s: float) -> list[list[RowLife]]:
    """Rows of prompts of 64 tokens with turns of log-normal lengths, and tools that take half to twice their time."""
    rng = np.random.default_rng((problems, rows, turns, int(median)))
    groups = []
    for _ in range(problems):
        lives = []
        for _ in range(rows):
            number = int(rng.integers(1, turns + 1))
            lengths = lognormal(rng, number, median, 0.7, 480 // number)
            waits = tool_s * np.exp2(rng.uniform(-1, 1, number))
            parts = [RowTurn(int(n), 16, float(wait)) for n, wait in zip(lengths, waits, strict=True)]
            lives.append(RowLife(64, (*parts[:-1], RowTurn(parts[-1].sampled))))
        groups.append(lives)
    return groups


def run(config: RolloutConfig, groups: list[list[RowLife]]) -> RolloutStats:
    """The rows, rolled out."""
    engine, sampler = engine_for(config, warm=True)
    lives = [life for group in groups for life in group]
    texts = prompts(len(groups), 64)
    places = [(index, sample) for index, group in enumerate(groups) for sample in range(len(group))]
    requests = [one_rollout(index, texts[index], config.max_response_tokens, sample) for index, sample in places]
    turns = [[turn.sampled for turn in life.turns] for life in lives]
    observations = [[np.ones(turn.observed, np.int32) for turn in life.turns[:-1]] for life in lives]
    waits = [[turn.tool_s for turn in life.turns[:-1]] for life in lives]
    _, stats = engine.run(sampler, requests, Script(turns, observations, waits))
    return stats


def mean_s(call, repeats: int = 8) -> float:
    """Seconds of a call that blocks until its result is there: the mean, as runs add them up."""
    call()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def timed_programs(config: RolloutConfig) -> Costs:
    """The programs of an engine, each timed alone; decode steps on rows whose last blocks lie in each of the first
    arenas, since each arena that is written costs time too."""
    engine, sampler = engine_for(config, warm=True)
    programs, size = engine.programs, config.block
    arenas = programs.size.arenas(programs.orders)
    state = [programs.new_pool(), programs.new_slots()]

    def decode(rows: int, count: int) -> None:
        patch = empty_patch(config.slots)
        bits = int(np.float32(1.0).view(np.int32))
        ends = np.arange(rows) % count
        values = {"touched": 1, "position": (ends + 1) * size - config.chunk, "active": 1, "limit": 1 << 20}
        for name, value in (values | {"temperature": bits}).items():
            patch[PATCH_FIELDS.index(name), :rows] = value
        table = np.full((config.slots, config.table_width), programs.size.blocks, np.int32)
        for i, arena in enumerate(arenas[:count]):
            table[:rows, i] = np.where(ends >= i, arena.start + np.arange(rows) % arena.blocks, table[:rows, i])
        placed = programs.place(patch), programs.place(table)
        *state[:], report = programs.decode(sampler.params, *state, *placed, rows)
        jax.device_get(report)

    def append(length: int) -> None:
        if programs.packs:  # the tokens of one row, in full tiles
            count, width, steps = tile_count(length), tile_width(length), np.arange(length)
            starts = np.minimum(np.arange(count) * width, length)
            arrays = (
                np.stack([np.zeros_like(steps), size + steps, steps]).astype(np.int32),
                np.tile(np.arange(config.table_width, dtype=np.int32), (count, 1)),
                np.stack([starts, np.minimum(width, length - starts)]).astype(np.int32),
            )
            state[0] = programs.append_packed(sampler.params, state[0], *map(programs.place, arrays))
        else:
            table = np.arange(config.table_width, dtype=np.int32)[None]
            where = np.array([[0], [size], [length]], np.int32)
            arrays = map(programs.place, (np.zeros((1, length), np.int32), table, where))
            state[0] = programs.append(sampler.params, state[0], *arrays)
        jax.block_until_ready(state[0])

    def copy() -> None:
        pairs = np.arange(2 * COPIES, dtype=np.int32).reshape(2, COPIES)
        state[0] = programs.copy(state[0], programs.place(pairs), programs.place(np.full_like(pairs, config.slots)))
        jax.block_until_ready(state[0])

    columns = tuple(float(size * n) for n in np.cumsum([arena.blocks for arena in arenas]))
    counts = range(1, len(arenas) + 1)
    measured = [
        DecodeTimes(rows, columns, tuple(mean_s(partial(decode, rows, n)) / config.chunk for n in counts))
        for rows in programs.widths
    ]
    lengths = programs.pack_lengths if programs.packs else config.append_lengths
    short, long = lengths[0], lengths[-1]
    times = [mean_s(partial(append, length)) for length in (short, long)]
    token = max(0.0, (times[1] - times[0]) / (long - short))
    once = max(0.0, times[0] - token * short)
    return Costs(0.0, 0.0, 0.0, once, token, copy=mean_s(copy), measured=tuple(measured))


def host_s(runs: list[RolloutStats]) -> float:
    """Seconds of a chunk outside of programs and waits, over all chunks of these runs."""
    left = [s.seconds - s.decode_s - s.append_s - s.tool_wait_s for s in runs]
    return sum(left) / sum(stats.chunks for stats in runs)


def simulated_s(config: RolloutConfig, groups: list[list[RowLife]], costs: Costs) -> float:
    return simulate(lambda step: groups, machine_of(config), costs, StepSchedule(), 1).seconds[0]


def timed_beside(reference, call):
    """(result of the call, mean seconds of the reference workload before and after it)."""
    before = reference().seconds
    result = call()
    return result, (before + reference().seconds) / 2


def at_pace(costs: Costs, pace: float) -> Costs:
    """On a machine that takes so many times longer."""
    slower = [times._replace(seconds=tuple(pace * s for s in times.seconds)) for times in costs.measured]
    named = {name: pace * getattr(costs, name) for name in ("append", "token", "copy")}
    return replace(costs, measured=tuple(slower), **named)


def middle(rounds: list[Costs]) -> Costs:
    """The median of each time."""
    first = rounds[0]
    named = {name: statistics.median(getattr(costs, name) for costs in rounds) for name in ("append", "token", "copy")}
    columns = [zip(*(costs.measured[i].seconds for costs in rounds), strict=True) for i in range(len(first.measured))]
    measured = [
        times._replace(seconds=tuple(map(statistics.median, each)))
        for times, each in zip(first.measured, columns, strict=True)
    ]
    return replace(first, measured=tuple(measured), **named)


def machine_of(config: RolloutConfig) -> Machine:
    engine, _ = engine_for(config, warm=True)
    sizes = [arena.blocks for arena in engine.programs.size.arenas(engine.programs.orders)]
    return Machine(
        engines=1,
        slots=config.slots,
        chunk=config.chunk,
        blocks=config.shard_blocks(1) + 1,
        block=config.block,
        longest=config.max_row_tokens,
        widths=engine.programs.widths,
        append_lengths=engine.programs.pack_lengths if engine.programs.packs else config.append_lengths,
        append_rows=0 if engine.programs.packs else engine.programs.append_rows[-1],
        copies=COPIES,
        shares=engine.programs.shared_blocks > 0,
        arenas=(*sizes[:-1], sizes[-1] + 1),
    )


def main() -> None:
    """Prints a line for each configuration, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--repeats", type=int, default=3, help="rounds of times, and runs of each configuration; medians count"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    given = parser.parse_args()
    start = environment(with_peers=False)
    key, shape = REFERENCE
    reference = partial(run, ENGINES[key], workload(*shape))
    round_s = timed_beside(
        reference, lambda: host_s([run(ENGINES[key], workload(*shape)) for key, shape in OTHERS.values()])
    )
    round_s = round_s[0] / round_s[1]
    rounds = [
        {key: timed_beside(reference, partial(timed_programs, config)) for key, config in ENGINES.items()}
        for _ in range(given.repeats)
    ]
    programs = {
        key: middle([at_pace(costs, 1 / usual) for costs, usual in (r[key] for r in rounds)]) for key in ENGINES
    }
    cases = {}
    for name, (key, shape) in PREDICTED.items():
        config, groups, tries = ENGINES[key], workload(*shape), []
        for _ in range(given.repeats):
            stats, pace = timed_beside(reference, partial(run, config, groups))
            now = replace(at_pace(programs[key], pace), round=round_s * pace)
            tries.append((stats.seconds, simulated_s(config, groups, now), pace))
        measured, predicted, pace = map(statistics.median, zip(*tries, strict=True))
        error = statistics.median(guess / actual for actual, guess, _ in tries) - 1
        cases[name] = {"measured_s": measured, "predicted_s": predicted, "reference_s": pace, "error": error}
        print(f"{name:22}{measured:9.2f} s{predicted:9.2f} s{error:+8.0%}  reference {pace:.2f} s", flush=True)
    worst = max(abs(case["error"]) for case in cases.values())
    timed = {f"{slots} slots, chunk {chunk}": vars(costs) for (slots, chunk), costs in programs.items()}
    report = {"benchmark": "simulate", "programs_by_reference": timed, "round_of_reference": round_s, "cases": cases}
    report |= {"worst_error": worst, "target": TARGET, "met": bool(worst <= TARGET), "repeats": given.repeats} | start
    print(json.dumps(report))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
