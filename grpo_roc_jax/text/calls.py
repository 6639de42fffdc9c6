"""Hermes-style tool calls in sampled text: finds the blocks, reads their JSON, and says what is wrong with it.

The messages of malformed calls are part of observations: a change of wording changes what the policy reads.
"""

import json

from grpo_roc_jax.types import ToolCall

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"


THOUGHTS = (("<think>", "</think>"), ("<reason>", "</reason>"))


def without_thoughts(text: str) -> str:
    """A turn without its closed thoughts, the first of which the prompt may have opened; in linear time."""
    for opening, closing in THOUGHTS:
        *thoughts, last = text.split(closing)
        first = [part.partition(opening)[0] if opening in part else "" for part in thoughts[:1]]
        text = "".join([*first, *(part.partition(opening)[0] for part in thoughts[1:]), last])
    return text


def call_blocks(text: str) -> tuple[list[str | None], str | None]:
    """Texts between call tags in order, and the text after a last tag that is never closed; in linear time.

    A closing tag without an opening one counts as a block, None: the policy meant a call, and the turn stops there.
    """
    blocks: list[str | None] = []
    at = 0
    while True:
        close = text.find(CALL_CLOSE, at)
        opened = text.find(CALL_OPEN, at, len(text) if close < 0 else close)
        if close < 0:
            return blocks, text[opened + len(CALL_OPEN) :] if opened >= 0 else None
        blocks.append(text[opened + len(CALL_OPEN) : close] if opened >= 0 else None)
        at = close + len(CALL_CLOSE)


def parse_call(raw: str | None) -> ToolCall:
    """A call from the text between its tags (None: no opening tag); a fault becomes a message to the policy.

    The arguments may be an object, or a string that holds one; `parameters` is an alias of `arguments`. Never raises.
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
    return call_of(call, raw)


def call_of(call: object, raw: str) -> ToolCall:
    """A call from its decoded JSON; a fault becomes a message to the policy."""
    if not isinstance(call, dict):
        return malformed(raw, f"must be a JSON object, not {type(call).__name__}")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return malformed(raw, "the object has no name")
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (RecursionError, ValueError):
            return malformed(raw, "the arguments are a string that is no JSON object", name)
    if not isinstance(arguments, dict):
        return malformed(raw, "the object has no arguments", name)
    try:
        json.dumps([name, arguments], ensure_ascii=False).encode()
    except (RecursionError, ValueError):
        return malformed(raw, "the call holds an unpaired surrogate")
    return ToolCall(name=name, arguments=arguments, raw=raw)


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
