"""Checkpoints: the training state through Orbax, the host state, and a manifest that makes a checkpoint valid.

A checkpoint is a directory `step_00000012` with `train/` (Orbax, sharded), `host_P.json` and `arrays_P.npz` of each
process P, `logs.json`, and `manifest.json`: sizes and checksums of every file, written last. It is built under the name
`staging_step_00000012` and renamed once the manifest is on disk, so that a process can be killed at any time. Older
checkpoints are removed only after the newer one has been read back. Errors while saving are counted and logged and do
not end the run. `checkpoint_files` is the part that needs no device.
"""

import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from grpo_roc_jax.learner.offload import device_copy, is_on_host
from grpo_roc_jax.record import checkpoint_files as files
from grpo_roc_jax.record.checkpoint_files import Entry, InvalidCheckpoint, Manifest
from grpo_roc_jax.record.codec import from_json, to_json
from grpo_roc_jax.record.missing import measure_logs
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.settings.options import AtLeast1, Count, settings

log = logging.getLogger(__name__)


@settings
class CheckpointConfig:
    """When checkpoints are written and how many are kept."""

    every: Count = 10
    """Training steps between checkpoints; 0 writes one at the end only. A killed run loses at most
    this many steps, and those done while a checkpoint was being written (at most as many again)."""
    keep: AtLeast1 = 2
    """Newest valid checkpoints that stay. 2 survive a bad disk block in the newest."""
    fail_on_error: bool = False
    """Ends the run when a checkpoint cannot be written (disk full, no permission). By default the run continues with
    the previous checkpoint, warns, and tries again at the next one."""


@dataclass(frozen=True, eq=False)
class Bundle:
    """Everything that a resumed run needs."""

    train: Any
    """Pytree of jax.Array: parameters, optimizer state, step. Restored with the shardings of `like`."""
    host: Mapping[str, Any] = field(default_factory=dict)
    """Generator states, data iterator, counters, configuration: values for `codec.to_json`. Equal in all processes."""
    arrays: Mapping[str, Any] = field(default_factory=dict)
    """NumPy arrays in nested mappings: buffered groups, method state. Equal in all processes."""
    step: int = -1
    """Number of training steps done; set by `restore_latest`, while `save` takes it as an argument."""
    logs: Mapping[str, int] = field(default_factory=dict)
    """How much the logs of the run held (`missing.measure_logs`); set by `restore_latest`, measured by `save`."""


class CheckpointFailed(OSError):
    """A checkpoint could not be written, and `fail_on_error` is set."""


class CheckpointMismatch(ConfigError):
    """A valid checkpoint that belongs to another model or optimizer."""


