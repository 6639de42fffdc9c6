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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
TRASH = "trash_"
ROOT = "root/"
"""Prefix of every name inside the archive, so that none collides with a parameter of `np.savez`."""
NAME = re.compile(r"(staging_)?step_(\d{8,})")


class InvalidCheckpoint(Exception):
    """An incomplete or corrupt checkpoint; the message names the file."""


@dataclass(frozen=True)
class Entry:
    """A directory that may be a checkpoint."""

    step: int
    path: Path
    staging: bool
    """Not renamed yet: complete if it has a manifest, interrupted otherwise."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of; written last, since it makes the checkpoint valid."""

    step: int
    processes: int
    versions: Mapping[str, str]
    """Package -> version that wrote it."""
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
    found = []
    for path in directory.iterdir():
        match = NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append(Entry(int(match[2]), path, bool(match[1])))
    return sorted(found, key=lambda entry: (entry.step, entry.staging), reverse=True)


def newest_name(directory: Path) -> str:
    """Name of the newest checkpoint that has all its files; `none` without one."""
    return next((entry.path.name for entry in entries(directory) if _is_whole(entry)), "none")


def write_host(path: Path, process: int, host: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the part of one process, JSON and arrays; it is on disk when this returns."""
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
    discard(final)
    os.replace(staging, final)
    _sync(final.parent)
    return final


def verify(entry: Entry) -> Manifest:
    """The manifest of a checkpoint, after checking that every file is as it was written.

    Raises:
        InvalidCheckpoint: Saving was interrupted, or a file is missing, truncated or altered.
    """
    manifest = _read_manifest(entry)
    _check_sizes(entry, manifest)
    names = list(manifest.files)
    with ThreadPoolExecutor(4) as pool:
        try:
            sums = list(pool.map(lambda name: _checksum(entry.path / name), names))
        except OSError as error:
            raise InvalidCheckpoint(f"cannot be read: {error}") from error
    for name, found in zip(names, sums, strict=True):
        if found != manifest.files[name]:
            raise InvalidCheckpoint(f"{name} does not match its checksum")
    return manifest


def recover(directory: Path) -> None:
    """After a kill: renames complete staging directories, removes interrupted and half-deleted ones."""
    for entry in entries(directory):
        if entry.staging:
            if _is_whole(entry):
                promote(entry.path)
            else:
                log.warning("checkpoint %s removed: saving was interrupted", entry.path.name)
                discard(entry.path)
    if directory.is_dir():
        for path in directory.iterdir():
            if path.name.startswith(TRASH):
                shutil.rmtree(path, ignore_errors=True)


def prune(newest: Path, keep: int) -> None:
    """Removes all but the `keep` newest valid checkpoints up to `newest`, which was just verified."""
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
    """Removes a directory if it exists; renames it first, so that no part of it keeps a valid name."""
    if not path.exists():
        return
    number = 0
    while (trash := path.with_name(f"{TRASH}{path.name}_{number}")).exists():
        number += 1
    os.replace(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _is_whole(entry: Entry) -> bool:
    """Whether the manifest and all files exist with their sizes; the cheap part of `verify`."""
    try:
        _check_sizes(entry, _read_manifest(entry))
    except InvalidCheckpoint:
        return False
    return True


def _read_manifest(entry: Entry) -> Manifest:
    try:
        content = json.loads((entry.path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidCheckpoint("no manifest: saving was interrupted") from None
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"{MANIFEST} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.pop("digest", "") != _digest(content):
        raise InvalidCheckpoint(f"{MANIFEST} does not match its own checksum")
    if content["format"] != FORMAT:
        raise InvalidCheckpoint(f"format {content['format']}; this version reads {FORMAT}")
    if content["step"] != entry.step:
        raise InvalidCheckpoint(f"{MANIFEST} belongs to step {content['step']}")
    return Manifest(**content)


def _check_sizes(entry: Entry, manifest: Manifest) -> None:
    for name, (size, _) in manifest.files.items():
        try:
            found = (entry.path / name).stat().st_size
        except OSError:
            raise InvalidCheckpoint(f"{name} is missing") from None
        if found != size:
            raise InvalidCheckpoint(f"{name} has {found} bytes of {size}")


def _checksum(path: Path) -> list[Any]:
    """[size, blake2b digest of the content]."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        return [file.tell(), digest]


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode(), digest_size=16).hexdigest()


def _sync(path: Path) -> None:
    """Syncs a file or directory to disk, on file systems that support it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        log.debug("no fsync of %s: %s", path, error)
    finally:
        os.close(descriptor)
