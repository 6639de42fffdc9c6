"""Files of checkpoints: names, manifests, checksums, recovery after a kill; independent of devices and models.

A directory counts as a checkpoint if its manifest is complete and agrees with every file; names and pointers are not
trusted. Directories are renamed before they are deleted, so a killed deletion leaves no partial checkpoint under a
valid name.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from grpo_roc_jax.process.points import reach
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.settings.files import read_json, read_json_object

T = TypeVar("T")

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
LOGS = "logs.json"
"""How much the logs of the run held (`missing.measure_logs`); absent if no process wrote logs."""
TRASH = "trash_"
ROOT = "root/"
"""Prefix of every name inside the archive, so that none collides with a parameter of `np.savez`."""
NAME = re.compile(r"(staging_)?step_(\d{8,})")
PAUSES_S = (0.5, 2.0, 8.0)
"""Seconds to wait before each retry of a read that failed; network file systems can fail for seconds at a time."""


def check_path(path: Path) -> None:
    """Refuses a directory whose checkpoints could not be read.

    Raises:
        ConfigError: Its path has a bracket. Orbax searches it as a pattern and then leaves out what it has written.
    """
    if "[" in str(path.resolve()):
        raise ConfigError(
            f"{path.resolve()} has a '[' in its path, where no checkpoint can be written; take a --run_dir without"
        )


class InvalidCheckpoint(Exception):
    """An incomplete or corrupt checkpoint; the message names the file."""


class NoValidCheckpoint(ConfigError):
    """Checkpoints exist, and none of them can be used."""


@dataclass(frozen=True)
class Entry:
    """A directory that may be a checkpoint."""

    step: int
    path: Path
    staging: bool
    """Whether the directory has not been renamed yet: it is complete if it has a manifest, interrupted otherwise."""


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint. It is written last, since it makes the checkpoint valid."""

    step: int
    processes: int
    versions: Mapping[str, str]
    """Package -> version at the time of writing."""
    leaves: Mapping[str, list[Any]]
    """Name of an array of the training state -> [shape, dtype]."""
    files: Mapping[str, list[Any]]
    """Path within the directory -> [size, checksum]."""
    format: int = field(default=FORMAT, kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """The content of the file, with a checksum of its own."""
        content = {"format": self.format} | asdict(self)
        return content | {"digest": _digest(content)}


def staging_name(step: int) -> str:
    return f"staging_step_{step:08d}"


def entries(directory: Path) -> list[Entry]:
    """Candidates in the directory, newest first; of two with the same step the staging one is newer."""
    if not directory.is_dir():
        return []
    candidates = []
    for path in directory.iterdir():
        match = NAME.fullmatch(path.name)
        if match and path.is_dir():
            candidates.append(Entry(int(match[2]), path, bool(match[1])))
    return sorted(candidates, key=lambda entry: (entry.step, entry.staging), reverse=True)


def whole_steps(directory: Path) -> list[int]:
    """Steps of the checkpoints that have all their files with their sizes, newest first."""
    return [entry.step for entry in entries(directory) if _is_whole(entry)]


def newest_name(directory: Path) -> str:
    """Name of the newest checkpoint with all its files; `none` if there is none."""
    try:
        newest = newest_whole(directory)
    except NoValidCheckpoint:
        newest = None
    return "none" if newest is None else newest.path.name


def newest_whole(directory: Path) -> Entry | None:
    """The newest checkpoint that has all its files with their sizes; None if none was ever completed.

    Raises:
        NoValidCheckpoint: All completed checkpoints are damaged or cannot be read.
    """
    try:
        candidates = patiently(lambda: entries(directory))
    except OSError as error:
        raise NoValidCheckpoint(f"{directory} cannot be read ({error}); nothing was changed") from error
    faults: dict[Entry, str] = {}
    for entry in candidates:
        try:
            patiently(lambda entry=entry: _check_sizes(entry, read_manifest(entry)))
        except (InvalidCheckpoint, OSError) as error:
            faults[entry] = str(error)
        else:
            return entry
    refuse_damaged(directory, faults)
    return None


def refuse_damaged(directory: Path, faults: Mapping[Entry, str]) -> None:
    """Refuses to start again at step 0 if a checkpoint was completed before.

    A staging directory without a manifest is a save that was interrupted, possibly the first one.

    Raises:
        NoValidCheckpoint: One of `faults` belongs to a completed checkpoint.
    """
    damaged = {e: why for e, why in faults.items() if not e.staging or (e.path / MANIFEST).exists()}
    if damaged:
        lines = [f"  {entry.path.name}: {why}" for entry, why in damaged.items()]
        raise NoValidCheckpoint(
            "\n".join([f"{directory} holds checkpoints and none of them can be used:", *lines])
            + "\nnothing was changed; restore the files or try again if the disk failed for a while, or move the "
            "directory away to start at step 0, which discards the metrics and trajectories of the run"
        )


def patiently(read: Callable[[], T], errors: tuple[type[Exception], ...] = (OSError,)) -> T:
    """Returns `read()`. Repeats it after growing pauses if the disk fails; a missing file is not such a failure."""
    for pause_s in PAUSES_S:
        try:
            return read()
        except FileNotFoundError:
            raise
        except errors as error:
            log.warning("a read failed and is tried again in %g s: %s", pause_s, error)
            time.sleep(pause_s)
    return read()


def write_host(path: Path, process: int, host: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the part of one process, JSON and arrays; it is on disk when this returns."""
    reach("checkpoint.write")
    for name, write in (
        (f"host_{process}.json", lambda file: file.write(host.encode())),
        (
            f"arrays_{process}.npz",
            lambda file: np.savez(file, allow_pickle=False, **{f"{ROOT}{name}": a for name, a in arrays.items()}),
        ),
    ):
        with open(path / name, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())


def read_host(path: Path, process: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Inverse of `write_host`.

    Raises:
        OSError, ValueError: The files cannot be read.
    """
    try:
        return _read_host(path, process)
    except (KeyError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise ValueError(f"the state of process {process} cannot be read: {error!r:.300}") from error


def _read_host(path: Path, process: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    host = read_json_object(path / f"host_{process}.json")
    with np.load(path / f"arrays_{process}.npz", allow_pickle=False) as archive:
        return host, {name.removeprefix(ROOT): archive[name] for name in archive.files}


def write_logs(path: Path, measured: Mapping[str, int]) -> None:
    """Writes how much the logs of the run hold."""
    (path / LOGS).write_text(json.dumps(dict(measured)), encoding="utf-8")


def read_logs(path: Path) -> dict[str, int]:
    """How much the logs of the run held when the checkpoint was saved; empty if it does not say.

    Raises:
        OSError, ValueError: The file cannot be read.
    """
    measured = read_json_object(path / LOGS) if (path / LOGS).exists() else {}
    if not all(type(amount) is int for amount in measured.values()):
        raise ValueError(f"{path / LOGS} must hold a number for each file")
    return measured


def saved_stage(path: Path) -> dict[str, Any] | None:
    """The position of a checkpoint's run among its stages; None before the first stage."""
    return read_json_object(path / "host_0.json").get("stage")


def commit(staging: Path, step: int, leaves: Mapping[str, Any], processes: int) -> Path:
    """Computes the checksum of every file, writes the manifest last, and renames the directory to its final name."""
    paths = sorted(path for path in staging.rglob("*") if path.is_file())
    for path in paths:
        _sync(path)
    for path in sorted(path for path in staging.rglob("*") if path.is_dir()):
        _sync(path)
    with ThreadPoolExecutor(4) as pool:  # hashing releases the interpreter lock
        sums = list(pool.map(_checksum, paths))
    names = [str(path.relative_to(staging)) for path in paths]
    versions = {name: metadata.version(name) for name in ("jax", "orbax-checkpoint")}
    reach("checkpoint.commit")
    manifest = Manifest(step, processes, versions, dict(leaves), dict(zip(names, sums, strict=True)))
    draft = staging / f"{MANIFEST}.part"
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(manifest.to_json(), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, staging / MANIFEST)
    _sync(staging)
    return promote(staging)


def promote(staging: Path) -> Path:
    """Renames a complete staging directory to its final name; replaces a checkpoint of the same step."""
    final = staging.with_name(staging.name.removeprefix("staging_"))
    reach("checkpoint.promote")
    discard(final)
    os.replace(staging, final)
    _sync(final.parent)
    return final


def verify(entry: Entry) -> Manifest:
    """The manifest of a checkpoint, after checking that every file is as it was written.

    Raises:
        InvalidCheckpoint: Saving was interrupted, or a file is missing, truncated, altered or unreadable.
    """
    try:
        return patiently(lambda: _verify(entry))
    except OSError as error:
        raise InvalidCheckpoint(f"cannot be read: {error}") from error


def _verify(entry: Entry) -> Manifest:
    manifest = read_manifest(entry)
    _check_sizes(entry, manifest)
    names = list(manifest.files)
    with ThreadPoolExecutor(4) as pool:
        sums = list(pool.map(lambda name: _checksum(entry.path / name), names))
    for name, checksum in zip(names, sums, strict=True):
        if checksum != manifest.files[name]:
            raise InvalidCheckpoint(f"{name} does not match its checksum")
    return manifest


def recover(directory: Path) -> None:
    """Cleans up after a kill: renames complete staging directories, removes interrupted and half-deleted ones."""
    for entry in entries(directory):
        if entry.staging:
            complete = _is_whole(entry)
            if complete:
                promote(entry.path)
            elif complete is False:
                log.warning("checkpoint %s removed: saving was interrupted", entry.path.name)
                discard(entry.path)
    if directory.is_dir():
        for path in directory.iterdir():
            if path.name.startswith(TRASH):
                shutil.rmtree(path, ignore_errors=True)


def prune(newest: Path, keep: int) -> None:
    """Removes all but the `keep` newest valid checkpoints up to `newest`, which was just verified."""
    step = int(NAME.fullmatch(newest.name)[2])
    valid = 0
    for entry in entries(newest.parent):
        if entry.step > step or entry.staging:
            continue
        complete = _is_whole(entry)
        if complete and valid < keep:
            valid += 1
        elif complete is not None:
            discard(entry.path)


def discard(path: Path) -> None:
    """Removes a directory if it exists. It is renamed first, so that no partial directory has a valid name."""
    if not path.exists():
        return
    number = 0
    while (trash := path.with_name(f"{TRASH}{path.name}_{number}")).exists():
        number += 1
    os.replace(path, trash)
    reach("checkpoint.discard")
    shutil.rmtree(trash, ignore_errors=True)


def _is_whole(entry: Entry) -> bool | None:
    """Whether the manifest and all files exist with their sizes, the cheap part of `verify`; None if the disk fails."""
    try:
        _check_sizes(entry, read_manifest(entry))
    except InvalidCheckpoint:
        return False
    except OSError as error:
        log.warning("checkpoint %s cannot be read: %s", entry.path.name, error)
        return None
    return True


def read_manifest(entry: Entry) -> Manifest:
    reach("checkpoint.read")
    try:
        content = read_json(entry.path / MANIFEST)
    except FileNotFoundError:
        raise InvalidCheckpoint("no manifest: saving was interrupted") from None
    except ValueError as error:
        raise InvalidCheckpoint(f"{MANIFEST} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.pop("digest", "") != _digest(content):
        raise InvalidCheckpoint(f"{MANIFEST} does not match its own checksum")
    try:
        if content["format"] != FORMAT:
            raise InvalidCheckpoint(f"format {content['format']}; this version reads {FORMAT}")
        if content["step"] != entry.step:
            raise InvalidCheckpoint(f"{MANIFEST} belongs to step {content['step']}")
        return Manifest(**content)
    except (KeyError, TypeError) as error:
        raise InvalidCheckpoint(f"{MANIFEST} has other entries than it may: {error}") from error


def _check_sizes(entry: Entry, manifest: Manifest) -> None:
    for name, (size, _) in manifest.files.items():
        try:
            size_on_disk = (entry.path / name).stat().st_size
        except FileNotFoundError:
            raise InvalidCheckpoint(f"{name} is missing") from None
        if size_on_disk != size:
            raise InvalidCheckpoint(f"{name} has {size_on_disk} bytes of {size}")


def _checksum(path: Path) -> list[Any]:
    """[size, blake2b digest of the content]."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        return [file.tell(), digest]


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


def sync_logs(run_dir: Path, since: float = 0.0) -> None:
    """Syncs the logs of a run to disk: metrics, events, and trajectories that were written after the time `since`.

    A file that cannot be synced is only logged, since a problem with the logs is no reason to lose a checkpoint.
    """
    folder = run_dir / "trajectories"
    recent = [path for path in folder.glob("*.jsonl") if path.stat().st_mtime >= since] if folder.is_dir() else []
    for path in (*sorted(run_dir.glob("*.jsonl")), *sorted(recent), folder, run_dir):
        try:
            if path.exists():
                _sync(path)
        except OSError as error:
            log.warning("%s could not be synced to disk: %s", path, error)


def _sync(path: Path) -> None:
    """Syncs a file or directory to disk, on file systems that support it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        log.debug("no fsync of %s: %s", path, error)
    finally:
        os.close(descriptor)
