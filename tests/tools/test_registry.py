"""Schemas of tools, and calls that do not match them: each gives a typed result, never an exception."""

import asyncio
import functools
import json
import sys
from collections.abc import Callable
from datetime import date
from typing import Annotated, Any, Literal, NotRequired

import pytest
from pydantic import Field
from typing_extensions import TypedDict

from grpo_roc_jax.tools import Registry, ToolUnavailable, default_registry
from grpo_roc_jax.tools.foreign import foreign_tool, normalized
from grpo_roc_jax.tools.registry import MAX_DESCRIPTION, Job, TooLate, failed_result
from grpo_roc_jax.types import ToolResult
from tests.helpers.fake_executor import area

IO = "python_code_with_standard_io"
TOO_LONG = "bytes of text, at most 8388608 are accepted, and 15728640 with its input"
NESTED = r"^(a+)+$"
"""Python's matcher takes twice as long with each further character of a text that does not match: 19 s for 24."""


def test_schemas_of_a_function_and_of_the_built_in_tools() -> None:
    function = Registry().add(area).schema["function"]
    assert (function["name"], function["description"]) == ("area", "Area of a rectangle.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "width": {"type": "number", "description": "Of the rectangle, in the unit."},
            "height": {"type": "number"},
            "unit": {"enum": ["cm", "m"], "description": "Of all lengths."},
        },
        "required": ["width"],
    }
    # Those of the built-in tools are part of prompts, byte by byte.
    assert json.dumps(default_registry().schemas) == (
        '[{"type": "function", "function": {"name": "python_code_with_standard_io", "description": "Run a Python '
        'program of its own with the given standard input; its output and last expression come back.", '
        '"parameters": {"type": "object", "properties": {"code": {"type": "string", "description": "The Python code to '
        'run."}, "input": {"anyOf": [{"type": "string"}, {"type": "null"}], "description": "Text on standard input; '
        'may be left out."}}, "required": ["code"]}}}, {"type": "function", "function": {"name": "jupyter_code", '
        '"description": "Run a notebook cell; variables of earlier cells are kept, and the last expression is shown.", '
        '"parameters": {"type": "object", "properties": {"code": {"type": "string", "description": "The Python code to '
        'run."}}, "required": ["code"]}}}]'
    )


def nested(rows: list[list[int]], names: dict[str, str], limit: int | None = None) -> int:
    """Counts things."""
    return len(rows) + len(names)


class Place(TypedDict):
    city: str
    zip: NotRequired[int]


def book(to: Place | None = None, seats: list[Literal[1, 2]] = [], level: Literal[0, "all"] | bool = 0) -> str:  # noqa: B006
    """Books seats."""
    return f"{to} {seats} {level}"


def test_arguments_are_checked_and_the_words_for_wrong_ones_are_these() -> None:
    """They are part of recorded trajectories."""
    registry = default_registry()
    registry.add(area)
    registry.add(nested)
    registry.add(book, where="trainer")
    for tool, arguments, message in (
        (IO, {"code": "x", "input": "y"}, None),
        (IO, {"code": "x", "input": None}, None),
        ("area", {"width": 2}, None),
        ("nested", {"rows": [[1]], "names": {"a": "b"}, "limit": None}, None),
        (IO, "code", "arguments must be an object, got string"),
        (IO, None, "arguments must be an object, got null"),
        (IO, {"stdin": 1}, "argument 'code' is missing"),
        (IO, {"stdin": 1, "code": 1}, "argument 'stdin' is not known; expected: code, input"),
        (IO, {"code": 1, "stdin": 1}, "argument 'code' must be string, got integer"),
        (IO, {"code": "x", "input": True}, "argument 'input' must be string, got boolean"),
        (IO, {"code": "x" * (9 << 20)}, f"9437184 {TOO_LONG}"),
        (IO, {"code": "x" * (8 << 20), "input": "x" * (8 << 20)}, f"8388608 {TOO_LONG}"),
        (IO, {"\ud800": 1, "code": "x"}, "argument '\\ud800' is not known; expected: code, input"),
        ("jupyter_code", {"code": "x", "y" * 100: 1}, "argument '" + "y" * 79 + " is not known; expected: code"),
        ("area", {"width": 1.5, "unit": "km"}, "argument 'unit' must be 'cm' or 'm'"),
        ("nested", {"rows": [[1], [2, "x"]], "names": {}}, "argument 'rows' item 1 item 1 must be integer, got string"),
        ("nested", {"rows": [], "names": {"a": 1}}, "argument 'names' entry 'a' must be string, got integer"),
        ("nested", {"rows": [], "names": {}, "limit": "x"}, "argument 'limit' must be integer, got string"),
        ("book", {"to": {"city": "Bern"}, "seats": [1, 2], "level": True}, None),
        ("book", {"to": {"zip": 3}}, "argument 'to' entry 'city' is missing"),
        ("book", {"to": {"city": "Bern", "street": ""}}, "argument 'to' entry 'street' is not known"),
        ("book", {"seats": [1, True]}, "argument 'seats' item 1 must be 1 or 2"),
        ("book", {"seats": [1.0]}, "argument 'seats' item 0 must be 1 or 2"),
        ("book", {"level": 0.0}, "argument 'level' must be 0 or 'all'"),
    ):
        prepared = registry.prepare(tool, arguments, None)
        if message is None:
            assert isinstance(prepared, Job)
        else:
            assert prepared.kind == "bad_arguments" and prepared.counts_as_error
            assert prepared.error_message == f"{tool}: {message}"
    for name in ("search", ""):
        result = default_registry().prepare(name, {"q": "x"}, None)
        assert result.kind == "unknown_tool" and result.counts_as_error
        assert f"{name!r}; known: {IO}" in result.error_message
    assert default_registry().prepare(IO, {"code": "print('\ud800')"}, None) == Job("print('\ud800')")