class Checkpointer:
    """Saves bundles to a directory in the background and restores the newest valid one.

    The first save creates the directory; nothing is read or written before.
    """

    def __init__(self, directory: str | Path, config: CheckpointConfig, *, logs: Path | None = None) -> None:
        """
        Args:
            directory: Directory of the checkpoints.
            config: When to save, and how many checkpoints to keep.
            logs: Directory of the run. Its logs are synced to disk before a checkpoint is committed, so that a power
                cut loses no row of the steps before it; None if this process writes no logs.

        Raises:
            ConfigError: No checkpoint can be written at that path; see `check_path`.
        """
        files.check_path(Path(directory))
        self.directory = Path(directory).absolute()
        self._logs, self._synced = logs, 0.0
        self.config = config
        self.saved: list[int] = []
        """Steps whose checkpoint is on disk and verified."""
        self.latest: Bundle | None = None
        """The state after the last finished step, which `save_latest` saves."""
        self.failures: list[str] = []
        """Reasons why a checkpoint was not written, oldest first."""
        self._finite = jax.jit(_all_finite)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[int, Future] | None = None
        self._recovered = False

    def due(self, step: int) -> bool:
        """Whether a checkpoint must be saved after `step` steps."""
        return self.config.every > 0 and step > 0 and step % self.config.every == 0

    def save(self, step: int, bundle: Bundle) -> bool:
        """Starts writing a checkpoint; True if it started, False if the state is not finite or writing failed.

        When this returns, host state is on disk and device arrays are copied, so that the caller can change or donate
        both. Waits for the previous checkpoint first.

        Raises:
            CheckpointFailed: This checkpoint or the previous one could not be written, and `fail_on_error` is set.
            TypeError, ValueError: A leaf cannot be stored.
        """
        self.wait()
        check_leaves(bundle)
        if not self._is_finite(bundle.train):
            return self._failed(step, "the state holds NaN or infinity; nothing was written")
        host = json.dumps(to_json({**bundle.host, "step": int(step)}), indent=1)
        staging = self.directory / files.staging_name(step)
        try:
            self._prepare(staging)
            files.write_host(staging, jax.process_index(), host, flatten_arrays(bundle.arrays))
            response = ocp.save_async(staging / "train", bundle.train)
        except (OSError, ValueError) as error:  # TensorStore reports a full disk as ValueError
            return self._failed(step, describe(error), error)
        finish = partial(self._finish, step, staging, describe_leaves(bundle.train), response)
        self._pending = (step, self._worker.submit(finish))
        return True

    def save_latest(self) -> tuple[bool, str]:
        """Saves the latest state, unless it is saved already, and waits for it. Returns (whether it is on disk, a
        description)."""
        step, lost = self.latest.step, any(leaf.is_deleted() for leaf in jax.tree.leaves(self.latest.train))
        with suppress(CheckpointFailed):
            self.wait()
            if step not in self.saved and not lost:
                self.save(step, self.latest)
                self.wait()
        if step in self.saved:
            return True, f"the state after step {step} is saved"
        why = "the update that failed had replaced it" if lost else self.failures[-1]
        return False, f"the state after step {step} is not saved ({why}); newest checkpoint: {self.newest}"

    def has(self, step: int) -> bool:
        """Whether the checkpoint of a step is on disk or being written."""
        return step in self.saved or (self._pending is not None and self._pending[0] == step)

    @property
    def newest(self) -> str:
        """Name of the newest checkpoint with all its files; `none` if there is none."""
        return files.newest_name(self.directory)

    def wait(self) -> None:
        """Waits until the pending checkpoint is written; failures are recorded in `failures`."""
        if self._pending is None:
            return
        step, future = self._pending
        error = future.exception()  # if interrupted here, the checkpoint stays pending and the next call waits again
        self._pending = None
        if error is None:
            self.saved.append(step)
        else:
            self._failed(step, describe(error), error)

    def close(self) -> None:
        """Waits for the pending checkpoint and releases the background thread."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def restore_latest(self, like: Bundle | Any, *, cast: bool = False) -> Bundle | None:
        """The newest valid checkpoint in the shapes and shardings of `like`; None if none was ever completed.

        Incomplete and corrupt checkpoints are logged and skipped; reads that fail are tried again. Changes nothing on
        disk.

        Args:
            like: A `Bundle` (whose `train` is used), or the training state itself. Leaves are arrays or
                `jax.ShapeDtypeStruct` with shardings. The mesh and the number of processes may differ from those that
                saved.
            cast: Whether arrays that were saved in another numeric dtype are accepted and cast.

        Raises:
            CheckpointMismatch: The newest valid checkpoint belongs to another model or optimizer.
            NoValidCheckpoint: There are checkpoints, and none of them is valid.
        """
        self.wait()
        train = like.train if isinstance(like, Bundle) else like
        faults: dict[Entry, str] = {}
        for entry in files.entries(self.directory):
            try:
                manifest = files.verify(entry)
                _refuse_difference(entry, manifest.leaves, describe_leaves(train), cast=cast)
                restored = self._load(entry, manifest, train)
            except InvalidCheckpoint as error:
                log.warning("checkpoint %s skipped: %s", entry.path.name, error)
                faults[entry] = str(error)
                continue
            self.saved.append(entry.step)
            return restored
        files.refuse_damaged(self.directory, faults)
        self._warm(train)
        return None

    def _load(self, entry: Entry, manifest: Manifest, train: Any) -> Bundle:
        process = jax.process_index() if manifest.processes == jax.process_count() else 0

        def read() -> tuple[Any, dict[str, Any], dict[str, np.ndarray], dict[str, int]]:
            state = ocp.load(entry.path / "train", jax.tree.map(_abstract, train))
            return state, *files.read_host(entry.path, process), files.read_logs(entry.path)

        try:  # TensorStore reports failing reads as ValueError; one process alone cannot repeat a load of several
            state, host, arrays, logs = (
                files.patiently(read, (OSError, ValueError)) if jax.process_count() == 1 else read()
            )
        except (OSError, ValueError, KeyError) as error:
            raise InvalidCheckpoint(describe(error)) from error
        if not self._is_finite(state):
            raise InvalidCheckpoint("the state holds NaN or infinity")
        return Bundle(state, from_json(host), unflatten_arrays(arrays), entry.step, logs)

    def _warm(self, train: Any) -> None:
        """Compiles the finiteness check before training, so that the first save compiles nothing."""
        if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(train)):
            self._is_finite(train)

    def _is_finite(self, train: Any) -> bool:
        """Whether all values are finite; leaves in host memory are copied to the devices one at a time."""
        leaves = _inexact_leaves(train)
        on_device = [leaf for leaf in leaves if not is_on_host(leaf)]
        copied = ([device_copy(leaf)] for leaf in leaves if is_on_host(leaf))
        return all(bool(jax.device_get(self._finite(part))) for part in (on_device, *copied))

    def _prepare(self, staging: Path) -> None:
        if jax.process_index() == 0:
            if not self._recovered:
                files.recover(self.directory)
                self._recovered = True
            files.discard(staging)
            staging.mkdir(parents=True)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(staging.name)

    def _finish(self, step: int, staging: Path, leaves: Mapping[str, Any], response: Any) -> None:
        """Runs in the background: waits for Orbax, writes the manifest, renames the directory, removes old
        checkpoints."""
        response.result()
        if self._logs is not None:
            begun = time.time()
            files.sync_logs(self._logs, self._synced)
            self._synced = begun - 2.0  # file times may be whole seconds, or come from another machine's clock
            self._measure_logs(step, staging)
        if jax.process_index() == 0:
            final = files.commit(staging, step, leaves, jax.process_count())
            files.prune(final, self.config.keep)

    def _measure_logs(self, step: int, staging: Path) -> None:
        try:
            files.write_logs(staging, measure_logs(self._logs, step))
        except OSError as error:  # a problem with the logs is no reason to lose a checkpoint
            (staging / files.LOGS).unlink(missing_ok=True)
            log.warning("checkpoint %d does not say how long the logs are: %s", step, error)

    def _failed(self, step: int, reason: str, error: BaseException | None = None) -> bool:
        message = f"no checkpoint at step {step}: {reason}"
        if jax.process_index() == 0:  # the partial checkpoint may be what fills the disk
            files.discard(self.directory / files.staging_name(step))
        self.failures.append(message)
        log.warning("%s (the run continues; newest checkpoint: %s)", message, self.newest)
        if error is not None and self.config.fail_on_error:
            raise CheckpointFailed(message) from error
        return False


def restore_params(directory: str | Path, like: Any, *, step: int | None = None) -> tuple[int, Any] | None:
    """(step, parameters) of the newest valid checkpoint, without optimizer state; None if there is none.

    Args:
        directory: The checkpoints of a run. The run may be in progress, since nothing is changed.
        like: Parameters or `jax.ShapeDtypeStruct`s with shardings.
        step: Step of the checkpoint to read; None for the newest.

    Raises:
        CheckpointMismatch: The newest valid checkpoint belongs to another model.
    """
    partly = ocp.Context()
    partly.pytree.loading.partial_load = True
    prefix, target = "state/params/", {"state": {"params": jax.tree.map(_abstract, like)}}
    for entry in files.entries(Path(directory).absolute()):
        if step not in (None, entry.step):
            continue
        try:
            leaves = files.verify(entry).leaves.items()
            saved = {name.removeprefix(prefix): leaf for name, leaf in leaves if name.startswith(prefix)}
            _refuse_difference(entry, saved, describe_leaves(like))
            with partly:
                loaded = ocp.load(entry.path / "train", target)
        except InvalidCheckpoint as error:
            log.warning("checkpoint %s skipped: %s", entry.path.name, error)
            continue
        return entry.step, loaded["state"]["params"]
    return None


def check_leaves(bundle: Bundle) -> None:
    """Refuses values that a checkpoint would not restore exactly.

    Raises:
        TypeError: A leaf of `train` is not a jax.Array, a leaf of `arrays` is not a plain array, or JSON cannot store
            the host state exactly.
        ValueError: `train` has an array of size 0, which Orbax cannot store.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(bundle.train):
        if not isinstance(leaf, jax.Array):
            raise TypeError(f"train/{_name(path)} is a {type(leaf).__name__}; convert it with jnp.asarray")
        if leaf.size == 0:
            raise ValueError(f"train/{_name(path)} has shape {leaf.shape}; leave empty arrays out of the state")
    flatten_arrays(bundle.arrays)
    to_json(bundle.host)


