"""States of recorded trajectories as problems of their own: `grpo-roc cut-traces RUN --out STATES.jsonl`.

Cobalt (arXiv:2602.03806) learns a dialogue by single steps: recorded trajectories are cut before each turn, what came
before the turn moves into the prompt, and the policy is trained from there by GRPO. Drop states that are always or
never solved with `grpo-roc difficulty`, name the file in `data.sources`, and set `rollout.max_turns 1`.
Not included: the subset of largest variance of pass rates, and perturbed traces against reward hacking.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from grpo_roc_jax.data.problems import problem_row
from grpo_roc_jax.process.outputs import output_file, write_output
from grpo_roc_jax.process.progress import show_log
from grpo_roc_jax.record.trace import TraceRecord, read_trace, recorded_steps


@dataclass(frozen=True)
class CutTraces:
    """Writes each state of the trajectories of a run as a problem."""

    run: tyro.conf.Positional[Path]
    """Directory of a run with trajectories (`log.traces`)."""
    out: Path
    """JSON-lines file to which the problems are written."""
    step: int | None = None
    """Only the trajectories of this step."""
    intro: str = "So far:\n"
    """Text between the question and what came before the turn."""


def states(records: Iterable[TraceRecord], intro: str) -> list[dict]:
    """A row for each different state before a later turn: question, turns and observations so far, answer, and the
    further columns of the problem."""
    rows: dict[str, dict] = {}
    for record in records:
        problem, history = record.problem, ""
        if record.trajectory.condition:
            continue  # its prompt had more than the question
        for turn in record.trajectory.turns[:-1]:
            texts = (turn.text, *(result.shown or result.observation for result in turn.results), turn.reply)
            history += "".join(f"{text}\n" for i, text in enumerate(texts) if text or not i)
            prompt = f"{problem.prompt}\n{intro}{history}"
            if prompt not in rows:
                rows[prompt] = problem_row(replace(problem, prompt=prompt))
    return list(rows.values())


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    show_log()
    options = tyro.cli(CutTraces, args=argv, prog="grpo-roc cut-traces")
    try:
        recorded_steps(options.run, options.step)
        out = output_file("--out", options.out)
        rows = states(read_trace(options.run, options.step), options.intro)
        if not rows:
            raise ValueError(
                f"{options.run} records no trajectory with two turns, so it has no state to cut; name another run or "
                "step"
            )
        write_output("--out", out, "".join(json.dumps(row, default=str) + "\n" for row in rows))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(rows)} states in {out}")
    return 0
