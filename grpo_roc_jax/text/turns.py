"""Reads a sampled turn from left to right: its thoughts, its calls, and whether it is over at a stop text.

Inside a thought only the mark that closes it counts, and inside a call only the call's own end: a call mentioned in a
thought is not run, and marks inside the arguments of a call are text. The engine's stop test and the parser of turns
use the same function.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_roc_jax.text.calls import THOUGHTS, CallSpan, Tools
from grpo_roc_jax.text.forms import CallForm

MOST_MENTIONS = 64
"""Most calls within one thought that are examined, and most stop texts that one turn may ignore."""
CLOSINGS = tuple(closing for _, closing in THOUGHTS)


@dataclass(frozen=True)
class TurnParts:
    """The parts of a turn."""

    spans: tuple[CallSpan, ...]
    """Calls outside of thoughts."""
    plain: tuple[tuple[int, int], ...]
    """Ranges of the text outside of calls and closed thoughts, as (start, end)."""
    thinks: bool
    """Whether a thought is open at the end."""


def read_turn(text: str, form: CallForm, *, opened: bool, strict: bool = False, tools: Tools = ()) -> TurnParts:
    """The parts of a turn. Never raises; takes linear time.

    A closing mark of a thought without an opening one ends a thought that began with the turn. If the prompt has not
    opened that thought, complete calls before the mark count all the same. A thought that is not closed is text, but
    its calls do not count.

    Args:
        text: Text of the turn, without its end token.
        form: How its calls are written.
        opened: Whether the prompt has opened a thought.
        strict: Whether such a thought is open until it is closed. Otherwise a turn that never closes it has no thought.
        tools: JSON schemas.
    """
    return _Reader(text, form, tools).parts(opened, strict)


class _Reader:
    """Reads one turn. Searches only go forward, so that each mark is searched once."""

    def __init__(self, text: str, form: CallForm, tools: Tools):
        self._text, self._form, self._tools = text, form, tools
        self._places: dict[str, int] = {}
        self._span: CallSpan | None = None
        self._searched = -1
        """Calls that begin at or after this index have been searched; the first of them is `_span`."""

    def parts(self, opened: bool, strict: bool) -> TurnParts:
        text = self._text
        spans: list[CallSpan] = []
        plain: list[tuple[int, int]] = []
        first, before = self._first_closing(opened)
        at = 0
        if first is not None:
            spans, at = ([] if opened else before), first
        thinks = opened and first is None
        if thinks and strict:
            return TurnParts((), ((0, len(text)),), True)
        while at < len(text):
            span, thought = self._next_call(at), self._next_thought(at)
            if span is not None and (thought is None or span.start < thought[0]):
                plain.append((at, span.start))
                spans.append(span)
                at = span.end
            elif thought is not None:
                begin, end = thought[0], self._closing(thought[1], (thought[2],))
                thinks = end is None
                plain.append((at, len(text) if end is None else begin))
                at = len(text) if end is None else end
            else:
                plain.append((at, len(text)))
                at = len(text)
        return TurnParts(tuple(spans), tuple(plain), thinks)

    def _find(self, mark: str, at: int) -> int:
        """Index of the next occurrence of a mark; the length of the text if there is none."""
        position = self._places.get(mark, -1)
        if position < at:
            position = self._text.find(mark, at)
            position = self._places[mark] = len(self._text) if position < 0 else position
        return position

    def _next_call(self, at: int) -> CallSpan | None:
        known = self._searched >= 0 and self._searched <= at and (self._span is None or self._span.start >= at)
        if not known:
            self._span, self._searched = self._form.next_call(self._text, at, self._tools), at
        return self._span

    def _next_thought(self, at: int) -> tuple[int, int, str] | None:
        """(index of the next opening mark, its end, the closing mark that belongs to it); None if there is none."""
        pairs = (*self._form.thoughts, *THOUGHTS)
        position, opening, closing = min(
            ((self._find(mark, at), mark, close) for mark, close in pairs), key=lambda x: x[0]
        )
        return (position, position + len(opening), closing) if position < len(self._text) else None

    def _closing(self, at: int, marks: Sequence[str]) -> int | None:
        """The end of the first of these marks outside of complete calls; None if there is none."""
        mentions = 0
        while True:
            position, mark = min((self._find(mark, at), mark) for mark in marks)
            if position == len(self._text):
                return None
            span = self._next_call(at) if mentions < MOST_MENTIONS else None
            if span is None or span.start >= position:
                return position + len(mark)
            mentions += 1
            at = span.end if span.state == "closed" else span.start + 1

    def _first_closing(self, opened: bool) -> tuple[int | None, list[CallSpan]]:
        """(end of the mark that closes a thought which began with the turn, or None; the complete calls before it)."""
        at = mentions = 0
        before: list[CallSpan] = []
        while True:
            position, mark = min((self._find(mark, at), mark) for mark in CLOSINGS)
            if position == len(self._text):
                return None, []
            thought = None if opened else self._next_thought(at)
            span = self._next_call(at) if mentions < MOST_MENTIONS else None
            if span is not None and span.start < min(position, thought[0] if thought else position):
                mentions += 1
                if span.state == "open" and not opened:
                    return None, []
                before += [span] if span.state == "closed" else []
                at = span.end if span.state == "closed" else span.start + 1
            elif thought is not None and thought[0] < position:
                return None, []
            else:
                return position + len(mark), before


@dataclass(frozen=True)
class StopTest:
    """Whether a turn is over at a stop text."""

    form: CallForm
    answer: str
    """The stop text of an answer, which ends a turn anywhere except inside a call. The other stop texts
    close a call."""
    tools: Tools
    opened: bool
    strict: bool
    """See `read_turn`."""

    def over(self, text: str) -> bool:
        """Whether a turn that ends with a stop text is over there.

        A call in an open thought does not end it, since the thought may be closed after it. A closing mark alone does,
        unless the turn has opened the thought itself: it is no call, and is answered as malformed.
        """
        parts = read_turn(text, self.form, opened=self.opened, strict=self.strict, tools=self.tools)
        last = parts.spans[-1] if parts.spans else None
        if text.endswith(self.answer):
            return last is None or last.state != "open"
        if last is None or not last.ended or last.end != len(text):
            return False
        stray = last.end - last.start == len(self.form.stop_text)
        return stray or not parts.thinks

    def end(self, text: str, stops: Sequence[str], *, beyond: int = 0) -> int | None:
        """The end of the first of these stop texts at which the turn is over; None if it goes on.

        At most `MOST_MENTIONS` of them are ignored; the next one ends the turn wherever it stands.

        Args:
            text: The turn so far.
            stops: The stop texts.
            beyond: Stop texts that end up to this index are known to be ignored.
        """
        at = ignored = 0
        while True:
            places = [(position, len(stop)) for stop in stops if (position := text.find(stop, at)) >= 0]
            if not places:
                return None
            position, length = min(places)
            ignored += 1
            if position + length > beyond and (ignored > MOST_MENTIONS or self.over(text[: position + length])):
                return position + length
            at = position + length
