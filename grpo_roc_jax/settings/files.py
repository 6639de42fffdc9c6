"""Reads files from other sources completely, within limits, and with one form of message for all errors.

JSON and YAML can take all memory, time or stack: aliases that double at each line, lists nested a thousand times,
numbers with a million digits, a file without an end. No useful file needs these.
"""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 256 << 20
"""Largest JSON file in bytes; a tokenizer can be large."""
MOST_YAML_BYTES = 1 << 19
"""Largest YAML file in bytes; its parser reads some 100 kB a second."""
MOST_VALUES = 100_000
"""Most values of a YAML file; an alias counts each time it is used."""
DEEPEST = 100
"""Most levels of nested lists and mappings."""
LONGEST_NUMBER = 100
"""Most characters of a number in YAML, which may be written in any base, also by parts of 60 (`1:30:00`)."""


def local_path(name: str | Path) -> Path:
    """A path as it was typed, with `~` for the home directory."""
    return Path(os.path.expanduser(name))


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a regular file, is too long, or is not UTF-8.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file")
    if status.st_size > most_bytes:
        raise ValueError(f"{path} has {status.st_size} bytes; must be at most {most_bytes}")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start + 1}") from None


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: The file cannot be read.
        ValueError: See `read_text` and `parse_json`; the message names the file.
    """
    return parse_json(read_text(path, most_bytes), str(path))


def read_json_object(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The object in a JSON file. Raises like `read_json`, and ValueError for any other value."""
    value = read_json(path, most_bytes)
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}; must be an object")
    return value


def parse_json(text: str | bytes, name: str) -> Any:
    """The value of a JSON text.

    Args:
        text: JSON.
        name: Name of the file, for messages.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"{name}: JSON is nested too deeply; must have at most {DEEPEST} levels") from None
    except ValueError as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if depth_over(value, DEEPEST):
        raise ValueError(f"{name}: JSON is nested too deeply; must have at most {DEEPEST} levels")
    return value


def depth_over(value: Any, most: int) -> bool:
    """Whether lists and mappings are nested more than `most` levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        inner = [
            child for container in level for child in (container.values() if isinstance(container, dict) else container)
        ]
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            return False
    return True


@contextmanager
def yaml_errors(name: str) -> Iterator[None]:
    """Turns whatever PyYAML raises within the block into a ValueError that names the file."""
    try:
        yield
    except RecursionError:
        raise ValueError(f"{name}: nested too deeply; must have at most {DEEPEST} levels") from None
    except (yaml.YAMLError, ValueError, ArithmeticError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{name}: cannot be read as YAML: {error}") from error


def yaml_root(loader: yaml.SafeLoader, name: str) -> yaml.Node | None:
    """The node of a whole text; None for an empty one.

    Args:
        loader: Loader of the text.
        name: Name of the file, for messages.

    Raises:
        ValueError: The text is not YAML, or its aliases expand to too much.
    """
    loader.name = name
    with yaml_errors(name):
        root = loader.get_single_node()
    waiting, values = [] if root is None else [(root, 1)], 0
    while waiting:  # each node counts as often as aliases refer to it
        node, level = waiting.pop()
        values += 1
        if level > DEEPEST:
            raise ValueError(f"{name}: nested too deeply; must have at most {DEEPEST} levels")
        if values > MOST_VALUES:
            raise ValueError(f"{name}: stands for more than {MOST_VALUES} values; write fewer aliases")
        if node.tag in _NUMBERS and len(node.value) > LONGEST_NUMBER:
            raise ValueError(
                f"{name}, line {node.start_mark.line + 1}: a number of {len(node.value)} characters; must have at most "
                f"{LONGEST_NUMBER}"
            )
        inner = node.value if isinstance(node, yaml.SequenceNode) else ()
        if isinstance(node, yaml.MappingNode):
            inner = [item for pair in node.value for item in pair]
        waiting += [(item, level + 1) for item in inner]
    return root


def parse_yaml(text: str, name: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """The value of a YAML text.

    Raises:
        ValueError: The text is not YAML, or its aliases expand to too much.
    """
    with yaml_errors(name):
        made = loader(text)
    root = yaml_root(made, name)
    with yaml_errors(name):
        return None if root is None else made.construct_document(root)


def read_yaml_mapping(path: Path) -> Mapping[str, Any]:
    """The mapping in a YAML file; empty for an empty file.

    Raises:
        OSError: The file cannot be read.
        ValueError: See `read_text` and `parse_yaml`, or the value is not a mapping.
    """
    value = parse_yaml(read_text(path, MOST_YAML_BYTES), str(path))
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; must be a mapping")
    return value or {}
