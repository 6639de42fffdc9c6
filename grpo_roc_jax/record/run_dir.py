"""The directory of a run: how it is chosen, locked against a second run, and described by two files.

Only `decide` determines what a start does with an existing directory (fresh, resume, finished, or a refusal). Until
then nothing in the directory is written or truncated.
"""

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import yaml

from grpo_roc_jax.record.checkpoint_files import check_path, newest_whole, read_manifest, saved_stage
from grpo_roc_jax.record.storage import is_address, local_dir
from grpo_roc_jax.settings.cli import ConfigError, config_errors, dump_yaml, flatten
from grpo_roc_jax.settings.files import local_path, read_json_object, read_yaml_mapping
from grpo_roc_jax.settings.options import absent_sections
from grpo_roc_jax.settings.secrets import without_secrets

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "sentencepiece", "math-verify")


CONFIG_FILE, SUMMARY_FILE = "config.yaml", "summary.json"

MAY_CHANGE = tuple(
    """name run_dir resume steps checkpoint eval limits log watch distributed sharding update optim.offload batch.rows
    data.eval_sources data.eval_problems data.eval_seed
    rollout.slots rollout.chunk rollout.narrow rollout.kv_tokens rollout.kv_start rollout.admission rollout.block
    rollout.append_lengths rollout.append_rows rollout.attention rollout.pipeline
    tools.executor tools.level tools.min_level tools.workers tools.roots tools.cpus tools.preload tools.bare_root
    tools.interpreter tools.sessions tools.session_idle_s tools.queue_timeout_s
    tools.start_timeout_s tools.scratch_dir tools.uid_base""".split()  # noqa: SIM905 (one line a section)
)
"""Sections and settings that may change when a run resumes: they do not affect what is trained, and how."""


@dataclass(frozen=True)
class Start:
    """What a start does with its directory."""

    kind: Literal["fresh", "resume", "finished"]
    step: int = 0
    """Step of the newest checkpoint that has all its files."""
    notes: tuple[str, ...] = ()
    """Settings that differ from those that the run has had so far."""
    stage: int = 0
    """Index of the stage of the next step."""
    began: int = 0
    """Steps before that stage."""
    forced: bool = False
    """Whether the saved state is converted to the settings of this start."""


def decide(
    path: Path, config: Any, *, force: bool = False, leaves: Callable[[], Mapping[str, list[Any]]] | None = None
) -> Start:
    """What a start with `resume: auto` does with a directory; reads only.

    Args:
        path: Directory of the run; need not exist.
        config: Configuration of this start.
        force: Resumes with settings that would otherwise be refused.
        leaves: Returns name -> [shape, dtype] of the arrays of the training state under `config`. `force` is neither
            offered nor applied if their names or shapes differ from the saved ones; None skips this check.

    Raises:
        ConfigError: Checkpoints exist and none of them is complete, or the run was begun with other settings.
    """
    newest = newest_whole(path / "checkpoints")
    if newest is None:
        return Start("fresh")
    before = saved_settings(path)
    changed = changed_settings(before or {}, config)
    lines = [f"  {name}: {old} -> {new}" for name, (old, new) in changed.items() if not _may_change(name)]
    if leaves is not None and (before is None or lines):
        _refuse_other_arrays(path, read_manifest(newest).leaves, leaves(), lines)
    if before is None and not force:
        raise ConfigError(
            f"{path / CONFIG_FILE} cannot be read, so the settings of the run are unknown; restore the file, or add "
            "--force to continue with those of this command"
        )
    if lines and not force:
        raise ConfigError(
            "\n".join([f"{path} was begun with other settings:", *lines])
            + "\nuse those, or another --run_dir, or add --force to continue with the new ones"
        )
    notes = tuple(f"changed since the run began: {name}: {old} -> {new}" for name, (old, new) in changed.items())
    stages, stage, began = getattr(config, "stages", None) or (), 0, 0
    if stages:
        with config_errors():
            saved = saved_stage(newest.path)
            stage = config.stage_after(saved, newest.step)
        began = saved["began"] if saved and saved["index"] == stage else newest.step
    complete = newest.step >= config.steps or (bool(stages) and stage >= len(stages))
    ended = complete and _summarized_step(path) == newest.step
    return Start("finished" if ended else "resume", newest.step, notes, stage, began, force)


