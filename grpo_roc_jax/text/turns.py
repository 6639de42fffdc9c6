"""A sampled turn from left to right: its thoughts, its calls, and whether it is over at a stop text.

Inside a thought only the mark that closes it counts, and inside a call only the call's own end: a call that a thought
mentions is none, and marks inside the arguments of a call are text. The engine's stop and the parser of turns read
turns by the same function.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_roc_jax.text.calls import THOUGHTS, CallSpan, Tools
from grpo_roc_jax.text.forms import CallForm

MOST_MENTIONS = 64
"""Calls within one thought that are looked at, and stop texts that one turn may hold back."""
CLOSINGS = tuple(closing for _, closing in THOUGHTS)


@dataclass(frozen=True)
class TurnParts:
    """What a turn consists of."""

    spans: tuple[CallSpan, ...]
    """Calls outside thoughts."""
    plain: tuple[tuple[int, int], ...]
    """Ranges of the text outside calls and closed thoughts."""
    thinks: bool
    """A thought is open at the end."""


def read_turn(text: str, form: CallForm, *, opened: bool, strict: bool = False, tools: Tools = ()) -> TurnParts:
    """The parts of a turn; never raises, in linear time.

    A closing mark of a thought without an opening one ends a thought that began with the turn. If the prompt has not
    opened that thought, complete calls before the mark count all the same. What stands in a thought that is not closed
    is text, but no call of it counts.

    Args:
        text: Of the turn, without its end token.
        form: How its calls are written.
        opened: The prompt has opened a thought.
        strict: Such a thought is open until it is closed. Otherwise a turn that never closes it has none.
        tools: JSON schemas.
    """
    return _Reader(text, form, tools).parts(opened, strict)


class _Reader:
    """Reads one turn. Searches go forward only, so that each mark is looked for once."""

    def __init__(self, text: str, form: CallForm, tools: Tools):
        self._text, self._form, self._tools = text, form, tools
        self._places: dict[str, int] = {}
        self._span: CallSpan | None = None
        self._searched = -1
        """Calls that begin from here on have been searched for; the first of them is `_span`."""

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
        """Where a mark stands next; the length of the text if it does not."""
        place = self._places.get(mark, -1)
        if place < at:
            place = self._text.find(mark, at)
            place = self._places[mark] = len(self._text) if place < 0 else place
        return place

    def _next_call(self, at: int) -> CallSpan | None:
        known = self._searched >= 0 and self._searched <= at and (self._span is None or self._span.start >= at)
        if not known:
            self._span, self._searched = self._form.next_call(self._text, at, self._tools), at
        return self._span

    def _next_thought(self, at: int) -> tuple[int, int, str] | None:
        """(place of the next opening mark, its end, the closing mark that belongs to it)."""
        pairs = (*self._form.thoughts, *THOUGHTS)
        place, opening, closing = min(
            ((self._find(mark, at), mark, close) for mark, close in pairs), key=lambda x: x[0]
        )
        return (place, place + len(opening), closing) if place < len(self._text) else None

    def _closing(self, at: int, marks: Sequence[str]) -> int | None:
        """The end of the first of these marks that stands in no complete call."""
        mentions = 0
        while True:
            place, mark = min((self._find(mark, at), mark) for mark in marks)
            if place == len(self._text):
                return None
            span = self._next_call(at) if mentions < MOST_MENTIONS else None
            if span is None or span.start >= place:
                return place + len(mark)
            mentions += 1
            at = span.end if span.state == "closed" else span.start + 1

    def _first_closing(self, opened: bool) -> tuple[int | None, list[CallSpan]]:
        """(end of the mark that closes a thought which began with the turn, if there is one; the complete calls before
        it)."""
        at = mentions = 0
        before: list[CallSpan] = []
        while True:
            place, mark = min((self._find(mark, at), mark) for mark in CLOSINGS)
            if place == len(self._text):
                return None, []
            thought = None if opened else self._next_thought(at)
            span = self._next_call(at) if mentions < MOST_MENTIONS else None
            if span is not None and span.start < min(place, thought[0] if thought else place):
                mentions += 1
                if span.state == "open" and not opened:
                    return None, []
                before += [span] if span.state == "closed" else []
                at = span.end if span.state == "closed" else span.start + 1
            elif thought is not None and thought[0] < place:
                return None, []
            else:
                return place + len(mark), before


@dataclass(frozen=True)
class StopTest:
    """Whether a turn is over at a stop text."""

    form: CallForm
    answer: str
    """The stop text that ends a turn wherever it stands but inside a call; the others close a call."""
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
        """Where the first of these stop texts ends at which the turn is over; None if it goes on.

        At most `MOST_MENTIONS` of them are held back; the next one ends the turn whatever it stands in.

        Args:
            text: Of the turn so far.
            stops: The texts.
            beyond: Those that end up to here are known to be held back.
        """
        at = held = 0
        while True:
            places = [(place, len(stop)) for stop in stops if (place := text.find(stop, at)) >= 0]
            if not places:
                return None
            place, length = min(places)
            held += 1
            if place + length > beyond and (held > MOST_MENTIONS or self.over(text[: place + length])):
                return place + length
            at = place + length
