"""Calls that were accepted, on disk before they are answered, so that a server that was killed runs them again.

`ROOT/MODEL/journal/` holds `calls`, the accepted calls of a model in the order in which they came, and states after
some of them: checkpoints that are named by the number of the call to come. A model goes on from the older of the last
two states; what follows it is computed again, by the same programs from the same numbers. So the results of calls that
a client has not come back for are there again, under the ids that it knows.
"""

import json
import re
import shutil
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_roc_jax.serving.tinker.store import About, CheckpointPath, Store, append_synced, replace_file, sync

KIND, CALLS, SESSIONS = "journal", "calls", ".sessions.jsonl"
LOADED = "loaded-"
"""Before the number of a call, in the name of what it has loaded."""
SAMPLER = "sampler-"
"""Before the number of a sampler without a name, in the name of its weights."""
KEPT = 16
"""Samplers of a model without a name whose weights are on disk, the last used ones."""
STATES = 2
"""States that are kept."""
FORGOTTEN_S = 7 * 24 * 3600.0
"""After this time without a call, a model that was not finished is removed at the next start."""


@dataclass(frozen=True)
class LoggedCall:
    """A call as it came; `path` is empty for a number whose call was refused."""

    path: str
    seq: int
    request_id: str
    body: bytes

    def packed(self) -> bytes:
        """The call as bytes, with its lengths and a checksum that show whether all of it was written."""
        head = {"path": self.path, "seq": self.seq, "request_id": self.request_id, "size": len(self.body)}
        line = json.dumps(head | {"crc": zlib.crc32(self.body)}).encode()
        return b"%08x" % len(line) + line + self.body


def _read_calls(content: bytes) -> Iterator[LoggedCall]:
    """The calls of a file, up to the first that was not written to its end."""
    at = 0
    with suppress(ValueError, KeyError):
        while at < len(content):
            size = int(content[at : at + 8], 16)
            head = json.loads(content[at + 8 : at + 8 + size])
            at += 8 + size
            body = content[at : at + head["size"]]
            at += head["size"]
            if len(body) < head["size"] or zlib.crc32(body) != head["crc"]:
                return
            yield LoggedCall(head["path"], head["seq"], head["request_id"], body)


