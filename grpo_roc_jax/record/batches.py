"""Saves the batches of updates that were not finite or raised an alarm, for `grpo-roc replay`.

A run saves the rows of its first few such updates in `batches/step_N.npz`, with its configuration.
"""

import json
import logging
import zipfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from grpo_roc_jax.learner.learner import UpdateBatch
from grpo_roc_jax.settings.cli import config_errors, dump_yaml
from grpo_roc_jax.settings.files import parse_json
from grpo_roc_jax.types import TrainRow

log = logging.getLogger(__name__)

FOLDER = "batches"
KEPT_FILES = 5
"""Most files of a run. The first failures are saved, since they show how the trouble began."""
KEPT_BYTES = 1 << 28
"""Most bytes of the arrays of one file; further rows are left out."""


def keep_batch(run_dir: Path, config: Any, step: int, batches: Sequence[UpdateBatch], why: str) -> Path | None:
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
