"""What does the Python tool cost as a tool of an `Environment`, beside the path that a run without one takes?

Both sample the same rollouts of a trained policy with the same programs, so tokens must be equal; the target is 1.03 of
the time. Rounds alternate; the ratio is that of the medians, with the spread of the pairs.

    python -m grpo_roc_jax.train --run_dir runs/toy
    python benchmarks/bench_environment.py runs/toy
"""

import argparse
import json
import os
import platform
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import grpo_roc_jax as g
from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.pipeline import eval_problems
from grpo_roc_jax.engine.protocol import RunOptions
from grpo_roc_jax.run.load import open_policy
from grpo_roc_jax.run.sample import sample_groups


class PythonToolAlone(g.Environment):
    """Its one tool is the one of a run without an environment."""

    uses = ("python_code_with_standard_io",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="directory of a run")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    problems = eval_problems(DataConfig(eval_problems=options.problems))
    words = {"tools": "tools", "environment": f"{Path(__file__).stem}:PythonToolAlone"}
    wall, cpu, tokens = {name: [] for name in words}, {name: [] for name in words}, {}
    with ExitStack() as stack:
        policies = {
            name: stack.enter_context(open_policy(options.run, [f"--environment={word}", "--rollout.slots=32"]))
            for name, word in words.items()
        }
        for number in range(options.rounds + 1):
            for name, (_, sampling) in policies.items():
                begun, spent = time.perf_counter(), sum(os.times()[:2])
                sampled = sample_groups(
                    sampling, sampling.sampler.weights, problems, options.samples, RunOptions(0, "evaluate")
                )
                if number:  # the first round compiles
                    wall[name].append(time.perf_counter() - begun)
                    cpu[name].append(sum(os.times()[:2]) - spent)
                tokens[name] = [t.tokens.tolist() for group in sampled.groups for t in group.trajectories]
    assert tokens["tools"] == tokens["environment"], "the rollouts differ"
    calls = sum(len(t.results) for group in sampled.groups for t in group.trajectories)
    pairs = np.divide(wall["environment"], wall["tools"])
    print(
        json.dumps(
            {
                "bench": "environment",
                "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
                "rollouts": options.problems * options.samples,
                "calls": calls,
                "seconds": {name: round(float(np.median(times)), 3) for name, times in wall.items()},
                "processor_seconds": {name: round(float(np.median(times)), 3) for name, times in cpu.items()},
                "ratio": round(float(np.median(wall["environment"]) / np.median(wall["tools"])), 4),
                "ratio_of_pairs": [round(float(x), 3) for x in np.quantile(pairs, [0.25, 0.5, 0.75])],
                "target": 1.03,
            }
        )
    )


if __name__ == "__main__":
    main()
