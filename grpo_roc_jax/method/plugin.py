"""Custom parts by dotted path."""

import importlib
from collections.abc import Callable
from functools import cache


@cache
def load_part(field: str, path: str) -> Callable | None:
    """The function behind `package.module:function`; None for an empty path.

    Raises:
        ValueError: Naming the config field, the path and what is wrong with it.
    """
    if not path:
        return None
    module, separator, name = path.partition(":")
    try:
        part = getattr(importlib.import_module(module), name) if separator else None
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{field} = {path!r}: {error}; write package.module:function, importable from here") from error
    if not callable(part):
        raise ValueError(f"{field} = {path!r} names no function; write package.module:function")
    return part
