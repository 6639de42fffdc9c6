"""How models write tool calls and read the outputs (Hermes, XML, Llama 3, Gemma, Mistral), under one protocol."""

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from grpo_roc_jax.text.calls import CALL_CLOSE, CALL_OPEN, call_blocks, call_of, malformed, parse_call
from grpo_roc_jax.types import ToolCall

Tools = Sequence[Mapping[str, Any]]
CALL_ID = "{:09d}"
"""Id of the n-th call of a turn that has none of its own: nine letters and digits, as Mistral's templates require."""


class CallConvention(Protocol):
    """What the dialogue needs to know about a form of tool calls."""

    stop_text: str
    """Text that ends a turn of one call; empty if only an end token ends it."""
    end_tokens: tuple[str, ...]
    """Special tokens that end a turn, besides the end token of the template."""

    def find_calls(self, text: str, *, over: bool, tools: Tools = ()) -> list[ToolCall]:
        """The calls of a turn in order, malformed ones with their fault; never raises.

        Args:
            text: Of the turn, without its end token.
            over: The policy ended the turn, so a call without its closing mark counts as complete.
            tools: JSON schemas, for forms that name no tool or do not tell a number from its text.
        """
        ...

    def write_calls(self, said: str, calls: Sequence[ToolCall]) -> str:
        """A turn of text followed by calls, in the form that `find_calls` reads; used to write demonstrations."""
        ...

    def observation(self, text: str) -> Mapping[str, Any]:
        """The chat message that returns a tool's output."""
        ...


class HermesCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, once or several times."""

    stop_text = CALL_CLOSE
    end_tokens: tuple[str, ...] = ()

    def find_calls(self, text: str, *, over: bool, tools: Tools = ()) -> list[ToolCall]:
        return [parse_call(block) for block in _blocks(text, over)]

    def write_calls(self, said: str, calls: Sequence[ToolCall]) -> str:
        texts = (call.raw if call.fault else f"\n{_as_json(call, 'arguments')}\n" for call in calls)
        return "\n".join([said, *(f"{CALL_OPEN}{text}{CALL_CLOSE}" for text in texts)])

    def observation(self, text: str) -> Mapping[str, Any]:
        return {"role": "tool", "name": "tool", "content": text}


class XmlCalls(HermesCalls):
    """`<tool_call><function=name><parameter=x>value</parameter></function></tool_call>`, once or several times.

    Values are plain text on lines of their own; the schema of the tool says which of them are JSON.
    Source: the chat templates of Qwen3-Coder, Qwen3.5 and Nemotron 3.
    """

    def find_calls(self, text: str, *, over: bool, tools: Tools = ()) -> list[ToolCall]:
        return [_xml_call(block, tools) for block in _blocks(text, over)]

    def write_calls(self, said: str, calls: Sequence[ToolCall]) -> str:
        return "\n".join(
            [said, *(f"{CALL_OPEN}{call.raw if call.fault else _as_xml(call)}{CALL_CLOSE}" for call in calls)]
        )


class LlamaCalls:
    """`{"name": ..., "parameters": {...}}` at the start of a line, or JSON or code after `<|python_tag|>`.

    `;` separates calls. Code is the argument of the first tool that takes `code`; `name.call(a=1)` names its tool.
    Source: the prompt formats of Llama 3.1 and 3.2 in Meta's model documentation.
    """

    stop_text = ""
    end_tokens = ("<|eom_id|>",)
    _tag = "<|python_tag|>"
    _begins = re.compile(r'\s*\{\s*"(?:name|type|function|parameters|arguments)"')
    _line = re.compile(r'^[^\S\n]*\{\s*"(?:name|type|function)"', re.MULTILINE)
    _given = re.compile(r'"(?:parameters|arguments)"\s{0,8}:')

    def find_calls(self, text: str, *, over: bool, tools: Tools = ()) -> list[ToolCall]:
        _, tag, body = text.rpartition(self._tag)
        if not over:
            return []
        if tag and not body.lstrip().startswith(("{", "[")):
            return [_code_call(body, tools)]
        if not tag and not self._begins.match(body):
            line = self._line.search(body)
            if line is None or not self._given.search(body, line.start()):
                return []
            body = body[line.start() :]
        return [parse_call(part) for part in _split_objects(body)]

    def write_calls(self, said: str, calls: Sequence[ToolCall]) -> str:
        texts = "; ".join(call.raw if call.fault else _as_json(call, "parameters") for call in calls)
        return f"{said}{self._tag}{texts}" if said.strip() or not self._begins.match(texts) else texts

    def observation(self, text: str) -> Mapping[str, Any]:
        return {"role": "ipython", "content": text}


class GemmaCalls:
    """A ```` ```tool_code ```` block with one Python call that has keyword arguments, as in Gemma's guide."""

    stop_text = ""
    end_tokens: tuple[str, ...] = ()
    _block = re.compile(r"```tool_code[^\S\n]*\n(.*?)(?:\n[^\S\n]*```|\Z)", re.DOTALL)

    def find_calls(self, text: str, *, over: bool, tools: Tools = ()) -> list[ToolCall]:
        matches = self._block.finditer(text)
        return [_python_call(match[1]) for match in matches if over or match[0].rstrip().endswith("```")]

    def write_calls(self, said: str, calls: Sequence[ToolCall]) -> str:
        texts = (call.raw.strip() if call.fault else _as_python(call) for call in calls)
        return "\n".join(
            [*([said.rstrip()] if said.strip() else []), *(f"```tool_code\n{text}\n```" for text in texts)]
        )

    def observation(self, text: str) -> Mapping[str, Any]:
        return {"role": "user", "content": f"```tool_output\n{text}\n```"}


class MistralCalls:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}]`, or `[TOOL_CALLS]name[ARGS]{...}` once a call.

    Source: the chat templates of Mistral 7B v0.3 and Nemo (the list), Mistral Small 3.2 and Devstral (the marks).

    Args:
        marked: `write_calls` writes the form with marks. Both are read.
    """

    stop_text = ""
    end_tokens: tuple[str, ...] = ()
    _tag, _arguments = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self, *, marked: bool):
        self._marked = marked

    def find_calls(self, text: str, *, over: bool, tools: Tools = ()) -> list[ToolCall]:
        _, tag, body = text.partition(self._tag)
        if not over or not tag:
            return []
        if self._arguments in body:
            return [self._marked_call(part) for part in body.split(self._tag)]
        try:
            found = json.loads(body)
        except (RecursionError, ValueError):
            return [parse_call(body)]
        return [call_of(call, json.dumps(call)) for call in (found if isinstance(found, list) else [found])]

    def _marked_call(self, text: str) -> ToolCall:
        head, _, arguments = text.partition(self._arguments)
        name, _, own_id = head.partition("[CALL_ID]")
        try:
            call = {"name": name.strip(), "arguments": json.loads(arguments), "id": own_id.strip()}
        except (RecursionError, ValueError):
            return malformed(text, "the arguments are no JSON object", name.strip())
        return call_of(call, json.dumps(call))

    def write_calls(self, said: str, calls: Sequence[ToolCall]) -> str:
        if self._marked:
            texts = (json.dumps(dict(call.arguments), ensure_ascii=False) for call in calls)
            marks = (f"{self._tag}{call.name}{self._arguments}" for call in calls)
            return said + "".join(map("".join, zip(marks, texts, strict=True)))
        texts = (
            f'{_as_json(call, "arguments")[:-1]}, "id": "{CALL_ID.format(i)}"}}' for i, call in enumerate(calls, 1)
        )
        return f"{said}{self._tag} [{', '.join(texts)}]"

    def observation(self, text: str) -> Mapping[str, Any]:
        return {"role": "tool", "name": "tool", "content": text}


CONVENTIONS: dict[str, CallConvention] = {
    "hermes": HermesCalls(),
    "xml": XmlCalls(),
    "llama3": LlamaCalls(),
    "gemma": GemmaCalls(),
    "mistral": MistralCalls(marked=False),
    "mistral_args": MistralCalls(marked=True),
}


def _blocks(text: str, over: bool) -> list[str | None]:
    blocks, unfinished = call_blocks(text)
    return [*blocks, unfinished] if unfinished is not None and over else blocks


def _properties(name: str, tools: Tools) -> Mapping[str, Any]:
    """The parameters of a tool by its name; empty if it is not known."""
    functions = (tool.get("function", tool) for tool in tools)
    found = next((function for function in functions if function.get("name") == name), {})
    parameters = found.get("parameters") or {}
    return {key: _resolved(part, parameters) for key, part in (parameters.get("properties") or {}).items()}


def _xml_call(raw: str | None, tools: Tools) -> ToolCall:
    if raw is None or "<function=" not in raw:
        return parse_call(raw)
    name, _, body = raw.partition("<function=")[2].partition(">")
    if "</function>" in body:
        body = body.rpartition("</function>")[0]
    known, arguments = _properties(name.strip(), tools), {}
    for part in body.split("<parameter=")[1:]:
        key, _, value = part.partition(">")
        if "</parameter>" in value:
            value = value.rpartition("</parameter>")[0]
        arguments[key.strip()] = _typed(value.removeprefix("\n").removesuffix("\n"), known.get(key.strip(), {}))
    return call_of({"name": name.strip(), "arguments": arguments}, raw)


def _resolved(schema: Any, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with its reference into `$defs` followed; a boolean schema admits everything or nothing."""
    if not isinstance(schema, Mapping):
        return {}
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return (parameters.get("$defs") or parameters.get("definitions") or {}).get(name) or schema


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema admits; text where it does not say."""
    if not isinstance(schema, Mapping):
        return {"string"}
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return set().union(*map(_types, options))
    found = schema.get("type", "string")
    return {found} if isinstance(found, str) else set(found)


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    """A value from its text: JSON (or Python's True, False, None) if the schema admits no text, else the text."""
    if "string" in _types(schema):
        return value
    try:
        return json.loads(value)
    except (RecursionError, ValueError):
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)


def _as_xml(call: ToolCall) -> str:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in call.arguments.items()}
    lines = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"\n<function={call.name}>\n{''.join(lines)}</function>\n"


def _code_call(body: str, tools: Tools) -> ToolCall:
    """`name.call(a=1)`, or code for the first tool that takes some."""
    name, called, arguments = body.strip().partition(".call(")
    if called and name.isidentifier():
        return _python_call(f"{name}({arguments}")
    names = [tool["function"]["name"] for tool in tools if "code" in _properties(tool["function"]["name"], tools)]
    if not names:
        return malformed(body, "no tool takes code; write a JSON object with the name of a tool and its parameters")
    return call_of({"name": names[0], "arguments": {"code": body.strip("\n")}}, body)


def _as_json(call: ToolCall, arguments: str) -> str:
    return json.dumps({"name": call.name, arguments: dict(call.arguments)}, ensure_ascii=False)


def _as_python(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def _split_objects(text: str) -> list[str]:
    """The text split at the semicolons between JSON objects; those inside an object do not count."""
    parts, depth, start, quoted, escaped = [], 0, 0, False, False
    for i, character in enumerate(text):
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = quoted
        elif character == '"':
            quoted = not quoted
        elif not quoted:
            depth += (character in "{[") - (character in "}]")
            if character == ";" and depth <= 0:
                parts.append(text[start:i])
                start = i + 1
    parts.append(text[start:])
    return [part for part in parts if part.strip()] or [text]


def _python_call(source: str) -> ToolCall:
    """`name(a=1, b="x")`, optionally inside `print(...)`; argument values are literals."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # invalid escapes in the policy's strings
            call = ast.parse(source.strip(), mode="eval").body
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "print" and len(call.args) == 1:
            call = call.args[0]
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            return malformed(source, "must be one call of a tool by its name")
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            return malformed(source, "arguments are given by name: tool(argument=value)", call.func.id)
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        json.dumps(arguments, ensure_ascii=False).encode()
    except SyntaxError as error:
        return malformed(source, f"not readable as a Python call: {error.msg}")
    except (ValueError, TypeError, MemoryError, RecursionError):
        return malformed(source, "the values of the arguments are plain ones, written out and not computed")
    return ToolCall(name=call.func.id, arguments=arguments, raw=source)
