"""Does the simulator predict how long rollouts take? Ten configurations of the engine, simulated and run.

The costs of the programs are fitted to other workloads on the same machine: the seconds of a run are the sum of its
decode steps, computed rows, columns read, appends, appended tokens and rounds, each times its cost, all of which are at
least 0. The ten configurations differ from those in slots, chunk, lengths, turns and tools. The ceiling is an error of
0; the target is at most 15 % in each of the ten.

    python benchmarks/bench_simulate.py --repeats 3     # five minutes on two idle cores

The engine's queue is that of the simulator; only times are predicted. A machine that others use makes the runs longer,
not the simulation.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
from bench_rollout import Script, engine_for, environment, lognormal, one_rollout, prompts
from scipy.optimize import nnls

from grpo_roc_jax.rollout.config import RolloutConfig
from grpo_roc_jax.rollout.records import RolloutStats
from grpo_roc_jax.run.simulate import Costs, Machine, RowLife, RowTurn, StepSchedule, simulate

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
    "one row": ((32, 8), (1, 1, 1, 500, 0.0)),
    "many prompts": ((32, 8), (96, 1, 1, 8, 0.0)),
    "turns": ((32, 8), (8, 8, 4, 40, 0.0)),
}
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


def counted(stats: RolloutStats, config: RolloutConfig) -> list[float]:
    """What a run did, in the order of `fitted`."""
    columns = stats.held_sum * stats.steps / max(1, stats.chunks)
    return [stats.steps, stats.slot_steps, columns, stats.appends, stats.padded_tokens, stats.chunks]


def fitted(runs: list[tuple[RolloutStats, RolloutConfig]]) -> Costs:
    """The costs that explain these runs best, relative to their times."""
    times = np.array([stats.seconds - stats.tool_wait_s for stats, _ in runs])
    counts = np.array([counted(*each) for each in runs])
    step, row, column, append, token, round_s = nnls(counts / times[:, None], np.ones(len(runs)))[0]
    return Costs(step, row, column, append, token, round=round_s)


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
    samples = []
    for _ in range(given.repeats):
        samples += [(run(ENGINES[key], workload(*shape)), ENGINES[key]) for key, shape in FITTED.values()]
    costs = fitted(samples)
    cases = {}
    for name, (key, shape) in PREDICTED.items():
        config, groups = ENGINES[key], workload(*shape)
        measured = statistics.median(run(config, groups).seconds for _ in range(given.repeats))
        result = simulate(lambda step, groups=groups: groups, machine_of(config), costs, StepSchedule(), 1)
        (predicted,) = result.seconds
        cases[name] = {"measured_s": measured, "predicted_s": predicted, "error": predicted / measured - 1}
        print(f"{name:22}{measured:9.2f} s{predicted:9.2f} s{predicted / measured - 1:+8.0%}", flush=True)
    worst = max(abs(case["error"]) for case in cases.values())
    report = {"benchmark": "simulate", "costs": vars(costs), "cases": cases, "worst_error": worst, "target": TARGET}
    report |= {"met": bool(worst <= TARGET), "repeats": given.repeats} | start
    print(json.dumps(report))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
