"""Sections and kinds: frozen dataclasses whose values are checked when they are made.

A section is a dataclass under `@settings`. A choice among kinds is an *axis*: an abstract base class, and below it one
dataclass under `@kind("name")` for each kind, with that kind's own settings next to the functions that read them. A
field typed with the axis takes a kind's name or a mapping with `kind` in it:

    advantage: pass_at_k                       # the kind with its defaults
    advantage: {kind: pass_at_k, k: 4}         # and with a setting of its own

Importing a file that defines a kind is all it takes to add one, inside the package or outside.
"""

import dataclasses
import inspect
import json
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic.types import AllowInfNan
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from grpo_roc_jax.hints.other_names import CLOSE_ALONE, close_to, near_choice, use_recipe

T = TypeVar("T")

AtLeast1 = Annotated[int, Ge(1)]
AtLeast2 = Annotated[int, Ge(2)]
Count = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Lt(1 << 63)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
PositiveShare = Annotated[float, Gt(0), Le(1)]
InnerShare = Annotated[float, Gt(0), Lt(1)]
PositiveOrInfinite = Annotated[float, Gt(0), AllowInfNan()]
"""For settings that mean something at infinity, and say what; every other number must be finite."""

NO_SWITCH = "must be a value other than true and false"
"""Message for a switch given to a setting of another type, for which it would be read as 1 or 0."""
NO_SUCH = "has no such setting"
"""Part of the message for a setting that no kind of an axis has."""

_CHECKS = ConfigDict(extra="forbid", use_attribute_docstrings=True, arbitrary_types_allowed=True, allow_inf_nan=False)


@dataclass_transform(frozen_default=True)
def settings(cls: type[T]) -> type[T]:
    """A frozen dataclass whose fields are checked against their types and constraints when a value is made."""
    return checked_dataclass(frozen=True, config=_CHECKS)(cls)


class Axis:
    """Base class of everything that is chosen by kind. Subclass it once for an axis, and subclass that for
    each kind."""

    axis: ClassVar[str] = ""
    """Name of the axis, given by its base class: `class Advantage(Axis, axis="advantage")`."""
    kind: ClassVar[str] = ""
    """Name of the kind; set by `@kind`."""
    kinds: ClassVar[dict[str, type]] = {}
    """Kinds of the axis by name."""
    other: ClassVar[str] = ""
    """The kind for a text that is not the name of a kind; the text becomes its `path`. Empty where such a text is an
    error."""

    def __init_subclass__(cls, axis: str = "", **more: Any) -> None:
        super().__init_subclass__(**more)
        if axis:
            cls.axis, cls.kinds = axis, {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if cls.kind:
            return core_schema.no_info_before_validator_function(cls._own_settings, handler(source))
        return core_schema.no_info_plain_validator_function(cls.read)

    @classmethod
    def read(cls, value: Any) -> Any:
        """The kind that a configuration names: a value of the axis, a name, or a mapping with `kind`."""
        if isinstance(value, cls):
            return value
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, str):
            value = cls.spelled_out(value)
        if isinstance(value, bool):  # `lora: true` in a file
            value = {"kind": str(value).lower()}
        if not isinstance(value, Mapping) or not isinstance(value.get("kind"), str):
            raise PydanticCustomError(
                "kind", "must be one of {kinds}, or a mapping with 'kind'", {"kinds": cls.names()}
            )
        name = value["kind"]
        if name not in cls.kinds:
            near = near_choice(name, cls.kinds)
            recipe = use_recipe(name)
            text = f"unknown kind '{name}'; must be one of {cls.names()}"
            text += f"; {recipe}" if recipe else f"; did you mean '{near}'?" if near else ""
            raise PydanticCustomError("kind", "{text}", {"text": text})
        return adapter(cls.kinds[name]).validate_python(value)

    @classmethod
    def spelled_out(cls, text: str) -> dict[str, Any]:
        """The mapping that a plain text abbreviates."""
        other = cls.other and text not in cls.kinds
        return {"kind": cls.other, "path": text} if other else {"kind": text}

    @classmethod
    def _own_settings(cls, value: Any) -> Any:
        """The settings of this kind from its name or mapping in a configuration."""
        if isinstance(value, str) and value == cls.kind:
            return {}
        if not isinstance(value, Mapping):
            return value
        if value.get("kind", cls.kind) != cls.kind:
            raise PydanticCustomError("kind", "must be kind {kind}", {"kind": cls.kind})
        kind_settings = {key: item for key, item in value.items() if key != "kind"}
        for key, item in kind_settings.items():
            if key not in fields_of(cls):
                raise PydanticCustomError("setting", "{said}", {"said": cls.misplaced(key), "key": key})
            field_type = type_of(cls, key)
            chooses = isinstance(field_type, type) and issubclass(field_type, Axis)  # whose message names the kinds
            if isinstance(item, bool) and not chooses and not takes_switch(field_type):
                raise PydanticCustomError("setting", "{said}", {"said": NO_SWITCH, "key": key})
        return kind_settings

    @classmethod
    def choices(cls) -> dict[str, type]:
        """The kinds that a field of this type can hold: all of an axis, or the one that it names."""
        return {cls.kind: cls} if cls.kind else cls.kinds

    @classmethod
    def names(cls) -> str:
        """The kinds of the axis, for messages."""
        return ", ".join(sorted(cls.kinds))

    @classmethod
    def misplaced(cls, key: str) -> str:
        """The message for a setting that this kind does not have."""
        owners = [other for other, kind_class in sorted(cls.kinds.items()) if key in fields_of(kind_class)]
        setting_names = ", ".join(fields_of(cls)) or "no settings"
        if owners:
            return f"is a setting of kind {', '.join(owners)}; kind {cls.kind} has {setting_names}"
        text = f"kind {cls.kind} {NO_SUCH}; it has {setting_names}"
        others = {field: other for other, each in sorted(cls.kinds.items()) for field in fields_of(each)}
        near = close_to(key, fields_of(cls)) or close_to(key, others, CLOSE_ALONE)
        owner = "" if near in fields_of(cls) else f" of kind {others.get(near)}"
        return f"{text}; did you mean '{near}'{owner}?" if near else text


