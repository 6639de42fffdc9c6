"""What the dialogue needs to know about a form of tool calls, and code that the forms share."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from grpo_roc_jax.text.calls import CallSpan, State, Tools, after_space, begins, call_id, functions_of
from grpo_roc_jax.text.literals import CodeStrings
from grpo_roc_jax.types import ToolCall

CALL_ID = "{:09d}"
"""Id of the n-th call of a turn, for calls without an id: nine letters and digits, as Mistral's templates require."""
PYTHON_TOOL = "python_code_with_standard_io"
"""Name of the tool that runs a program: the library's own, and that of rStar2-Agent."""
_UNFIT = re.compile(r"[^A-Za-z0-9_.:-]")


class CallForm:
    """A form of calls: where they are in a turn, how they are written, how their outputs return."""

    stop_text: str = ""
    """Text that ends a turn of one call; empty if only an end token ends it."""
    end_tokens: tuple[str, ...] = ()
    """Special tokens that end a turn, in addition to the end token of the template."""
    turn_end: str = ""
    """Token by which the policy ends a turn without calls, where the template writes `past_ends` for it later."""
    past_ends: tuple[str, ...] = ()
    """Tokens by which the template ends earlier turns."""
    thoughts: tuple[tuple[str, str], ...] = ()
    """Marks around thoughts, in addition to those that all forms know."""
    thought: tuple[str, str] | None = None
    """Marks that a demonstration writes around a thought; None for those of the template."""
    thinks_if: str = ""
    """Text in the prompt that makes the model think in this way; empty if it always does."""
    openings: tuple[str, ...] = ()
    """Marks with which calls begin."""
    marks: tuple[str, ...] = ()
    """Further marks that no text from outside may spell."""
    how_to: str = ""
    """Instructions for writing a call in the tool list of a built-in template; empty to show an example instead."""

    def next_call(self, text: str, at: int, tools: Tools = ()) -> CallSpan | None:
        """The first call, or block of calls, that begins at `at` or later; never raises.

        Args:
            text: Text of the turn, without its end token.
            at: 0, or the end of an earlier span.
            tools: JSON schemas, for forms that name no tool or do not distinguish a number from its text.
        """
        raise NotImplementedError

    def find_calls(self, text: str, *, over: bool, tools: Tools = ()) -> list[ToolCall]:
        """The calls of a turn in order, malformed ones with their fault. Never raises; takes linear time.

        Args:
            text: Text of the turn, without its end token.
            over: Whether the policy ended the turn. If so, a complete call without its closing mark counts. A call that
                was cut off inside is malformed.
            tools: As in `next_call`.
        """
        calls: list[ToolCall] = []
        at = 0
        while (span := self.next_call(text, at, tools)) is not None:
            if span.ended or over:
                calls += span.calls
            at = span.end
        return calls

    def write_calls(self, text_before: str, calls: Sequence[ToolCall], tools: Tools = ()) -> str:
        """A turn of text followed by calls, in the form that `find_calls` reads; used to write demonstrations.

        Args:
            text_before: The text.
            calls: The calls, in order.
            tools: As in `next_call`; those with which the turn will be read.
        """
        raise NotImplementedError

    def write_text(self, text: str) -> str:
        """A turn without calls, as the form writes it."""
        return text

    def split(self, text: str) -> tuple[str, str] | None:
        """(thought, text after it) of a turn, if the form has separate messages for them; else None."""
        return None

    def observation(self, text: str) -> Mapping[str, Any]:
        """The chat message that returns a tool's output."""
        return {"role": "tool", "name": "tool", "content": text}

    def reply_id(self, call: ToolCall | None, index: int) -> str:
        """The id under which the output of the call with index `index` (from 0) returns: the policy's own if it gave
        one."""
        return (call_id(call.raw) if call else "") or CALL_ID.format(index + 1)

    def probe_id(self, name: str, index: int) -> str:
        """An id of a call in this form, for a template that checks it or reads the name of the tool from it."""
        return CALL_ID.format(index + 1)


CODE = "code"
"""Name of a parameter whose values are Python."""


def value_end(text: str, at: int, closing: str, follows: Sequence[str], *, code: bool) -> tuple[State, int]:
    """Where the closing mark of a value begins that stands as it is; it must be followed by one of some marks.

    `open` with a place that is before the end of the text: the mark is inside a string of Python that the text does not
    end, so that it may belong to the value. In strings that are closed, marks are text. Takes linear time.

    Args:
        code: The value is Python.
    """
    strings = CodeStrings(text, at) if code else None
    while (end := text.find(closing, at)) >= 0:
        after = after_space(text, end + len(closing))
        if any(begins(text, after, mark) != "broken" for mark in follows):
            inside = strings.around(end) if strings else None
            if inside != "closed":
                return ("open" if inside else "closed"), end
        at = end + 1
    return "open", len(text)


