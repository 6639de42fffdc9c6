"""Runs one update of a run again, alone: `grpo-roc replay FILE [--checkpoint STEP] [--section.field value]`.

A run saves the rows of its first few updates that were not finite or raised an alarm in `batches/step_N.npz`. The
replay needs only that file and a checkpoint, on any machine: it loads the newest checkpoint from before the update,
computes loss and gradient of the whole batch and of each row, and names the rows that are not finite or have the
largest gradients.
"""

import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.learner.learner import Learner
from grpo_roc_jax.record.batches import read_batch
from grpo_roc_jax.record.checkpoint_files import whole_steps
from grpo_roc_jax.run.components import check_components, make_registry
from grpo_roc_jax.run.learning import make_learner
from grpo_roc_jax.run.policy import PolicyModel, frozen_weights, load_trained
from grpo_roc_jax.settings.cli import ConfigError, load_config
from grpo_roc_jax.train import split_option
from grpo_roc_jax.types import TrainRow

SHOWN = 5
ONE_MACHINE = """
--distributed=never --sharding.data=-1 --sharding.fsdp=1 --sharding.tensor=1 --sharding.sequence=1 --run_dir=
""".split()  # noqa: SIM905
PROG = "grpo-roc replay"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    step, words = split_option(sys.argv[1:] if argv is None else argv, "--checkpoint")
    if step is not None and not step.isdecimal():
        print(f"replay: --checkpoint {step}; must be the number of a step", file=sys.stderr)
        return 2
    checkpoint = None if step is None else int(step)
    if not words or words[0].startswith("-"):
        print(f"usage: {PROG} FILE [--checkpoint STEP] [--section.field value ...]\n\n{__doc__}")
        return 0 if {"--help", "-h"} & {*words} else 2
    try:
        print("\n".join(replay(Path(words[0]), words[1:], checkpoint)))
    except ConfigError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    return 0


def replay(path: Path, overrides: Sequence[str] = (), checkpoint: int | None = None) -> list[str]:
    """Replays an update; returns the lines of the report.

    Raises:
        ConfigError: The file or its checkpoint cannot be read.
    """
    about, batches = read_batch(path)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(about["config"])
        file.flush()
        words = [file.name, *ONE_MACHINE, f"--rollout.slots={jax.device_count()}", *overrides]
        config = load_config(Config, words, prog=PROG)
    run = path.absolute().parent.parent
    run = run if (run / "checkpoints").is_dir() else Path(about["run"])
    _, chat, model, mesh, _ = check_components(config, make_registry(config))
    policy = PolicyModel(model, mesh, frozen_weights(config, model, mesh), config.lora)
    last = about["step"] - (about["why"] != "not finite")  # an update that was skipped left the parameters as they were
    steps = [step for step in whole_steps(run / "checkpoints") if step <= last]
    wanted = checkpoint if checkpoint is not None else max(steps, default=None)
    if wanted is None:
        raise ConfigError(f"{run} has no checkpoint from before step {about['step']}; name one with --checkpoint STEP")
    step, params = load_trained(run / "checkpoints", model, mesh, config.lora, wanted)
    learner = make_learner(config, policy, chat).learner
    lines = [f"update of step {about['step']} ({about['why']}), with the parameters after step {step}"]

    def measure(rows: Sequence[TrainRow], temperature: float) -> Mapping[str, float]:
        return measured(learner, learner.start(params), rows, temperature)

    for rows, temperature in zip(batches, about["temperatures"], strict=True):
        metrics = sorted(measure(rows, temperature).items())
        lines.append("  ".join([f"{len(rows)} rows:", *(f"{name} {value:.4g}" for name, value in metrics)]))
        lines += heaviest(rows, [measure([row], temperature) for row in rows])
    return lines


def heaviest(rows: Sequence[TrainRow], alone: Sequence[Mapping[str, float]]) -> list[str]:
    """Describes the rows that are not finite and those with the largest gradients, from the metrics of
    each row alone."""
    order = sorted(range(len(rows)), key=lambda i: -weight_of(alone[i]))
    lines = []
    for i in order[: max(SHOWN, sum(weight_of(figures) == math.inf for figures in alone))]:
        figures, row = alone[i], rows[i]
        faults = "" if weight_of(figures) < math.inf else f"NOT FINITE: {', '.join(faults_of(row))}; "
        lines.append(
            f"  row {i}: {faults}loss {figures['loss/value']:.4g}, gradient norm {figures['update/grad_norm']:.4g}, "
            f"{row.length} tokens, {int(row.policy_mask.sum())} trained"
        )
    return lines


def measured(learner: Learner, state: Any, rows: Sequence[TrainRow], temperature: float) -> dict[str, float]:
    """Metrics of an optimizer step on these rows. The new state is discarded."""
    _, metrics = learner.optimizer_step(state, learner.on_mesh(list(rows), temperature).packed)
    return {name: float(value) for name, value in jax.device_get(metrics).items()}


def weight_of(figures: Mapping[str, float]) -> float:
    """The gradient norm of a row; infinite if the norm or the loss is not finite."""
    values = [figures["loss/value"], figures["update/grad_norm"]]
    return values[1] if all(map(math.isfinite, values)) else math.inf


def faults_of(row: TrainRow) -> list[str]:
    """Names of the arrays of a row that have NaN or infinity on the policy mask."""
    arrays = {item.name: getattr(row, item.name) for item in fields(row)}
    inexact = {n: a for n, a in arrays.items() if isinstance(a, np.ndarray) and a.dtype.kind == "f"}
    names = [name for name, array in inexact.items() if not np.isfinite(array[row.policy_mask]).all()]
    return names or ["the policy's own numbers"]
