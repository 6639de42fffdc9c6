"""Calls written as Python, and values in the notation of Gemma's function calls."""

import ast
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_roc_jax.text.calls import State, after_space, begins, call_of, json_span, malformed
from grpo_roc_jax.types import ToolCall

_QUOTE = re.compile(r'"""|\'\'\'|"|\'')
_CLOSINGS = {
    quote: re.compile(rf"(?:\\.|(?!{quote}).)*+" if len(quote) == 3 else rf"(?:\\.|[^\\{quote}\n])*+", re.DOTALL)
    for quote in ('"""', "'''", '"', "'")
}
DEEPEST = 100
"""Most levels of nested values in a Gemma call."""


def string_end(text: str, at: int) -> tuple[State, int]:
    """Where the Python string that begins with the quote at `at` ends; `broken` at a line end inside it."""
    quote = _QUOTE.match(text, at).group()
    end = _CLOSINGS[quote].match(text, at + len(quote)).end()
    if text.startswith(quote, end):
        return "closed", end + len(quote)
    if end >= len(text) or begins(text, end, quote) == "open" or (text[end] == "\\" and end + 1 == len(text)):
        return "open", len(text)
    return "broken", end


_STRING_OR_COMMENT = re.compile(rf"{_QUOTE.pattern}|#")


class CodeStrings:
    """The strings of Python code that begins at `at`. Asked for growing indices, reads the text once."""

    def __init__(self, text: str, at: int):
        self._strings = self._read(text, at)
        self._string = next(self._strings, None)

    @staticmethod
    def _read(text: str, at: int) -> Iterator[tuple[int, int, State]]:
        while (mark := _STRING_OR_COMMENT.search(text, at)) is not None:
            if mark.group() == "#":
                at = text.find("\n", mark.end())
                if at < 0:
                    return
                continue
            state, at = string_end(text, mark.start())
            if state != "broken":
                yield mark.start(), at, state

    def around(self, index: int) -> State | None:
        """The state of the string that `index` is inside of: closed, or open at the end of the text; None outside of
        strings. A string of one line that the line ends is none."""
        while self._string is not None and self._string[1] <= index:
            self._string = next(self._strings, None)
        return self._string[2] if self._string is not None and self._string[0] < index else None


_PLAIN = re.compile(r"[^\"'#()\[\]{}]*")
_FENCE = re.compile(r"[\"'#]|\n[^\S\n]*```")


def fence_end(text: str, at: int) -> tuple[int, int] | None:
    """(end of the Python text that begins at `at`, end of the fence that closes it); None if no fence closes it.

    The fence must begin a line. A fence inside a string or a comment does not count.
    """
    while (fence := _FENCE.search(text, at)) is not None:
        mark = fence.group()
        if mark == "#":
            at = text.find("\n", fence.end())
            if at < 0:
                return None
        elif mark[0] == "\n":
            return fence.start(), fence.end()
        else:
            state, at = string_end(text, fence.start())
            if state == "open":
                return None
    return None


def bracket_end(text: str, at: int) -> tuple[State, int, list[int]]:
    """The end of the bracket at `at` of Python text, with the indices of the commas directly inside it."""
    depth, commas, here = 0, [], at
    while True:
        plain = _PLAIN.match(text, here).end()
        if depth == 1:
            commas += [here + match.start() for match in re.finditer(",", text[here:plain])]
        here = plain
        if here >= len(text):
            return "open", len(text), commas
        character = text[here]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth <= 0:
                return "closed", here + 1, commas
        elif character == "#":
            line = text.find("\n", here)
            here = len(text) - 1 if line < 0 else line
        else:
            state, end = string_end(text, here)
            if state != "closed":
                return state, end, commas
            here = end - 1
        here += 1


def python_value(text: str, *, as_json: bool) -> Any:
    """A literal, read as JSON first with `as_json`, else as Python first. Raises ValueError for anything else."""
    readers = (json.loads, _python) if as_json else (_python, json.loads)
    for read in readers:
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    raise ValueError(text)


