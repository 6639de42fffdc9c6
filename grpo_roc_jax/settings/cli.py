"""Reading a configuration: YAML files and `--section.field value` overrides, in one grammar.

A YAML file is a layer of settings over its `base:`; later files override earlier ones, the command line all:

    python -m grpo_roc_jax.train configs/toy.yaml --advantage.kind pass_at_k --advantage.k 4

`--help` shows sections and kinds, `--help SECTION` their settings.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from grpo_roc_jax.hints.other_names import CONFIG_DIR, CONTRIB_METHODS, advice, close_to, counterpart, near_choice
from grpo_roc_jax.settings import helping
from grpo_roc_jax.settings.callables import import_file
from grpo_roc_jax.settings.files import local_path
from grpo_roc_jax.settings.layers import (
    COMMAND_LINE,
    ConfigError,
    KeyPath,
    Layer,
    config_errors,
    is_axis,
    is_section,
    item_axis,
    known_keys,
    merge,
    opened,
    read_words,
    read_yaml,
)
from grpo_roc_jax.settings.layers import listed as listed_words
from grpo_roc_jax.settings.options import NO_SUCH, Axis, adapter, as_mapping, as_text, defaults_of, fields_of, type_of
from grpo_roc_jax.settings.secrets import without_secrets

__all__ = [
    "CONFIG_DIR",
    "CONTRIB_METHODS",
    "ConfigError",
    "config_errors",
    "dump_yaml",
    "find_config",
    "flatten",
    "load_config",
]

T = TypeVar("T")


def load_config(config_type: type[T], argv: Sequence[str], *, prog: str, default_file: str = "") -> T:
    """The configuration that `argv` describes: YAML files first, then overrides, left to right.

    Args:
        config_type: A `@settings` dataclass with a default for every field; nested ones are sections.
        argv: Leading words that do not start with `-`, and contain no `=` unless they are files, are YAML files;
            without any, `default_file`.
        prog: Name shown by `--help`.
        default_file: Looked up in `CONFIG_DIR`; empty for none.

    Raises:
        ConfigError: A file is missing or not a mapping, a key is unknown (the message has the nearest known one), a
            setting refuses its value (with file and line), or a section refuses a combination.
        SystemExit: After `--help`.
    """
    words, files = list(argv), []
    while words and not words[0].startswith("-") and ("=" not in words[0] or Path(words[0]).is_file()):
        if not words[0]:
            raise ConfigError("the name of the configuration file is empty; name one, or leave the word out")
        files.append(words.pop(0))
    help_positions = [i for i, word in enumerate(words) if word in ("--help", "-h")]
    layers = [layer for name in files or [default_file] if name for layer in file_layers(find_config(name))]
    layers.append(read_words(words[: help_positions[0]] if help_positions else words, config_type))
    _keep_words(layers, config_type)
    for path in _method_files(config_type, layers):
        try:
            import_file(path)
        except ImportError as error:
            raise ConfigError(f"{config_type.files_setting}: {error}") from error
    if help_positions:
        print(helping.help_text(config_type, words[help_positions[0] + 1 :], prog))
        raise SystemExit(0)
    return build(config_type, layers)


def build(config_type: type[T], layers: Sequence[Layer], below: T | None = None) -> T:
    """Builds the configuration from layers, the lowest first, on top of the complete configuration `below` if one is
    given.

    Raises:
        ConfigError: See `load_config`.
    """
    values, places = as_mapping(below or config_type()), {}
    for layer in layers:
        try:
            values = merge(config_type, values, layer, layer.values)
        except ConfigError as error:
            raise ConfigError(_with_hint(str(error), config_type, layer)) from None
        places |= layer.places
        if "stages" in layer.values and "steps" not in layer.values:
            places.pop(("steps",), None)  # those of the layers below count other stages, or none
    if below is None:
        values = getattr(config_type, "completed", lambda values, _: values)(values, places)
    try:
        config = adapter(config_type).validate_python(values)
    except ValidationError as error:
        known = tuple(known_keys(config_type))
        raise ConfigError("\n".join(_message(problem, places, known) for problem in error.errors())) from error
    if hasattr(config, "staged"):
        config.staged(places)
    return config


def _keep_words(layers: Sequence[Layer], config_type: type) -> None:
    """Applies the command line, the last layer, which overrides all, to the settings of stages in the files."""
    for layer in layers[:-1]:
        stages = layer.values.get("stages")
        for stage in stages if isinstance(stages, list) else ():
            values = stage.get("set") if isinstance(stage, dict) else None
            if isinstance(values, dict):
                _override(config_type, values, layers[-1].values)


def _override(cls: type, below: dict[str, Any], above: dict[str, Any], path: KeyPath = ()) -> None:
    """Removes from a section of a stage what the command line sets for the whole run.

    A kind that the stage chooses stays, and gets those settings of the command line that it has; it goes only if the
    command line chooses a kind.

    Args:
        cls: Dataclass of the section.
        below: Settings of the stage; changed in place.
        above: Settings of the command line.
        path: Names from the root to the section.
    """
    for name in above.keys() & below.keys() & fields_of(cls).keys():
        field_type, value, staged, here = type_of(cls, name), opened(above[name]), below[name], (*path, name)
        axis = item_axis(field_type)
        if is_section(field_type) and isinstance(value, dict) and isinstance(staged, dict):
            _override(field_type, staged, value, here)
        elif is_axis(field_type) and isinstance(value, dict) and "kind" not in value:
            below[name] = _overridden_kind(field_type, staged, value, here)
        elif axis and isinstance(value, dict) and "kind" not in value and isinstance(staged, list):
            kinds = list(map(_kind_of, staged))
            below[name] = [
                _overridden_kind(axis, item, value.get(kind, {}), (*here, kind))
                for kind, item in zip(kinds, staged, strict=True)
            ]
        else:
            del below[name]


def _overridden_kind(axis: type[Axis], below: Any, above: dict[str, Any], path: KeyPath) -> Any:
    """A choice of kind in a stage, with the settings of that kind that the command line gives."""
    if not above or not isinstance(below, dict | str):
        return below
    below = dict(below) if isinstance(below, dict) else axis.spelled_out(below)
    chosen = axis.kinds.get(_kind_of(below))
    if chosen is None:  # the stage changes settings of the run's kind
        return {key: value for key, value in below.items() if key not in above}
    same = {key: value for key, value in above.items() if key in fields_of(chosen)}
    _override(chosen, below, same, path)
    # A list of kinds that the stage leaves empty has nothing to change.
    listed = [key for key in same if item_axis(type_of(chosen, key)) and isinstance(opened(same[key]), dict)]
    missing = {key: value for key, value in same.items() if key not in below and key not in listed}
    merged = merge(chosen, defaults_of(chosen), Layer(COMMAND_LINE), missing, path)
    return below | {key: merged[key] for key in missing}


def _kind_of(item: Any) -> str:
    """The name of the kind in an entry of a file; empty if it names none."""
    return str(item.get("kind", "")) if isinstance(item, dict) else str(item)


def file_layers(path: Path, over: tuple[Path, ...] = ()) -> Iterator[Layer]:
    """The layers of a file, those of its `base` first. `over` are the files whose base it is.

    Raises:
        ConfigError: There is no such file, or it is its own base.
    """
    layer = read_yaml(path)
    base = layer.values.pop("base", None)
    if base is not None:
        beside = path.parent / str(base)
        if path.resolve().parent == CONTRIB_METHODS.resolve() and not beside.is_file():
            beside = CONFIG_DIR / "methods" / str(base)
        if path.resolve() in over:
            raise ConfigError(f"{layer.places[('base',)]}: base: {base} leads back to {path.name}")
        try:
            below = beside if beside.is_file() else find_config(str(base))
        except ConfigError as error:
            raise ConfigError(f"{layer.places[('base',)]}: base: {error}") from error
        yield from file_layers(below, (*over, path.resolve()))
    yield layer


def find_config(name: str) -> Path:
    """The path of a recipe, given as a path, or as a name in the configs directory with or without `configs/` before
    it."""
    if name.startswith("@"):
        raise ConfigError(f"{name!r}: a configuration file is named without @, as in `grpo-roc train my.yaml`")
    inside = name.removeprefix("configs/")
    folders = [CONFIG_DIR / inside]
    if inside.startswith("methods/"):
        folders.append(CONTRIB_METHODS / inside.removeprefix("methods/"))
    for path in (local_path(name), *(path for at in folders for path in (at, at.with_name(f"{at.name}.yaml")))):
        if path.is_file():
            return path
    stems = {path.stem: f"methods/{path.name}" for path in sorted(CONTRIB_METHODS.glob("*.yaml"))}
    stems |= {path.stem: str(path.relative_to(CONFIG_DIR)) for path in sorted(CONFIG_DIR.rglob("*.yaml"))}
    near = close_to(Path(name).stem, stems)
    hint = f"; nearest: configs/{stems[near]}" if near else f"; `ls {CONFIG_DIR}` lists the recipes"
    raise ConfigError(f"no configuration file {name!r}, neither as a path nor under {CONFIG_DIR}{hint}")


def dump_yaml(config: Any) -> str:
    """The whole configuration as YAML that `load_config` reads back to an equal value. Secrets are hidden, since the
    text is printed and saved in files."""
    return yaml.safe_dump(without_secrets(as_mapping(config)), sort_keys=False, allow_unicode=True)


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(`section.field`, value) of every setting of a configuration, or of one read back from YAML."""
    for name, value in as_mapping(config).items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _method_files(config_type: type, layers: Sequence[Layer]) -> list[str]:
    """The files with the user's kinds: as for every list, those of the highest layer that names any."""
    names: Any = None
    for layer in layers:
        value: Any = layer.values
        for name in getattr(config_type, "files_setting", "").split("."):
            value = opened(value)
            value = value.get(name) if isinstance(value, dict) else None
        names = names if value is None else value
    return list(map(str, listed_words(names)))


