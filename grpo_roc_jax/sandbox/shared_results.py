"""Runs a program once for all calls of it, if the executor shares results."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from grpo_roc_jax.sandbox.program import Ticket

REMEMBERED = 1024
"""Number of results that are remembered; the least recently used one is forgotten first."""
SHARED_KINDS = frozenset({"ok", "exception", "syntax_error"})
"""Kinds of results that depend only on the program. Limits and the host influence the others, so these
calls each run."""
NO_TIME = {"wall_ms": 0.0, "cpu_ms": 0.0, "queue_ms": 0.0}


class SharedResults:
    """Decides which calls run, and which take the result of another call. The executor's mutex guards it."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], dict[str, Any] | None] = OrderedDict()
        """Program -> fields of its result; None if each call of it runs."""
        self._waiting: dict[tuple[str, str], list[Ticket]] = {}
        """Program -> calls of it that are in flight. The first one runs."""

    def result_of(self, ticket: Ticket) -> dict[str, Any] | None:
        """Fields of the result of an earlier call, if there is one."""
        if ticket.text in self._known:
            self._known.move_to_end(ticket.text)
        return self._known.get(ticket.text)

    def joins(self, ticket: Ticket) -> bool:
        """Whether another running call will deliver the result. If not, this call must run."""
        if ticket.text in self._known:
            return False
        waiting = self._waiting.setdefault(ticket.text, [])
        waiting.append(ticket)
        return len(waiting) > 1

    def settle(self, ticket: Ticket, fields: Mapping[str, Any]) -> list[Ticket]:
        """Remember the result of a call. Returns the calls that waited for it."""
        text = ticket.text
        waiting = self._waiting.get(text, [])
        if not waiting or waiting[0] is not ticket:
            return []
        del self._waiting[text]
        self._known[text] = {**fields, **NO_TIME} if fields["kind"] in SHARED_KINDS else None
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return waiting[1:]

    def leave(self, ticket: Ticket) -> Ticket | None:
        """Removes a cancelled call. Returns the call that must run instead, if others wait for its result."""
        waiting = self._waiting.get(ticket.text, [])
        led = bool(waiting) and waiting[0] is ticket
        waiting[:] = [other for other in waiting if other is not ticket]
        if not waiting:
            self._waiting.pop(ticket.text, None)
        return waiting[0] if led and waiting else None
