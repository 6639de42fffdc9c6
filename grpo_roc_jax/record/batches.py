"""Saves the batches of updates that were not finite or raised an alarm, for `grpo-roc replay`.

A run saves the rows of its first few such updates in `batches/step_N.npz`, with its configuration.
"""

import json
import logging
import zipfile
import zlib
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
ABOUT = ("step", "why", "config", "run", "temperatures")
"""What the description of an update tells `replay`."""
NOT_A_BATCH = (
    *(ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError, MemoryError),
    *(zipfile.BadZipFile, zlib.error),
)
"""What reading another file raises."""


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


@config_errors()
def read_batch(path: Path) -> tuple[dict[str, Any], list[list[TrainRow]]]:
    """(description of the update, rows of each optimizer step).

    Raises:
        ConfigError: The file cannot be read, or is no batch of a run.
    """
    row_arrays: dict[tuple[int, int], dict[str, np.ndarray]] = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            about = parse_json(str(archive["about"]), str(path))
            for name in archive.files:
                if name != "about":
                    index, number, field = name.split("/")
                    row_arrays.setdefault((int(index), int(number)), {})[field] = archive[name]
        if missing := set(ABOUT) - about.keys():
            raise KeyError(*missing)
        batches: list[list[TrainRow]] = [[] for _ in about["rows"]]
        for scalars, (index, number) in zip(about["scalars"], sorted(row_arrays), strict=True):
            parts = tuple(scalars.pop("parts", ()))
            batches[index].append(TrainRow(**row_arrays[index, number], **scalars, parts=parts))
    except NOT_A_BATCH as error:
        raise ValueError(
            f"{path} is no batch of a run, or is damaged; name a file {FOLDER}/step_N.npz of a run"
        ) from error
    return about, batches
