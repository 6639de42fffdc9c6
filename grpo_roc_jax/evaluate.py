"""Evaluation of a policy on held-out problems, by the same engine, executor and verifier as training.

`python -m grpo_roc_jax.evaluate RUN [--data FILE...] [--samples K] [--section.field value]` takes every setting that
the command line does not name from the configuration of the run.
"""

import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from grpo_roc_jax.cli import ConfigError, load_config
from grpo_roc_jax.config import Config
from grpo_roc_jax.data.config import DataConfig
from grpo_roc_jax.data.pipeline import eval_problems
from grpo_roc_jax.data.problems import drop_long
from grpo_roc_jax.data.worlds import WORLD_PREFIX
from grpo_roc_jax.method.family.rc_grpo import HIGH, LOW, RewardTokens, check_separation, reward_goal
from grpo_roc_jax.method.shaping import prompt_suffix
from grpo_roc_jax.record.accuracy import ALL, eval_metrics, summarize
from grpo_roc_jax.rollout.progress import rollout_display
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.rollout.records import RunOptions
from grpo_roc_jax.run.components import Components, make_components
from grpo_roc_jax.run.load import load_run_policy
from grpo_roc_jax.run.policy import split_checkpoint
from grpo_roc_jax.run.sample import ScoredRollouts, sample_groups
from grpo_roc_jax.types import PLAIN, Condition, Metrics, Problem

PROG = "python -m grpo_roc_jax.evaluate"
WORLD_PROBLEMS = 64
"""Held-out problems of a generated world, which has no end, if no number is given."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluates the policy of a run. Further `--section.field value` replace settings of the run."""

    run: tyro.conf.Positional[str]
    """Directory of the run, for its newest checkpoint, or one of its checkpoints (`RUN/checkpoints/step_00000012`)."""
    data: tuple[str, ...] = ()
    """.jsonl or .parquet files, or `world:FAMILY:LEVEL`; empty: the held-out problems of the run."""
    problems: int = 0
    """Problems of each source; 0 takes all of a file and 64 of a world."""
    samples: int = 1
    """Rollouts for each problem: the k of avg@k, pass@k and maj@k."""
    temperature: float | None = None
    """Sampling temperature, 0 for greedy decoding; by default that of training."""
    out: str = ""
    """JSON file to which the table is written as well."""

    def __post_init__(self) -> None:
        if self.samples < 1 or self.problems < 0:
            raise ValueError(
                f"--samples {self.samples} --problems {self.problems}; samples must be at least 1, problems at least 0"
            )


def evaluate_policy(
    components: Components,
    sampler: SamplerParams,
    problems: Sequence[Problem],
    samples: int,
    *,
    step: int = 0,
    temperature: float | None = None,
) -> tuple[float, Metrics, ScoredRollouts]:
    """(avg@samples over all problems, metrics by source, the scored rollouts).

    Args:
        components: Of the run.
        sampler: From `engine.publish`.
        problems: Held out from training.
        samples: Rollouts for each problem.
        step: Of training; evaluation draws from random streams of its own.
        temperature: Instead of `sampling.temperature`; 0 is greedy.
    """
    condition, suffix = prompt_end(components.config, step)
    extras = {"temperature": temperature, "condition": condition, "suffix": suffix}
    sampled = sample_groups(components, sampler, problems, samples, RunOptions(step, "evaluate"), **extras)
    table = summarize(sampled.groups, samples, sampled.removed)
    return table["all"][f"avg@{samples}"], eval_metrics(table), sampled


def reward_token(config: Config) -> tuple[Condition, str]:
    """(condition, end of the prompt) of evaluation: by default the high reward token, for policies trained with one."""
    tokens = config.plan.condition
    if isinstance(tokens, RewardTokens):
        condition, form = {"high": HIGH, "low": LOW, "none": PLAIN}[tokens.evaluate], tokens.form
    else:
        form = config.sft.reward_tokens
        condition = PLAIN if form == "none" else HIGH
    return condition, reward_goal(condition, form)


def prompt_end(config: Config, step: int) -> tuple[Condition, str]:
    """(condition, end of the prompt) of evaluation after `step` training steps: reward token and token budget."""
    condition, goal = reward_token(config)
    return condition, goal + prompt_suffix(config.shaping, step)


