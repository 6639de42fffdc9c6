"""The tools that a policy may call: their schemas, the check of their arguments, and what runs for a call.

A tool is built in (`python_code_with_standard_io`, `jupyter_code`) or made from a Python function whose type hints and
docstring become the schema. Such a function runs in the trainer (trusted: it may use the trainer's state) or, as
source text, in the sandbox. Whatever is wrong with a call becomes a typed result; nothing the policy writes raises.

pydantic makes the schema and finds errors in arguments; docstring_parser reads the docstring. The wording of errors is
kept here, since the policy sees it and recorded trajectories hold it.
"""

import asyncio
import builtins
import copy
import dis
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import SchemaValidator, core_schema

from grpo_roc_jax.settings.callables import described_error, message_of
from grpo_roc_jax.settings.files import DEEPEST, depth_over
from grpo_roc_jax.types import ToolResult

MAX_CODE_BYTES = 8 << 20
"""Longest program or input that is accepted."""
MAX_CALL_BYTES = 15 << 20
"""Most bytes of a program and its input together; frames to the executor process are limited to 16 MiB."""


TYPE_ERRORS = {
    "bool_type": "boolean", "dict_type": "object", "float_type": "number", "int_type": "integer", "list_type": "array",
    "none_required": "null", "string_type": "string",
}  # fmt: skip
"""pydantic's name of an error -> the JSON type that was expected."""
JSON_VALUES = frozenset((
    "any", "none", "bool", "int", "float", "str", "literal", "list", "dict", "nullable", "union", "definitions",
    "definition-ref", "default", "model", "model-fields", "model-field", "typed-dict", "typed-dict-field",
))  # fmt: skip
"""pydantic's names of the types whose JSON values equal the Python values."""
UNKNOWN_ARGUMENT = ("extra_forbidden", "invalid_key")
MAX_TOOL_NAME = 128
MAX_DESCRIPTION = 4000
"""Most characters of a description in an outside schema, of the tool or of a parameter; longer ones are cut."""
MAX_SCHEMA = 64_000
"""Most characters of an outside schema as JSON."""
MAX_TOOLS = 1000
"""Most tools of one server, and most pages of its list."""
TOOL_NAME = re.compile(rf"[\w./:-]{{1,{MAX_TOOL_NAME}}}")


def outside_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool from a server or a data set in a form that may stand in a prompt. Long descriptions are cut,
    so that outsiders cannot fill the prompt. `text.escape.plain_tools` escapes what imitates a mark of the dialogue.

    Args:
        function: Mapping with `name`, `description` and `parameters`.

    Raises:
        ValueError: The name is not made of letters, digits and `_ . / : -`, or the name or the schema is too long.
    """
    name = str(function.get("name"))
    if not TOOL_NAME.fullmatch(name):
        raise ValueError(
            f"tool {name!r:.200}: a name from outside must have 1 to {MAX_TOOL_NAME} letters, digits and _ . / : -; "
            "rename it where it is offered"
        )
    try:
        short = _cut_descriptions(dict(function))
        size = len(json.dumps(short, default=str))
    except RecursionError:
        raise ValueError(f"tool {name!r}: its schema is nested too deep; offer the tool with a smaller one") from None
    if size > MAX_SCHEMA:
        raise ValueError(
            f"tool {name!r}: its schema has {size} characters of JSON, at most {MAX_SCHEMA} are taken into a prompt; "
            "offer the tool with a smaller one"
        )
    return short


def _cut_descriptions(value: Any) -> Any:
    if isinstance(value, Mapping):
        cut = {key: _cut_descriptions(part) for key, part in value.items()}
        text = cut.get("description")
        if isinstance(text, str) and len(text) > MAX_DESCRIPTION:
            cut["description"] = f"{text[:MAX_DESCRIPTION]} [... {len(text) - MAX_DESCRIPTION} characters omitted]"
        return cut
    return [_cut_descriptions(part) for part in value] if isinstance(value, list | tuple) else value


class Arguments(BaseModel):
    """Base of the models of arguments: values are not converted, and unknown arguments are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


CHECKED = core_schema.CoreConfig(strict=True, extra_fields_behavior="forbid")
"""The same for a validator."""


