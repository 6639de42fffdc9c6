"""Does the simulator predict how long rollouts take? Ten configurations of the engine, simulated and run.

The programs of each engine are timed alone: decode steps by rows and by columns of the cache, appends by length. What
the host adds to a chunk is fitted to the seconds of other workloads. The ten configurations differ from those in slots,
chunk, lengths, turns and tools. The ceiling is an error of 0; the target is at most 15 % in each of the ten.

A reference workload runs before and after each run of a configuration. Its seconds over those at the time of the fit
are the pace of the machine, by which the costs of that run are multiplied: only ratios in alternation mean something.

    python benchmarks/bench_simulate.py --repeats 3     # five minutes on two idle cores

The engine's queue is that of the simulator; only times are predicted.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import jax
import numpy as np
from bench_rollout import Script, engine_for, environment, lognormal, one_rollout, prompts

from grpo_roc_jax.rollout.config import RolloutConfig
from grpo_roc_jax.rollout.decode import PATCH_FIELDS, empty_patch
from grpo_roc_jax.rollout.records import RolloutStats
from grpo_roc_jax.run.simulate import Costs, DecodeTimes, Machine, RowLife, RowTurn, StepSchedule, simulate

TARGET = 0.15
BASE = RolloutConfig(slots=32, narrow=(2, 4), max_prompt_tokens=64, max_response_tokens=576, append_lengths=(16, 64))
ENGINES = {
    (slots, chunk): replace(BASE, slots=slots, chunk=chunk) for slots, chunk in ((32, 8), (16, 8), (64, 8), (32, 16))
}
"""Rollout settings by slots and chunk."""

# Problems, rows of each, turns of a row at most, median tokens of a turn, seconds of a tool.
FITTED = {
    "short rows": ((32, 8), (8, 8, 1, 24, 0.0)),
    "long rows": ((32, 8), (4, 8, 1, 300, 0.0)),
    "few rows": ((32, 8), (2, 4, 1, 200, 0.0)),
    "many prompts": ((32, 8), (96, 1, 1, 8, 0.0)),
    "turns": ((32, 8), (8, 8, 4, 40, 0.0)),
}
REFERENCE = FITTED["few rows"]
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
    found = []
    for _ in range(problems):
        lives = []
        for _ in range(rows):
            number = int(rng.integers(1, turns + 1))
            lengths = lognormal(rng, number, median, 0.7, 480 // number)
            waits = tool_s * np.exp2(rng.uniform(-1, 1, number))
            parts = [RowTurn(int(n), 16, float(wait)) for n, wait in zip(lengths, waits, strict=True)]
            lives.append(RowLife(64, (*parts[:-1], RowTurn(parts[-1].sampled))))
        found.append(lives)
    return found


def run(config: RolloutConfig, groups: list[list[RowLife]]) -> RolloutStats:
    """The rows, rolled out."""
    engine, sampler = engine_for(config, warm=True)
    lives = [life for group in groups for life in group]
    texts = prompts(len(groups), 64)
    places = [(place, sample) for place, group in enumerate(groups) for sample in range(len(group))]
    requests = [one_rollout(place, texts[place], config.max_response_tokens, sample) for place, sample in places]
    turns = [[turn.sampled for turn in life.turns] for life in lives]
    observations = [[np.ones(turn.observed, np.int32) for turn in life.turns[:-1]] for life in lives]
    waits = [[turn.tool_s for turn in life.turns[:-1]] for life in lives]
    _, stats = engine.run(sampler, requests, Script(turns, observations, waits))
    return stats


def median_s(call, repeats: int = 5) -> float:
    """Seconds of a call that blocks until its result is there."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@lru_cache
