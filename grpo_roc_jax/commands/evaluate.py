"""Evaluation of a policy on held-out problems, by the same engine, executor and verifier as training.

`grpo-roc evaluate POLICY [--data FILE...] [--samples K] [--against OTHER] [--section.field value]`. A policy is a run,
one of its checkpoints, or a published model. Settings that the command line does not name are those of the run. The
trajectories are saved, scores have 95% intervals, and two policies are compared on the same problems.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from grpo_roc_jax.data.config import DataConfig, split_name
from grpo_roc_jax.data.generated import generator_of
from grpo_roc_jax.data.pipeline import Notes, eval_problems, fitting_problems
from grpo_roc_jax.engine.protocol import RunOptions, rollout_display
from grpo_roc_jax.process.outputs import output_file, write_output
from grpo_roc_jax.process.progress import phase, show_log
from grpo_roc_jax.record.accuracy import ALL, Difference, compare, intervals, summarize
from grpo_roc_jax.record.codec import finite
from grpo_roc_jax.record.metrics import FILE as METRICS_FILE
from grpo_roc_jax.record.run_dir import CONFIG_FILE, describe_run, locked, unused
from grpo_roc_jax.record.trace import FOLDER as TRAJECTORIES
from grpo_roc_jax.record.trace import TraceWriter, eval_records
from grpo_roc_jax.run.components import make_parts, prompt_length
from grpo_roc_jax.run.evaluate import REQUEST_FILE, Parts, prompt_end, sample_parts
from grpo_roc_jax.run.load import is_run, load_policy, settings_for, warn_of_tools
from grpo_roc_jax.run.policy import split_checkpoint
from grpo_roc_jax.run.sample import ScoredRollouts, sample_groups
from grpo_roc_jax.settings.cli import ConfigError, config_errors, dump_yaml
from grpo_roc_jax.settings.files import local_path
from grpo_roc_jax.types import Metrics, Problem

PROG = "grpo-roc evaluate"
WORLD_PROBLEMS = 64
"""Held-out problems of a generated world, which has no end, if no number is given."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluates a policy. Further `--section.field value` replace settings of the run."""

    policy: tyro.conf.Positional[str]
    """A run, for its newest checkpoint, one of its checkpoints (`RUN/checkpoints/step_00000012`), or a published model:
    a directory or a hub id."""
    data: tuple[str, ...] = ()
    """.jsonl, .json or .parquet files, or `world:FAMILY:LEVEL`, each with `NAME=` before it to name its column of the
    table; empty: the held-out problems of the run. A published model needs some."""
    problems: int = 0
    """Problems of each source; 0 takes all of a file and 64 of a world."""
    samples: int = 1
    """Rollouts for each problem: the k of avg@k, pass@k and maj@k."""
    temperature: float | None = None
    """Sampling temperature, 0 for greedy decoding; by default that of training."""
    against: str = ""
    """Another policy, evaluated on the same problems; scores are compared problem by problem."""
    keep: str = ""
    """Directory for the trajectories; empty: a new one in `evaluations/` of the run, or in `runs/evaluations`."""
    resume: bool = False
    """Resume the evaluation in `--keep`: what it has scored is not rolled out again."""
    out: str = ""
    """JSON file to which the table, the intervals and the comparison are written as well."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.problems < 0:
            raise ValueError(
                f"--samples {self.samples} --problems {self.problems}; samples must be at least 1, problems at least 0"
            )
        check_temperature(self.temperature)
        if self.resume and (not self.keep or self.against):
            raise ValueError("--resume continues in one directory: name it with --keep, and leave out --against")


def check_temperature(value: float | None) -> None:
    """Refuses a `--temperature` that no rollout can have."""
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"--temperature {value}; must be at least 0 and finite")


@dataclass(frozen=True, eq=False)
class EvaluatedPolicy:
    """The scored rollouts of a policy on held-out problems."""

    policy: str
    step: int
    """Training steps of the policy."""
    problems: Sequence[Problem]
    """The problems whose prompts fit."""
    sampled: ScoredRollouts
    notes: Sequence[str]
    """Notes on reading the sources, including the rows left out."""
    folder: Path | None
    """Directory of the trajectories."""
    data: DataConfig
    """The settings by which the problems were read."""


@config_errors()
def chosen_problems(options: EvaluateConfig, data: DataConfig, notes: list[str] | None = None) -> list[Problem]:
    """The problems of `--data`, source by source, or the held-out ones of the run. Notes on reading are appended to
    `notes`."""
    if not options.data:
        return eval_problems(data if not options.problems else replace(data, eval_problems=options.problems), notes)
    chosen: list[Problem] = []
    for source in options.data:
        every = WORLD_PROBLEMS if generator_of(split_name(source)[1]) else sys.maxsize
        # The training sources do not matter here: a file that was trained on may be evaluated too.
        section = replace(data, sources=("world:gcd:1",), weights=(), eval_sources=(source,))
        chosen += eval_problems(replace(section, eval_problems=options.problems or every), notes)
    return chosen


def folder_of(options: EvaluateConfig) -> Path:
    """The directory for the trajectories of an evaluation: that of `keep`, or an unused one in the run (in `runs` for a
    published model).

    Raises:
        ConfigError: The evaluation in `keep` is to be resumed, and there is something else, such as a run.
    """
    if options.keep:
        folder = local_path(options.keep)
        return evaluation_in(folder) if options.resume else unused(folder)
    if not is_run(options.policy):
        return unused(Path("runs") / "evaluations" / Path(options.policy).name)
    run, step = split_checkpoint(options.policy)
    return unused(run / "evaluations" / ("newest" if step is None else f"step_{step:08d}"))


def evaluation_in(folder: Path) -> Path:
    """The directory of an evaluation that is resumed, or begun where there is none.

    Raises:
        ConfigError: It holds something else, such as a run, whose files the evaluation would replace.
    """
    others = [CONFIG_FILE, METRICS_FILE, TRAJECTORIES] if not (folder / REQUEST_FILE).is_file() else []
    if names := [name for name in ("checkpoints", *others) if (folder / name).exists()]:
        raise ConfigError(
            f"--keep {folder} --resume: it holds {names[0]} and is no evaluation; name the directory of an evaluation, "
            "or one that is unused"
        )
    return folder


def sample_policy(
    options: EvaluateConfig,
    overrides: Sequence[str],
    *,
    prog: str,
    problems: Sequence[Problem] | None = None,
    folder: Path | None = None,
) -> EvaluatedPolicy:
    """Rolls out the chosen problems, or the given ones, under a policy, scores them, and saves the trajectories.

    Args:
        options: The policy, the problems, the number of samples.
        overrides: `--section.field=value` words over the settings of the policy.
        prog: Program name in messages.
        problems: Replaces the problems that `options` chooses.
        folder: Directory for the trajectories; None saves none.

    Raises:
        ConfigError: No policy, no problems, or settings that do not fit them.
    """
    config, notes = settings_for(options.policy, overrides, prog, dialogue=False), Notes()
    chosen = chosen_problems(options, config.data, notes) if problems is None else list(problems)
    with ExitStack() as resources:
        if folder is not None:
            resources.enter_context(locked(folder, "--keep"))
        policy, sampling = resources.enter_context(make_parts(config))
        sampler = sampling.sampler
        warn_of_tools(options.policy, sampler.chat)
        progress = resources.enter_context(rollout_display(config.log.console))
        _, suffix = prompt_end(config, 0)
        length = prompt_length(config, sampler.chat, [suffix])
        with config_errors():
            chosen = fitting_problems(chosen, length, config.rollout.max_prompt_tokens, config.data, notes)
        if not chosen:
            raise ConfigError("\n".join(["no problem is left to evaluate on; name some with --data", *notes]))
        step, params = load_policy(policy, options.policy)
        condition, suffix = prompt_end(config, step)
        extras = {"temperature": options.temperature, "condition": condition, "suffix": suffix}
        weights, run_options = sampler.publish(params, step), RunOptions(step, "evaluate", progress)
        if folder is None:
            sampled = sample_groups(sampling, weights, chosen, options.samples, run_options, **extras)
        else:
            wanted = [options.policy, step, options.samples, options.temperature, dump_yaml(config)]
            parts = Parts(folder, [*wanted, *(problem.uid for problem in chosen)])
            describe_run(folder, config, "--keep")
            sampled = parts.finished(step, chosen, options.samples)
            if sampled is None:
                sampled = sample_parts(sampling, weights, chosen, options.samples, run_options, parts, **extras)
                records = eval_records(step, sampled.groups, sampled.removed)
                TraceWriter(folder, 1, sampler.chat.tokenizer.decode).write(step, records, kind="eval")
            parts.remove()
    return EvaluatedPolicy(options.policy, step, chosen, sampled, notes, folder, config.data)


def show_table(
    table: Mapping[str, Metrics], samples: int, ranges: Mapping[str, Mapping[str, tuple[float, float]]] | None = None
) -> Table:
    """The results as a table: scores (with their intervals) before the figures that explain them; sources as columns,
    `all` last."""
    scores = [name for name in table[ALL] if "@" in name or "^" in name]
    if samples == 1:  # pass@1, pass^1 and maj@1 are avg@1
        scores = scores[:1]
    explained = ("tool_error_rate", "tool_error_in_correct", "tool_calls", "turns", "length", "truncated")
    shown = Table("", box=None, padding=(0, 2, 0, 0))
    for source in table:
        shown.add_column(source, justify="right", no_wrap=True)
    for name in ("problems", *scores, *explained, "no_answer", "infrastructure"):
        form = "{:.0f}" if name == "problems" else "{:.1f}" if name == "length" else "{:.3f}"
        shown.add_row(name.replace("_", " "), *(form.format(row[name]) for row in table.values()))
        if ranges is not None and name in scores:
            cells = (ranges.get(source, {}).get(name, (math.nan, math.nan)) for source in table)
            shown.add_row("  95%", *(f"{low:.3f}-{high:.3f}" for low, high in cells))
    return shown


def show_policy(evaluated: EvaluatedPolicy, samples: int, console: Console) -> dict[str, Any]:
    """Prints the result of an evaluation; returns it as plain values."""
    table = summarize(evaluated.sampled.groups, samples, evaluated.sampled.removed)
    ranges = intervals(evaluated.sampled.groups, samples)
    for note in evaluated.notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    line = f"{evaluated.policy}, policy after {evaluated.step} training steps, {samples} rollouts a problem"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    wide = 28 + sum(max(len(source), 13) + 2 for source in table)
    console.print(show_table(table, samples, ranges), width=max(console.width, wide), crop=False, soft_wrap=True)
    line = f"trajectories: {evaluated.folder} (`grpo-roc view {evaluated.folder} --kind eval`)"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    content = {"run": evaluated.policy, "step": evaluated.step, "samples": samples, "notes": list(evaluated.notes)}
    return content | {"trajectories": str(evaluated.folder), "table": table, "intervals": ranges}


def difference_lines(differences: Mapping[str, Difference], names: tuple[str, str]) -> list[str]:
    """One line for each score: both values, their difference and its interval."""
    lines = [f"{names[0]} less {names[1]}, on the problems that both were scored on, 95% by problem:"]
    for score, gap in differences.items():
        lines.append(
            f"  {score:<9} {gap.first:.3f} - {gap.second:.3f} = {gap.value:+.3f}  ({gap.low:+.3f} to {gap.high:+.3f}; "
            f"{gap.problems} problems)"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    show_log()
    try:
        options, overrides = tyro.cli(EvaluateConfig, args=argv, prog=PROG, return_unknown_args=True)
        files = [split_name(source)[1] for source in options.data]
        second, out = None, output_file("--out", options.out, files) if options.out else None
        with phase("evaluate", routine=True):
            first = sample_policy(options, overrides, prog=PROG, folder=folder_of(options))
            if options.against:
                other = replace(options, policy=options.against)
                second = sample_policy(other, overrides, prog=PROG, problems=first.problems, folder=folder_of(other))
    except ValueError as error:  # ConfigError is one
        print(f"configuration: {error}", file=sys.stderr)
        return 2
    console, samples = Console(), options.samples
    content = show_policy(first, samples, console)
    if second is not None:
        content["against"] = show_policy(second, samples, console)
        differences = compare(first.sampled.groups, second.sampled.groups, samples)
        differences = dict(list(differences.items())[: 1 if samples == 1 else None])
        for line in difference_lines(differences, (first.policy, second.policy)):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        content["differences"] = {name: asdict(gap) for name, gap in differences.items()}
    if out:
        try:
            write_output("--out", out, json.dumps(finite(content), indent=1))
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    return 0
