"""Layers of settings: YAML files and command-line words as nested values, merged from the lowest to the highest.

A layer remembers where each of its values was written, so that a mistake is reported with its file and line.
"""

import re
import typing
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_roc_jax.hints.other_names import near_choice, use_recipe
from grpo_roc_jax.settings.files import MOST_YAML_BYTES, parse_yaml, read_text, yaml_errors, yaml_root
from grpo_roc_jax.settings.options import (
    NO_SWITCH,
    Axis,
    as_text,
    defaults_of,
    fields_of,
    is_left_out,
    takes_switch,
    type_of,
)
from grpo_roc_jax.settings.secrets import hidden

KeyPath = tuple[str, ...]
"""Names from the root to a value, such as ("advantage", "k")."""
COMMAND_LINE = "command line"


class ConfigError(ValueError):
    """A configuration that cannot run; the message says what was got, the constraint and what to change."""

    def __init__(self, message: str):
        super().__init__(hidden(message))


@contextmanager
def config_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turns an OSError, a ValueError or one of `kinds` within the block (or the decorated function) into a
    `ConfigError` with the same message."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, *kinds) as error:
        raise ConfigError(str(error)) from error


class Word(str):
    """A value as typed on the command line; its meaning depends on the type of the setting."""


@dataclass
class Layer:
    """The values of one file or of the command line."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    """Where each value was written, such as `toy.yaml, line 3`."""
    blank: set[KeyPath] = field(default_factory=set)
    """Keys of a file without a value, not even `null`."""


# ---- YAML files ----------------------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Only `true` and `false` are booleans; `on`, `off`, `yes` and `no` are words, as settings use them. No number is
    of base 60 or 8: 1:30 is a text, and 010 is not 8. A date is a text too."""


