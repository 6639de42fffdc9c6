"""Schemas of tools, and calls that do not match them: each gives a typed result, never an exception."""

import asyncio
import json
from collections.abc import Callable
from datetime import date
from typing import Annotated, Any, Literal, NotRequired
from unittest.mock import Mock

import pytest
from pydantic import Field
from typing_extensions import TypedDict

from grpo_roc_jax.tools import Registry, ToolUnavailable, default_registry
from grpo_roc_jax.tools.foreign import foreign_tool, normalized
from grpo_roc_jax.tools.registry import MAX_DESCRIPTION, Job, TooLate, failed_result
from grpo_roc_jax.types import ToolResult
from tests.helpers.fake_executor import area

IO = "python_code_with_standard_io"
TOO_LONG = "9437184 bytes of text, at most 8388608 are accepted, and 15728640 with its input"
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


class Place(TypedDict):
    city: str
    zip: NotRequired[int]


def book(to: Place | None = None, seats: list[Literal[1, 2]] = [], rows: list[list[int]] = []) -> str:  # noqa: B006
    """Books seats."""
    return f"{to} {seats} {rows}"


def test_arguments_are_checked_and_the_words_for_wrong_ones_are_these() -> None:
    """They are part of recorded trajectories."""
    registry = default_registry()
    registry.add(area)
    registry.add(book, where="trainer")
    for tool, arguments, message in (
        ("area", {"width": 2}, None),
        (IO, "code", "arguments must be an object, got string"),
        (IO, {"stdin": 1}, "argument 'code' is missing"),
        (IO, {"stdin": 1, "code": 1}, "argument 'stdin' is not known; expected: code, input"),
        (IO, {"code": "x", "input": True}, "argument 'input' must be string, got boolean"),
        (IO, {"code": "x" * (9 << 20)}, TOO_LONG),
        ("jupyter_code", {"code": "x", "y" * 100: 1}, "argument '" + "y" * 79 + " is not known; expected: code"),
        ("area", {"width": 1.5, "unit": "km"}, "argument 'unit' must be 'cm' or 'm'"),
        ("book", {"rows": [[1], [2, "x"]]}, "argument 'rows' item 1 item 1 must be integer, got string"),
        ("book", {"to": {"city": "Bern"}, "seats": [1, 2]}, None),
        ("book", {"to": {"zip": 3}}, "argument 'to' entry 'city' is missing"),
        ("book", {"to": {"city": "Bern", "street": ""}}, "argument 'to' entry 'street' is not known"),
        ("book", {"seats": [1.0]}, "argument 'seats' item 0 must be 1 or 2"),
    ):
        prepared = registry.prepare(tool, arguments, None)
        assert isinstance(prepared, Job) if message is None else prepared.error_message == f"{tool}: {message}"
        assert message is None or (prepared.kind == "bad_arguments" and prepared.counts_as_error)
    result = default_registry().prepare("search", {"q": "x"}, None)
    assert result.kind == "unknown_tool" and result.counts_as_error and f"'search'; known: {IO}" in result.error_message
    assert default_registry().prepare(IO, {"code": "print('\ud800')"}, None) == Job("print('\ud800')")


def test_trusted_functions_give_results_and_never_raise() -> None:
    given = ToolResult("ok", stdout="given", truncated=True)

    def run(**answer: Any) -> ToolResult:
        registry = Registry([foreign_tool({"name": "now"}, Mock(**answer))])
        return registry.run_trusted(registry.prepare("now", {}, None), 0.2)

    assert run(return_value=asyncio.sleep(0.01, 2)).echo == "2" and run(return_value=given) is given
    for error in (AssertionError(), SystemExit(3), TimeoutError("its own")):
        result = run(side_effect=error)
        assert (result.kind, result.error_type) == ("exception", type(error).__name__)
    late = run(return_value=asyncio.sleep(60))
    assert (late.kind, late.limit_hit, late.wall_ms) == ("timeout", "wall", 200.0)
    assert failed_result(TooLate(), None).wall_ms == 0.0
    assert run(side_effect=ToolUnavailable("x")).infra and run(side_effect=ConnectionRefusedError()).infra