def check_reward_tokens(components: Components, trained: Any) -> list[str]:
    """Lines on how the reward tokens change held-out success before training; none for methods without them.

    Args:
        components: Engine, executor, chat, scorer, configuration.
        trained: Parameters of the training state after the supervised stage.

    Raises:
        ConfigError: Success under the two differs by less than `plan.condition.separation`.
    """
    config, tokens = components.config, components.config.plan.condition
    if not isinstance(tokens, RewardTokens) or not tokens.separation or not config.steps:
        return []
    sampler, problems = components.engine.publish(components.full(trained), 0), eval_problems(config.data)
    rates = []
    for condition in (HIGH, LOW):
        extras = {"condition": condition, "suffix": reward_goal(condition, tokens.form)}
        options = RunOptions(0, "evaluate")
        sampled = sample_groups(components, sampler, problems, config.eval.samples, options, **extras)
        rewards = [group.rewards for group in sampled.groups if group.size]
        rates.append(float(np.mean(np.concatenate(rewards) > 0)) if rewards else 0.0)
    try:
        check_separation(*rates, tokens.separation)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return [f"held-out success {rates[0]:.3f} under the high reward token, {rates[1]:.3f} under the low one"]


def chosen_problems(asked: EvaluateConfig, data: DataConfig) -> list[Problem]:
    """The problems of `--data`, source by source, or the held-out ones of the run."""
    if not asked.data:
        return eval_problems(data if not asked.problems else replace(data, eval_problems=asked.problems))
    chosen: list[Problem] = []
    for source in asked.data:
        every = WORLD_PROBLEMS if source.startswith(WORLD_PREFIX) else sys.maxsize
        # The training sources do not matter here: a file that was trained on may be evaluated too.
        section = replace(data, sources=("world:gcd:1",), weights=(), eval_sources=(source,))
        chosen += eval_problems(replace(section, eval_problems=asked.problems or every))
    return chosen


def sample_run(asked: EvaluateConfig, overrides: Sequence[str], *, prog: str) -> tuple[int, ScoredRollouts, list[str]]:
    """(training step of the policy, scored rollouts of the chosen problems, notes on problems left out) of a run.

    Raises:
        ConfigError: No run, no checkpoint, or settings that do not fit them.
    """
    run, step = split_checkpoint(asked.run)
    config = load_config(Config, [str(run / "config.yaml"), *overrides], prog=prog)
    try:
        problems = chosen_problems(asked, config.data)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    with make_components(config) as components, rollout_display(config.log.console) as progress:
        _, suffix = prompt_end(config, 0)
        problems, notes = drop_long(
            problems, lambda problem: len(components.chat.prompt_ids(problem, suffix)), config.rollout.max_prompt_tokens
        )
        if not problems:
            raise ConfigError("\n".join(["no problem is left to evaluate on", *notes[:20]]))
        found, params = load_run_policy(components, run / "checkpoints", step)
        condition, suffix = prompt_end(config, found)
        extras = {"temperature": asked.temperature, "condition": condition, "suffix": suffix}
        sampler, options = components.engine.publish(params, found), RunOptions(found, "evaluate", progress)
        sampled = sample_groups(components, sampler, problems, asked.samples, options, **extras)
    return found, sampled, notes


def show_table(table: Mapping[str, Metrics], samples: int) -> Table:
    """Figures as rows, scores before the figures that explain them; sources as columns, `all` last."""
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
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        asked, overrides = tyro.cli(EvaluateConfig, args=argv, prog=PROG, return_unknown_args=True)
        step, sampled, notes = sample_run(asked, overrides, prog=PROG)
    except ValueError as error:  # ConfigError is one
        print(f"configuration: {error}", file=sys.stderr)
        return 2
    table = summarize(sampled.groups, asked.samples, sampled.removed)
    for note in notes:
        print(note)
    print(f"{asked.run}, policy after {step} training steps, {asked.samples} rollouts a problem")
    console = Console()
    wide = 28 + sum(max(len(source), 8) + 2 for source in table)
    console.print(show_table(table, asked.samples), width=max(console.width, wide), crop=False, soft_wrap=True)
    if asked.out:
        plain = {source: {n: v if math.isfinite(v) else None for n, v in row.items()} for source, row in table.items()}
        content = {"run": asked.run, "step": step, "samples": asked.samples, "table": plain}
        Path(asked.out).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
