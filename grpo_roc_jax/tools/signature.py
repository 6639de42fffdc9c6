"""The arguments of a tool: their JSON schema and their check, both from a function's type hints and docstring.

pydantic makes the schema and finds errors in arguments; docstring_parser reads the docstring. The wording of errors is
kept here, since the policy sees it and recorded trajectories hold it.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_type_hints

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

TYPE_ERRORS = {
    "bool_type": "boolean", "dict_type": "object", "float_type": "number", "int_type": "integer", "list_type": "array",
    "none_required": "null", "string_type": "string",
}  # fmt: skip
"""pydantic's name of the error -> the JSON type that was expected."""
JSON_VALUES = frozenset((
    "any", "none", "bool", "int", "float", "str", "literal", "list", "dict", "nullable", "union", "definitions",
    "definition-ref", "default", "model", "model-fields", "model-field", "typed-dict", "typed-dict-field",
))  # fmt: skip
"""pydantic's names of the types whose JSON values are the values themselves."""
UNKNOWN_ARGUMENT = ("extra_forbidden", "invalid_key")


class Arguments(BaseModel):
    """Base of the models of arguments: values are not converted, and unknown arguments are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class ArgumentsSchema(GenerateJsonSchema):
    """Schemas for prompts: no titles, keys in their original order.

    A function gets JSON values without conversion, so types with other values (dates, dataclasses) are refused.
    """

    def generate_inner(self, schema: Any) -> dict[str, Any]:
        known = schema["type"] in JSON_VALUES
        if not known or (schema["type"] == "model" and not issubclass(schema["cls"], Arguments)):
            self.handle_invalid_for_json_schema(schema, "its values are not JSON values")
        return super().generate_inner(schema)

    def literal_schema(self, schema: Any) -> dict[str, Any]:
        return {"enum": list(schema["expected"])}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def sort(self, value: dict[str, Any], parent_key: str | None = None) -> dict[str, Any]:
        return value


@dataclass(frozen=True)
class Signature:
    """The description of a function for the policy, and the check of the arguments of a call."""

    description: str
    """First paragraph of the docstring."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments object."""
    model: type[Arguments]

    def fault(self, arguments: Any) -> str:
        """What is wrong with the arguments, in words for the policy; empty if they are valid."""
        if not isinstance(arguments, Mapping):
            return f"arguments must be an object, got {json_type(arguments)}"
        try:
            self.model.model_validate(dict(arguments))
        except ValidationError as error:
            return self._describe(error.errors(include_url=False, include_context=False), arguments)
        return ""

    def _describe(self, errors: list[Any], arguments: Mapping[str, Any]) -> str:
        """The first error in words: a missing argument, else the first wrong one in the order of the arguments."""
        missing = [one["loc"][0] for one in errors if one["type"] == "missing" and len(one["loc"]) == 1]
        if missing:
            return f"argument {missing[0]!r} is missing"
        order = list(arguments)
        first = min(errors, key=lambda one: order.index(one["loc"][0]))
        name, *inner = first["loc"]
        if first["type"] in UNKNOWN_ARGUMENT and not inner:
            return f"argument {name!r:.80} is not known; expected: {', '.join(self.parameters['properties'])}"
        if first["type"] in TYPE_ERRORS:
            fault = f"must be {TYPE_ERRORS[first['type']]}, got {json_type(first['input'])}"
        else:
            fault = first["msg"].replace("Input should", "must", 1)
        return f"argument {name!r} {place_of(inner, arguments[name])}{fault}"


def place_of(path: list[int | str], value: Any) -> str:
    """The place of an error inside a value, in words."""
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
    """The signature of a function or bound method.

    Raises:
        ValueError: it has no docstring, or a parameter has no usable type hint.
    """
    return _signature_of(getattr(function, "__func__", function), inspect.ismethod(function))


@lru_cache(maxsize=256)
def _signature_of(function: Callable[..., Any], bound: bool) -> Signature:
    name = function.__name__
    text = inspect.getdoc(function)
    if not text:
        raise ValueError(f"tool {name!r} has no docstring; the policy reads it to learn what the tool does")
    document = docstring_parser.parse(text)
    described = {one.arg_name: " ".join((one.description or "").split()) for one in document.params}
    hints = get_type_hints(function, include_extras=True)
    parameters = list(inspect.signature(function).parameters.values())[bound:]
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"tool {name!r}: parameter {parameter.name!r} needs a type hint and a name of its own")
        hint = hints[parameter.name]
        if hint is object:
            raise ValueError(f"{name}.{parameter.name}: type {hint!r} has no JSON schema; use Any for any value")
        default = ... if parameter.default is parameter.empty else None
        # Names of arguments are aliases, since some, such as `copy` or `_x`, cannot be names of a model's fields.
        fields[f"argument_{number}"] = (hint, Field(default, alias=parameter.name))
    try:
        model = create_model(name, __base__=Arguments, **fields)
        made = model.model_json_schema(schema_generator=ArgumentsSchema)
    except PydanticUserError as error:
        message = f"tool {name!r}: a parameter's type has no JSON schema ({error.message}); "
        raise ValueError(message + "use str, int, float, bool, Literal, list, dict or TypedDict") from error
    properties = {one: dict(part) for one, part in made.get("properties", {}).items()}
    for one, part in properties.items():
        part.pop("default", None)
        if described.get(one):
            part["description"] = described[one]
    schema = {"type": "object", "properties": properties, "required": made.get("required", [])}
    if "$defs" in made:
        schema["$defs"] = made["$defs"]
    return Signature((document.description or "").split("\n\n")[0].strip(), schema, model)
