"""Schemas of tools, and calls that do not fit them: each a typed result, never an exception."""

import pytest
from sample_tools import area

from grpo_roc_jax.tools import Registry, default_registry
from grpo_roc_jax.tools.registry import Job
from grpo_roc_jax.types import ToolResult

IO = "python_code_with_standard_io"


def test_schema_of_a_function() -> None:
    schema = Registry().add(area).schema
    assert schema["function"]["name"] == "area"
    assert schema["function"]["description"] == "Area of a rectangle."
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "width": {"type": "number", "description": "Of the rectangle, in the unit."},
            "height": {"type": "number"},
            "unit": {"enum": ["cm", "m"], "description": "Of all lengths."},
        },
        "required": ["width"],
    }


@pytest.mark.parametrize(
    ("tool", "arguments", "kind"),
    [
        (IO, {"code": "x"}, None),
        (IO, {"code": "x", "input": "y"}, None),
        (IO, {"code": "x", "input": None}, None),
        (IO, {"code": 5}, "bad_arguments"),
        (IO, {}, "bad_arguments"),
        (IO, {"code": "x", "stdin": "y"}, "bad_arguments"),
        (IO, {"code": "x", "input": 3}, "bad_arguments"),
        (IO, "code", "bad_arguments"),
        (IO, None, "bad_arguments"),
        (IO, ["x"], "bad_arguments"),
        (IO, {"code": "x" * (9 << 20)}, "bad_arguments"),
        ("jupyter_code", {"code": "x"}, None),
        ("jupyter_code", {"code": "x", "input": ""}, "bad_arguments"),
        ("search", {"q": "x"}, "unknown_tool"),
        ("", {}, "unknown_tool"),
        ("area", {"width": 2}, None),
        ("area", {"width": True}, "bad_arguments"),
        ("area", {"width": 1.5, "unit": "km"}, "bad_arguments"),
    ],
)
def test_arguments_are_checked(tool: str, arguments: object, kind: str | None) -> None:
    registry = default_registry()
    registry.add(area)
    prepared = registry.prepare(tool, arguments, None)
    if kind is None:
        assert isinstance(prepared, Job)
    else:
        assert isinstance(prepared, ToolResult)
        assert prepared.kind == kind and prepared.counts_as_error and prepared.error_message


def nested(rows: list[list[int]], names: dict[str, str], limit: int | None = None) -> int:
    """Counts things."""
    return len(rows) + len(names)


def test_nested_types_are_checked() -> None:
    registry = Registry()
    registry.add(nested, where="trainer")
    assert isinstance(registry.prepare("nested", {"rows": [[1]], "names": {"a": "b"}, "limit": None}, None), Job)
    for wrong in ({"rows": [["x"]], "names": {}}, {"rows": [], "names": {"a": 1}}, {"rows": {}, "names": {}}):
        assert registry.prepare("nested", wrong, None).kind == "bad_arguments"


def test_trusted_functions_give_results_and_never_raise() -> None:
    registry = Registry()
    registry.add(area, where="trainer")
    assert registry.run_trusted(registry.prepare("area", {"width": 2.0, "height": 3.0}, None)).echo == "6.0 cm"

    def broken(x: int) -> int:
        """Fails."""
        return x // 0

    registry.add(broken, where="trainer")
    result = registry.run_trusted(registry.prepare("broken", {"x": 1}, None))
    assert (result.kind, result.error_type) == ("exception", "ZeroDivisionError")


def test_functions_that_cannot_be_tools() -> None:
    registry = Registry()
    with pytest.raises(ValueError, match="docstring"):
        registry.add(lambda: None)

    def untyped(x):
        """Text."""

    with pytest.raises(ValueError, match="type hint"):
        registry.add(untyped)

    def strange(x: object) -> None:
        """Text."""

    with pytest.raises(ValueError, match="JSON schema"):
        registry.add(strange)
    registry.add(area)
    with pytest.raises(ValueError, match="registered already"):
        registry.add(area)
    with pytest.raises(ValueError, match="unknown tools"):
        default_registry(("python",))
