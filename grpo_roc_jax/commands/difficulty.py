"""Selects problems that a policy solves sometimes: `grpo-roc difficulty POLICY --data FILE... --out KEPT.jsonl`.

Groups whose rollouts are all right or all wrong carry no learning signal. Each problem is rolled out by the engine,
executor and verifier of training, and kept if its success rate lies between two bounds. The output file can be named in
`data.sources`; it holds the rates with the problems.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from grpo_roc_jax.commands.evaluate import EvaluateConfig, check_temperature, folder_of, sample_policy
from grpo_roc_jax.data.config import DataConfig, split_name
from grpo_roc_jax.data.problems import problem_row
from grpo_roc_jax.process.outputs import output_file, write_output
from grpo_roc_jax.process.progress import show_log
from grpo_roc_jax.types import Group

PROG = "grpo-roc difficulty"


@dataclass(frozen=True)
class DifficultyConfig:
    """Keeps problems that a policy solves sometimes. Further `--section.field value` replace settings of the run."""

    policy: tyro.conf.Positional[str]
    """A run, one of its checkpoints, or a published model: a directory or a hub id."""
    data: tuple[str, ...]
    """.jsonl, .json or .parquet files, or `world:FAMILY:LEVEL`."""
    out: str
    """JSON-lines file to which the kept problems are written."""
    problems: int = 0
    """Problems of each source; 0 takes all of a file and 64 of a world."""
    samples: int = 8
    """Rollouts for each problem; rates are multiples of 1 / samples."""
    lowest: float = 0.05
    """Smallest success rate that is kept; the default drops problems that are never solved."""
    highest: float = 0.95
    """Largest success rate that is kept; the default drops problems that are always solved."""
    temperature: float | None = None
    """Sampling temperature; by default that of training."""
    keep: str = ""
    """Directory for the trajectories; empty: they are not kept."""
    resume: bool = False
    """Resume from the rollouts in `--keep`: what is there is not rolled out again."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.lowest <= self.highest <= 1.0:
            raise ValueError(f"--lowest {self.lowest} --highest {self.highest}; must be rising success rates in [0, 1]")
        check_temperature(self.temperature)
        if self.resume and not self.keep:
            raise ValueError("--resume continues in one directory: name it with --keep")


def success_rate(group: Group) -> float | None:
    """Share of correct trajectories among those that could be scored; None if there are none."""
    return float(group.correct.mean()) if group.size else None


def kept_rows(
    groups: Sequence[Group], lowest: float, highest: float, data: DataConfig | None = None
) -> tuple[list[dict], dict[str, int]]:
    """(a row of the file for each problem within the bounds, number of problems by outcome).

    A row is read as the same problem under any settings that read the first file, and under none (`problem_row`).
    """
    data = data or DataConfig()
    rows: list[dict] = []
    counts = dict.fromkeys(("kept", "too hard", "too easy", "not judged"), 0)
    for group in groups:
        rate, problem = success_rate(group), group.problem
        if rate is None:
            counts["not judged"] += 1
        elif rate < lowest:
            counts["too hard"] += 1
        elif rate > highest:
            counts["too easy"] += 1
        else:
            counts["kept"] += 1
            row = problem_row(problem, data.prompt_column, data.answer_column)
            rows.append(row | {"success_rate": rate, "judged": group.size})
    return rows, counts


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    show_log()
    try:
        options, overrides = tyro.cli(DifficultyConfig, args=argv, prog=PROG, return_unknown_args=True)
        out = output_file("--out", options.out, [split_name(source)[1] for source in options.data])
        names = ("policy", "data", "problems", "samples", "temperature", "keep", "resume")
        evaluation = EvaluateConfig(**{name: getattr(options, name) for name in names})
        folder = folder_of(evaluation) if options.keep else None
        evaluated = sample_policy(evaluation, overrides, prog=PROG, folder=folder)
    except ValueError as error:  # ConfigError is one
        print(f"configuration: {error}", file=sys.stderr)
        return 2
    for note in evaluated.notes:
        print(note)
    rows, counts = kept_rows(evaluated.sampled.groups, options.lowest, options.highest, evaluated.data)
    lines = [json.dumps(row, default=str) + "\n" for row in rows]
    summary = ", ".join(f"{number} {name}" for name, number in counts.items())
    print(
        f"{options.policy}, policy after {evaluated.step} training steps, "
        f"{options.samples} rollouts a problem: {summary}"
    )
    try:
        write_output("--out", out, "".join(lines))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0
