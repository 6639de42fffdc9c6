"""Checkpoints of models on disk: written whole or not at all, and found by their `tinker://` path after a restart.

A checkpoint is a directory `ROOT/MODEL/KIND/NAME` with `about.json`, the adapter in PEFT's form where the family has
one, and `state.safetensors`: the parameters and, for `weights`, the moments. A directory of that name is complete.
"""

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from grpo_roc_jax.model.lora import LowRank
from grpo_roc_jax.serving.refusal import RequestRefused

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
NAME = re.compile(r"[\w][\w.:=+-]{0,199}")
ABOUT, STATE = "about.json", "state.safetensors"
MOVED, ORIGIN = "checkpoint", "origin"
"""In the folder of a checkpoint that is being replaced: the checkpoint, and its place."""


@dataclass(frozen=True)
class About:
    """What a checkpoint is of."""

    base_model: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    steps: int
    seed: int
    time: float
    expires: float = 0.0
    """Seconds since 1970; 0 for never."""
    call: int = 0
    """Number of the call of its model that wrote it."""

    @property
    def lora(self) -> LowRank:
        return LowRank(rank=self.rank, alpha=self.alpha, targets=self.targets)

    @property
    def expired(self) -> bool:
        return 0 < self.expires < time.time()


@dataclass(frozen=True)
class CheckpointPath:
    """The three parts of a path."""

    model: str
    kind: str
    name: str

    @classmethod
    def read(cls, path: str) -> "CheckpointPath":
        """
        Raises:
            RequestRefused: It is no path of this server's.
        """
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise RequestRefused(f"path {path!r:.200}; must be tinker://MODEL/weights/NAME (or sampler_weights)")
        for part in (parts[0], parts[2]):
            check_name(part)
        return cls(*parts)

    def __str__(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"


def check_name(name: str) -> str:
    """
    Raises:
        RequestRefused: It is no name that a folder can have.
    """
    if not NAME.fullmatch(name):
        raise RequestRefused(f"the name {name!r:.200} must be letters, digits and . _ : = + - only, at most 200")
    return name


@dataclass(frozen=True)
class Store:
    """A folder of checkpoints."""

    root: Path

    def folder(self, checkpoint: CheckpointPath) -> Path:
        return self.root / checkpoint.model / checkpoint.kind / checkpoint.name

    def save(
        self,
        checkpoint: CheckpointPath,
        about: About,
        leaves: Any,
        export: Callable[[Path], Any] | None = None,
        *,
        overwrite: bool,
    ) -> None:
        """Returns once the checkpoint is on disk.

        Args:
            checkpoint: Its path.
            about: What is recorded about the model.
            leaves: A tree of arrays.
            export: Writes further files into the folder.
            overwrite: Replaces one of that name.

        Raises:
            RequestRefused: There is one of that name.
        """
        target, before = self.folder(checkpoint), self.written(checkpoint)
        if before is not None and not before.expired and not overwrite:
            raise RequestRefused(f"{checkpoint} exists; take another name, or pass overwrite")
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".new-", dir=self.root))
        try:
            if export is not None:
                export(staging)
            arrays = {name: np.asarray(jax.device_get(leaf)) for name, leaf in _named(leaves)}
            save_file(arrays, staging / STATE)
            (staging / ABOUT).write_text(json.dumps(asdict(about), indent=2), encoding="utf-8")
            for path in staging.iterdir():
                sync(path)
            sync(staging)
            old = Path(tempfile.mkdtemp(prefix=".old-", dir=self.root)) if target.exists() else None
            if old is not None:
                write_synced(old / ORIGIN, str(target.relative_to(self.root)).encode())
                sync(old)
                os.rename(target, old / MOVED)
            os.rename(staging, target)
            for folder in (target.parent, target.parent.parent, self.root):
                sync(folder)
            if old is not None:
                shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def repair(self) -> None:
        """After a kill while a checkpoint was replaced: it is the new one if that is there, or else the old one. What
        was not written to its end is removed."""
        for folder in self.root.glob(".new-*"):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in self.root.glob(".old-*"):
            with suppress(OSError, ValueError):
                target = self.root / (folder / ORIGIN).read_text()
                if not target.exists() and (folder / MOVED).is_dir():
                    os.rename(folder / MOVED, target)
                    sync(target.parent)
            shutil.rmtree(folder, ignore_errors=True)

    def written(self, checkpoint: CheckpointPath) -> About | None:
        """What a checkpoint is of, even if it has expired; None if there is none."""
        try:
            values = json.loads((self.folder(checkpoint) / ABOUT).read_text(encoding="utf-8"))
            return About(**values | {"targets": tuple(values["targets"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def about(self, checkpoint: CheckpointPath) -> About:
        """
        Raises:
            RequestRefused: There is no such checkpoint.
        """
        about = self.written(checkpoint)
        if about is None or about.expired:
            raise RequestRefused(
                f"no checkpoint {checkpoint}; list those that there are (list_checkpoints)", status=404
            )
        return about

    def load(self, checkpoint: CheckpointPath, like: Any) -> Any:
        """The arrays of a checkpoint in the form, dtypes and places of `like`.

        Raises:
            RequestRefused: It lacks some of them.
        """
        try:
            tensors, (leaves, form) = load_file(self.folder(checkpoint) / STATE), jax.tree.flatten(like)
        except FileNotFoundError:
            raise RequestRefused(f"no checkpoint {checkpoint}; it was deleted meanwhile", status=404) from None
        loaded = []
        for (name, _), leaf in zip(_named(like), leaves, strict=True):
            if name not in tensors or tensors[name].shape != leaf.shape:
                raise RequestRefused(
                    f"{checkpoint} holds no {name} {list(leaf.shape)}; it is a checkpoint of another kind"
                )
            loaded.append(jax.device_put(tensors[name].astype(leaf.dtype), leaf.sharding))
        return jax.tree.unflatten(form, loaded)

    def models(self) -> list[str]:
        """Names of the models that have checkpoints."""
        return sorted(path.name for path in self.root.iterdir() if path.is_dir() and NAME.fullmatch(path.name))

    def checkpoints(self, model: str | None = None) -> Iterator[tuple[CheckpointPath, About]]:
        """The checkpoints of a model, or of all, that have not expired."""
        for name in [model] if model is not None else self.models():
            for kind in KINDS:
                folder = self.root / check_name(name) / kind
                for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                    with suppress(RequestRefused):
                        checkpoint = CheckpointPath(name, kind, path.name)
                        yield checkpoint, self.about(checkpoint)

    def expire(self, checkpoint: CheckpointPath, when: float) -> None:
        """Sets when a checkpoint is no longer there, in seconds since 1970; 0 for never.

        Raises:
            RequestRefused: There is no such checkpoint.
        """
        about = replace(self.about(checkpoint), expires=when)
        replace_file(self.folder(checkpoint) / ABOUT, json.dumps(asdict(about), indent=2).encode())

    def delete(self, checkpoint: CheckpointPath) -> None:
        """
        Raises:
            RequestRefused: There is no such checkpoint.
        """
        self.about(checkpoint)
        doomed = Path(tempfile.mkdtemp(prefix=".old-", dir=self.root))
        os.rename(self.folder(checkpoint), doomed / MOVED)
        shutil.rmtree(doomed, ignore_errors=True)


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file; the content is on disk when this returns."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def append_synced(path: Path, content: bytes) -> None:
    """Appends to a file; the content is on disk when this returns. If that fails, the file stays as it was: a part of
    a record would hide those after it."""
    with open(path, "ab", buffering=0) as file:
        end, left = file.tell(), memoryview(content)
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise


def replace_file(path: Path, content: bytes) -> None:
    """The file has its old content or the new one, whenever the process ends."""
    new = path.with_name(f"{path.name}.new")
    write_synced(new, content)
    os.replace(new, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """A file or a folder is on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
