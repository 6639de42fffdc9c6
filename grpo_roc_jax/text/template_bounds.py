"""A jinja environment for templates from untrusted sources. Without limits a small template can write 10 GB of text, or
never end.

Every operation whose result is longer than its operands is checked before or right after it runs: repeating, joining,
formatting, filters, methods of texts. Iterations of loops are counted, and a rendering has a deadline.
"""

import functools
import re
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_TEXT = 1 << 24
"""Most characters of a rendered conversation or an intermediate text, and most items of a list."""
MOST_ROUNDS = 1_000_000
"""Most iterations of all loops of a rendering."""
MOST_NUMBER = 1 << 20
"""Largest argument that determines how wide or how long something is."""
MOST_EXPONENT = 64
LONGEST_S = 10.0
"""Most seconds of a rendering."""
WIDTH = re.compile(r"[0-9]{7}")
"""Matches widths of a million and more in a format such as `%10000000d`, whose output would be that long."""
FORMATS = ("format", "format_map", "do_format")
WIDE = ("center", "ljust", "rjust", "zfill", "expandtabs", "do_center", "do_indent", "do_batch", "do_slice", "tojson")
"""Methods and filters with a number that determines how much they write."""


class UnboundedTemplate(jinja2.TemplateRuntimeError):
    """The template writes too much or does not end."""


SHALLOW = {
    "len", "do_first", "do_last", "do_list", "do_items", "do_map", "do_select", "do_reject", "do_selectattr",
    "do_rejectattr", "do_default", "do_attr", "do_reverse", "do_random", "do_batch", "do_slice", "do_unique",
    "sync_do_first", "sync_do_list", "sync_do_map", "sync_do_select", "sync_do_reject", "sync_do_selectattr",
    "sync_do_rejectattr", "sync_do_slice",
}  # fmt: skip
"""Filters that neither write out nor compare what a list or mapping contains; all others may do so."""


def too_long(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple | dict) and len(value) > MOST_TEXT


_INSIDE = str | bytes | list | tuple | dict | set


def size(value: Any, most: int = MOST_TEXT) -> int:
    """Characters and items in a value, however often a part of it is repeated; counting ends above `most`."""
    total, waiting = 0, [value]
    while waiting and total <= most:
        item = waiting.pop()
        if isinstance(item, str | bytes):
            total += len(item) + 1
        elif isinstance(item, dict):
            total += len(item)
            waiting += [part for pair in item.items() for part in pair if isinstance(part, _INSIDE)]
        elif isinstance(item, list | tuple | set):
            total += len(item)
            waiting += [part for part in item if isinstance(part, _INSIDE)]
        else:
            total += 1
    return total


