"""The tools a policy may call: their schemas, the check of their arguments, and what is run for a call.

A tool is built in (`python_code_with_standard_io`, `jupyter_code`) or made from a Python function whose type hints and
docstring become the schema. Such a function runs in the trainer (trusted: it may use the trainer's state) or, as
source text, in the sandbox. Whatever is wrong with a call becomes a typed result; nothing the policy writes raises.
"""

import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from grpo_roc_jax.types import ToolResult

MAX_CODE_BYTES = 8 << 20
"""Longest program or input that is accepted; frames to the executor process are capped at 16 MiB."""
JSON_TYPES: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


@dataclass(frozen=True)
class Job:
    """What a call comes down to: a program for a sandbox, or a trusted function of the trainer."""

    code: str
    stdin: str = ""
    session: str | None = None
    function: Callable[..., Any] | None = None
    arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Tool:
    """A registered tool: its schema and how a call becomes a job."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments object."""
    prepare: Callable[[Mapping[str, Any], str | None], Job]
    stateful: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The function schema in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class Registry:
    """Tools by name."""

    def __init__(self, tools: typing.Iterable[Tool] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of all tools, for the prompt."""
        return [tool.schema for tool in self._tools.values()]

    def add(self, function: Callable[..., Any], *, where: Literal["sandbox", "trainer"] = "sandbox") -> Tool:
        """Register a function as a tool.

        Args:
            function: Typed parameters and a docstring; its first paragraph describes the tool, lines `name: text`
                under `Args:` describe parameters. For the sandbox it must be a plain function that imports what it
                needs inside its body.
            where: `sandbox` sends its source text, `trainer` calls it in a thread of this process.

        Raises:
            ValueError: a parameter has no usable type hint, the docstring is missing, or the source is not to be had.
        """
        tool = tool_of_function(function, where)
        if tool.name in self._tools:
            raise ValueError(f"a tool named {tool.name!r} is registered already; rename the function")
        self._tools[tool.name] = tool
        return tool

    def prepare(self, name: str, arguments: Any, session: str | None) -> Job | ToolResult:
        """The job of a call, or the result that says what is wrong with it."""
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools)
            return ToolResult("unknown_tool", error_type="UnknownTool", error_message=f"{name!r:.80}; known: {known}")
        fault = check_arguments(tool.parameters, arguments)
        if fault:
            return ToolResult("bad_arguments", error_type="BadArguments", error_message=f"{tool.name}: {fault}"[:500])
        job = tool.prepare(arguments, session)
        if max(len(job.code), len(job.stdin)) > MAX_CODE_BYTES // 4:
            size = max(byte_length(job.code), byte_length(job.stdin))
            if size > MAX_CODE_BYTES:
                message = f"{tool.name}: {size} bytes of text, at most {MAX_CODE_BYTES} are accepted"
                return ToolResult("bad_arguments", error_type="BadArguments", error_message=message)
        return job

    @staticmethod
    def run_trusted(job: Job) -> ToolResult:
        """Call a trainer-side tool; what it raises is its result."""
        try:
            value = job.function(**job.arguments)
            return ToolResult("ok", echo="" if value is None else value if isinstance(value, str) else repr(value))
        except Exception as error:
            return ToolResult("exception", error_type=type(error).__name__, error_message=str(error)[:500])


def byte_length(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def check_arguments(schema: Mapping[str, Any], arguments: Any) -> str:
    """What is wrong with the arguments, in words for the policy; empty when nothing is."""
    if not isinstance(arguments, Mapping):
        return f"arguments must be an object, got {json_type(arguments)}"
    properties = schema["properties"]
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties:
            return f"argument {name!r:.80} is not known; expected: {', '.join(properties)}"
        fault = check_value(properties[name], value)
        if fault:
            return f"argument {name!r} {fault}"
    return ""


def check_value(schema: Mapping[str, Any], value: Any) -> str:
    """What is wrong with one value against its part of the schema."""
    if "anyOf" in schema:
        faults = [check_value(part, value) for part in schema["anyOf"]]
        return "" if "" in faults else faults[0]
    if "enum" in schema and value not in schema["enum"]:
        return f"must be one of {schema['enum']}"
    wanted = schema.get("type")
    if wanted is None or "enum" in schema:
        return ""
    got = json_type(value)
    if got != wanted and not (wanted == "number" and got == "integer"):
        return f"must be {wanted}, got {got}"
    if wanted == "array":
        for index, item in enumerate(value):
            fault = check_value(schema.get("items", {}), item)
            if fault:
                return f"item {index} {fault}"
    if wanted == "object" and "additionalProperties" in schema:
        for key, item in value.items():
            fault = check_value(schema["additionalProperties"], item)
            if fault:
                return f"entry {key!r:.80} {fault}"
    return ""


def json_type(value: Any) -> str:
    """Name of a value's JSON type; bool is no integer here."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number")):
        if isinstance(value, kind):
            return name
    return "object" if isinstance(value, Mapping) else "array" if isinstance(value, list | tuple) else "unknown"


def tool_of_function(function: Callable[..., Any], where: Literal["sandbox", "trainer"]) -> Tool:
    """A tool whose schema comes from the function's hints and docstring."""
    name = function.__name__
    document = inspect.getdoc(function)
    if not document:
        raise ValueError(f"tool {name!r} has no docstring; the policy reads it to learn what the tool does")
    hints = get_type_hints(function)
    described = argument_texts(document)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"tool {name!r}: parameter {parameter.name!r} needs a type hint and a name of its own")
        properties[parameter.name] = schema_of_type(hints[parameter.name], f"{name}.{parameter.name}")
        if parameter.name in described:
            properties[parameter.name]["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    schema = {"type": "object", "properties": properties, "required": required}
    description = re.split(r"\n\s*\n", document, maxsplit=1)[0]
    if where == "trainer":

        def prepare(arguments: Mapping[str, Any], session: str | None) -> Job:
            return Job("", function=function, arguments=arguments)
    else:
        source = source_of(function)

        def prepare(arguments: Mapping[str, Any], session: str | None) -> Job:
            text = json.dumps(dict(arguments))
            return Job(f"{source}\n\nimport json\n{name}(**json.loads({text!r}))")

    return Tool(name, description, schema, prepare)


def source_of(function: Callable[..., Any]) -> str:
    """Source text of a function as a program of its own."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise ValueError(
            f"tool {function.__name__!r}: its source is not to be had ({error}); use where='trainer'"
        ) from error
    if not source.lstrip().startswith("def "):
        raise ValueError(f"tool {function.__name__!r} must be a plain, undecorated `def` to run in the sandbox")
    return "from __future__ import annotations\n" + source


def schema_of_type(hint: Any, where: str) -> dict[str, Any]:
    """JSON schema of a type hint: scalars, Literal, list, dict with string keys, and unions of these."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    if hint is type(None):
        return {"type": "null"}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [schema_of_type(part, where) for part in parts]}
    if hint is list or origin is list:
        return {"type": "array", "items": schema_of_type(parts[0], where) if parts else {}}
    if hint is dict or origin is dict:
        return {"type": "object", "additionalProperties": schema_of_type(parts[1], where) if parts else {}}
    raise ValueError(f"{where}: type {hint!r} has no JSON schema; use str, int, float, bool, Literal, list or dict")