def kind(name: str) -> Callable[[type[T]], type[T]]:
    """Makes a class a kind of its axis: checked settings, chosen by `name`.

    Raises:
        ValueError: The name is taken by a class of another file.
        TypeError: The class belongs to no axis.
    """

    @dataclass_transform(frozen_default=True)
    def register(cls: type[T]) -> type[T]:
        if not (issubclass(cls, Axis) and cls.axis):
            raise TypeError(f"{cls.__name__}: kind {name!r} has no axis; derive it from one, such as Advantage")
        cls.kind = name
        made = settings(cls)
        existing = cls.kinds.get(name)
        if existing is not None and (existing.__module__, existing.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"kind {name!r} exists already: {inspect.getsourcefile(existing)}; choose another name for the one in "
                f"{inspect.getsourcefile(cls)}"
            )
        cls.kinds[name] = made
        return made

    return register


@cache
def adapter(cls: type) -> TypeAdapter:
    """The validator of a class, made once."""
    return TypeAdapter(cls)


def fields_of(cls: type) -> dict[str, dataclasses.Field]:
    """The settings of a section or kind by name."""
    return {field.name: field for field in dataclasses.fields(cls)}


@cache
def _types_of(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=False)


def type_of(cls: type, name: str) -> Any:
    """The type of a field without its constraints, and without None."""
    hint = _types_of(cls)[name]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        alternatives = [part for part in typing.get_args(hint) if part is not type(None)]
        return alternatives[0] if len(alternatives) == 1 else hint
    return hint


def takes_switch(field_type: Any) -> bool:
    """Whether true and false are values of a type."""
    return field_type in (bool, Any) or bool in typing.get_args(field_type)


def default_of(field: dataclasses.Field) -> Any:
    """A field's default; `dataclasses.MISSING` if it has none."""
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def defaults_of(cls: type) -> dict[str, Any]:
    """The defaults of a section or kind as plain nested values; fields without a default are left out."""
    defaults = {name: default_of(field) for name, field in fields_of(cls).items()}
    return {name: as_mapping(value) for name, value in defaults.items() if value is not dataclasses.MISSING}


def described(cls: type) -> dict[str, str]:
    """The docstring of each field."""
    descriptions: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        for name, info in getattr(base, "__pydantic_fields__", {}).items():
            if info.description:
                descriptions[name] = inspect.cleandoc(info.description)
    return {name: text for name, text in descriptions.items() if name in fields_of(cls)}


def is_left_out(cls: type, name: str, value: Any) -> bool:
    """Whether a field is a section, or a list of sections, that is absent by default."""
    if value is not None or fields_of(cls)[name].default is not None:
        return False
    field_type = type_of(cls, name)
    return dataclasses.is_dataclass(field_type) or typing.get_origin(field_type) is tuple


def absent_sections(cls: type, prefix: str = "") -> Iterator[str]:
    """`section.field` of the sections, and lists of sections, that are absent by default."""
    for name in fields_of(cls):
        if is_left_out(cls, name, None):
            yield f"{prefix}{name}"
        elif dataclasses.is_dataclass(section := type_of(cls, name)) and not issubclass(section, Axis):
            yield from absent_sections(section, f"{prefix}{name}.")


def as_mapping(value: Any) -> Any:
    """Settings as plain nested values, with `kind` first if there is one; a kind without settings becomes its name."""
    if isinstance(value, Axis):
        kind_settings = {name: as_mapping(getattr(value, name)) for name in fields_of(type(value))}
        return {"kind": value.kind, **kind_settings} if kind_settings else value.kind
    if dataclasses.is_dataclass(value):
        section_values = {name: getattr(value, name) for name in fields_of(type(value))}
        return {
            name: as_mapping(item) for name, item in section_values.items() if not is_left_out(type(value), name, item)
        }
    if isinstance(value, Mapping):
        return {name: as_mapping(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_mapping(item) for item in value]
    return str(value) if isinstance(value, str) else value


def as_text(value: Any) -> str:
    """A value on one line, as in a YAML file; strings have quotes only if these are needed."""
    if isinstance(value, str):
        clear = value.strip() == value != "" and "\n" not in value
        return str(value) if clear else json.dumps(value, ensure_ascii=False)
    try:
        text = yaml.safe_dump(as_mapping(value), default_flow_style=True, sort_keys=False, width=1 << 20)
    except yaml.YAMLError:
        return repr(value)
    return " ".join(text.removesuffix("...\n").split())
