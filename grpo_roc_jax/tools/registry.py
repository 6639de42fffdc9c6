"""The tools that a policy may call: their schemas, the check of their arguments, and what runs for a call.

A tool is built in (`python_code_with_standard_io`, `jupyter_code`) or made from a Python function whose type hints and
docstring become the schema. Such a function runs in the trainer (trusted: it may use the trainer's state) or, as
source text, in the sandbox. Whatever is wrong with a call becomes a typed result; nothing the policy writes raises.
"""

import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from grpo_roc_jax.tools.signature import Signature, signature_of
from grpo_roc_jax.types import ToolResult

MAX_CODE_BYTES = 8 << 20
"""Longest program or input that is accepted; frames to the executor process are limited to 16 MiB."""


@dataclass(frozen=True)
class Job:
    """What runs for a call: a program in the sandbox, or a trusted function in the trainer."""

    code: str
    stdin: str = ""
    session: str | None = None
    function: Callable[..., Any] | None = None
    arguments: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Tool:
    """A registered tool: its description for the policy, and how a call becomes a job."""

    function: Callable[..., Any]
    """Its name, type hints and docstring make the schema."""
    prepare: Callable[[Mapping[str, Any], str | None], Job]
    """Makes the job from checked arguments and the session."""
    stateful: bool = False

    @property
    def name(self) -> str:
        return self.function.__name__

    @cached_property
    def signature(self) -> Signature:
        return signature_of(self.function)

    @property
    def schema(self) -> dict[str, Any]:
        """The function schema in the form that chat templates take."""
        described = {"description": self.signature.description, "parameters": dict(self.signature.parameters)}
        return {"type": "function", "function": {"name": self.name, **described}}


class Registry:
    """Tools by name."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
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
            ValueError: a parameter has no usable type hint, the docstring is missing, or the source is not available.
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
        fault = tool.signature.fault(arguments)
        if fault:
            return ToolResult("bad_arguments", error_type="BadArguments", error_message=f"{tool.name}: {fault}"[:500])
        job = tool.prepare(arguments, session)
        if max(len(job.code), len(job.stdin)) > MAX_CODE_BYTES // 4:
            size = max(len(text.encode("utf-8", "surrogatepass")) for text in (job.code, job.stdin))
            if size > MAX_CODE_BYTES:
                message = f"{tool.name}: {size} bytes of text, at most {MAX_CODE_BYTES} are accepted"
                return ToolResult("bad_arguments", error_type="BadArguments", error_message=message)
        return job

    @staticmethod
    def run_trusted(job: Job) -> ToolResult:
        """Call a trainer-side tool. An exception that it raises becomes its result."""
        try:
            value = job.function(**job.arguments)
            return ToolResult("ok", echo="" if value is None else value if isinstance(value, str) else repr(value))
        except Exception as error:
            return ToolResult("exception", error_type=type(error).__name__, error_message=str(error)[:500])


def tool_of_function(function: Callable[..., Any], where: Literal["sandbox", "trainer"]) -> Tool:
    """A tool whose schema comes from the function's hints and docstring.

    Raises:
        ValueError: they do not make a schema, or the source is not available.
    """
    signature_of(function)  # raises if there is none
    if where == "trainer":

        def prepare(arguments: Mapping[str, Any], session: str | None) -> Job:
            return Job("", function=function, arguments=arguments)
    else:
        source = source_of(function)

        def prepare(arguments: Mapping[str, Any], session: str | None) -> Job:
            text = json.dumps(dict(arguments))
            return Job(f"{source}\n\nimport json\n{function.__name__}(**json.loads({text!r}))")

    return Tool(function, prepare)


def source_of(function: Callable[..., Any]) -> str:
    """Source text of a function, as a program."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        message = f"tool {function.__name__!r}: its source is not available ({error}); use where='trainer'"
        raise ValueError(message) from error
    if not source.lstrip().startswith("def "):
        raise ValueError(f"tool {function.__name__!r} must be a plain, undecorated `def` to run in the sandbox")
    return "from __future__ import annotations\n" + source


def python_code_with_standard_io(code: str, input: str | None = None) -> Job:
    """Run a Python program of its own with the given standard input; its output and last expression come back.

    Args:
        code: The Python code to run.
        input: Text on standard input; may be left out.
    """
    return Job(code, stdin=input or "")


def jupyter_code(code: str) -> Job:
    """Run a notebook cell; variables of earlier cells are kept, and the last expression is shown.

    Args:
        code: The Python code to run.
    """
    return Job(code)


BUILT_IN = (
    Tool(python_code_with_standard_io, lambda arguments, session: python_code_with_standard_io(**arguments)),
    Tool(jupyter_code, lambda arguments, session: replace(jupyter_code(**arguments), session=session), stateful=True),
)


def default_registry(names: Iterable[str] = ("python_code_with_standard_io", "jupyter_code")) -> Registry:
    """The built-in tools of these names.

    Raises:
        ValueError: a name is not that of a built-in tool.
    """
    known = {tool.name: tool for tool in BUILT_IN}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown tools {unknown} in tools.enabled; built in are {list(known)}")
    return Registry(replace(known[name]) for name in names)