def argument_texts(document: str) -> dict[str, str]:
    """Descriptions of parameters under `Args:` in a docstring."""
    _, found, section = document.partition("\nArgs:\n")
    texts: dict[str, str] = {}
    current = ""
    for line in section.splitlines() if found else ():
        if line and not line.startswith(" "):
            break
        match = re.match(r"(?: {2,4}|\t)(\w+)(?: \([^)]*\))?: (.*)", line)
        if match and not line.startswith(" " * 8):
            current = match.group(1)
            texts[current] = match.group(2).strip()
        elif current and line.strip():
            texts[current] += " " + line.strip()
    return texts


def _standard_io(arguments: Mapping[str, Any], session: str | None) -> Job:
    return Job(arguments["code"], stdin=arguments.get("input") or "")


def _jupyter(arguments: Mapping[str, Any], session: str | None) -> Job:
    return Job(arguments["code"], session=session)


def _code_schema(**extra: Any) -> dict[str, Any]:
    code = {"type": "string", "description": "The Python code to run."}
    return {"type": "object", "properties": {"code": code, **extra}, "required": ["code"]}


_INPUT = {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "Text on standard input; may be left out."}
BUILT_IN = (
    Tool(
        "python_code_with_standard_io",
        "Run a Python program of its own with the given standard input; its output and last expression come back.",
        _code_schema(input=_INPUT),
        _standard_io,
    ),
    Tool(
        "jupyter_code",
        "Run a notebook cell; variables of earlier cells are kept, and the last expression is shown.",
        _code_schema(),
        _jupyter,
        stateful=True,
    ),
)


def default_registry(names: typing.Iterable[str] = ("python_code_with_standard_io", "jupyter_code")) -> Registry:
    """The built-in tools of these names.

    Raises:
        ValueError: there is no such tool.
    """
    known = {tool.name: tool for tool in BUILT_IN}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown tools {unknown} in tools.enabled; built in are {list(known)}")
    return Registry(replace(known[name]) for name in names)
