"""A run directory in object storage: `run_dir: gs://BUCKET/RUN`, or `s3://`, read and written by TensorStore.

Objects cannot be appended to or renamed. A run therefore has its directory on the local disk, under `runs/BUCKET/RUN`,
and a thread copies what has changed: metrics and trajectories first, then the files of complete checkpoints, and their
manifests last. Whenever copying is interrupted, the store holds a run that can be resumed.

The object `owner` names the local directory that writes. A start in this directory continues from its content. A start
elsewhere replaces the local content by that of the store, and ends a run that is still writing.
"""

import json
import logging
import os
import shutil
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_roc_jax.process.points import reach
from grpo_roc_jax.process.progress import phase
from grpo_roc_jax.record.checkpoint_files import MANIFEST, patiently
from grpo_roc_jax.settings.cli import ConfigError, config_errors
from grpo_roc_jax.settings.files import read_json_object
from grpo_roc_jax.settings.secrets import hidden

log = logging.getLogger(__name__)

SCHEMES = ("gs", "s3", "file")
OWNER = "owner"
STATE_FILE = ".copied"
"""File that records who wrote to the store from a local directory, and what the store has of it: name -> size and time
of the file."""
DRAFTS = ".fetched"
"""Folder for files that are being fetched."""
CHECKPOINTS = "checkpoints/"
PAUSE_S = 10.0
"""Seconds between two searches for changed files."""
WARN_EVERY = 20
"""Number of failures between two warnings."""
AT_ONCE = 8
"""Most objects that are transferred at a time; each is held in memory."""
RETRIES = {"max_retries": 4, "initial_delay": "500ms", "max_delay": "8s"}
"""Retries of each request, by TensorStore."""
FAILURES = (OSError, ValueError)
"""Errors that TensorStore raises if a request fails."""


class StorageFailed(OSError):
    """The store does not have all of a run that has ended."""


def is_address(run_dir: str) -> bool:
    """Whether a run directory is that of a store, or is meant to be one, as `gs:/BUCKET/RUN`, which `local_dir`
    refuses."""
    return "://" in run_dir or run_dir.startswith(tuple(f"{scheme}:" for scheme in SCHEMES))


def local_dir(address: str) -> Path:
    """The local directory of a run with this address.

    Raises:
        ConfigError: The address does not name a supported store.
    """
    scheme, _, bucket_and_path = address.partition("://")
    if scheme not in SCHEMES or "/" not in bucket_and_path.strip("/") or ".." in bucket_and_path.split("/"):
        raise ConfigError(f"run_dir = {address}; must be a path, gs://BUCKET/RUN or s3://BUCKET/RUN")
    return Path("runs") / bucket_and_path.strip("/")


@contextmanager
def copied(address: str, folder: Path, resume: bool) -> Iterator[None]:
    """Keeps the store at `address` equal to a local directory within the block; for a plain path it does nothing.

    Raises:
        ConfigError: The store cannot be read, or holds a run that is not to be resumed.
        StorageFailed: Raised at the end if what was written last could not be copied.
    """
    if not is_address(address):
        yield
        return
    try:
        copy = Copy(address, folder)
        with phase(f"reading {hidden(address)}"):
            copy.begin(resume)
    except ConfigError:
        raise
    except FAILURES as error:
        raise ConfigError(f"run_dir = {address} cannot be used: {_brief(error)}") from error
    thread = threading.Thread(target=copy.keep, args=[PAUSE_S], name="storage", daemon=True)
    thread.start()
    complete = True
    try:
        yield
    except (ConfigError, KeyboardInterrupt):
        complete = False
        raise
    finally:
        copy.ended.set()
        thread.join()
        if complete:
            with phase(f"copying the run to {hidden(address)}"):
                copy.finish()