class ArgumentsSchema(GenerateJsonSchema):
    """Schemas for prompts: no titles, keys in their original order.

    A function gets JSON values without conversion, so types with other values (dates, dataclasses) are refused.
    """

    def generate_inner(self, schema: Any) -> dict[str, Any]:
        known = schema["type"] in JSON_VALUES
        if not known or (schema["type"] == "model" and not issubclass(schema["cls"], Arguments)):
            self.handle_invalid_for_json_schema(schema, "its values are not JSON values")
        return super().generate_inner(schema)

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        if not _is_text(schema.get("keys_schema", {"type": "any"})):
            self.handle_invalid_for_json_schema(schema, "a dict whose keys are not text, as those of JSON are")
        return super().dict_schema(schema)

    def literal_schema(self, schema: Any) -> dict[str, Any]:
        return {"enum": list(schema["expected"])}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def sort(self, value: dict[str, Any], parent_key: str | None = None) -> dict[str, Any]:
        return value


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether the values of a schema of pydantic are text, or any."""
    if schema["type"] == "literal":
        return all(isinstance(value, str) for value in schema["expected"])
    if schema["type"] == "union":
        return all(_is_text(choice[0] if isinstance(choice, tuple) else choice) for choice in schema["choices"])
    return schema["type"] in ("str", "any", "definition-ref")  # what is defined elsewhere is checked by calls alone


def _with_exact_literals(schema: Any) -> Any:
    """A schema of pydantic whose literals are of the type of the value: 1 is neither True nor 1.0. Of a model its
    fields are left, since pydantic has compiled the model itself before."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_with_exact_literals, schema))
    if not isinstance(schema, dict):
        return schema
    changed = {key: _with_exact_literals(part) for key, part in schema.items()}
    if changed.get("type") == "model":
        return changed["schema"] | ({"ref": changed["ref"]} if "ref" in changed else {})
    if changed.get("type") != "literal":
        return changed

    def listed(value: Any) -> Any:
        """The value, or one that no schema lists."""
        return value if any(type(value) is type(choice) and value == choice for choice in changed["expected"]) else ...

    return core_schema.no_info_before_validator_function(listed, changed)


@dataclass(frozen=True)
class Signature:
    """The description of a function for the policy, and the check of the arguments of a call."""

    description: str
    """First paragraph of the docstring."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments object."""
    validator: SchemaValidator | None
    """Checks the arguments; None if a subclass does."""

    def fault(self, arguments: Any) -> str:
        """What is wrong with the arguments, in words for the policy; empty if they are valid."""
        if not isinstance(arguments, Mapping):
            return f"arguments must be an object, got {json_type(arguments)}"
        try:
            self.validator.validate_python(dict(arguments))
        except ValidationError as error:
            return self._describe(error.errors(include_url=False, include_context=False), arguments)
        return ""

    def _describe(self, errors: list[Any], arguments: Mapping[str, Any]) -> str:
        """The first error in words: a missing argument, else the first wrong one in the order of the arguments."""
        missing = [error["loc"][0] for error in errors if error["type"] == "missing" and len(error["loc"]) == 1]
        if missing:
            return f"argument {missing[0]!r} is missing"
        order = {str(name): index for index, name in enumerate(arguments)}  # a name that is no text is named by it
        first = min(errors, key=lambda error: order.get(str(error["loc"][0]), -1) if error["loc"] else -1)
        name, *inner = first["loc"] or (first["input"],)
        if not first["loc"] or (first["type"] in UNKNOWN_ARGUMENT and not inner):  # a name that is no text has no place
            return f"argument {name!r:.80} is not known; expected: {', '.join(self.parameters['properties'])}"
        if first["type"] == "missing":
            return f"argument {name!r} {place_of(inner[:-1], arguments[name])}entry {inner[-1]!r:.80} is missing"
        if first["type"] in UNKNOWN_ARGUMENT:
            fault = "is not known"
        elif first["type"] in TYPE_ERRORS:
            fault = f"must be {TYPE_ERRORS[first['type']]}, got {json_type(first['input'])}"
        else:
            fault = first["msg"].replace("Input should", "must", 1)
        return f"argument {name!r} {place_of(inner, arguments[name])}{fault}"