def timed_programs(config: RolloutConfig) -> Costs:
    """The programs of an engine, each timed alone on rows of equal length in the first blocks of the pool."""
    engine, sampler = engine_for(config, warm=True)
    programs, size = engine.programs, config.block
    state = [programs.new_pool(), programs.new_slots()]

    def decode(rows: int, blocks: int) -> None:
        patch = empty_patch(config.slots)
        bits = int(np.float32(1.0).view(np.int32))
        values = {"touched": 1, "position": blocks * size - config.chunk, "active": 1, "limit": 1 << 20}
        for name, value in (values | {"temperature": bits}).items():
            patch[PATCH_FIELDS.index(name), :rows] = value
        table = np.full((config.slots, config.table_width), programs.size.blocks, np.int32)
        table[:rows, :blocks] = np.arange(rows * blocks).reshape(blocks, rows).T
        placed = programs.place(patch), programs.place(table)
        *state[:], report = programs.decode(sampler.params, *state, *placed, rows)
        jax.device_get(report)

    def append(length: int) -> None:
        table = np.arange(config.table_width, dtype=np.int32)[None]
        where = np.array([[0], [size], [length]], np.int32)
        arrays = map(programs.place, (np.zeros((1, length), np.int32), table, where))
        state[0] = programs.append(sampler.params, state[0], *arrays)
        jax.block_until_ready(state[0])

    depths = [n for n in (1, 2, 4, 7, 10) if n * size <= config.max_row_tokens]
    measured = [
        DecodeTimes(
            rows,
            tuple(rows * (n * size - config.chunk / 2) for n in depths),
            tuple(median_s(partial(decode, rows, n)) / config.chunk for n in depths),
        )
        for rows in programs.widths
    ]
    short, long = config.append_lengths[0], config.append_lengths[-1]
    times = [median_s(partial(append, length)) for length in (short, long)]
    token = max(0.0, (times[1] - times[0]) / (long - short))
    return Costs(0.0, 0.0, 0.0, max(0.0, times[0] - token * short), token, measured=tuple(measured))


def host_s(runs: list[tuple[RolloutStats, RolloutConfig, list[list[RowLife]]]]) -> float:
    """Seconds that the host adds to a chunk, mean over these runs."""
    left = [stats.seconds - simulated_s(config, groups, timed_programs(config)) for stats, config, groups in runs]
    return max(0.0, sum(left) / sum(stats.chunks for stats, _, _ in runs))


def simulated_s(config: RolloutConfig, groups: list[list[RowLife]], costs: Costs) -> float:
    return simulate(lambda step: groups, machine_of(config), costs, StepSchedule(), 1).seconds[0]


def at_pace(costs: Costs, pace: float) -> Costs:
    """On a machine that takes so many times longer."""
    slower = [times._replace(seconds=tuple(pace * s for s in times.seconds)) for times in costs.measured]
    named = {name: pace * getattr(costs, name) for name in ("append", "token", "round")}
    return replace(costs, measured=tuple(slower), **named)


def machine_of(config: RolloutConfig) -> Machine:
    engine, _ = engine_for(config, warm=True)
    return Machine(
        engines=1,
        slots=config.slots,
        chunk=config.chunk,
        blocks=config.shard_blocks(1) + 1,
        block=config.block,
        longest=config.max_row_tokens,
        widths=engine.programs.widths,
        append_lengths=config.append_lengths,
        append_rows=engine.programs.append_rows[-1],
    )


def main() -> None:
    """Prints a line for each configuration, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each configuration; the median counts")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    given = parser.parse_args()
    start = environment(with_peers=False)
    fitted = [(run(ENGINES[key], workload(*shape)), ENGINES[key], workload(*shape)) for key, shape in FITTED.values()]
    key, shape = REFERENCE
    reference = partial(run, ENGINES[key], workload(*shape))
    round_s, usual = host_s(fitted), statistics.median(reference().seconds for _ in range(given.repeats))
    cases = {}
    for name, (key, shape) in PREDICTED.items():
        config, groups = ENGINES[key], workload(*shape)
        costs, tries = replace(timed_programs(config), round=round_s), []
        for _ in range(given.repeats):
            before, measured, after = reference().seconds, run(config, groups).seconds, reference().seconds
            pace = (before + after) / 2 / usual
            tries.append((measured, simulated_s(config, groups, at_pace(costs, pace)), pace))
        measured, predicted, pace = map(statistics.median, zip(*tries, strict=True))
        error = statistics.median(guess / found for found, guess, _ in tries) - 1
        cases[name] = {"measured_s": measured, "predicted_s": predicted, "pace": pace, "error": error}
        print(f"{name:22}{measured:9.2f} s{predicted:9.2f} s{error:+8.0%}  pace {pace:.2f}", flush=True)
    worst = max(abs(case["error"]) for case in cases.values())
    programs = {f"{slots} slots, chunk {chunk}": vars(timed_programs(one)) for (slots, chunk), one in ENGINES.items()}
    report = {"benchmark": "simulate", "programs": programs, "round_s": round_s, "reference_s": usual, "cases": cases}
    report |= {"worst_error": worst, "target": TARGET, "met": bool(worst <= TARGET), "repeats": given.repeats} | start
    print(json.dumps(report))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
