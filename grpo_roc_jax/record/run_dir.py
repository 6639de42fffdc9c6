"""The directory of a run: how it is chosen, locked against a second run, and described by two files."""

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    if resume == "auto" or not (path / "config.yaml").exists():
        return path
    if run_dir:
        raise ConfigError(f"{path} holds a run already; --resume auto continues it, another --run_dir starts a new one")
    number = 2
    while (path.with_name(f"{name}-{number}") / "config.yaml").exists():
        number += 1
    return path.with_name(f"{name}-{number}")


@contextmanager
def opened(path: Path, config: Any) -> Iterator[Path]:
    """Creates and locks the directory and writes `config.yaml` and `environment.json` into it.

    Raises:
        ConfigError: Another process uses the directory, or it cannot be written.
    """
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
    finally:
        lock.close()


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
