"""The directory of a run: how it is chosen, locked against a second run, and described by two files."""

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from grpo_roc_jax.cli import ConfigError, dump_yaml

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "sentencepiece", "math-verify")


def choose_run_dir(name: str, run_dir: str, resume: str) -> Path:
    """The directory of a run: `run_dir`, or `runs/NAME`, with a number if a fresh run finds that name in use.

    Raises:
        ConfigError: `run_dir` holds a run and `resume` is `never`.
    """
    path = Path(run_dir) if run_dir else Path("runs") / name
    if resume == "auto":
        return path
    if run_dir and (path / "config.yaml").exists():
        raise ConfigError(f"{path} holds a run already; --resume auto continues it, another --run_dir starts a new one")
    return unused(path)


def unused(path: Path) -> Path:
    """The directory, or with `-2`, `-3`, ... at its end, where no run is yet."""
    number, free = 1, path
    while (free / "config.yaml").exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


@contextmanager
def opened(path: Path, config: Any) -> Iterator[Path]:
    """Creates and locks the directory and writes `config.yaml` and `environment.json` into it.

    A start that fails with a ConfigError leaves the disk as it was, unless a checkpoint was saved.

    Raises:
        ConfigError: Another process uses the directory, or it cannot be written.
    """
    new = [place for place in (path, *path.parents) if not place.exists()]
    before = {entry: _content(entry) for entry in path.iterdir()} if path.is_dir() else {}
    saved = set((path / "checkpoints").glob("step_*"))
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / "lock", "a+")  # noqa: SIM115 (held for the length of the run)
    except OSError as error:
        raise ConfigError(f"run directory {path} cannot be written ({error}); choose another with --run_dir") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise ConfigError(f"another run (process {owner}) is writing to {path}; choose another --run_dir") from error
    try:
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        (path / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        (path / "environment.json").write_text(json.dumps(environment(), indent=1), encoding="utf-8")
        yield path
    except ConfigError:
        if saved == set((path / "checkpoints").glob("step_*")):
            _undo(path, new, before)
        raise
    finally:
        lock.close()


def _content(entry: Path) -> bytes | None:
    """What `opened` overwrites in a directory that exists."""
    return entry.read_bytes() if entry.name in ("config.yaml", "environment.json") else None


def _undo(path: Path, new: Sequence[Path], before: Mapping[Path, bytes | None]) -> None:
    """Removes the entries of a run directory that were not there before, and the directories made for it."""
    for entry in set(path.iterdir()) - before.keys():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for entry, content in before.items():
        if content is not None:
            entry.write_bytes(content)
    with suppress(OSError):  # another run may have begun in `runs` meanwhile
        for place in new:
            place.rmdir()


def environment() -> dict[str, Any]:
    """The environment of the run: versions, commit, command, machine."""
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "versions": versions(PACKAGES),
        "commit": _commit(),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Package -> installed version, or `missing`."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def _commit() -> str:
    """The commit of the checkout that the package is imported from; empty if it is not a checkout."""
    here = Path(__file__).resolve().parent
    asked = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
