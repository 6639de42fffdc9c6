"""How often a policy solves each problem of a list. The counts are written as they come, so that a job that is stopped
goes on with the problems that are left."""

from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_roc_jax.record.metrics import JsonlWriter, parsed_row
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.rollout.records import RunOptions
from grpo_roc_jax.run.components import Components
from grpo_roc_jax.run.sample import sample_requests
from grpo_roc_jax.settings.progress import phase
from grpo_roc_jax.types import Problem, RolloutRequest

FILLS = 4
"""How many times the rollouts of a part fill the slots of the engine."""

Counts = dict[str, tuple[int, int]]
"""uid -> (correct rollouts, rollouts that could be scored)."""


def count_solved(
    path: Path,
    components: Components,
    sampler: Callable[[], SamplerParams],
    problems: Sequence[Problem],
    samples: int,
    step: int,
) -> Counts:
    """The counts of these problems, those in the file `path` included, which the others are appended to.

    Args:
        path: Rows of `step` (the place of a problem in the list), `uid`, `solved` and `judged`.
        components: Of the run.
        sampler: Returns the policy; called if there are problems left.
        problems: In the order of the first call.
        samples: Rollouts of each problem.
        step: Training steps of the policy.
    """
    once = components.processes.once
    counts = once(lambda: read_counts(path))
    left = [(place, problem) for place, problem in enumerate(problems) if problem.uid not in counts]
    if not left:
        return counts
    policy, file = sampler(), JsonlWriter(path)
    once(lambda: file.cut(left[0][0] - 1))
    size = part_size(components, samples)
    with phase("problems", steps=len(left), unit="problem") as counting:
        for first in range(0, len(left), size):
            part = left[first : first + size]
            requests = [RolloutRequest(problem, place, samples) for place, problem in part]
            groups = sample_requests(components, policy, requests, RunOptions(step, "evaluate")).groups
            rows = [{"uid": g.problem.uid, "solved": int(g.correct.sum()), "judged": g.size} for g in groups]
            counts |= {row["uid"]: (row["solved"], row["judged"]) for row in rows}
            places = [place for place, _ in part]
            once(lambda places=places, rows=rows: list(map(file.write, places, rows)))
            counting.step(first + len(part))
    return counts


def part_size(components: Components, samples: int) -> int:
    """Problems that are rolled out together."""
    return max(1, FILLS * components.config.rollout.slots // samples)


def read_counts(path: Path) -> Counts:
    """The counts in a file, but for damaged rows; none where there is no file."""
    lines = path.read_bytes().splitlines(True) if path.exists() else ()
    return {row["uid"]: (row["solved"], row["judged"]) for row in filter(None, map(parsed_row, lines))}