def place_of(path: list[int | str], value: Any) -> str:
    """The location of an error inside a value, in words."""
    words = ""
    for part in path:
        if isinstance(value, Mapping) and part in value:
            words += f"entry {part!r:.80} "
        elif isinstance(value, list) and isinstance(part, int):
            words += f"item {part} "
        else:
            continue  # pydantic's name for a member of a union
        value = value[part]
    return words


def json_type(value: Any) -> str:
    """Name of a value's JSON type. A bool is not an integer here."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number")):
        if isinstance(value, kind):
            return name
    return "object" if isinstance(value, Mapping) else "array" if isinstance(value, list | tuple) else "unknown"


def signature_of(function: Callable[..., Any]) -> Signature:
    """The signature of a function or bound method. Raises ValueError without a docstring or usable type hints."""
    plain = getattr(function, "__func__", function)
    if not isinstance(getattr(plain, "__name__", None), str):
        raise ValueError(f"tool {plain!r} has no name; must be a function or a method, so write a `def` around it")
    return _signature_of(plain, inspect.ismethod(function))


_WITHOUT_NAME = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@lru_cache(maxsize=256)
def _signature_of(function: Callable[..., Any], bound: bool) -> Signature:
    name = function.__name__
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"tool {name!r} yields; must return its result, such as the texts joined")
    text = inspect.getdoc(function)
    if not text:
        raise ValueError(f"tool {name!r} has no docstring; the policy reads it to learn what the tool does")
    document = docstring_parser.parse(text)
    described = {
        argument_name.arg_name: " ".join((argument_name.description or "").split()) for argument_name in document.params
    }
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        raise ValueError(f"tool {name!r}: its type hints cannot be read: {described_error(error, function)}") from error
    parameters = list(inspect.signature(function).parameters.values())[bound:]
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        if parameter.name not in hints or parameter.kind in _WITHOUT_NAME:
            raise ValueError(
                f"tool {name!r}: parameter {parameter.name!r} needs a type hint and a name of its own; calls pass "
                "arguments by name"
            )
        hint = hints[parameter.name]
        if hint is object:
            raise ValueError(f"{name}.{parameter.name}: type {hint!r} has no JSON schema; use Any for any value")
        default = ... if parameter.default is parameter.empty else None
        # Arguments are named by aliases, since some names, such as `copy` or `_x`, cannot be fields of a model.
        fields[f"argument_{number}"] = (hint, Field(default, alias=parameter.name))
    try:
        model = create_model(name, __base__=Arguments, **fields)
        made = model.model_json_schema(schema_generator=ArgumentsSchema)
        validator = SchemaValidator(_with_exact_literals(model.__pydantic_core_schema__), CHECKED)
    except PydanticUserError as error:
        message = f"tool {name!r}: a parameter's type has no JSON schema ({error.message}); "
        raise ValueError(
            message + "use str, int, float, bool, Literal, list, dict or typing_extensions.TypedDict"
        ) from error
    properties = {argument_name: dict(part) for argument_name, part in made.get("properties", {}).items()}
    for argument_name, part in properties.items():
        part.pop("default", None)
        if described.get(argument_name):
            part["description"] = described[argument_name]
    schema = {"type": "object", "properties": properties, "required": made.get("required", [])}
    if "$defs" in made:
        schema["$defs"] = made["$defs"]
    return Signature((document.description or "").split("\n\n")[0].strip(), schema, validator)


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
        return [tool.schema for tool in self._tools.values()]

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def get(self, name: str) -> Tool | None:
        """The tool of that name; None if there is none."""
        return self._tools.get(name)

    def add(self, function: Callable[..., Any], *, where: Literal["sandbox", "trainer"] = "sandbox") -> Tool:
        """Register a function as a tool.

        Args:
            function: Typed parameters and a docstring; its first paragraph describes the tool, lines `name: text`
                under `Args:` describe parameters. For the sandbox it must be a plain function that imports what it
                needs inside its body.
            where: `sandbox` sends its source text, `trainer` calls it in a thread of this process (see `run_trusted`).

        Raises:
            ValueError: a parameter has no usable type hint, the docstring is missing, or the source is not available.
        """
        tool = tool_of_function(function, where)
        if tool.name in self._tools:
            raise ValueError(f"a tool named {tool.name!r} is registered already; rename the function")
        self._tools[tool.name] = tool
        return tool

    def prepare(self, name: str, arguments: Any, session: str | None) -> Job | ToolResult:
        """The job of a call, or the result that says what is wrong with the call."""
        tool = self._tools.get(name)
        if tool is None:
            known = ", ".join(self._tools)
            return ToolResult("unknown_tool", error_type="UnknownTool", error_message=f"{name!r:.80}; known: {known}")
        fault = f"arguments are nested more than {DEEPEST} levels deep" if depth_over(arguments, DEEPEST) else ""
        try:
            fault = fault or tool.signature.fault(arguments)
            job = None if fault else tool.prepare(arguments, session)
        except (ValueError, RecursionError) as error:  # numbers of too many digits
            fault = f"arguments cannot be passed on: {error}"
        if fault:
            return ToolResult("bad_arguments", error_type="BadArguments", error_message=f"{tool.name}: {fault}"[:500])
        if max(len(job.code), len(job.stdin)) > MAX_CODE_BYTES // 4:
            sizes = [len(text.encode("utf-8", "surrogatepass")) for text in (job.code, job.stdin)]
            if max(sizes) > MAX_CODE_BYTES or sum(sizes) > MAX_CALL_BYTES:
                message = (
                    f"{tool.name}: {max(sizes)} bytes of text, at most {MAX_CODE_BYTES} are accepted, and "
                    f"{MAX_CALL_BYTES} with its input"
                )
                return ToolResult("bad_arguments", error_type="BadArguments", error_message=message)
        return job

    @staticmethod
    def run_trusted(job: Job, limit_s: float | None = None) -> ToolResult:
        """Call a trainer-side tool, which may be a coroutine function; it is awaited for at most `limit_s` seconds.

        A `ToolResult` that it returns is the result. An exception that it raises becomes the result: an error of the
        policy, or an infrastructure failure if it is a `ToolUnavailable` or a `ConnectionError`.
        """
        try:
            value = job.function(**copy.deepcopy(dict(job.arguments)))  # those of the job are recorded
            if inspect.isawaitable(value):
                value = asyncio.run(await_for(value, limit_s))
            return returned_result(value)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # that of a call asks for nothing here
            return failed_result(error, limit_s)


class ToolUnavailable(Exception):
    """Raised by a trainer-side tool that cannot answer through no fault of the policy: an infrastructure failure."""


class TooLate(Exception):
    """An awaited tool exceeded its time. A `TimeoutError` of its own is an error like any other."""


async def await_for(value: Awaitable[Any], limit_s: float | None) -> Any:
    """The value, awaited for at most `limit_s` seconds.

    Raises:
        TooLate: It took longer and was cancelled.
        RuntimeError: It asked to exit, or cancelled itself.
    """
    task = asyncio.ensure_future(_contained(value))
    done, _ = await asyncio.wait([task], timeout=limit_s)
    if not done:
        task.cancel()
        raise TooLate
    if task.cancelled():
        raise RuntimeError("it cancelled itself")
    return task.result()


async def _contained(value: Awaitable[Any]) -> Any:
    """Awaits the value. A request to exit would end the event loop, so it is turned into an error."""
    try:
        return await value
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(repr(error)) from error


def returned_result(value: Any) -> ToolResult:
    """The result of a trusted function that returned."""
    if isinstance(value, ToolResult):
        return value
    return ToolResult("ok", echo="" if value is None else value if isinstance(value, str) else repr(value))


def failed_result(error: BaseException, limit_s: float | None) -> ToolResult:
    """The result of a trusted function that raised, or that was late."""
    if isinstance(error, TooLate):
        return ToolResult("timeout", limit_hit="wall", wall_ms=1000 * (limit_s or 0.0))
    kind = "transport_error" if isinstance(error, ToolUnavailable | ConnectionError) else "exception"
    return ToolResult(kind, error_type=type(error).__name__, error_message=message_of(error)[:500])


_CALL = """