def flatten_arrays(tree: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """Nested mappings of arrays as one mapping with names joined by `/`."""
    flat: dict[str, np.ndarray] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if not isinstance(key, str) or "/" in key or not key:
            raise TypeError(f"arrays: key {key!r} under {prefix!r}; must be text without '/'")
        if isinstance(value, Mapping):
            flat |= flatten_arrays(value, f"{name}/")
        elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcUS":
            flat[name] = np.asarray(value)
        else:
            raise TypeError(f"arrays: {name} is a {type(value).__name__}; must be a NumPy array or a mapping")
    return flat


def unflatten_arrays(flat: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Inverse of `flatten_arrays`, except that empty mappings are lost."""
    return traverse_util.unflatten_dict(flat, sep="/")


def describe_leaves(tree: Any) -> dict[str, list[Any]]:
    """Name -> [shape, dtype] of each leaf, for the manifest and for messages."""
    return {
        _name(path): [list(leaf.shape), str(leaf.dtype)] for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def describe(error: BaseException) -> str:
    """One line: the type and the beginning of the message, since TensorStore appends its whole specification."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _refuse_difference(
    entry: Entry, saved: Mapping[str, Any], expected: Mapping[str, Any], *, cast: bool = False
) -> None:
    def differ(old: list[Any] | None, new: list[Any] | None) -> bool:
        if cast and old and new and all(jnp.issubdtype(leaf[1], jnp.floating) for leaf in (old, new)):
            return old[0] != new[0]
        return old != new

    def show(leaf: list[Any] | None) -> str:
        return f"{leaf[1]}{leaf[0]}" if leaf else "nothing"

    lines = [
        f"  {name}: saved {show(saved.get(name))}, expected {show(expected.get(name))}"
        for name in sorted({*saved, *expected})
        if differ(saved.get(name), expected.get(name))
    ]
    if lines:
        more = [f"  and {len(lines) - 12} more"] if len(lines) > 12 else []
        raise CheckpointMismatch(
            "\n".join([f"{entry.path} belongs to another model or optimizer:", *lines[:12], *more])
            + "\nuse the configuration that it was saved with, or another run directory"
        )


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _inexact_leaves(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _all_finite(leaves: list[jax.Array]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves])) if leaves else jnp.bool_(True)
