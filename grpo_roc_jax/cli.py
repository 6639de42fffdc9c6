"""Reading a configuration: YAML files and `--section.field value` overrides, in one grammar and one parser.

A YAML file is a list of overrides: `loss: {clip_high: 0.3}` means `--loss.clip_high 0.3`, so files and command line
share one set of types, choices and messages. `base: other.yaml` at the top of a file is read first; later wins.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml

T = TypeVar("T")

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"
"""Where the recipes lie in a checkout; bare names such as `toy.yaml` are looked up here too."""


class ConfigError(ValueError):
    """A configuration that cannot run; the message says what was got, what was wanted and what to change."""


def dotted_fields(config_type: type, prefix: str = "") -> Iterator[str]:
    """Every leaf of a tree of dataclasses as `section.field`."""
    for field in dataclasses.fields(config_type):
        default = _default_of(field)
        if dataclasses.is_dataclass(default):
            yield from dotted_fields(type(default), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(`section.field`, value) of every leaf of a configuration."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from flatten(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def load_config(config_type: type[T], argv: Sequence[str], *, prog: str, default_file: str = "") -> T:
    """The configuration that `argv` asks for: YAML files first, then `--section.field value` overrides, left to right.

    Args:
        config_type: Dataclass with a default for every field; nested dataclasses are sections.
        argv: Leading words that do not start with `--` are YAML files; none means `default_file`.
        prog: Name shown by `--help`.
        default_file: Looked up in `CONFIG_DIR`; empty for none.

    Raises:
        ConfigError: A file that is missing or no mapping, an unknown key (with the nearest known one), a value of
            the wrong type or outside its choices, or a combination that a section refuses.
    """
    words = list(argv)
    files = []
    while words and not words[0].startswith("-"):
        files.append(words.pop(0))
    if not files and default_file:
        files = [default_file]
    known = list(dotted_fields(config_type))
    arguments: list[str] = []
    for name in files:
        for key, value in read_yaml(find_config(name)):
            check_key(key, known, where=name)
            arguments += _words(key, value)
    for word in words:
        if word.startswith("--") and word != "--help":  # a value that starts so is written --key=--value
            check_key(word[2:].split("=")[0].replace("-", "_"), known, where="command line")
    words = [_yaml_spelling(word) for word in words]
    try:
        return tyro.cli(
            config_type,
            args=arguments + words,
            prog=prog,
            config=(tyro.conf.FlagConversionOff,),
            use_underscores=True,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def find_config(name: str) -> Path:
    """The path of a recipe: as given, or by name in the configs directory."""
    for path in (Path(name), CONFIG_DIR / name, CONFIG_DIR / f"{name}.yaml"):
        if path.is_file():
            return path
    near = difflib.get_close_matches(name, [str(p.relative_to(CONFIG_DIR)) for p in CONFIG_DIR.rglob("*.yaml")], n=1)
    hint = f"; nearest: configs/{near[0]}" if near else ""
    raise ConfigError(f"no configuration file {name!r}, neither as a path nor under {CONFIG_DIR}{hint}")


def read_yaml(path: Path) -> Iterator[tuple[str, Any]]:
    """(`section.field`, value) of a file, those of its `base` first."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a mapping of sections is wanted, got a {type(content).__name__}")
    base = content.pop("base", None)
    if base is not None:
        beside = path.parent / base
        yield from read_yaml(beside if beside.is_file() else find_config(base))
    yield from _flatten_mapping(content, "")


def check_key(key: str, known: Sequence[str], *, where: str) -> None:
    """Refuses a key that no section has, naming the nearest one."""
    if key in known:
        return
    tails = {name.rsplit(".", 1)[-1]: name for name in known}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    near = near or [tails[tail] for tail in difflib.get_close_matches(key.rsplit(".", 1)[-1], tails, n=1)]
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    raise ConfigError(f"unknown configuration key {key!r} ({where}){hint} --help lists them all")


def dump_yaml(config: Any) -> str:
    """The whole configuration as YAML that `load_config` reads back to an equal value."""

    def nested(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {field.name: nested(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return list(value) if isinstance(value, tuple) else value

    return yaml.safe_dump(nested(config), sort_keys=False, allow_unicode=True)


def _flatten_mapping(mapping: dict, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        if isinstance(value, dict):
            yield from _flatten_mapping(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _words(key: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [f"--{key}", *(str(item) for item in value)]
    return [f"--{key}={value}"]


def _yaml_spelling(word: str) -> str:
    """`true` and `false`, as in the files, for the parser's `True` and `False`."""
    name, equals, value = word.rpartition("=")
    return f"{name}{equals}{value.capitalize()}" if value in ("true", "false") else word


def _default_of(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
