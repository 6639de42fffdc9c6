"""Saves the batches of updates that were not finite or raised an alarm, and replays them (`grpo-roc replay`).

A run saves the rows of its first few such updates in `batches/step_N.npz`, with its configuration. The replay needs
only that file and a checkpoint, on any machine: it loads the newest checkpoint from before the update, computes loss
and gradient of the whole batch and of each row, and names the rows that are not finite or have the largest gradients.
"""

import json
import logging
import math
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.learner.learner import Learner, UpdateBatch
from grpo_roc_jax.record.checkpoint_files import entries
from grpo_roc_jax.run.components import check_components, make_registry
from grpo_roc_jax.run.learning import make_learner
from grpo_roc_jax.run.policy import PolicyModel, frozen_weights, load_trained
from grpo_roc_jax.settings.cli import ConfigError, config_errors, dump_yaml, load_config
from grpo_roc_jax.settings.files import parse_json
from grpo_roc_jax.types import TrainRow

log = logging.getLogger(__name__)

FOLDER = "batches"
KEPT_FILES = 5
"""Most files of a run. The first failures are saved, since they show how the trouble began."""
KEPT_BYTES = 1 << 28
"""Most bytes of the arrays of one file; further rows are left out."""
SHOWN = 5
ONE_MACHINE = """
--distributed=never --sharding.data=-1 --sharding.fsdp=1 --sharding.tensor=1 --sharding.sequence=1 --run_dir=
""".split()  # noqa: SIM905
PROG = "grpo-roc replay"


def keep_batch(run_dir: Path, config: Config, step: int, batches: Sequence[UpdateBatch], why: str) -> Path | None:
    """Writes the rows of an update; None if enough files are saved already or the disk fails."""
    folder = run_dir / FOLDER
    path = folder / f"step_{step:08d}.npz"
    arrays: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {"step": step, "why": why, "config": dump_yaml(config), "run": str(run_dir.absolute())}
    about["temperatures"] = [batch.temperature for batch in batches]
    about["rows"], size, scalars = [], 0, []
    for index, batch in enumerate(batches):
        for number, row in enumerate(batch.rows):
            values = {item.name: getattr(row, item.name) for item in fields(row)}
            row_arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
            size += sum(value.nbytes for value in row_arrays.values())
            if size > KEPT_BYTES:
                break
            arrays |= {f"{index}/{number}/{name}": value for name, value in row_arrays.items()}
            scalars.append(
                {name: value for name, value in values.items() if isinstance(value, float) or name == "parts"}
            )
        about["rows"].append(len(batch.rows))
    about["scalars"] = scalars
    try:
        if len(list(folder.glob("step_*.npz"))) >= KEPT_FILES:
            return None
        folder.mkdir(exist_ok=True)
        np.savez_compressed(path, allow_pickle=False, about=np.array(json.dumps(about)), **arrays)
    except OSError as error:
        log.warning("the batch of step %d is not kept: %s", step, error)
        return None
    return path


@config_errors(KeyError, TypeError, AttributeError, EOFError, MemoryError, zipfile.BadZipFile)
def read_batch(path: Path) -> tuple[dict[str, Any], list[list[TrainRow]]]:
    """(description of the update, rows of each optimizer step).

    Raises:
        ConfigError: The file cannot be read.
    """
    batches: list[list[TrainRow]] = []
    with np.load(path, allow_pickle=False) as archive:
        about = parse_json(str(archive["about"]), str(path))
        row_arrays: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        for name in archive.files:
            if name != "about":
                index, number, field = name.split("/")
                row_arrays.setdefault((int(index), int(number)), {})[field] = archive[name]
    batches = [[] for _ in about["rows"]]
    for scalars, (index, number) in zip(about["scalars"], sorted(row_arrays), strict=True):
        parts = tuple(scalars.pop("parts", ()))
        batches[index].append(TrainRow(**row_arrays[index, number], **scalars, parts=parts))
    return about, batches


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
    steps = [entry.step for entry in entries(run / "checkpoints") if entry.step < about["step"]]
    skipped = about["step"] if about["why"] == "not finite" else None
    steps += [entry.step for entry in entries(run / "checkpoints") if entry.step == skipped]
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
