"""Files of checkpoints: names, manifests, checksums, recovery after a kill. Knows no device and no model.

A directory counts as a checkpoint when its manifest is whole and agrees with every file; names and pointers decide
nothing. All deletion goes by renaming first, so that a killed deletion leaves no half checkpoint under a valid name.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
TRASH = "trash_"
ROOT = "root/"
"""Before every name inside the archive, so that none meets a parameter of `np.savez`."""
NAME = re.compile(r"(staging_)?step_(\d{8,})")


class InvalidCheckpoint(Exception):
    """A torn or corrupt checkpoint; the message says which file."""


@dataclass(frozen=True)
class Entry:
    """A directory that may be a checkpoint."""

    step: int
    path: Path
    staging: bool
    """Not yet renamed: complete when its manifest is there, else interrupted."""


def final_name(step: int) -> str:
    return f"step_{step:08d}"


def staging_name(step: int) -> str:
    return f"staging_step_{step:08d}"


def entries(directory: Path) -> list[Entry]:
    """Candidates, newest first; found by looking, since pointers go stale. At equal step the unnamed one is newer."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        match = NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append(Entry(int(match[2]), path, bool(match[1])))
    return sorted(found, key=lambda entry: (entry.step, entry.staging), reverse=True)


def newest_name(directory: Path) -> str:
    """Name of the newest checkpoint whose files are there; `none` without one."""
    return next((entry.path.name for entry in entries(directory) if _is_whole(entry)), "none")


def write_host(path: Path, process: int, host: str, arrays: Mapping[str, np.ndarray]) -> None:
    """The part of one process: JSON and arrays, on disk when this returns."""
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
    """Inverse of `write_host`."""
    host = json.loads((path / f"host_{process}.json").read_text(encoding="utf-8"))
    with np.load(path / f"arrays_{process}.npz", allow_pickle=False) as archive:
        return host, {name.removeprefix(ROOT): archive[name] for name in archive.files}


def commit(staging: Path, step: int, leaves: Mapping[str, Any], processes: int) -> Path:
    """Reads every file back into a manifest, writes it last, and gives the directory its name."""
    paths = sorted(path for path in staging.rglob("*") if path.is_file())
    for path in paths:
        _sync(path)
    for path in sorted(path for path in staging.rglob("*") if path.is_dir()):
        _sync(path)
    with ThreadPoolExecutor(4) as pool:  # hashing releases the interpreter lock
        sums = list(pool.map(_checksum, paths))
    manifest = {
        "format": FORMAT,
        "step": step,
        "processes": processes,
        "versions": {name: metadata.version(name) for name in ("jax", "orbax-checkpoint")},
        "leaves": dict(leaves),
        "files": {str(path.relative_to(staging)): found for path, found in zip(paths, sums, strict=True)},
    }
    manifest["digest"] = _digest(manifest)
    draft = staging / f"{MANIFEST}.part"
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, staging / MANIFEST)
    _sync(staging)
    return promote(staging)


def promote(staging: Path) -> Path:
    """Gives a complete staging directory its final name; one of the same step is replaced."""
    final = staging.with_name(staging.name.removeprefix("staging_"))
    discard(final)
    os.replace(staging, final)
    _sync(final.parent)
    return final


def verify(entry: Entry) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is as it was written.

    Raises:
        InvalidCheckpoint: Interrupted while saving, or a file is missing, cut or altered.
    """
    manifest = _read_manifest(entry)
    _check_sizes(entry, manifest)
    names = list(manifest["files"])
    with ThreadPoolExecutor(4) as pool:
        try:
            sums = list(pool.map(lambda name: _checksum(entry.path / name), names))
        except OSError as error:
            raise InvalidCheckpoint(f"cannot be read: {error}") from error
    for name, found in zip(names, sums, strict=True):
        if found != manifest["files"][name]:
            raise InvalidCheckpoint(f"{name} does not match its checksum")
    return manifest


def recover(directory: Path) -> None:
    """After a kill: names complete staging directories, removes interrupted ones and half-deleted ones."""
    for entry in entries(directory):
        if entry.staging:
            if _is_whole(entry):
                promote(entry.path)
            else:
                log.warning("checkpoint %s removed: its saving was interrupted", entry.path.name)
                discard(entry.path)
    if directory.is_dir():
        for path in directory.iterdir():
            if path.name.startswith(TRASH):
                shutil.rmtree(path, ignore_errors=True)


def prune(newest: Path, keep: int) -> None:
    """Removes all but the `keep` newest valid checkpoints up to `newest`, which was just read back."""
    step = int(NAME.fullmatch(newest.name)[2])
    kept = 0
    for entry in entries(newest.parent):
        if entry.step > step or entry.staging:
            continue
        if kept < keep and _is_whole(entry):
            kept += 1
        else:
            discard(entry.path)


def discard(path: Path) -> None:
    """Removes a directory that may be there; renamed first, so that no half of it keeps a valid name."""
    if not path.exists():
        return
    number = 0
    while (trash := path.with_name(f"{TRASH}{path.name}_{number}")).exists():
        number += 1
    os.replace(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _is_whole(entry: Entry) -> bool:
    """Whether the manifest and all files are there in their sizes; the cheap part of `verify`."""
    try:
        _check_sizes(entry, _read_manifest(entry))
    except InvalidCheckpoint:
        return False
    return True


def _read_manifest(entry: Entry) -> dict[str, Any]:
    try:
        manifest = json.loads((entry.path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidCheckpoint("no manifest: saving was interrupted") from None
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"{MANIFEST} cannot be read: {error}") from error
    if not isinstance(manifest, dict) or manifest.pop("digest", "") != _digest(manifest):
        raise InvalidCheckpoint(f"{MANIFEST} does not match its own checksum")
    if manifest["format"] != FORMAT:
        raise InvalidCheckpoint(f"format {manifest['format']}; this version reads {FORMAT}")
    if manifest["step"] != entry.step:
        raise InvalidCheckpoint(f"{MANIFEST} is of step {manifest['step']}")
    return manifest


def _check_sizes(entry: Entry, manifest: Mapping[str, Any]) -> None:
    for name, (size, _) in manifest["files"].items():
        try:
            found = (entry.path / name).stat().st_size
        except OSError:
            raise InvalidCheckpoint(f"{name} is missing") from None
        if found != size:
            raise InvalidCheckpoint(f"{name} has {found} bytes of {size}")


def _checksum(path: Path) -> list[Any]:
    """[size, blake2b of the content]."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        return [file.tell(), digest]


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _sync(path: Path) -> None:
    """Asks the disk for a file or directory; file systems that cannot are taken as they are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        log.debug("no fsync of %s: %s", path, error)
    finally:
        os.close(descriptor)