def _with_hint(message: str, config_type: type, layer: Layer) -> str:
    """The refusal of an unknown key, extended by what to write instead; see `other_names.advice`."""
    if not message.startswith("unknown key '"):
        return message
    key, known = message.split("'")[1], tuple(known_keys(config_type))
    if key in known:  # with dots in one key of a file
        *sections, last = key.split(".")
        return f"{message}; write it as {': {'.join([*sections, last])}: ...{'}' * len(sections)}"
    value: Any = layer.values
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return f"{message}; {advice(key, value, known) or '--help lists the sections'}"


BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
    "multiple_of": ("a multiple of", "multiple_of"),
}
"""pydantic's error types: words for the bound, and its name in the error's context."""
MOST_SHOWN = 500
"""Characters of a refused value that a message shows."""
PLAIN = {
    "dict": "a mapping",
    "dataclass": "a mapping",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "tuple": "a list",
}
"""What a type is called in messages, by the first part of pydantic's error type."""


def describe_error(error: ValueError) -> str:
    """A refusal as text; of values of a section, the setting, what was given, and the constraint of each."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(_message(problem, {}, ()) for problem in error.errors())


def _message(problem: dict[str, Any], places: dict[KeyPath, str], known: Collection[str]) -> str:
    """The message for one refused value: the setting, what was given, where it was written, the constraint."""
    reason, context, got = problem["type"], problem.get("ctx", {}), problem["input"]
    path = tuple(map(str, problem["loc"]))
    if reason == "setting":
        path, got = (*path, context["key"]), got[context["key"]]
    if reason in ("value_error", "assertion_error"):  # of a section as a whole; the message names its settings
        text = str(context.get("error", problem["msg"]))
        named = [tuple(name.split(".")) for name in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)+", text)]
        written = [places[name] for name in named if name in places] or [_where(path, places) if path else ""]
        return f"{text} ({written[0]})" if written[0] else text
    where = _below(path, places) if isinstance(got, dict) and reason != "kind" else ""
    where = where or _where(path, places)
    at = f" ({where})" if where else ""
    if reason == "unexpected_keyword_argument":
        return f"unknown key '{'.'.join(path)}'{at}"
    if reason == "missing":
        return f"{'.'.join(path)} has no default; give it a value"
    if reason in BOUNDS:
        word, limit = BOUNDS[reason]
        constraint = f"must be {word} {context[limit]:g}"
    elif reason == "literal_error":
        constraint = f"must be {context['expected']}"
        choices = [choice.strip("' ") for choice in context["expected"].replace(" or ", ", ").split(",")]
        near = near_choice(got, choices)
        constraint += f"; did you mean '{near}'?" if near else ""
    elif reason == "too_short":
        constraint = "must have at least one entry"
    elif reason in ("kind", "setting"):
        constraint = problem["msg"]
        if reason == "setting" and NO_SUCH in constraint:
            plain, _, near = constraint.partition("; did you mean")
            hint = counterpart(".".join(path), got, known, misspelt=not near)
            constraint = f"{plain}; {hint}" if hint else constraint
    elif reason == "finite_number":
        constraint = "must be a finite number"
    else:
        constraint = f"must be {PLAIN.get(reason.split('_')[0], problem['msg'])}"
    if reason == "kind" and isinstance(got, dict):
        got = got.get("kind", got)
    text = as_text(got)
    shown = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
    return f"{'.'.join(path)} = {shown}{at}: {constraint}"


def _where(path: KeyPath, places: dict[KeyPath, str]) -> str:
    """Where a setting was written: the setting itself, something below it, or the nearest section above; empty for a
    default."""
    return (
        places.get(path)
        or _below(path, places)
        or next((places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in places), "")
    )


def _below(path: KeyPath, places: dict[KeyPath, str]) -> str:
    """Where something below a setting was written; empty if nothing was."""
    return next((where for at, where in places.items() if at[: len(path)] == path != at), "")