def _refuse_other_arrays(
    path: Path, saved: Mapping[str, list[Any]], expected: Mapping[str, list[Any]], lines: Sequence[str]
) -> None:
    """Refuses settings whose training state cannot be made from the saved one by casting."""
    shapes, now = ({name: leaf[0] for name, leaf in side.items()} for side in (saved, expected))
    if shapes == now:
        return
    names = sorted(name for name in shapes.keys() | now.keys() if shapes.get(name) != now.get(name))
    name = min(names, key=lambda name: ("/params/" not in name, name))
    message_lines = (
        [f"{path} was begun with other settings:", *lines] if lines else [f"{path} holds another training state:"]
    )
    raise ConfigError(
        "\n".join(message_lines)
        + f"\nunder these the training state has other arrays ({name}: saved {shapes.get(name, 'nothing')}, expected "
        f"{now.get(name, 'nothing')}), so the run cannot continue; use its settings, or another --run_dir"
    )


def saved_settings(path: Path) -> dict[str, Any] | None:
    """The settings in `config.yaml` of a run by name; None if they cannot be read."""
    try:
        return dict(flatten(read_yaml_mapping(path / CONFIG_FILE))) or None
    except (OSError, ValueError):
        return None


def changed_settings(before: Mapping[str, Any], config: Any) -> dict[str, tuple[Any, Any]]:
    """Name -> (value before, value now) of the settings that differ, None for a section that one side leaves out. A
    number may have been written as a text, as in `seed: '0'` or `lr: 1e-5`, which settings read alike. Other
    settings that only one side has are not compared: a kind without settings has no `.kind`, other kinds have other
    settings, and versions add some."""
    old, new = (
        {name.removesuffix(".kind"): value for name, value in settings.items()}
        for settings in (before, dict(flatten(yaml.safe_load(dump_yaml(config)))))
    )
    both = {name: (old[name], new[name]) for name in old.keys() & new.keys()}
    changed = {name: pair for name, pair in both.items() if not _same(*pair)}
    for section in absent_sections(type(config)):
        sides = tuple(_settings_of(section, settings) for settings in (old, new))
        if before and (sides[0] is None) != (sides[1] is None):
            changed[section] = sides
    return changed


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, str) and type(new) in (int, float):
        with suppress(ValueError):
            return float(old) == new
    return old == new


def _settings_of(section: str, values: Mapping[str, Any]) -> Any:
    """What is set in a section: its value, or name -> value of its settings; None if it is left out."""
    below = {
        name.removeprefix(f"{section}."): value for name, value in values.items() if name.startswith(f"{section}.")
    }
    return values.get(section, below or None)


def _may_change(name: str) -> bool:
    return any(name == allowed or name.startswith(f"{allowed}.") for allowed in MAY_CHANGE)


def _summarized_step(path: Path) -> int | None:
    """The step after which `summary.json` was written; None if there is no such file. Those of older versions have the
    number of recorded steps instead."""
    try:
        summary = read_json_object(path / SUMMARY_FILE)
        return summary.get("step", summary.get("steps"))
    except (OSError, ValueError):
        return None


