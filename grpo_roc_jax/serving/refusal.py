"""What is wrong with a request, in the form that OpenAI's clients read; and the first things that may be."""

import json
import re
from collections.abc import Mapping
from typing import Any

DEEPEST = 128
"""Objects and lists within each other. What reads a body goes down by functions that call themselves."""
UNPAIRED = re.compile(rb"\\u[dD][89a-fA-F]")
"""Halves of characters beyond 16 bits, as JSON writes them."""


class RequestRefused(Exception):
    """A request that is answered with an error.

    Args:
        message: What was got, the constraint, and the fix.
        param: Field of the body that it is about.
        code: Short name for programs.
        status: Of HTTP.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def read_body(raw: bytes) -> dict[str, Any]:
    """The object of a body, without halves of characters, which no tokenizer takes.

    Raises:
        RequestRefused: It is none, or nested too deeply.
    """
    try:
        body = json.loads(raw)
        if UNPAIRED.search(raw):
            body = json.loads(json.dumps(body, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestRefused(f"the body is {type(body).__name__}; must be an object")
    layer: list[Any] = [body]
    for _ in range(DEEPEST):
        layer = [part for value in layer for part in (value.values() if isinstance(value, dict) else value)]
        layer = [part for part in layer if isinstance(part, dict | list)]
    if layer:
        raise RequestRefused(f"the body is nested more than {DEEPEST} times; must be flatter")
    return body


def whole_number(body: Mapping[str, Any], name: str, default: int = 0, least: int = 0, bits: int = 31) -> int:
    """A field of a request that counts: from `least` to 2**bits - 1.

    Raises:
        RequestRefused: It is something else.
    """
    value = field_of(body, name, int, default)
    if not least <= value < 1 << bits:
        raise RequestRefused(f"{name} = {str(value)[:40]}; must be {least} to {(1 << bits) - 1}", name)
    return value


def field_of(body: Mapping[str, Any], name: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
    """A field of a request, of one of these types; `default` where it is absent or null.

    Raises:
        RequestRefused: It is of another type.
    """
    value = body.get(name)
    if value is None:
        return default
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise RequestRefused(f"{name} is {type(value).__name__}; must be {names}", name)
    return value
