"""Results of tools matched to the calls that they answer."""

from collections.abc import Mapping, Sequence
from typing import Any

ANSWERED_KEYS = ("tool_call_id", "call_id", "tool_use_id")
"""Keys that can hold the id of the answered call."""


class UnmatchedReply(ValueError):
    """A result that answers no call, or a call without a result."""

    def __init__(self, message: str, reply: int | None = None):
        super().__init__(message)
        self.reply = reply
        """Index of the result, or None if the error concerns a call."""


def in_order_of_calls(
    calls: Sequence[tuple[str | None, str]], replies: Sequence[tuple[str | None, str]], *, strict: bool = False
) -> list[int]:
    """Indices of the results of a turn, in the order of its calls.

    Results are matched by id. If neither side has ids they are matched by name (the role `function` of older requests),
    those of one tool in their order. Results without names are taken in the order of the calls.

    Args:
        calls: Id, if it has one, and name of each call. Empty if the turn has its calls as text; results are then taken
            in their order.
        replies: Id of the answered call, and name of the tool, of each result; either may be missing.
        strict: Whether calls with ids must be answered by id even if there is only one call.

    Raises:
        UnmatchedReply: An id is unknown, missing, or given twice, a call has no result, or the names of several results
            are not those of the calls.
    """
    known = [own_id for own_id, _ in calls if own_id]
    given = [own_id for own_id, _ in replies]
    if not calls:
        first = next((i for i, own_id in enumerate(given) if own_id), None)
        if first is not None and strict:
            raise UnmatchedReply(f"tool_call_id {given[first]!r:.80} answers no call: there is none before it", first)
        return list(range(len(replies)))
    twice = next((own_id for own_id in known if known.count(own_id) > 1), None)
    if twice is not None:
        raise UnmatchedReply(f"two calls of one message have the id {twice!r:.80}; ids must differ")
    if any(given):
        return _by_id(known, given, len(calls))
    if known and (strict or len(calls) > 1):
        raise UnmatchedReply(
            f"a result without tool_call_id; must name the call that it answers ({', '.join(map(repr, known))[:200]})",
            0,
        )
    if len(replies) < len(calls):
        raise UnmatchedReply(f"{len(calls)} calls and {len(replies)} results; every call must have one")
    names, called = [name for _, name in replies], [name for _, name in calls]
    if len(calls) > 1 and len(replies) > len(calls):
        raise UnmatchedReply(f"{len(calls)} calls and {len(replies)} results; name their calls by tool_call_id")
    if len(replies) != len(calls) or sorted(names) != sorted(called):
        if len(calls) > 1 and all(names):
            raise UnmatchedReply(
                f"results of {', '.join(names)[:200]} after calls of {', '.join(called)[:200]}; "
                "must be of the same tools"
            )
        return list(range(len(replies)))
    left = {name: iter([i for i, other in enumerate(names) if other == name]) for name in names}
    return [next(left[name]) for name in called]


def id_of_call(call: Mapping[str, Any]) -> Any:
    """The id of a call: `id` of chat completions, or `call_id` of responses."""
    return next((call[key] for key in ("id", "call_id") if call.get(key) is not None), None)


def answered_id(reply: Mapping[str, Any]) -> Any:
    """The id of the call that a result answers, under any of the keys in use."""
    return next((reply[key] for key in ANSWERED_KEYS if reply.get(key) is not None), None)


def _by_id(known: Sequence[str], given: Sequence[str | None], calls: int) -> list[int]:
    for i, own_id in enumerate(given):
        if not own_id:
            raise UnmatchedReply("a result without tool_call_id beside others that have one; must be given", i)
        if own_id not in known:
            listed = ", ".join(map(repr, known))[:200] or "none has an id"
            raise UnmatchedReply(f"tool_call_id {own_id!r:.80} is of no call before it ({listed})", i)
        if own_id in given[:i]:
            raise UnmatchedReply(f"a second result for tool_call_id {own_id!r:.80}; each call has one", i)
    if len(known) < calls:
        raise UnmatchedReply("a call without an id beside results that have one; must be given")
    left = [own_id for own_id in known if own_id not in given]
    if left:
        raise UnmatchedReply(f"no result for the calls {', '.join(map(repr, left))[:200]}; every call must have one")
    return [given.index(own_id) for own_id in known]