def plain_name(name: str) -> str:
    """A tool's name reduced to characters that are safe in the text around an output, and cut to a short length."""
    return _UNFIT.sub("_", name)[:64]


def as_json(call: ToolCall, arguments: str) -> str:
    return json.dumps({"name": call.name, arguments: dict(call.arguments)}, ensure_ascii=False)


def properties_of(name: str, tools: Tools) -> Mapping[str, Any]:
    """The schemas of the parameters of a tool by its name, with references followed as far as `typed` reads them; empty
    if the tool is not known."""
    parameters = functions_of(tools).get(name, {}).get("parameters") or {}
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties") or {}, Mapping):
        return {}
    definitions = parameters.get("$defs") or parameters.get("definitions")
    definitions = definitions if isinstance(definitions, Mapping) else {}
    schemas = (parameters.get("properties") or {}).items()
    return {key: _resolved(part, definitions, iter(range(_MOST_PARTS))) for key, part in schemas}


_UNIONS = ("anyOf", "oneOf", "allOf")
_MOST_PARTS = 200
"""References and members of unions of one parameter that are followed; a schema may refer to itself."""


def _resolved(schema: Any, definitions: Mapping[str, Any], left: Iterator[int]) -> Mapping[str, Any]:
    """A schema with its references into `$defs` followed, also those of the members of a union; a boolean schema admits
    everything or nothing. Each part takes one number of `left`; without one nothing is known of it."""
    if not isinstance(schema, Mapping) or next(left, None) is None:
        return {}
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if name in definitions:
        return _resolved(definitions[name], definitions, left)
    unions = {key: schema[key][:_MOST_PARTS] for key in _UNIONS if isinstance(schema.get(key), list)}
    members = {key: [_resolved(part, definitions, left) for part in union] for key, union in unions.items()}
    return {**schema, **members}


_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def _types(schema: Mapping[str, Any]) -> set[str] | None:
    """The JSON types that a schema admits; None if it does not say."""
    types = schema.get("type")
    if isinstance(types, str):
        return {types}
    if isinstance(types, list) and types:
        return {part for part in types if isinstance(part, str)}
    if choices := _choices(schema):
        return {_JSON_TYPES.get(type(choice), "null") for choice in choices}
    for key in ("anyOf", "oneOf"):
        if options := schema.get(key):
            admitted = [_types(option) for option in options] if isinstance(options, list) else [None]
            return None if None in admitted else set().union(*admitted)
    parts = schema.get("allOf")
    known = [types for part in (parts if isinstance(parts, list) else []) if (types := _types(part)) is not None]
    if known:
        return set.intersection(*known)
    return {"object"} if "properties" in schema else {"array"} if "items" in schema else None


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists, if it does."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return choices if isinstance(choices, list) else []


def typed(value: str, schema: Mapping[str, Any]) -> Any:
    """A value from its text. It is read as JSON (or Python's True, False, None) if the schema admits no text, or if it
    lists values of which the text is none. Where a schema admits text and other values, null, lists and objects are
    read so if it admits them; numbers and booleans are text."""
    types = _types(schema)
    listed = _choices(schema)
    if types is None or value in listed:
        return value
    try:
        read = json.loads(value)
    except (RecursionError, ValueError):
        read = {"True": True, "False": False, "None": None}.get(value.strip(), value)
    if "string" not in types:
        return read
    if listed:
        return read if any(type(read) is type(choice) and read == choice for choice in listed) else value
    kind = _JSON_TYPES.get(type(read), "null")
    return read if kind in types & {"null", "array", "object"} else value


def schema_of(call: ToolCall) -> Tools:
    """Schema of a tool that takes the arguments of `call`: text as text, everything else as JSON."""
    given = {key: {"type": "string" if isinstance(value, str) else "object"} for key, value in call.arguments.items()}
    return [{"type": "function", "function": {"name": call.name, "parameters": {"properties": given}}}]


def or_json(
    form: CallForm, call: ToolCall, tools: Tools, write: Callable[[ToolCall], str], fallback: Callable[[ToolCall], str]
) -> str:
    """A call as `write` writes it, or as JSON if that would be read as another call: because a value holds marks of the
    form, or would be of another type under the schema of its tool."""
    text = write(call)
    calls = form.find_calls(text, over=False, tools=tools if call.name in functions_of(tools) else schema_of(call))
    same = [(read.name, read.arguments, read.fault) for read in calls] == [(call.name, call.arguments, None)]
    return text if same else fallback(call)