BOOL_TAG, INT_TAG, FLOAT_TAG = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float"))
PLAIN_SCALARS = (
    (BOOL_TAG, r"true|True|false|False", "tTfF"),
    (INT_TAG, r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)", "-+0123456789"),
    (
        FLOAT_TAG,
        r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
)
"""(tag, pattern, first characters) of the scalars without quotes that are no text."""
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for scalar_tag, scalar_pattern, first_characters in PLAIN_SCALARS:
    _Loader.add_implicit_resolver(scalar_tag, re.compile(f"^(?:{scalar_pattern})$"), list(first_characters))


def read_yaml(path: Path) -> Layer:
    """The values of one file, including its `base`.

    Raises:
        ConfigError: The file is not YAML, is not a mapping, or gives a key twice.
    """
    layer = Layer(path.name)
    if path.suffix == ".toml":
        raise ConfigError(f"{path}: is TOML; settings are written in YAML, a section as `optim: {{lr: 1.0e-5}}`")
    try:
        text = read_text(path, MOST_YAML_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    with config_errors():
        with yaml_errors(str(path)):
            loader = _Loader(text)
        root = yaml_root(loader, str(path))
    loader.name = path.name
    if root is None:
        return layer
    if not isinstance(root, yaml.MappingNode):
        got = {"scalar": "single value", "sequence": "list"}.get(root.id, root.id)
        raise ConfigError(f"{path}: must be a mapping of sections, got a {got}")
    layer.values = _plain(loader, root, (), layer)
    return layer


def _plain(loader: yaml.SafeLoader, node: yaml.Node, path: KeyPath, layer: Layer) -> Any:
    """The value of a node. The line of every value in it is recorded in `layer.places`."""
    layer.places[path] = f"{layer.name}, line {node.start_mark.line + 1}"
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, (*path, str(i)), layer) for i, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(loader, node)
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            line = key_node.start_mark.line + 1
            raise ConfigError(
                f"{layer.name}, line {line}: `<<` is not read; write the settings out, or name a `base` file"
            )
        key = str(_scalar(loader, key_node))
        if key in values:
            line = key_node.start_mark.line + 1
            raise ConfigError(f"{layer.name}, line {line}: {'.'.join((*path, key))} is given twice; keep one of them")
        values[key] = _plain(loader, value_node, (*path, key), layer)
        if isinstance(value_node, yaml.ScalarNode) and not value_node.value and value_node.style is None:
            layer.blank.add((*path, key))
    return values


@config_errors()
def _scalar(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    with yaml_errors(f"{loader.name}, line {node.start_mark.line + 1}"):
        return loader.construct_object(node, deep=True)


# ---- the command line ----------------------------------------------------------------------------------------------


def read_words(words: Sequence[str], config_type: type | None = None) -> Layer:
    """The layer of `--section.field value`, `--section.field=value` and `section.field=value`, left to right.

    Words after a name up to the next name are its values; a name without a value switches its setting on. With a
    `config_type`, `a=b` after a name is a value unless `a` begins a setting: a path, or the name of a source.

    Raises:
        ConfigError: A value without a name.
    """
    layer = Layer(COMMAND_LINE)
    known = None if config_type is None else {field.name for field in fields(config_type)}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not _is_name(word):
            raise ConfigError(f"{word!r} on the command line has no name; write --section.field {word}")
        values = [value] if equals else []
        while rest and not _is_name(rest[0], known):
            values.append(rest.pop(0))
        path = tuple(name.replace("-", "_").split("."))
        given = Word(values[0]) if len(values) == 1 else [Word(value) for value in values] if values else True
        put(layer.values, path, given, config_type)
        layer.places[path] = COMMAND_LINE
    return layer


def _is_name(word: str, known: Collection[str] | None = None) -> bool:
    match = re.match(r"([a-z][a-z_0-9]*)(\.[a-z_0-9]+)*=", word)
    return word.startswith("--") or (match is not None and (known is None or match[1] in known))


def put(values: dict[str, Any], path: KeyPath, value: Any, cls: type | None = None) -> None:
    """Sets a value of a section of type `cls`, if that is known. A kind and the settings of that kind may come in
    either order; of a section as a whole and its settings, what comes later counts."""
    *parents, last = path
    for name in parents:
        cls = section_in(cls, name)
        below = opened(values.setdefault(name, {}))  # `--advantage '{kind: pass_at_k, k: 4}' --advantage.of.scale none`
        if cls and below != "null" and not isinstance(below, dict):
            return  # `--model DIR --model.layers 2`: refused where it is merged
        if not isinstance(below, dict):  # `--advantage pass_at_k --advantage.k 4`, `--watch null --watch.steps 3`
            below = {} if cls else {"kind": below}
        values[name] = values = below
    if not isinstance(values.get(last), dict):
        values[last] = value
    elif isinstance(mapping := opened(value), dict):  # `--advantage.k 4 --advantage '{kind: pass_at_k}'`
        values[last] |= mapping
    elif section_in(cls, last):  # `--watch.steps 3 --watch null`
        values[last] = value
    else:  # `--advantage.k 4 --advantage pass_at_k`
        values[last]["kind"] = value


def opened(value: Any) -> Any:
    """Words that form one mapping are returned as that mapping; other values are unchanged."""
    words = value if isinstance(value, list) else [value]
    is_mapping = bool(words) and all(isinstance(word, Word) for word in words) and words[0].startswith("{")
    if not is_mapping or (len(words) > 1 and _are_mappings(words)):
        return value
    parsed = _parsed(" ".join(words))
    return parsed if isinstance(parsed, dict) else value


def _are_mappings(words: Sequence[str]) -> bool:
    """Whether each word that begins a mapping also ends it."""
    return all(word[-1:] == "}" for word in words if word[:1] == "{")


# ---- merging -------------------------------------------------------------------------------------------------------


def is_axis(field_type: Any) -> bool:
    return isinstance(field_type, type) and issubclass(field_type, Axis)


def is_section(field_type: Any) -> bool:
    return isinstance(field_type, type) and is_dataclass(field_type) and not issubclass(field_type, Axis)


def section_in(cls: type | None, name: str) -> type | None:
    """The section of that name in a section; None if it has none, or is not known."""
    field_type = type_of(cls, name) if cls and name in fields_of(cls) else None
    return field_type if is_section(field_type) else None


def item_axis(field_type: Any) -> type[Axis] | None:
    """The axis whose kinds a field lists, such as `shaping`; None for other fields."""
    parts = typing.get_args(field_type) if typing.get_origin(field_type) is tuple else ()
    return parts[0] if parts and is_axis(parts[0]) else None


def merge(cls: type, below: dict[str, Any], layer: Layer, above: dict[str, Any], path: KeyPath = ()) -> dict[str, Any]:
    """The values of a section, overridden by those of a higher layer.

    Another `kind` in the higher layer starts from that kind's defaults; a list replaces a list.

    Args:
        cls: Dataclass of the section.
        below: Complete values of the section so far.
        layer: The higher layer, for messages.
        above: Values of the higher layer for this section.
        path: Names from the root to the section.

    Raises:
        ConfigError: A key does not exist in the section; the message has the nearest one that does.
    """
    merged = dict(below)
    for name, value in above.items():
        here = (*path, name)
        if name not in fields_of(cls):
            while isinstance(value, dict) and value:  # to the name that was written out
                here, value = (*here, next(iter(value))), next(iter(value.values()))
            raise ConfigError(f"unknown key '{'.'.join(here)}' ({layer.places.get(here, layer.name)})")
        field_type = type_of(cls, name)
        where = layer.places.get(here, layer.name)
        if (value is None or value == "null") and here not in layer.blank and is_left_out(cls, name, None):
            merged[name] = None
            continue
        if is_section(field_type):
            value = opened(value)
            if not isinstance(value, dict):
                field = ".".join([*here, next(iter(fields_of(field_type)))])
                text = use_recipe(value) or f"is a section; set one of its fields, such as {field}"
                raise ConfigError(f"{'.'.join(here)} = {as_text(value)} ({where}): {text}")
            merged[name] = merge(field_type, below.get(name) or {}, layer, value, here)
            continue
        value = _typed(value, field_type)
        if is_axis(field_type):
            merged[name] = _merge_kind(field_type, below.get(name), layer, value, here)
        elif item_axis(field_type) and isinstance(value, dict):
            merged[name] = _merge_items(item_axis(field_type), below.get(name) or [], layer, value, here)
        else:
            _check_one_value(value, field_type, here, where)
            merged[name] = value
    return merged


def _check_one_value(value: Any, field_type: Any, path: KeyPath, where: str) -> None:
    """Refuses a name without a value, unless its setting is a switch, several values for a single one, and settings of
    one entry of a list."""
    if isinstance(value, bool) and not takes_switch(field_type):
        literal = typing.get_origin(field_type) is typing.Literal
        near = near_choice(as_text(value), list(map(str, typing.get_args(field_type)))) if literal else ""
        meant = f"; did you mean '{near}'?" if near else ""
        option = f"--{'.'.join(path)}"
        missing = f"{option} has no value; write {option} VALUE"
        if field_type == tuple[str, ...]:
            missing += f", or {option}=VALUE where it begins like a setting, as name=a.jsonl does"
        raise ConfigError(
            missing if where == COMMAND_LINE else f"{'.'.join(path)} = {as_text(value)} ({where}): {NO_SWITCH}{meant}"
        )
    name = ".".join(path)
    if value is None and typing.get_origin(field_type) is tuple:
        raise ConfigError(f"{name} ({where}) has no value; write {name}: [...], or [] for none")
    if isinstance(value, dict) and typing.get_origin(field_type) is tuple:
        at = next((f".{key}" for key in value), "")
        raise ConfigError(f"{name}{at} ({where}): {name} is a list, which is given as a whole; write {name} [...]")
    if isinstance(value, list) and typing.get_origin(field_type) is not tuple and where == COMMAND_LINE:
        raise ConfigError(
            f"{'.'.join(path)} = {' '.join(value)} ({where}): must be one value, got {len(value)}; put quotes "
            "around a text with spaces"
        )


def _merge_kind(axis: type[Axis], below: Any, layer: Layer, above: Any, path: KeyPath) -> Any:
    """A choice of kind, overridden by that of a higher layer."""
    if not isinstance(above, dict | str):
        return above  # refused where it is read
    above = above if isinstance(above, dict) else {"kind": above}
    if isinstance(above.get("kind"), str):
        above = {**above, **axis.spelled_out(str(above["kind"]))}
    if below is None and "kind" not in above:
        key = next(iter(above), "")
        owners = ", ".join(kind for kind, cls in sorted(axis.kinds.items()) if key in fields_of(cls)) or axis.names()
        at, where = ".".join((*path, key)), layer.places.get((*path, key), layer.name)
        raise ConfigError(f"{at} ({where}): is a setting of kind {owners}; set {'.'.join(path)} to a kind too")
    below = below if isinstance(below, dict) else axis.spelled_out(str(below))
    name = above.get("kind", below.get("kind"))
    if str(name) not in axis.kinds:
        return {**above, "kind": name}  # refused with the list of kinds where it is read
    chosen = axis.kinds[str(name)]
    kind_settings = {key: value for key, value in above.items() if key != "kind" and key in fields_of(chosen)}
    foreign = {key: value for key, value in above.items() if key != "kind" and key not in fields_of(chosen)}
    same = {key: value for key, value in below.items() if key != "kind"} if below.get("kind") == name else {}
    same = {**defaults_of(chosen), **same}
    return {"kind": str(name), **merge(chosen, same, layer, kind_settings, path), **foreign}


def _merge_items(axis: type[Axis], below: list, layer: Layer, above: dict[str, Any], path: KeyPath) -> list:
    """A list of kinds, some of which are changed by name: `--shaping.overlong.limit 4096`."""
    above = dict(above)
    listed = above.pop("kind", None)
    if listed is not None:
        if isinstance(listed, str) and listed in axis.kinds:  # one item, written without brackets
            item_settings = {key: above.pop(key) for key in [*above] if key in fields_of(axis.kinds[listed])}
            below = [{"kind": str(listed), **item_settings}]
        else:
            below = _typed(listed, tuple[axis, ...])
    items = [item if isinstance(item, dict) else axis.spelled_out(str(item)) for item in below]
    names = [  # an item is named by what was written, or by its kind
        item["kind"] if isinstance(written, dict) or item["kind"] in above else str(written)
        for written, item in zip(below, items, strict=True)
    ]
    here = ".".join(path)
    for name in above.keys() - set(names):
        where = layer.places.get((*path, name), layer.name)
        holding = [kind for kind in names if kind in axis.kinds and name in fields_of(axis.kinds[kind])]
        if name not in axis.kinds and holding:
            raise ConfigError(f"{here}.{name} ({where}): {here} is a list; write {here}.{holding[0]}.{name}")
        if name not in axis.kinds:
            raise ConfigError(f"{here}.{name} ({where}): unknown kind '{name}'; must be one of {axis.names()}")
        how = f"first, with --{here} {','.join([*names, name])}"
        if where != COMMAND_LINE:
            how = f"with its settings: {here}: [{', '.join([*names, f'{{kind: {name}, ...}}'])}]"
        raise ConfigError(f"{here}.{name} ({where}): {here} holds {', '.join(names) or 'nothing'}; list it {how}")
    merged = []
    for index, (name, item) in enumerate(zip(names, below, strict=True)):
        start = (*path, name)
        noted = [(at, where) for at, where in layer.places.items() if at[: len(start)] == start]
        layer.places.update({(*path, str(index), *at[len(start) :]): where for at, where in noted})
        merged.append(_merge_kind(axis, item, layer, above[name], start) if name in above else item)
    return merged


def listed(value: Any) -> list:
    """The items of a value for a setting that is a list of texts, as `merge` reads it; none of one without a value."""
    return [] if isinstance(value, bool | None) else _typed(value, tuple[str, ...])


def _typed(value: Any, field_type: Any) -> Any:
    """A value in the form that its setting reads: words of the command line are split and parsed by their type."""
    if typing.get_origin(field_type) is typing.Literal and isinstance(value, str):
        return next((choice for choice in typing.get_args(field_type) if str(choice) == value), value)
    several = typing.get_origin(field_type) is tuple
    words = value if isinstance(value, list) else [value]
    if words and all(isinstance(word, Word) for word in words):
        text = " ".join(words)
        if text[:1] in ("[", "{") and (several or is_axis(field_type)):
            each = text[0] == "{" and _are_mappings(words)
            value = _parsed(f"[{', '.join(words)}]" if several and each else text)
            return value[0] if isinstance(value, list) and len(value) == 1 and text[0] == "{" else value
        if several and any(
            word[:1] == "{" for word in words
        ):  # names and mappings: answer '{kind: format, weight: 0.1}'
            return _parsed(f"[{', '.join(words)}]")
        if several:
            return [part.strip() for word in words for part in word.split(",") if part.strip()]
        return value
    if several and not isinstance(value, list | tuple | dict | bool | None):
        return [value]  # one item, written without brackets
    return value


def _parsed(text: str) -> Any:
    try:
        return parse_yaml(text, f"{text:.200} on the command line", _Loader)
    except ValueError as error:
        raise ConfigError(str(error)) from error


# ---- names ---------------------------------------------------------------------------------------------------------


def known_keys(cls: type, prefix: str = "", within: tuple[type, ...] = ()) -> Iterator[str]:
    """Every setting as `section.field`, including those of all kinds.

    Args:
        cls: Section or kind.
        prefix: Its name with a dot.
        within: The kinds that it is part of; a kind may contain another kind of its own axis.
    """
    for name in fields_of(cls):
        field_type = type_of(cls, name)
        if is_section(field_type):
            yield from known_keys(field_type, f"{prefix}{name}.", within)
            continue
        yield f"{prefix}{name}"
        axis = field_type if is_axis(field_type) else item_axis(field_type)
        if axis is None:
            continue
        yield f"{prefix}{name}.kind"
        for kind_name, chosen in axis.choices().items():
            if chosen not in within:
                middle = "" if is_axis(field_type) else f"{kind_name}."
                yield from known_keys(chosen, f"{prefix}{name}.{middle}", (*within, chosen))