@dataclass(frozen=True)
class Journal:
    """The journals of all models of a store. `append`, `trim` and `note` are for one thread, `save_state` for any."""

    store: Store
    samplers: int = KEPT
    """Samplers of a model without a name whose weights stay on disk, the last used ones."""

    def _folder(self, model: str) -> Path:
        return self.store.root / model / KIND

    def append(self, model: str, call: LoggedCall) -> None:
        """Returns once the call is on disk.

        Raises:
            OSError: It is not, for example since the disk is full.
        """
        folder = self._folder(model)
        new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        append_synced(folder / CALLS, call.packed())
        if new:
            for path in (folder, folder.parent, self.store.root):
                sync(path)

    def calls(self, model: str) -> list[LoggedCall]:
        """The calls that are on disk, in the order in which they came."""
        try:
            return list(_read_calls((self._folder(model) / CALLS).read_bytes()))
        except FileNotFoundError:
            return []

    def states(self, model: str) -> list[int]:
        """The numbers of the call to come of the states, ascending."""
        folder = self._folder(model)
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(name) for name in names if name.isdigit())

    def first_state(self, model: str) -> tuple[CheckpointPath, About, int] | None:
        """The state that a model goes on from: (where it is, of what, the number of the call to come)."""
        states = self.states(model)[-STATES:]
        if not states:
            return None
        checkpoint = CheckpointPath(model, KIND, str(states[0]))
        return checkpoint, self.store.about(checkpoint), states[0]

    def first_after(self, model: str, next_seq: int) -> int:
        """The number of the first call that is run again at a start, once the state before this call is written."""
        return sorted({*self.states(model), next_seq})[-STATES:][0]

    @staticmethod
    def sampler(model: str, name: str) -> CheckpointPath:
        """Where the weights of a sampler without a name are, once the call that made it is not run again."""
        return CheckpointPath(model, KIND, f"{SAMPLER}{name.rpartition(':')[2]}")

    def find_sampler(self, name: str) -> CheckpointPath | None:
        """Where the weights of a sampler (`SESSION:sample:NUMBER`) of any model of its session are."""
        if not re.fullmatch(r"\w+:sample:\d+", name):
            return None
        session, _, number = name.split(":")
        path = next(self.store.root.glob(f"{session}:train:*/{KIND}/{SAMPLER}{number}"), None)
        return None if path is None else CheckpointPath(path.parent.parent.name, KIND, path.name)

    def drop_samplers(self, model: str, used: Collection[CheckpointPath]) -> None:
        """Removes the oldest samplers without a name beyond `samplers`, but none of those."""
        names = {checkpoint.name for checkpoint in used}
        others = [path for path in self._folder(model).glob(f"{SAMPLER}*") if path.name not in names]
        others.sort(key=lambda path: path.stat().st_mtime)
        for path in others[: max(0, len(others) + len(names) - self.samplers)]:
            shutil.rmtree(path, ignore_errors=True)

    def save_state(self, model: str, about: About, leaves: Any, next_seq: int) -> int:
        """Writes a state and removes those before the last two; the number of the first call that is needed."""
        self.store.save(CheckpointPath(model, KIND, str(next_seq)), about, leaves, overwrite=True)
        states = self.states(model)
        for old in states[:-STATES]:
            shutil.rmtree(self._folder(model) / str(old), ignore_errors=True)
        first = states[-STATES:][0]
        for path in self._folder(model).glob(f"{LOADED}*"):
            if int(path.name.removeprefix(LOADED)) < first:
                shutil.rmtree(path, ignore_errors=True)
        return first

    @staticmethod
    def loaded(model: str, seq: int) -> CheckpointPath:
        """What the call of this number has loaded: its own copy, since the checkpoint may be another later."""
        return CheckpointPath(model, KIND, f"{LOADED}{seq}")

    def trim(self, model: str, first: int) -> None:
        """Removes the calls before a number, but for what made the model, and what was not written to its end."""
        folder = self._folder(model)
        if folder.is_dir():
            packed = b"".join(call.packed() for call in self.calls(model) if call.seq >= first or not call.seq)
            replace_file(folder / CALLS, packed)

    def forget(self, model: str, gone: Callable[[LoggedCall], bool]) -> None:
        """Calls that are not run again: their numbers count as refused."""
        folder = self._folder(model)
        if folder.is_dir():
            calls = [LoggedCall("", call.seq, "", b"") if gone(call) else call for call in self.calls(model)]
            replace_file(folder / CALLS, b"".join(call.packed() for call in calls))

    def remove(self, model: str) -> None:
        """The model has ended: its checkpoints stay."""
        shutil.rmtree(self._folder(model), ignore_errors=True)

    def note(self, **fields: Any) -> None:
        """Notes a session or a sampler; returns once it is on disk."""
        append_synced(self.store.root / SESSIONS, json.dumps(fields | {"time": time.time()}).encode() + b"\n")

    def notes(self) -> list[dict[str, Any]]:
        """The sessions and samplers that were not finished, oldest first; what is too old is removed from disk."""
        file, notes = self.store.root / SESSIONS, []
        for line in file.read_bytes().splitlines() if file.exists() else ():
            with suppress(ValueError):  # the last line may not have been written to its end
                notes.append(json.loads(line))
        finished = {note["finished"] for note in notes if "finished" in note}
        recent = time.time() - FORGOTTEN_S
        active = {model.partition(":")[0] for model in self.store.models() if self._called(model) > recent}
        lines = [
            note
            for note in notes
            if "session" in note
            and note["session"] not in finished
            and (note["time"] > recent or note["session"] in active)
        ]
        replace_file(file, b"".join(json.dumps(note).encode() + b"\n" for note in lines))
        self._forget(recent)
        return lines

    def _called(self, model: str) -> float:
        """When the last call of a model was noted; 0 for a model without calls."""
        calls = self._folder(model) / CALLS
        return calls.stat().st_mtime if calls.exists() else 0.0

    def _forget(self, before: float) -> None:
        for model in self.store.models():
            if 0 < self._called(model) < before:
                self.remove(model)


def owner_of(request_id: str) -> str:
    """The model whose call has this id; empty for none."""
    return request_id.partition("@")[2]