class Copy:
    """The copy of a run directory in a store."""

    def __init__(self, address: str, folder: Path) -> None:
        import tensorstore  # imported here, since most runs do not need it

        self.address, self.folder = address, folder
        self.ended = threading.Event()
        context = tensorstore.Context({f"{name}_request_retries": RETRIES for name in ("gcs", "s3")})
        self._store = tensorstore.KvStore.open(f"{address.rstrip('/')}/", context=context).result()
        self._id = uuid.uuid4().hex
        self._stored: dict[str, list[int]] = {}
        self._lost = False

    def begin(self, resume: bool) -> None:
        """Takes the store over, and fills the local directory with its run.

        Raises:
            ConfigError: There is a run and `resume` is false, or the store is empty although this directory was copied
                to it.
        """
        owner, state = self._owner(), self.folder / STATE_FILE
        with config_errors():
            known = read_json_object(state) if state.exists() else {}
        if owner and not resume:
            raise ConfigError(
                f"{self.address} holds a run already; --resume auto continues it, another --run_dir starts a new one"
            )
        if not owner and known.get("held"):
            raise ConfigError(
                f"{self.address} is empty, and {self.folder} was copied there; remove this directory to begin again"
            )
        if owner and owner == known.get("owner"):
            self._id, self._stored = owner, known["held"]
        elif owner:
            self._write({OWNER: self._id.encode()})
            self._fetch()  # recorded by the first copy: a start that is refused before then leaves nothing to resume

    def keep(self, pause_s: float) -> None:
        """Copies what has changed every `pause_s` seconds until `ended` is set. Failures are logged, and retried."""
        failures = 0
        while not self.ended.wait(pause_s):
            try:
                self.copy()
            except Exception as error:
                if self._lost:
                    log.error("%s: this one saves its state and ends", error)
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
                if failures % WARN_EVERY == 0:
                    log.warning("%s lags behind: %s (the run continues)", self.address, _brief(error))
                failures += 1

    def finish(self) -> None:
        """Copies what is left.

        Raises:
            StorageFailed: Copying failed several times, or another run has taken the store over.
        """
        try:
            self.copy() if self._lost else patiently(self.copy, FAILURES)
        except FAILURES as error:
            raise StorageFailed(f"{self.address} lacks the end of {self.folder}: {_brief(error)}") from error

    def copy(self) -> None:
        """Makes the store equal to the directory. Nothing is copied before there is a checkpoint.

        Raises:
            StorageFailed: Another run has taken the store over.
        """
        files = self._files()
        if not self._stored and not any(name.endswith(MANIFEST) for name in files):
            return
        owner = self._owner()
        if owner and owner != self._id:
            self._lost = True
            raise StorageFailed(f"another run writes to {self.address}")
        if not owner:
            self._stored = {}
            self._note()
            self._write({OWNER: self._id.encode()})
        changed = [name for name, stamp in files.items() if self._stored.get(name) != stamp]
        gone = [name for name in self._stored if name not in files]
        outside = [name for name in changed if not name.startswith(CHECKPOINTS)]
        manifests = [name for name in changed if name.startswith(CHECKPOINTS) and name.endswith(MANIFEST)]
        self._write(dict.fromkeys(manifests))  # a checkpoint that is written again is invalid until it is complete
        self._copy_files([*outside, *(name for name in changed if name not in {*outside, *manifests})], files)
        self._copy_files([name for name in manifests if self._unchanged(name.removesuffix(MANIFEST), files)], files)
        for last in (False, True):  # the manifest of an old checkpoint is deleted first
            self._write({name: None for name in gone if name.endswith(MANIFEST) is not last})
        self._stored = {name: stamp for name, stamp in self._stored.items() if name in files}
        self._note()

    def _copy_files(self, names: Sequence[str], files: Mapping[str, list[int]]) -> None:
        """Writes files to the store, except those that were deleted after they had been listed in `files`."""
        for some in _parts(names):
            contents = {}
            for name in some:
                with suppress(FileNotFoundError):
                    contents[name] = (self.folder / name).read_bytes()
            self._write(contents)
            self._stored |= {name: files[name] for name in contents}

    def _unchanged(self, prefix: str, files: Mapping[str, list[int]]) -> bool:
        """Whether the files of a checkpoint are still those that were listed: it may have been deleted or replaced
        while it was copied."""
        return all(self._stamp(name) == stamp for name, stamp in files.items() if name.startswith(prefix))

    def _files(self) -> dict[str, list[int]]:
        """Name -> size and time of each file, except drafts and incomplete checkpoints. Checkpoints are listed first,
        so that metrics and trajectories belong to the newest of them or to later steps."""
        complete = {path.parent for path in self.folder.glob(f"{CHECKPOINTS}step_*/{MANIFEST}")}
        files: dict[str, list[int]] = {}
        for folder, folders, names in os.walk(self.folder):
            path = Path(folder)
            if path == self.folder / CHECKPOINTS:
                folders[:] = [name for name in folders if path / name in complete]
            folders[:] = [name for name in folders if name != DRAFTS]
            for name in names:
                if name != "lock" and not name.startswith(".") and not name.endswith(".part"):
                    relative = (path / name).relative_to(self.folder).as_posix()
                    if (stamp := self._stamp(relative)) is not None:
                        files[relative] = stamp
        return files

    def _stamp(self, name: str) -> list[int] | None:
        """Size and time of a file; None if there is none, as for one that was just deleted."""
        try:
            about = (self.folder / name).stat()
        except FileNotFoundError:
            return None
        return [about.st_size, about.st_mtime_ns]

    def _fetch(self) -> None:
        """Replaces the local directory by the content of the store, without incomplete checkpoints."""
        drafts = self.folder / DRAFTS
        shutil.rmtree(drafts, ignore_errors=True)
        stored = {name.decode() for name in self._store.list().result()} - {OWNER}
        complete = tuple(name.removesuffix(MANIFEST) for name in stored if name.endswith(MANIFEST))
        names = [name for name in stored if name.startswith(complete) or not name.startswith(CHECKPOINTS)]
        drafts.mkdir()
        for some in _parts(names):
            for name, content in zip(some, self._read(some), strict=True):
                (drafts / name).parent.mkdir(parents=True, exist_ok=True)
                (drafts / name).write_bytes(content)
        (self.folder / STATE_FILE).unlink(missing_ok=True)
        for entry in [*self.folder.iterdir()]:
            if entry.name not in ("lock", DRAFTS):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for entry in [*drafts.iterdir()]:
            os.replace(entry, self.folder / entry.name)
        drafts.rmdir()
        self._stored = {name: [0, 0] for name in stored} | self._files()

    def _owner(self) -> str:
        return self._read([OWNER])[0].decode()

    def _read(self, names: Sequence[str]) -> list[bytes]:
        """The contents of objects; empty for an object that does not exist."""
        waiting = [self._store.read(name) for name in names]
        return [future.result().value for future in waiting]

    def _write(self, objects: Mapping[str, bytes | None]) -> None:
        """Writes objects, or deletes those whose value is None, and waits until this is done."""
        waiting = []
        for name, content in objects.items():
            reach("storage.write")
            waiting.append(self._store.write(name, content))
        for future in waiting:
            future.result()

    def _note(self) -> None:
        """Records what the store has, for a start in the same directory."""
        draft = self.folder / f"{STATE_FILE}.part"
        draft.write_text(json.dumps({"owner": self._id, "held": self._stored}), encoding="utf-8")
        os.replace(draft, self.folder / STATE_FILE)


def _parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    return (names[at : at + AT_ONCE] for at in range(0, len(names), AT_ONCE))


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
