"""Tool calls in sampled text: where a call begins and ends, what its JSON says, and what is wrong with it.

A call is read from its opening mark on. Its JSON decides where it ends, so a closing mark inside a string does not end
it. The engine uses the same test to stop a turn (`text.turns`).

The messages of malformed calls are part of observations: changing their wording changes what the policy reads.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_roc_jax.settings.files import DEEPEST, depth_over
from grpo_roc_jax.types import ToolCall

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"

THOUGHTS = (
    ("<think>", "</think>"),
    ("<reason>", "</reason>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
)
"""Marks around thoughts: those of most models, of the built-in templates, of Magistral, of Gemma 4."""
LINE_BEGIN = rf"(?:^|{'|'.join(f'(?<={re.escape(closing)})' for _, closing in THOUGHTS)})[^\S\n]*"
"""The begin of a line, or the end of a thought: for forms of calls that no mark opens."""
Tools = Sequence[Mapping[str, Any]]
State = Literal["closed", "open", "broken"]
"""State of a call. `closed`: complete. `open`: the text ends inside it, so that more text could complete it. `broken`:
neither."""
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class CallSpan:
    """One call, or one block of calls, in a text: from its opening mark to the end of its closing mark."""

    start: int
    end: int
    calls: tuple[ToolCall, ...]
    """The calls in order; malformed ones have a fault."""
    state: State
    ended: bool = True
    """Whether its closing mark is there. A call without one counts only if the policy ended its turn and no closed call
    follows it."""


def without_thoughts(text: str) -> str:
    """The text without its closed thoughts; the first thought may have begun before the text. Takes linear time.

    Every mark counts, wherever it stands: this function is for texts of messages. Sampled text is read by `text.turns`.
    """
    for opening, closing in THOUGHTS:
        *thoughts, last = text.split(closing)
        first = [part.partition(opening)[0] if opening in part else "" for part in thoughts[:1]]
        text = "".join([*first, *(part.partition(opening)[0] for part in thoughts[1:]), last])
    return text


# ---- JSON ----------------------------------------------------------------------------------------------------------

_FILL = re.compile(r"[\s,:A-Za-z0-9+.\-]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])*+')
"""A string up to its closing quote, a control character (which JSON forbids), or the end of the text."""


def json_span(text: str, at: int) -> tuple[State, int]:
    """The end of the JSON object, array or string at `at`: ("closed", index after it), ("open", length of the text), or
    ("broken", index of the first character that cannot belong to it). Looks only at brackets and strings; takes
    linear time."""
    depth = 0
    while True:
        at = _FILL.match(text, at).end() if depth else at
        if at >= len(text):
            return "open", len(text)
        character = text[at]
        if character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
            if not depth:
                return "closed", at + 1
        elif character == '"':
            at = _STRING.match(text, at).end()
            if text[at : at + 1] != '"':
                unfinished = at >= len(text) or (text[at] == "\\" and at + 1 == len(text))
                return ("open", len(text)) if unfinished else ("broken", at)
            if not depth:
                return "closed", at + 1
        else:
            return "broken", at
        at += 1


def after_space(text: str, at: int) -> int:
    """Index of the next character that is not white space."""
    return _SPACE.match(text, at).end()


def begins(text: str, at: int, mark: str) -> State:
    """Whether `mark` stands at `at`: `closed` if it does, `open` if the text ends within the mark, else `broken`."""
    if text.startswith(mark, at):
        return "closed"
    return "open" if len(text) - at < len(mark) and mark.startswith(text[at:]) else "broken"


# ---- the JSON of one call ------------------------------------------------------------------------------------------


def parse_call(raw: str | None, tools: Tools = ()) -> ToolCall:
    """Parses a call from the text between its tags (None if there is no opening tag). A fault becomes a message to the
    policy.

    The arguments may be an object, or a string that holds one; `parameters` is an alias of `arguments`. They may be
    left out for a tool in `tools` that requires none. Never raises.
    """
    if raw is None:
        return malformed("", f"{CALL_CLOSE} without {CALL_OPEN}")
    try:
        call = json.loads(raw)
    except json.JSONDecodeError as error:
        where = f" at character {error.pos}" if raw.strip() else ""
        return malformed(raw, f"invalid JSON: {error.msg}{where}" if raw.strip() else "the call is empty")
    except (RecursionError, ValueError) as error:
        return malformed(raw, f"invalid JSON: {'nested too deep' if isinstance(error, RecursionError) else error}")
    return call_of(call, raw, tools)


def call_of(call: object, raw: str, tools: Tools = ()) -> ToolCall:
    """Makes a call from its decoded JSON. A fault becomes a message to the policy."""
    if not isinstance(call, dict):
        return malformed(raw, f"must be a JSON object, not {type(call).__name__}")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return malformed(raw, "the object has no name")
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str) and arguments.strip() in ("", "null"):
        arguments = None
    if arguments is None and requires_nothing(name, tools):
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (RecursionError, ValueError):
            return malformed(raw, "the arguments are a string that is no JSON object", name)
    if not isinstance(arguments, dict):
        return malformed(raw, "the object has no arguments", name)
    try:
        json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (RecursionError, ValueError):
        return malformed(raw, "the call holds an unpaired surrogate or a number that is not finite")
    if depth_over(arguments, DEEPEST):
        return malformed(raw, f"the arguments are nested too deep; at most {DEEPEST} levels are read", name)
    return ToolCall(name=name, arguments=arguments, raw=raw)


def absent_end(text: str, at: int, closing: str) -> int:
    """Where arguments that are empty or null end before a closing mark; -1 for others."""
    end = after_space(text, at)
    end = after_space(text, end + len("null")) if text.startswith("null", end) else end
    return end if text.startswith(closing, end) else -1


def functions_of(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """The functions of tools by name; a schema may stand under `function` or alone."""
    functions = (tool.get("function", tool) for tool in tools)
    return {str(function.get("name")): function for function in functions if isinstance(function, Mapping)}


def requires_nothing(name: str, tools: Tools) -> bool:
    """Whether a tool of this name is known and can be called without arguments."""
    function = functions_of(tools).get(name)
    if function is None:
        return False
    parameters = function.get("parameters") or {}
    return isinstance(parameters, Mapping) and not parameters.get("required")


def call_id(raw: str) -> str:
    """The id that the policy gave a JSON call; empty without one, or if it is not at most 40 letters and digits."""
    try:
        value = json.loads(raw).get("id")
    except (AttributeError, RecursionError, ValueError):
        return ""
    return value if isinstance(value, str) and value.isascii() and value.isalnum() and len(value) <= 40 else ""


def malformed(raw: str, message: str, name: str = "") -> ToolCall:
    """A call that is not run but answered with `message`."""
    return ToolCall(name=name, arguments={}, raw=raw, fault="malformed_call", message=message)


# ---- Hermes tags ---------------------------------------------------------------------------------------------------


def block_end(text: str, at: int) -> tuple[State, int, int]:
    """The text after an opening tag: (state, end of the text between the tags, end of the closing tag).

    If the text is JSON, the JSON ends the call: a closing tag inside one of its strings does not. Otherwise the first
    closing tag ends the call.
    """
    begin = after_space(text, at)
    if begin >= len(text):
        return "open", len(text), len(text)
    state: State = "broken"
    end = begin
    if text[begin] in "{[":
        state, end = json_span(text, begin)
        if state == "open":
            return "open", len(text), len(text)
        if state == "closed":
            close = after_space(text, end)
            state = begins(text, close, CALL_CLOSE)
            if state == "open":
                return "open", len(text), len(text)
    close = text.find(CALL_CLOSE, end)
    if close < 0:
        return "broken", len(text), len(text)
    return state, close, close + len(CALL_CLOSE)


def call_blocks(text: str) -> tuple[list[str | None], str | None]:
    """Texts between call tags in order, and the text after a last tag that is never closed; in linear time.

    A closing tag without an opening one counts as a block, None: the policy meant a call, and the turn stops there.
    """
    blocks: list[str | None] = []
    at = 0
    while True:
        close = text.find(CALL_CLOSE, at)
        opened = text.find(CALL_OPEN, at, len(text) if close < 0 else close)
        if opened < 0:
            if close < 0:
                return blocks, None
            blocks.append(None)
            at = close + len(CALL_CLOSE)
            continue
        begin = opened + len(CALL_OPEN)
        _, end, at = block_end(text, begin)
        if end == at:  # no closing tag
            return blocks, text[begin:]
        blocks.append(text[begin:end])
