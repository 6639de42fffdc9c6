"""Tools whose schemas come from elsewhere: other packages, servers, data sets. jsonschema checks their arguments.

Such schemas may lack `properties`, use `$ref`, lists of types, booleans in place of schemas or nested requirements, all
of which is valid JSON Schema (draft 2020-12). This module normalizes the form around them and words the errors for the
policy.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry as Documents
from referencing.exceptions import Unresolvable

from grpo_roc_jax.tools.registry import Job, Signature, Tool, json_type, outside_schema, place_of


def normalized(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The function of a tool's schema: its name, description, and parameters as an object schema with `properties`.

    Args:
        schema: In OpenAI's form, its `function` alone, or in the form of MCP (`input_schema` or `inputSchema`).

    Raises:
        ValueError: It has no name, its parameters are no valid schema of an object, or see `outside_schema`.
    """
    function = schema.get("function", schema) if isinstance(schema, Mapping) else schema
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"the schema of a tool has no name: {str(schema)[:200]}")
    given = next((function[key] for key in ("parameters", "input_schema", "inputSchema") if function.get(key)), {})
    if not isinstance(given, Mapping) or given.get("type", "object") not in ("object", ["object"]):
        raise ValueError(f"tool {name!r}: its parameters must be the schema of an object, got {str(given)[:200]}")
    parameters = {"type": "object", "properties": {}, **given} | {"type": "object"}
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ValueError(f"tool {name!r}: its parameters are no valid JSON schema: {error.message}") from error
    return outside_schema(
        {"name": name, "description": str(function.get("description") or ""), "parameters": parameters}
    )


@dataclass(frozen=True)
class ForeignSignature(Signature):
    """A description whose arguments jsonschema checks; `$ref` is followed within the schema only."""

    model: None = None

    @cached_property
    def _validator(self) -> Draft202012Validator:
        return Draft202012Validator(self.parameters, registry=Documents())

    def fault(self, arguments: Any) -> str:
        if not isinstance(arguments, Mapping):
            return f"arguments must be an object, got {json_type(arguments)}"
        try:
            error = best_match(self._validator.iter_errors(dict(arguments)))
        except (Unresolvable, ArithmeticError, RecursionError) as unknown:  # the policy's numbers may be of any size
            return f"arguments cannot be checked: {unknown}"
        if error is None:
            return ""
        path, known = list(error.absolute_path), self.parameters["properties"]
        if error.validator == "required" and not path:
            missing = next(name for name in error.validator_value if name not in arguments)
            return f"argument {missing!r} is missing"
        if error.validator == "additionalProperties" and not path:
            extra = next(name for name in arguments if name not in known)
            return f"argument {extra!r:.80} is not known; expected: {', '.join(known)}"
        if error.validator == "type":
            kinds = error.validator_value
            problem = (
                f"must be {kinds if isinstance(kinds, str) else ' or '.join(kinds)}, got {json_type(error.instance)}"
            )
        else:
            problem = error.message[:200]
        return f"argument {path[0]!r} {place_of(path[1:], arguments[path[0]])}{problem}" if path else problem


@dataclass(frozen=True)
class ForeignTool(Tool):
    """A tool with a schema of its own."""

    given: Mapping[str, Any] = field(default_factory=dict)
    """The schema as `normalized` returns it."""

    @property
    def name(self) -> str:
        return self.given["name"]

    @cached_property
    def signature(self) -> ForeignSignature:
        return ForeignSignature(self.given["description"], self.given["parameters"])


def foreign_tool(schema: Mapping[str, Any], function: Callable[..., Any]) -> ForeignTool:
    """A tool from a schema of another origin; add it by `Registry([*tools, foreign_tool(...)])`.

    Args:
        schema: See `normalized`.
        function: Called in the trainer with the arguments by name; may be a coroutine function.

    Raises:
        ValueError: The schema cannot be used, for example because it refers to another document.
    """
    given = normalized(schema)
    tool = ForeignTool(
        function, lambda arguments, session: Job("", function=function, arguments=arguments), given=given
    )
    try:
        for error in tool.signature._validator.iter_errors({name: None for name in given["parameters"]["properties"]}):
            del error  # errors in the values do not matter here; references are followed on the way
    except Unresolvable as unknown:
        raise ValueError(f"tool {given['name']!r}: its schema refers to what it does not hold: {unknown}") from unknown
    return tool