import builtins as __builtins, json as __json
__value = {name}(**__json.loads({arguments!r}))
__text = __builtins.type("text", (__builtins.str,), {{"__repr__": __builtins.str.__str__}})
__text(__value) if __builtins.isinstance(__value, __builtins.str) else __value
"""
"""Calls the function whose source is before it. The repr of the last expression is shown: for a returned text, of one
whose repr is the text. The names are those of no tool."""


def tool_of_function(function: Callable[..., Any], where: Literal["sandbox", "trainer"]) -> Tool:
    """A tool made from a function. Raises ValueError if it has no schema, or no source although it runs in
    the sandbox."""
    if where not in ("sandbox", "trainer"):
        raise ValueError(f"where is {where!r:.80}; must be 'sandbox' or 'trainer'")
    signature_of(function)  # raises if there is none
    if where == "trainer":

        def prepare(arguments: Mapping[str, Any], session: str | None) -> Job:
            return Job("", function=function, arguments=arguments)
    else:
        source = source_of(function)

        def prepare(arguments: Mapping[str, Any], session: str | None) -> Job:
            return Job(source + _CALL.format(name=function.__name__, arguments=json.dumps(dict(arguments))))

    return Tool(function, prepare)


def source_of(function: Callable[..., Any]) -> str:
    """Source text of a function, as a program."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError) as error:
        message = f"tool {function.__name__!r}: its source is not available ({error}); use where='trainer'"
        raise ValueError(message) from error
    if not source.lstrip().startswith("def ") or not inspect.isfunction(function):
        raise ValueError(
            f"tool {function.__name__!r} must be a plain, undecorated `def` to run in the sandbox, and no method of an "
            "object; use where='trainer'"
        )
    if source[0].isspace():  # to remove the indentation would change texts of several lines
        source = "if True:\n" + source
    source = "from __future__ import annotations\n" + source
    try:
        exec(compile(source, f"<tool {function.__name__}>", "exec"), {})
    except Exception as error:
        raise ValueError(
            f"tool {function.__name__!r} cannot be defined in the sandbox, which has nothing of its module: "
            f"{type(error).__name__}: {message_of(error)}; write its defaults as values, or use where='trainer'"
        ) from error
    if outside := names_outside(function, source):
        raise ValueError(
            f"tool {function.__name__!r} uses {', '.join(outside)} from outside of its body, which is not in the "
            "sandbox; import or define it inside, or use where='trainer'"
        )
    return source


READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
"""Instructions that look a name up outside of a function; the second one in class bodies."""


def names_outside(function: Callable[..., Any], source: str) -> list[str]:
    """Names that the source of a function, alone in a program, reads and does not bind, in alphabetic order."""
    outside: set[str] = set()
    bound = {function.__name__}
    codes = list(filter(inspect.iscode, compile(source, function.__name__, "exec").co_consts))
    while codes:
        code = codes.pop()
        codes += filter(inspect.iscode, code.co_consts)
        steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
        attributes = {name for opname, name in steps if opname == "STORE_NAME"}  # of a class body
        outside |= {name for opname, name in steps if opname in READS} - attributes
        bound |= {name for opname, name in steps if opname == "STORE_GLOBAL"} - function.__globals__.keys()
    shadowed = {name for name in outside if function.__globals__.get(name, at := vars(builtins).get(name)) is not at}
    unknown = (outside - vars(builtins).keys()) | {name for name in shadowed if not name.startswith("__")}
    return sorted(unknown - bound)


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
    Tool(jupyter_code, lambda arguments, session: replace(jupyter_code(**arguments), session=session)),
)


def default_registry(names: Iterable[str] = ("python_code_with_standard_io", "jupyter_code")) -> Registry:
    """The built-in tools of these names. Raises ValueError for any other name."""
    known = {tool.name: tool for tool in BUILT_IN}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(
            f"unknown tools {unknown} in tools.enabled; built in are {list(known)}, and [] leaves all of them out"
        )
    return Registry(replace(known[name]) for name in names)
