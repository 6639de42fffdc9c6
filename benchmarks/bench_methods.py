"""What does the host side of each method cost?

Planning, selection and advantages are timed alone, in CPU seconds of one core, on synthetic arrays of a large run. The
ceiling is 2% of a step. What a step is, is an assumption: a model of 14 billion parameters (that of arXiv:2508.20722)
on 64 devices of 1e15 FLOP/s, with 2 FLOP a parameter for a sampled token and 6 for a trained one, all at 40% of the
peak. Real steps are longer, since decoding reaches less. Nothing here touches a device. `python -m benchmarks.study
methods` trains the methods on the toy.

    python -m benchmarks.bench_methods --problems 64               # a minute; times grow with --problems
    python -m benchmarks.bench_methods --problems 512 --repeats 1  # the size of a published run, 8 GB

`--json FILE` adds the summary line to a file; the published ones are under benchmarks/results.
"""

import argparse
import functools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np

from docs.methods_table import load_methods
from grpo_roc_jax.config import Config
from grpo_roc_jax.method.compose import Scores, initial_state, next_state, resample_group, subset, train_rows
from grpo_roc_jax.method.planning import Wave, choose_problems, first_wave, gathered, next_wave
from grpo_roc_jax.settings.cli import load_config
from grpo_roc_jax.types import Group, Problem, ToolResult, Trajectory, Turn, Verdict

CEILING = 0.02
"""Largest share of a step for planning, selection and advantages."""
PARAMETERS, DEVICES, PEAK, UTILISATION = 14e9, 64, 1e15, 0.4
"""The run that a step is assumed to belong to."""
PARTS = ("plan", "select", "rows", "state", "total", "share")


def synthetic_group(index: int, rollouts: int, tokens: int, functions: tuple[str, ...]) -> Group:
    """A mixed group of rollouts of about `tokens` tokens with three calls each; arrays of the real sizes."""
    rng = np.random.default_rng(index)
    problem = Problem(f"p{index}", "?", "1", "synthetic", {"hints": ["a", "b"]})
    lengths = np.clip(rng.lognormal(np.log(tokens * 0.8), 0.4, rollouts), 16, tokens).astype(int)
    trajectories, verdicts = [], []
    for sample, length in enumerate(lengths):
        mask = np.ones(length, bool)
        edges = np.linspace(8, length, 5).astype(int)
        mask[:8] = False
        turns = []
        for start, end in pairwise(edges):
            mask[end - 4 : end] = False
            turns.append(Turn(int(start), int(end) - 4, "", results=(ToolResult("ok"),)))
        logprobs = np.where(mask, -rng.random(length, np.float32), np.float32(0))
        ids = rng.integers(0, 1 << 15, length, dtype=np.int32)
        versions = np.where(mask, 0, -1).astype(np.int32)
        trajectories.append(Trajectory(ids, mask, logprobs, versions, 8, tuple(turns), "answer", sample))
        reward = float(rng.random() < 0.5)
        channels = {name: float(rng.random() < 0.5) for name in functions[1:]}
        if channels:
            channels[functions[0]] = reward
        status, errors = "correct" if reward else "wrong", int(rng.integers(0, 4))
        verdicts.append(Verdict(reward, status, "1", 3, errors, 1, True, 4, channels))
    return Group(problem, tuple(trajectories), tuple(verdicts))


def step_seconds(sampled: int, trained: int) -> float:
    """Seconds of the assumed step, by arithmetic alone."""
    return PARAMETERS * (2 * sampled + 6 * trained) / (DEVICES * PEAK * UTILISATION)


def host_stages(config: Config, groups: list[Group]) -> dict[str, float]:
    """CPU seconds of each part of the host side for these groups, and the share of the assumed step."""
    rng = np.random.default_rng(0)
    state = initial_state(config)
    problems = [group.problem for group in groups]
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable):
        begun = time.process_time()
        value = call()
        seconds[name] = time.process_time() - begun
        return value

    count = config.resample.sampled(config.group.size)

    def plan() -> None:
        choose_problems(problems, len(problems), config.plan, state, rng)
        wave = Wave(problems, count, state, rng)
        requests = first_wave(wave, config.plan)
        if len(requests) == len(groups):
            gathered(problems, requests, groups)
        next_wave(replace(wave, number=1, groups=groups), config.plan)

    timed("plan", plan)
    selections = timed("select", lambda: [resample_group(group, config, rng) for group in groups])
    kept_groups = [subset(g, s) for g, s in zip(groups, selections, strict=True) if s.kept]
    recorded = [t.logprobs for group in kept_groups for t in group.trajectories]
    scores = Scores(recorded, recorded, recorded, recorded)
    rows = timed("rows", lambda: train_rows(kept_groups, config, state, rng=rng, scores=scores))
    assert rows
    timed("state", lambda: next_state(groups, kept_groups, config, state))
    sampled, trained = (sum(t.length for group in some for t in group.trajectories) for some in (groups, kept_groups))
    seconds["total"] = sum(seconds.values())
    return seconds | {"share": seconds["total"] / step_seconds(sampled, trained)}


def bench_host(names: list[str], problems: int, rollouts: int, tokens: int, repeats: int) -> dict[str, dict]:
    """Medians of each method's host side, with the spread of the total."""
    methods = load_methods()
    configs = {name: sized(methods[name].path, rollouts) for name in names}
    make = functools.cache(lambda functions: [synthetic_group(i, rollouts, tokens, functions) for i in range(problems)])
    print(f"{'method':24}" + "".join(f"{part:>9}" for part in PARTS) + f"   of a step; must be at most {CEILING:.0%}")
    report = {}
    for name, config in configs.items():
        groups = make(config.reward.names)
        host_stages(config, groups[:2])
        runs = [host_stages(config, groups) for _ in range(repeats)]
        parts = {part: statistics.median(run[part] for run in runs) for part in PARTS}
        totals = [run["total"] for run in runs]
        report[name] = parts | {"spread": (max(totals) - min(totals)) / parts["total"]}
        cells = "".join(f"{parts[part]:9.3f}" for part in PARTS[:-1])
        print(f"{name:24}{cells}{parts['share']:9.2%}{'   too much' * (parts['share'] > CEILING)}", flush=True)
    return report


def sized(path: Path, rollouts: int) -> Config:
    """The method with groups of a published run: `rollouts` sampled, half of them kept where it selects."""
    plain = load_config(Config, [str(path)], prog="bench_methods")
    size = rollouts if plain.resample.kind == "none" else rollouts // 2
    words = [f"--group.size={size}"]
    if plain.plan.second.kind == "serial":
        words.append(f"--plan.second.cuts={rollouts - 1}")
    return load_config(Config, [str(path), *words], prog="bench_methods")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=[], help="names in configs/methods; all by default")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", default="", help="file that the summary line is added to")
    arguments = parser.parse_args()
    names = arguments.methods or list(load_methods())
    report = bench_host(names, arguments.problems, arguments.rollouts, arguments.tokens, arguments.repeats)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    summary = {
        "benchmark": "methods/host",
        "device": f"{platform.machine()} {platform.system()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("grpo-roc-jax", "jax", "numpy", "scipy")},
        "commit": commit,
        "config": vars(arguments),
        "methods": report,
    }
    line = json.dumps(summary)
    print(line)
    if arguments.json:
        with open(arguments.json, "a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