def test_hints_and_docstrings_of_further_kinds() -> None:
    def rate(copy: Annotated[int, Field(ge=1, le=5)], _x: list = [], anything: Any = None) -> None:  # noqa: B006
        """Rates
        something.

        Parameters
        ----------
        copy : int
            How good
            it is.
        """

    registry = Registry()
    function = registry.add(rate, where="trainer").schema["function"]
    assert function["description"] == "Rates\nsomething."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "copy": {"type": "integer", "minimum": 1, "maximum": 5, "description": "How good it is."},
            "_x": {"type": "array", "items": {}},
            "anything": {},
        },
        "required": ["copy"],
    }
    assert (
        "argument 'copy' must be less than or equal to 5" in registry.prepare("rate", {"copy": 9}, None).error_message
    )
    assert registry.prepare("rate", {"copy": 5, "_x": [None], "anything": {}}, None).arguments["copy"] == 5


Silent = type("Silent", (Exception,), dict.fromkeys(("__str__", "__repr__"), lambda self: 1 // 0))


def test_trusted_functions_give_results_and_never_raise() -> None:
    given = ToolResult("ok", stdout="given", truncated=True)

    def fails(error: BaseException) -> None:
        raise error

    async def gives_up() -> None:
        raise TimeoutError

    def run(act: Callable[[], Any], later: bool = False) -> ToolResult:
        def now(x: int) -> Any:
            """Answers."""
            return act()

        async def then(x: int) -> Any:
            """Answers later."""
            return await act()

        registry = Registry()
        registry.add(then if later else now, where="trainer")
        return registry.run_trusted(registry.prepare("then" if later else "now", {"x": 1}, None), 0.2)

    assert run(lambda: asyncio.sleep(0.01, 2), later=True).echo == "2"
    broken = [run(act) for act in (lambda: fails(AssertionError()), lambda: sys.exit(3), lambda: 10**5000, Silent)]
    assert [result.error_type for result in broken] == [
        "AssertionError",
        "SystemExit",
        "ValueError",
        "ZeroDivisionError",
    ]
    silent, own_limit = run(lambda: fails(Silent())), run(gives_up, later=True)
    assert silent.error_type == "Silent" and "cannot be read" in silent.error_message
    late = run(lambda: asyncio.sleep(60), later=True)
    assert (late.kind, late.limit_hit, late.wall_ms) == ("timeout", "wall", 200.0)
    assert failed_result(TooLate(), None).wall_ms == 0.0
    assert (own_limit.kind, own_limit.error_type) == ("exception", "TimeoutError")
    away = [run(functools.partial(fails, error)) for error in (ToolUnavailable("x"), ConnectionRefusedError())]
    assert all(result.infra for result in away)
    assert run(lambda: given) is given


def test_functions_that_cannot_be_tools() -> None:
    def hinted(hint: Any) -> Callable:
        def tool(x):
            """Text."""

        tool.__annotations__ = {"x": hint} if hint else {}
        return tool

    def yields(x: int):
        """Text."""
        yield x

    async def yields_later(x: int):
        """Text."""
        yield x

    def unnamed(x: int, /) -> None:
        """Text."""

    def of_the_module(x: str = IO) -> None:
        """Text."""

    rate = 2.0

    def enclosed(x: float) -> float:
        """Text."""
        return max(y * rate for y in (x, 0.0))

    def in_a_class(x: int) -> int:
        """Text."""

        class Inner:
            value = IO

        return len(Inner.value) + x

    def counted(x: int) -> int:
        """Text."""
        global IO
        IO = IO + str(x)
        return len(IO)

    def allowed(x: int) -> int:
        """Text."""

        class Inner:
            base = 1
            more = base + 1

        def inner(y: "Callable", z: dict = ()) -> dict[str, date]:
            return {str(i): len(z) for i in range(y) if inner and i >= 0}

        return len(inner(x)) + Inner.more + bool(x and allowed(x - 1))

    registry = Registry()
    registry.add(area)
    registry.add(allowed)
    for function, message in (
        (enclosed, "uses rate from outside of its body"),
        (in_a_class, "uses IO from outside of its body"),
        (counted, "uses IO from outside of its body"),
        (registry.prepare, "no method of an object"),
        (yields, "yields; must return its result"),
        (yields_later, "yields; must return its result"),
        (unnamed, "calls pass arguments by name"),
        (hinted("Missing"), "type hints cannot be read: NameError"),
        (of_the_module, r"cannot be defined in the sandbox.*NameError: name 'IO'"),
        (functools.partial(area, width=1.0), "has no name; must be a function"),
        (lambda: None, "docstring"),
        (hinted(None), "type hint"),
        (hinted(object), "JSON schema"),
        (hinted(list[date]), "JSON schema"),
        (hinted(list[dict[int, str]]), "a dict whose keys are not text"),
        (hinted(dict[Literal[1, 2], str]), "a dict whose keys are not text"),
        (area, "registered already"),
    ):
        with pytest.raises(ValueError, match=message):
            registry.add(function)
    with pytest.raises(ValueError, match="where is 'Trainer'; must be 'sandbox' or 'trainer'"):
        registry.add(area, where="Trainer")
    with pytest.raises(ValueError, match="unknown tools"):
        default_registry(("python",))


def test_texts_of_a_nested_function_reach_the_sandbox_as_they_are() -> None:
    def texts(count: int) -> str:
        """Text."""
        return (
            """
        first
            second"""
            + """
first"""
            * count
        )

    registry, names = Registry(), {}
    registry.add(texts)
    exec(registry.prepare("texts", {"count": 2}, None).code, names)
    assert names["__value"] == texts(2)


FOREIGN = {
    "name": "book",
    "input_schema": {
        "$defs": {"Place": {"type": "object", "required": ["city"], "additionalProperties": False,
                            "properties": {"city": {"type": "string"}, "zip": {"type": ["integer", "null"]}}}},
        "properties": {"to": {"$ref": "#/$defs/Place"}, "class": {"const": "second"}, "seats": {"items": True},
                       "notes": {"type": "object", "additionalProperties": True}, "never": False},
        "required": ["to"],
        "additionalProperties": False,
    },
}  # fmt: skip


def test_schemas_of_other_origin_are_checked_by_their_own_rules() -> None:
    tool = foreign_tool(FOREIGN, lambda **given: sorted(given))
    registry = Registry([tool])
    assert tool.schema["function"]["parameters"]["type"] == "object"
    for arguments, fault in (
        ({"to": {"city": "Bern", "zip": None}, "class": "second", "seats": [1, "a"], "notes": {"a": 1}}, ""),
        ([], "arguments must be an object, got array"),
        ({}, "argument 'to' is missing"),
        ({"to": {"city": "Bern"}, "from": 1}, "argument 'from' is not known; expected: to, class, seats, notes, never"),
        ({"to": 3}, "argument 'to' must be object, got integer"),
        ({"to": {}}, "argument 'to' 'city' is a required property"),
        ({"to": {"city": "Bern", "zip": "x"}}, "argument 'to' entry 'zip' must be integer or null, got string"),
        ({"to": {"city": "Bern"}, "class": "first"}, "argument 'class' 'second' was expected"),
        ({"to": {"city": "Bern"}, "never": 1}, "False schema does not allow 1"),
    ):
        prepared = registry.prepare("book", arguments, None)
        assert (prepared.error_message if isinstance(prepared, ToolResult) else "") == (fault and f"book: {fault}")
        if not fault:
            assert registry.run_trusted(prepared).echo == "['class', 'notes', 'seats', 'to']"


def test_values_of_any_size_are_no_exception() -> None:
    def keep(value: Any) -> None:
        """Keeps a value."""

    schema = {"name": "pay", "parameters": {"properties": {"sum": {"type": "number", "multipleOf": 0.01}}}}
    registry = Registry([foreign_tool(schema, lambda **given: "paid")])
    registry.add(keep)
    for tool, arguments in (
        ("keep", {"value": 10**5000}),
        *(("keep", {"value": functools.reduce(lambda inner, _: [inner], range(deep), [])}) for deep in (99, 5000)),
        ("pay", {"sum": 10**5000}),
    ):
        assert registry.prepare(tool, arguments, None).kind == "bad_arguments"
    assert isinstance(registry.prepare("pay", {"sum": 10.5}, None), Job)
    result = registry.prepare("pay", {"sum": 10**400}, None)
    assert result.kind == "bad_arguments" and "cannot be checked" in result.error_message


def test_patterns_of_schemas_take_a_time_that_is_linear_in_the_text() -> None:
    for parameters, arguments, right in (
        ({"properties": {"s": {"type": "string", "pattern": NESTED}}}, {"s": "a" * 5000 + "b"}, False),
        ({"properties": {"s": {"type": "string", "pattern": NESTED}}}, {"s": "a" * 5000}, True),
        ({"patternProperties": {NESTED: {}}, "additionalProperties": False}, {"a" * 5000 + "b": 1}, False),
        ({"patternProperties": {NESTED: {}}, "additionalProperties": {"type": "string"}}, {"a" * 99 + "b": 1}, False),
        ({"patternProperties": {NESTED: {"type": "string"}}}, {"a" * 5000: 1}, False),
        ({"patternProperties": {NESTED: {}}, "additionalProperties": False}, {"aa": 1}, True),
        ({"patternProperties": {NESTED: {}}, "unevaluatedProperties": False}, {"a" * 5000 + "b": 1}, True),
        ({"properties": {"s": {"propertyNames": {"pattern": NESTED}}}}, {"s": {"a" * 5000 + "b": 1}}, False),
        ({"properties": {"s": {"pattern": r"^\p{L}+$"}}}, {"s": "Grüße"}, True),  # as JavaScript writes them
        ({"properties": {"s": {"pattern": r"^\p{L}+$"}}}, {"s": "a1"}, False),
        ({"properties": {"s": {"pattern": r"^(?<year>\d{4})$"}}}, {"s": "20x6"}, False),
        ({"properties": {"s": {"pattern": r"^(?=.*\d)(?=.*x)"}}}, {"s": "none of both"}, True),  # is not checked
        ({"properties": {"s": {"pattern": "("}}}, {"s": "x"}, True),
    ):
        registry = Registry([foreign_tool({"name": "find", "parameters": parameters}, lambda **given: "found")])
        answer = registry.prepare("find", arguments, None)
        assert isinstance(answer, Job) if right else answer.kind == "bad_arguments"


def test_schemas_from_outside_without_parameters_those_that_cannot_be_used_and_their_bounds() -> None:
    wrapped = {"type": "function", "function": {"name": "now", "parameters": {}}}
    for schema in ({"name": "now"}, {"name": "now", "description": "The time."}, wrapped):
        registry = Registry([foreign_tool(schema, lambda: "noon")])
        function, parameters = registry.schemas[0]["function"], {"type": "object", "properties": {}}
        assert (function["parameters"], function["description"]) == (parameters, schema.get("description", ""))
        assert isinstance(registry.prepare("now", {}, None), Job)
    for schema, message in (
        ({"description": "?"}, "no name"),
        ("not a schema", "no name"),
        ({"name": "a", "parameters": {"type": "array"}}, "schema of an object"),
        ({"name": "a", "parameters": {"properties": {"x": {"type": "int"}}}}, "no valid JSON schema"),
        ({"name": "a", "parameters": {"properties": {"x": {"$ref": "http://host/s.json"}}}}, "refers to what"),
    ):
        with pytest.raises(ValueError, match=message):
            foreign_tool(schema, print)

    def offered(name="f", description="", **properties):
        return normalized({"name": name, "description": description, "input_schema": {"properties": properties}})

    long = "x" * (MAX_DESCRIPTION + 5)
    cut = offered(description=long, a={"type": "array", "items": {"description": long}})
    assert cut["description"].endswith(" [... 5 characters omitted]") and len(cut["description"]) < len(long) + 40
    assert cut["parameters"]["properties"]["a"]["items"]["description"] == cut["description"]
    assert offered(name="server.look-up/v2:x")["name"] == "server.look-up/v2:x"
    for name in ("a b", "a<|im_end|>", "x" * 129, "a\nb"):
        with pytest.raises(ValueError, match="a name from outside must have 1 to 128 letters"):
            offered(name=name)
    with pytest.raises(ValueError, match=r"its schema has \d+ characters of JSON, at most 64000"):
        offered(**{f"a{i}": {"enum": ["y" * 100]} for i in range(1000)})
    deep: dict = {}
    for _ in range(20_000):
        deep = {"items": deep}
    with pytest.raises((ValueError, RecursionError)):
        offered(a=deep)
