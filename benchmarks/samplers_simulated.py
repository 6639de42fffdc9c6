"""Where samplers apart from the trainer pay: simulated steps of the 14B recipe (the table of docs/ray_samplers.md).

    python benchmarks/samplers_simulated.py --stage 8k --mean_response 2500
    python benchmarks/samplers_simulated.py --stage 12k --mean_response 5000

The times of programs are bounds by arithmetic. A whole step of 16 hosts takes minutes to play, so four hosts with a
share of the rows and slots are played, with costs scaled to match. Two steps count, after two that fill the stream.
Nothing is measured. Printed are seconds a step, and one JSON line.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace

from grpo_roc_jax.config import read_config
from grpo_roc_jax.planner.plan import chosen_stages, deployment_of, needs_of
from grpo_roc_jax.planner.schedules import compiled_costs, drawn_groups
from grpo_roc_jax.planner.simulate import Machine, StepSchedule, simulate
from grpo_roc_jax.planner.topology import parse_topology

PLAYED, CHUNK, STEPS = 4, 64, 2
APART = StepSchedule(lag=1, stealing=True, apart=True)
CASES = (
    ("all hosts sample and train, step by step", 4, StepSchedule(), 1),
    ("all hosts sample and train, lag 1", 4, StepSchedule(lag=1), 1),
    ("a quarter trains apart, lag 1", 3, APART, 4),
    ("half trains apart, lag 1", 2, APART, 2),
    ("half trains apart, lag 2", 2, replace(APART, lag=2), 2),
    ("all train, half as many more sample, lag 1", 2, APART, 1),
    ("all train, as many more sample, lag 1", 4, APART, 1),
    ("all train, twice as many more sample, lag 1", 8, APART, 1),
)
"""Name; hosts of the four that sample, or that are added; schedule; how many times longer an update takes."""


def simulated(stage: str, topology: str, mean_response: float, share: int) -> dict[str, float]:
    """Case -> seconds of a step."""
    (config,) = chosen_stages(read_config("configs/rstar2_qwen3_14b.yaml"), stage)
    pod = parse_topology(topology)
    deployment = deployment_of(config, pod, "Qwen/Qwen3-14B-Base", True, mean_response)
    work, rollout = deployment.work, config.rollout
    costs = compiled_costs(needs_of(deployment, (), lambda line: None), work, pod.chip)
    problems = max(1, work.problems * PLAYED // work.samplers // share)
    part = replace(work, problems=problems, samplers=PLAYED, sampled=problems * (work.sampled // work.problems))
    costs = replace(
        costs,
        column=costs.column * share,
        compute_row=costs.compute_row * share,
        token=costs.token * share,
        trained_token=costs.trained_token * work.sampled / part.sampled,
    )
    groups = drawn_groups(part, rollout.max_response_tokens, rollout.max_turns, config.seed)
    seconds = {}
    for name, engines, schedule, longer in CASES:
        machine = Machine(
            engines=engines,
            slots=2 * work.slots // share,
            chunk=CHUNK,
            blocks=work.shards * (rollout.shard_blocks(work.shards) + 1) // share,
            block=rollout.block,
            longest=rollout.max_row_tokens,
            append_lengths=rollout.append_lengths,
            append_rows=work.append_rows,
        )
        slower = replace(costs, trained_token=costs.trained_token * longer)
        result = simulate(groups, machine, slower, schedule, STEPS, skipped=2, kept=work.kept / work.sampled)
        seconds[name] = sum(result.seconds) / STEPS
        print(f"{name:45} {seconds[name]:8.1f} s a step", flush=True)
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", default="8k", help="of configs/rstar2_qwen3_14b.yaml")
    parser.add_argument("--topology", default="v5p:4x4x4")
    parser.add_argument("--mean_response", type=float, default=2500.0, help="tokens")
    parser.add_argument("--share", type=int, default=8, help="one row and slot in so many is played")
    arguments = parser.parse_args(argv)
    print(json.dumps(vars(arguments) | {"seconds": simulated(**vars(arguments))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