def test_functions_that_cannot_be_tools() -> None:
    def hinted(hint: Any) -> Callable:
        def tool(copy):
            """Text."""

        tool.__annotations__ = {"copy": hint} if hint else {}
        return tool

    def of_the_module(x: str = IO) -> None:
        """Text."""

    def enclosed(x: float) -> float:
        """Text."""
        return max(y * len(function.__name__) for y in (x, 0.0))

    def allowed(x: int) -> int:
        """Text."""

        def inner(y: "Callable") -> dict[str, date]:
            return {str(i): i for i in range(y) if inner}

        return len(inner(x)) + bool(x and allowed(x - 1))

    registry = Registry()
    registry.add(area)
    registry.add(allowed)
    function = registry.add(hinted(Annotated[int, Field(ge=1)]), where="trainer")
    assert function.schema["function"]["parameters"]["properties"] == {"copy": {"type": "integer", "minimum": 1}}
    for function, message in (
        (enclosed, "uses function from outside of its body"),
        (registry.prepare, "no method of an object"),
        (hinted("Missing"), "type hints cannot be read: NameError"),
        (of_the_module, r"cannot be defined in the sandbox.*NameError: name 'IO'"),
        (lambda: None, "docstring"),
        (hinted(None), "type hint"),
        (hinted(object), "JSON schema"),
        (hinted(dict[Literal[1, 2], str]), "a dict whose keys are not text"),
        (area, "registered already"),
    ):
        with pytest.raises(ValueError, match=message):
            registry.add(function)
    with pytest.raises(ValueError, match="unknown tools"):
        default_registry(("python",))


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
    registry = Registry([foreign_tool(FOREIGN, lambda **given: sorted(given))])
    assert registry.schemas[0]["function"]["parameters"]["type"] == "object"
    for arguments, fault in (
        ({"to": {"city": "Bern", "zip": None}, "class": "second", "seats": [1, "a"], "notes": {"a": 1}}, ""),
        ([], "arguments must be an object, got array"),
        ({}, "argument 'to' is missing"),
        ({"to": {"city": "Bern"}, "from": 1}, "argument 'from' is not known; expected: to, class, seats, notes, never"),
        ({"to": {}}, "argument 'to' 'city' is a required property"),
        ({"to": {"city": "Bern", "zip": "x"}}, "argument 'to' entry 'zip' must be integer or null, got string"),
        ({"to": {"city": "Bern"}, "class": "first"}, "argument 'class' 'second' was expected"),
        ({"to": {"city": "Bern"}, "never": 1}, "False schema does not allow 1"),
    ):
        prepared = registry.prepare("book", arguments, None)
        assert (prepared.error_message if isinstance(prepared, ToolResult) else "") == (fault and f"book: {fault}")
        if not fault:
            assert registry.run_trusted(prepared).echo == "['class', 'notes', 'seats', 'to']"


def test_patterns_of_schemas_take_a_time_that_is_linear_in_the_text() -> None:
    for parameters, arguments, right in (
        ({"properties": {"s": {"type": "string", "pattern": NESTED}}}, {"s": "a" * 5000 + "b"}, False),
        ({"patternProperties": {NESTED: {}}, "additionalProperties": False}, {"a" * 5000 + "b": 1}, False),
        ({"patternProperties": {NESTED: {"type": "string"}}}, {"a" * 5000: 1}, False),
        ({"patternProperties": {NESTED: {}}, "additionalProperties": False}, {"aa": 1}, True),
        ({"patternProperties": {NESTED: {}}, "unevaluatedProperties": False}, {"a" * 5000 + "b": 1}, True),
        ({"properties": {"s": {"pattern": r"^\p{L}+$"}}}, {"s": "Grüße"}, True),  # as JavaScript writes them
        ({"properties": {"s": {"pattern": r"^(?=.*\d)(?=.*x)"}}}, {"s": "none of both"}, True),  # is not checked
    ):
        registry = Registry([foreign_tool({"name": "find", "parameters": parameters}, lambda **given: "found")])
        answer = registry.prepare("find", arguments, None)
        assert isinstance(answer, Job) if right else answer.kind == "bad_arguments"


def test_schemas_from_outside_without_parameters_those_that_cannot_be_used_and_their_bounds() -> None:
    wrapped = {"type": "function", "function": {"name": "now", "parameters": {}}}
    for schema in ({"name": "now"}, {"name": "now", "description": "The time."}, wrapped):
        function = Registry([foreign_tool(schema, print)]).schemas[0]["function"]
        assert function["description"] == schema.get("description", "")
        assert function["parameters"] == {"type": "object", "properties": {}}
    for schema, message in (
        ({"description": "?"}, "no name"),
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
    for name in ("a<|im_end|>", "x" * 129, "a\nb"):
        with pytest.raises(ValueError, match="a name from outside must have 1 to 128 letters"):
            offered(name=name)
    with pytest.raises(ValueError, match=r"its schema has \d+ characters of JSON, at most 64000"):
        offered(**{f"a{i}": {"enum": ["y" * 100]} for i in range(1000)})