def _python(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # the policy's strings may have invalid escapes
        value = ast.literal_eval(text)
    return _as_json_values(value)


def _as_json_values(value: Any) -> Any:
    """A literal in the types of JSON: a tuple as a list, keys as text. Raises ValueError or TypeError for a set, bytes
    or an unpaired surrogate; numbers that are not finite stay, and `call_of` refuses them."""
    text = json.dumps(value, ensure_ascii=False)
    text.encode()
    return json.loads(text)


def python_call(source: str) -> ToolCall:
    """`name(a=1, b="x")`, optionally inside `print(...)`; argument values are literals."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # the policy's strings may have invalid escapes
            call = ast.parse(source.strip(), mode="eval").body
    except SyntaxError as error:
        return malformed(source, f"not readable as a Python call: {error.msg}")
    except (ValueError, TypeError, MemoryError, RecursionError):
        return malformed(source, "the values of the arguments are plain ones, written out and not computed")
    return _call_of_node(call, source)


def python_calls(source: str) -> list[ToolCall]:
    """The calls of a block, one a line or statement. A block that is not a sequence of calls is one malformed call."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            statements = ast.parse(source.strip()).body
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return [python_call(source)]
    if len(statements) < 2 or not all(isinstance(statement, ast.Expr) for statement in statements):
        return [python_call(source)]
    lines = [line.encode() for line in re.split(r"(?<=\n)|(?<=\r)(?!\n)", source.strip())]
    parts = [_segment(lines, statement) for statement in statements]
    return [_call_of_node(statement.value, part) for statement, part in zip(statements, parts, strict=True)]


def _segment(lines: Sequence[bytes], node: ast.stmt) -> str:
    """The source of a node. `ast.get_source_segment` splits all of the source for each."""
    first, last = node.lineno - 1, node.end_lineno - 1
    if first == last:
        return lines[first][node.col_offset : node.end_col_offset].decode()
    middle = lines[first + 1 : last]
    return b"".join([lines[first][node.col_offset :], *middle, lines[last][: node.end_col_offset]]).decode()


def _call_of_node(call: ast.expr, source: str) -> ToolCall:
    if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "print" and len(call.args) == 1:
        call = call.args[0]
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return malformed(source, "must be one call of a tool by its name")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        return malformed(source, "arguments are given by name: tool(argument=value)", call.func.id)
    try:
        arguments = _as_json_values({keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords})
    except (ValueError, TypeError, MemoryError, RecursionError):
        return malformed(source, "the values of the arguments are plain ones, written out and not computed")
    return call_of({"name": call.func.id, "arguments": arguments}, source)


def sorted_keys(values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Items by key without regard to case, as jinja's `dictsort` orders them."""
    return sorted(values.items(), key=lambda item: item[0].lower())


# ---- Gemma's notation ----------------------------------------------------------------------------------------------

_WORD = re.compile(r"[^\s,:{}\[\]<\"]+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)


class Ended(Exception):
    """The text ended inside a value."""


class Broken(Exception):
    """A character that is not allowed at its position; holds that position."""


class GemmaValues:
    """Reads `{key:value,...}`: strings between two `quote` marks, numbers, true, false, null, objects, lists.

    Args:
        quote: `<escape>` of FunctionGemma, `<|"|>` of Gemma 4. A string in quotation marks is JSON.
    """

    def __init__(self, quote: str):
        self._quote = quote

    def read(self, text: str, at: int, depth: int = 0) -> tuple[Any, int]:
        """(value at `at`, index after it).

        Raises:
            Ended: The text ends inside the value.
            Broken: There is no value.
        """
        at = self._next(text, at)
        if depth > DEEPEST:
            raise Broken(at)
        if text[at] == "{":
            return self._object(text, at + 1, depth)
        if text[at] == "[":
            return self._list(text, at + 1, depth)
        if text[at] == '"' or self._quoted(text, at):
            return self._string(text, at)
        word = _WORD.match(text, at)
        if word is None:
            raise Broken(at)
        if word.end() == len(text):
            raise Ended
        known = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
        if word.group() in known:
            return known[word.group()], word.end()
        if _NUMBER.fullmatch(word.group()) and len(word.group()) < 1000:
            return json.loads(word.group()), word.end()
        return word.group(), word.end()

    def write(self, value: Any) -> str:
        """A value as text; keys are in the order of the templates."""
        if isinstance(value, str):
            has_quote = self._quote in value
            return json.dumps(value, ensure_ascii=False) if has_quote else f"{self._quote}{value}{self._quote}"
        if isinstance(value, dict):
            parts = (f"{self._key(key)}:{self.write(part)}" for key, part in sorted_keys(value))
            return "{" + ",".join(parts) + "}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(self.write, value)) + "]"
        return json.dumps(value)

    def _key(self, key: str) -> str:
        return key if _WORD.fullmatch(key) else self.write(key)

    def _next(self, text: str, at: int) -> int:
        at = after_space(text, at)
        if at >= len(text):
            raise Ended
        return at

    def _quoted(self, text: str, at: int) -> bool:
        state = begins(text, at, self._quote)
        if state == "open":
            raise Ended
        return state == "closed"

    def _string(self, text: str, at: int) -> tuple[str, int]:
        if text[at] == '"':
            state, end = json_span(text, at)
            if state == "open":
                raise Ended
            if state == "broken":
                raise Broken(end)
            try:
                return json.loads(text[at:end]), end
            except ValueError:
                raise Broken(at) from None
        begin = at + len(self._quote)
        end = text.find(self._quote, begin)
        if end < 0:
            raise Ended
        return text[begin:end], end + len(self._quote)

    def _object(self, text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        at = self._next(text, at)
        if text[at] == "}":
            return values, at + 1
        while True:
            at = self._next(text, at)
            if text[at] == '"' or self._quoted(text, at):
                key, at = self._string(text, at)
            else:
                word = _WORD.match(text, at)
                if word is None:
                    raise Broken(at)
                key, at = word.group(), word.end()
            at = self._next(text, at)
            if text[at] != ":":
                raise Broken(at)
            values[key], at = self.read(text, at + 1, depth + 1)
            at = self._next(text, at)
            if text[at] == "}":
                return values, at + 1
            if text[at] != ",":
                raise Broken(at)
            at += 1

    def _list(self, text: str, at: int, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        at = self._next(text, at)
        if text[at] == "]":
            return items, at + 1
        while True:
            value, at = self.read(text, at, depth + 1)
            items.append(value)
            at = self._next(text, at)
            if text[at] == "]":
                return items, at + 1
            if text[at] != ",":
                raise Broken(at)
            at += 1