@config_errors()
def choose_run_dir(name: str, run_dir: str, resume: str) -> Path:
    """The directory of a run: `run_dir`, the local directory of an address (`storage`), or `runs/NAME`, with a number
    added if a fresh run has a name that is in use.

    Raises:
        ConfigError: `run_dir` holds a run and `resume` is `never`, is not the address of a supported store, or has a
            path where no checkpoint can be written; or the name is that of no directory below `runs`.
    """
    if not run_dir and (Path(os.path.normpath(name)).parts[:1] in ((), ("..",)) or Path(name).is_absolute()):
        raise ConfigError(f"name = {name!r}; must name a directory below runs, as in --name toy, or set --run_dir")
    path = Path("runs") / name if not run_dir else local_dir(run_dir) if is_address(run_dir) else local_path(run_dir)
    check_path(path)
    holds_run = _holds_run(path)
    if resume == "auto":
        return path
    if run_dir and holds_run:
        raise ConfigError(f"{path} holds a run already; --resume auto continues it, another --run_dir starts a new one")
    return unused(path)


def unused(path: Path) -> Path:
    """The directory, or the first one with `-2`, `-3`, ... appended that holds no run."""
    path = path if path.name not in ("", "..") else path.resolve()  # `.`, which has no name to append to
    number, free = 1, path
    while _holds_run(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _holds_run(path: Path) -> bool:
    """Whether the directory holds a run, or one that is just starting, since `config.yaml` is written
    after its checks."""
    return any((path / name).exists() for name in (CONFIG_FILE, "checkpoints", "metrics.jsonl", "lock"))


@contextmanager
def locked(path: Path, option: str = "--run_dir") -> Iterator[None]:
    """Creates and locks the directory; changes no file of a run that is already there. `option` names the directory on
    the command line.

    A start that fails with a ConfigError, or before the run is described, leaves the disk as it was, unless a
    checkpoint was saved.

    Raises:
        ConfigError: Another process uses the directory, or it cannot be written.
    """
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    before = {entry: _content(entry) for entry in path.iterdir()} if path.is_dir() else {}
    saved = set((path / "checkpoints").glob("step_*"))
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / "lock", "a+")  # noqa: SIM115 (open for the length of the run)
    except OSError as error:
        raise ConfigError(f"directory {path} cannot be written ({error}); choose another with {option}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise ConfigError(f"another run (process {owner}) is writing to {path}; choose another {option}") from error
    try:
        yield
    except Exception as error:
        refused = isinstance(error, ConfigError) or not (path / CONFIG_FILE).exists()
        if refused and saved == set((path / "checkpoints").glob("step_*")):
            _undo(path, new, before)
        raise
    finally:
        lock.close()


def describe_run(path: Path, config: Any, option: str = "--run_dir") -> None:
    """Writes the process that holds the lock, `config.yaml` and `environment.json`.

    Raises:
        ConfigError: They cannot be written.
    """
    try:
        (path / "lock").write_text(str(os.getpid()), encoding="utf-8")
        write_whole(path / CONFIG_FILE, dump_yaml(config))
        write_whole(path / "environment.json", json.dumps(environment(), indent=1))
    except OSError as error:
        raise ConfigError(f"directory {path} cannot be written ({error}); choose another with {option}") from error


def write_whole(path: Path, text: str) -> None:
    """Writes a file atomically: it always has either its old or its new content."""
    draft = path.with_name(f".{path.name}")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _content(entry: Path) -> bytes | None:
    """Content of a file that `describe_run` overwrites in an existing directory."""
    return entry.read_bytes() if entry.name in (CONFIG_FILE, "environment.json") else None


def _undo(path: Path, new: Sequence[Path], before: Mapping[Path, bytes | None]) -> None:
    """Removes the entries of a run directory that were not there before, and the directories made for it."""
    for entry in set(path.iterdir()) - before.keys():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for entry, content in before.items():
        if content is not None and entry.read_bytes() != content:
            entry.write_bytes(content)
    with suppress(OSError):  # another run may have begun in `runs` meanwhile
        for folder in new:
            folder.rmdir()


def environment() -> dict[str, Any]:
    """The environment of the run: versions, commit, command, machine."""
    return {
        "command": without_secrets(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "versions": versions(PACKAGES),
        "commit": _commit(),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Package -> installed version, or `missing`."""
    installed = {}
    for package in packages:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "missing"
    return installed


def _commit() -> str:
    """The commit of the checkout that the package is imported from; empty if it is not a checkout."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