def checked(value: Any) -> Any:
    """Returns the value; raises UnboundedTemplate if it is too long."""
    if too_long(value):
        raise UnboundedTemplate(f"the chat template makes a text or list of more than {MOST_TEXT} characters or items")
    return value


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A jinja environment that raises UnboundedTemplate before a template takes all memory or time."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.finalize = self._written
        self._rounds, self._until_s = 0, 0.0
        self.globals.pop("lipsum")
        for name, function in [*self.filters.items()]:
            self.filters[name] = self.bounded_filter(function)
        self.filters |= {"counted loop": self._counted, "joined texts": self._joined}

    def render(self, template: jinja2.Template, /, **variables: Any) -> str:
        """The output of a template of this environment.

        Raises:
            UnboundedTemplate: It is too long, or takes too long.
            jinja2.TemplateError: The template refuses the variables.
        """
        self._rounds, self._until_s = 0, time.monotonic() + LONGEST_S
        parts, length = [], 0
        try:
            for part in template.generate(variables):
                self._tick()
                parts.append(part)
                length += len(part)
                if length > MOST_TEXT:
                    raise UnboundedTemplate(f"the chat template writes more than {MOST_TEXT} characters")
        except RecursionError:
            raise UnboundedTemplate("the chat template calls itself without an end") from None
        except MemoryError:
            raise UnboundedTemplate("the chat template takes all memory") from None
        return "".join(parts)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins the output of a macro or of a block that is assigned."""
        pieces, length = [], 0
        for part in parts:
            pieces.append(part)
            length += len(part)
            if length > MOST_TEXT:
                raise UnboundedTemplate(f"the chat template makes a text of more than {MOST_TEXT} characters")
        return "".join(pieces)

    def bounded_filter(self, function: Any) -> Any:
        """A filter whose arguments and result are checked."""

        @functools.wraps(function)
        def bounded(*arguments: Any, **named: Any) -> Any:
            if function.__name__ == "do_join":
                arguments = self._listed(arguments)
            self._check(function.__name__, arguments, named)
            return checked(function(*arguments, **named))

        return bounded

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._tick()
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        sizes = [len(operand) if isinstance(operand, Sized) else operand for operand in (left, right)]
        if numbers:
            if operator == "**" and (abs(left) > MOST_NUMBER or abs(right) > MOST_EXPONENT):
                raise UnboundedTemplate(f"the chat template raises {left} to the power of {right}")
            if any(isinstance(operand, int) and operand.bit_length() > MOST_NUMBER for operand in (left, right)):
                raise UnboundedTemplate("the chat template computes with numbers of a million digits")
        elif operator == "*" and all(isinstance(size, int) for size in sizes) and sizes[0] * sizes[1] > MOST_TEXT:
            raise UnboundedTemplate(f"the chat template repeats something to a length of {sizes[0] * sizes[1]}")
        elif operator == "%" and isinstance(left, str):
            self._check("format", (left, *(right if isinstance(right, tuple) else (right,))), {})
        return checked(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        self._tick()
        text = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(text, str | bytes):
            arguments = self._listed(arguments)
            self._check(function.__name__, (text, *arguments), named)
        return checked(super().call(context, function, *arguments, **named))

    def _check(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Refuses arguments of a method of a text, or of a filter, whose result would be too long."""
        self._tick()
        values = [*arguments, *named.values()]
        texts = [value for value in values if isinstance(value, str)]
        wide = name in WIDE or name in FORMATS
        if wide and any(isinstance(value, int) and abs(value) > MOST_NUMBER for value in values):
            raise UnboundedTemplate(f"the chat template asks {name} for more than {MOST_NUMBER} characters")
        if name in FORMATS and any(map(WIDTH.search, texts)):
            raise UnboundedTemplate(f"the chat template asks {name} for more than {MOST_NUMBER} characters")
        if name in ("replace", "do_replace") and len(texts) >= 3:
            text, old, new = texts[:3]
            if text.count(old) * len(new) > MOST_TEXT:
                raise UnboundedTemplate(f"the chat template makes a text of more than {MOST_TEXT} characters")
        if name not in SHALLOW and sum(size(value) for value in values if isinstance(value, _INSIDE)) > MOST_TEXT:
            raise UnboundedTemplate(f"the chat template makes a text of more than {MOST_TEXT} characters")
        if (times := _repeats(name, values)) and times > MOST_TEXT:
            raise UnboundedTemplate(f"the chat template asks {name} for more than {MOST_TEXT} characters")
        if name in ("join", "do_join"):
            lists = [value for value in values if isinstance(value, Sized) and not isinstance(value, str)]
            between = max(map(len, texts), default=0)
            if sum(len(item) for item in lists) * between > MOST_TEXT:
                raise UnboundedTemplate(f"the chat template makes a text of more than {MOST_TEXT} characters")

    @staticmethod
    def _written(value: Any) -> Any:
        """A value that an expression writes."""
        if isinstance(value, list | tuple | dict | set) and size(value) > MOST_TEXT:
            raise UnboundedTemplate(f"the chat template writes more than {MOST_TEXT} characters")
        return value

    def _listed(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with iterators replaced by lists, whose lengths can be checked."""
        return tuple(
            [*self._counting(argument)] if isinstance(argument, Iterator) else argument for argument in arguments
        )

    def _tick(self) -> None:
        if self._until_s and time.monotonic() > self._until_s:
            raise UnboundedTemplate(f"the chat template takes longer than {LONGEST_S:g} seconds")

    def _count(self, rounds: int) -> None:
        self._rounds += rounds
        if self._rounds > MOST_ROUNDS:
            raise UnboundedTemplate(f"the loops of the chat template take more than {MOST_ROUNDS} rounds")
        self._tick()

    def _counted(self, items: Any) -> Any:
        """The items that a loop iterates over; iterations are counted."""
        if isinstance(items, Sized):
            self._count(len(items))
            return items
        return self._counting(items) if isinstance(items, Iterable) else items

    def _counting(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._count(1)
            yield item

    def _joined(self, items: list[Any]) -> str:
        """Implements the operator `~`."""
        return self.concat(str(self._written(item)) for item in items)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in [*tree.find_all(nodes.For)]:
            loop.iter = nodes.Filter(loop.iter, "counted loop", [], [], None, None, lineno=loop.lineno)
        for node in [*tree.find_all(nodes.Node)]:
            for field, value in [*node.iter_fields()]:
                if isinstance(value, nodes.Concat):
                    setattr(node, field, _joining(value))
                elif isinstance(value, list):
                    setattr(node, field, [_joining(item) if isinstance(item, nodes.Concat) else item for item in value])
        return tree.set_environment(self)


def _repeats(name: str, values: list[Any]) -> int:
    """About how many characters come of arguments that are multiplied: fields by what fills them, lines by how far they
    are indented, characters by what replaces them; 0 for others."""
    values = [value for value in values if isinstance(value, _INSIDE | int)]  # filters may get the environment, too
    if not values or not isinstance(values[0], str | bytes):
        return size(values[0]) * _widest(values[1:]) if values and name in ("do_tojson", "tojson") else 0
    text, rest = values[0], values[1:]
    if name in FORMATS and isinstance(text, str):
        widths = sum(int(digits) for digits in NUMBERS.findall(text))
        return widths + (text.count("{") + text.count("%")) * _widest(rest)
    if name == "expandtabs":
        return len(text) * _widest(rest)
    if name == "do_indent":
        return (text.count("\n") + 1) * _widest(rest)
    if name in ("translate", "do_wordwrap"):
        return len(text) * (1 if name == "do_wordwrap" else 0) + len(text) * max(map(_longest, rest), default=0)
    return 0


NUMBERS = re.compile(r"[0-9]{1,7}")


def _widest(values: Iterable[Any]) -> int:
    """The largest number or size of some values."""
    return max((abs(value) if isinstance(value, int) else size(value) for value in values), default=0)


def _longest(value: Any) -> int:
    """Characters of the longest text in a value."""
    if isinstance(value, dict):
        return max(map(_longest, value.values()), default=0)
    return len(value) if isinstance(value, str) else 0


def _joining(node: nodes.Concat) -> nodes.Filter:
    items = nodes.List(node.nodes, lineno=node.lineno)
    return nodes.Filter(items, "joined texts", [], [], None, None, lineno=node.lineno)
