"""Tools whose schemas come from elsewhere: other packages, servers, data sets. jsonschema checks their arguments.

Such schemas may lack `properties`, use `$ref`, lists of types, booleans in place of schemas or nested requirements, all
of which is valid JSON Schema (draft 2020-12). This module normalizes the form around them and words the errors for the
policy.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import pydantic_core
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.validators import extend
from pydantic_core import SchemaValidator, core_schema
from referencing import Registry as Documents
from referencing.exceptions import Unresolvable

from grpo_roc_jax.tools.registry import Job, Signature, Tool, json_type, outside_schema, place_of

log = logging.getLogger(__name__)


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
        Draft202012Validator.check_schema(parameters, format_checker=FormatChecker(()))  # for patterns see `matcher`
    except SchemaError as error:
        raise ValueError(f"tool {name!r}: its parameters are no valid JSON schema: {error.message}") from error
    return outside_schema(
        {"name": name, "description": str(function.get("description") or ""), "parameters": parameters}
    )


# ---- regular expressions: arguments are texts of the policy, and Python's matcher may take years for 30 characters ---


@lru_cache(1024)
def matcher(pattern: str) -> Callable[[str], bool] | None:
    """Whether a text holds a match of a pattern, in a time that is linear in the text. None for a pattern that has no
    such matcher (look-around, back-references) or is written in another way than Rust's: it is not checked."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern)).isinstance_python
    except pydantic_core.SchemaError:
        log.warning("schemas of tools: the pattern %.200r is not checked, since no linear matcher reads it", pattern)
        return None


def holds(pattern: str, text: str) -> bool:
    """Whether the text holds a match; true for a pattern that is not checked."""
    matches = matcher(pattern)
    return matches is None or matches(text)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not holds(pattern, instance):
        yield ValidationError(f"{instance!r:.100} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    for pattern, part in patterns.items() if isinstance(instance, dict) else ():
        matches = matcher(pattern)
        for name in filter(matches, instance) if matches else ():
            yield from validator.descend(instance[name], part, path=name, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    patterns = schema.get("patternProperties", {})
    if not patterns:
        yield from Draft202012Validator.VALIDATORS["additionalProperties"](validator, allowed, instance, schema)
        return
    for name in instance if isinstance(instance, dict) else ():
        if name in schema.get("properties", {}) or any(holds(pattern, name) for pattern in patterns):
            continue
        if allowed is False:
            yield ValidationError(f"{name!r:.80} is not known, and no pattern of names admits it")
        else:
            yield from validator.descend(instance[name], allowed, path=name)


_KEYWORDS = {"pattern": _pattern, "patternProperties": _pattern_properties}
_KEYWORDS |= {"additionalProperties": _additional_properties}
LinearValidator = extend(Draft202012Validator, _KEYWORDS)
_UNCHECKED = extend(LinearValidator, {"unevaluatedProperties": lambda *_: iter(())})
"""For schemas with `unevaluatedProperties` beside patterns of names, which jsonschema matches by itself."""


@dataclass(frozen=True)
class ForeignSignature(Signature):
    """A description whose arguments jsonschema checks; `$ref` is followed within the schema only."""

    validator: None = None

    @cached_property
    def _validator(self) -> Any:
        text = str(self.parameters)
        kind = _UNCHECKED if "'patternProperties'" in text and "'unevaluatedProperties'" in text else LinearValidator
        return kind(self.parameters, registry=Documents())

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
        if error.validator == "additionalProperties" and not path and "patternProperties" not in self.parameters:
            extra = next((name for name in arguments if name not in known), None)
            if extra is None:  # known to the schema, and not to a part of it
                return error.message[:200]
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
