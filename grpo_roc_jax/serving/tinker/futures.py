"""Results that clients come back for, and the order in which calls of a model run."""

import asyncio
import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grpo_roc_jax.serving.refusal import RequestRefused

REMEMBERED = 8192
"""Results that are kept for clients that ask again."""


@dataclass(eq=False)
class Pending:
    """A result to come."""

    request_id: str
    digest: bytes
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of the first answer beside the id."""
    result: dict[str, Any] | bytes | None = None
    """JSON, or a protocol buffer."""
    queue_state: str = "active"
    """The answer to a client that asks before there is a result."""
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def finish(self, result: dict[str, Any] | bytes) -> None:
        if not self.done.is_set():
            self.result = result
            self.done.set()

    def fail(self, error: BaseException) -> None:
        category = "user" if isinstance(error, RequestRefused) and error.status < 500 else "server"
        text = error.message if isinstance(error, RequestRefused) else f"{type(error).__name__}: {error}"
        self.finish({"error": text, "category": category})


@dataclass(eq=False)
class Futures:
    """Results by their ids, and by what makes a request the same as an earlier one."""

    _by_id: OrderedDict[str, Pending] = field(default_factory=OrderedDict)
    _by_key: dict[Any, str] = field(default_factory=dict)
    _keys: dict[str, Any] = field(default_factory=dict)

    def make(self, key: Any, body: bytes, owner: str = "", request_id: str = "") -> tuple[Pending, bool]:
        """(the result of this request, whether it is new). A request that comes again has the result of the first.

        Args:
            key: What makes it the same as an earlier one.
            body: As it came.
            owner: The model that it is a call of, which its id then names.
            request_id: The id that it had before the server started again.

        Raises:
            RequestRefused: Another request came under this key.
        """
        digest = hashlib.blake2b(body, digest_size=16).digest()
        if (known := self._by_id.get(self._by_key.get(key, ""))) is not None:
            if known.digest != digest:
                raise RequestRefused(f"{key} came before with another body; count seq_id up for each call")
            return known, False
        new_id = uuid.uuid4().hex + (f"@{owner}" if owner else "")
        pending = Pending(request_id or new_id, digest)
        self._by_id[pending.request_id] = pending
        self._by_key[key], self._keys[pending.request_id] = pending.request_id, key
        if len(self._by_id) > REMEMBERED:
            old = next((name for name, future in self._by_id.items() if future.done.is_set()), None)
            if old is not None:
                self.drop(old)
        return pending, True

    def drop(self, request_id: str) -> None:
        """Forgets a request; the same one is new when it comes again."""
        del self._by_id[request_id]
        self._by_key.pop(self._keys.pop(request_id), None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def find(self, request_id: str) -> Pending:
        """
        Raises:
            RequestRefused: There is no such request.
        """
        if (pending := self._by_id.get(request_id)) is None:
            raise RequestRefused(
                f"no request {request_id!r:.80}; the server started again, or forgot its result", status=404
            )
        return pending

    @property
    def open(self) -> int:
        """Requests without a result."""
        return sum(not pending.done.is_set() for pending in self._by_id.values())


@dataclass(eq=False)
class InOrder:
    """Calls of one model, which arrive in any order and run by their numbers."""

    run: Callable[[Callable[[], None]], None]
    next_seq: int = 1
    _held: dict[int, Callable[[], None]] = field(default_factory=dict)

    def put(self, seq: int, call: Callable[[], None]) -> None:
        """Runs a call as soon as all with lower numbers have been started."""
        self._held[seq] = call
        self._start()

    def skip(self, seq: int, call: Callable[[], None]) -> None:
        """The same for a number whose call was refused, unless that number came before."""
        if seq >= self.next_seq and seq not in self._held:
            self.put(seq, call)

    def _start(self) -> None:
        while (ready := self._held.pop(self.next_seq, None)) is not None:
            self.next_seq += 1
            self.run(ready)
