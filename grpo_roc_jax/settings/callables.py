"""The user's own code: files that define kinds, and functions that a configuration names."""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_roc_jax.hints.other_names import close_to

_GIVEN: ContextVar[Mapping[str, Callable]] = ContextVar("functions")
"""Functions passed in the current context, by the name that the configuration uses."""


def import_file(path: str) -> ModuleType:
    """The module of a Python file or of a dotted name. The kinds that it defines can be chosen afterwards.

    Raises:
        ImportError: There is no such file or module, or it fails; the message names the line.
    """
    if not path.endswith(".py"):
        try:
            return importlib.import_module(path)
        except ImportError as error:
            raise ImportError(f"{path!r} is neither a Python file nor an importable module: {error}") from error
        except (Exception, SystemExit) as error:
            raise ImportError(f"{path!r}: {type(error).__name__}: {error}") from error
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ImportError(f"there is no file {path!r}")
    # two files with the same name are two modules
    name = f"grpo_roc_jax_user.{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        at = f", line {lines[-1]}" if lines else ""
        raise ImportError(f"{path}{at}: {type(error).__name__}: {error}") from error
    return module


def described_error(error: BaseException, function: Callable[..., Any]) -> str:
    """What a function of the user's raised: the exception, the line of its file, and the attributes that a value has
    in place of one that it lacks."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    at = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
    fields = getattr(getattr(error, "obj", None), "__dataclass_fields__", ())
    names = f"; it has {', '.join(fields)}" if fields and isinstance(error, AttributeError) else ""
    return f"{type(error).__name__}: {message_of(error)}{names}{at}"


def message_of(error: BaseException) -> str:
    """The message of an exception; a class of the user's own may have none that can be read."""
    try:
        return str(error)
    except Exception as second:
        return f"(its message cannot be read: {type(second).__name__})"


def check_functions(functions: Mapping[str, Callable] | None) -> None:
    """Refuses what names no functions.

    Raises:
        TypeError: The message says what to pass instead.
    """
    if not isinstance(functions, Mapping | None):
        raise TypeError(
            f"functions is {functions!r:.80} ({type(functions).__name__}); must be a mapping from the names that the "
            "configuration uses to functions, such as functions={'mine': mine}"
        )
    for name, function in (functions or {}).items():
        if not callable(function):
            raise TypeError(
                f"functions[{name!r}] is {function!r:.80} ({type(function).__name__}); must be a function or a class"
            )


@contextmanager
def given(functions: Mapping[str, Callable] | None) -> Iterator[None]:
    """Within the block, a setting with one of these names refers to that function."""
    check_functions(functions)
    token = _GIVEN.set({**_GIVEN.get({}), **(functions or {})})
    try:
        yield
    finally:
        _GIVEN.reset(token)


def passed(name: str) -> Callable[..., Any] | None:
    """The function that was passed under a name in the current context; None if there is none."""
    return _GIVEN.get({}).get(name)


def all_passed() -> dict[str, Callable[..., Any]]:
    """All functions that were passed in the current context, by their names: for `given` in another process."""
    return dict(_GIVEN.get({}))


def public_callables(module: ModuleType) -> list[str]:
    """Names of the functions and classes that a module defines, in the order of its text; if it defines none, all of
    its public ones."""
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    return [name for name in names if getattr(vars(module)[name], "__module__", "") == module.__name__] or names


def resolve(setting: str, name: str) -> Callable[..., Any] | None:
    """The function that a setting names: one passed under that name, else `package.module:function` or
    `path/to/file.py:function`.

    Returns:
        None for an empty name.

    Raises:
        ValueError: There is no such function; the message names the setting and what to write.
    """
    if not name:
        return None
    if (function := passed(name)) is not None:
        return function
    module, separator, attribute = (name, ":", "") if name.endswith(".py") else name.rpartition(":")
    what, passing = "function", "functions={name: ...}"
    if setting.startswith("environment."):
        what, passing = "class", "environment=..."
    hint = f"write package.module:{what} or file.py:{what}, or pass the {what} to train_policy(config, {passing})"
    try:
        holder = import_file(module) if separator else None
    except ImportError as error:
        raise ValueError(f"{setting} = {name!r}: {error}; {hint}") from error
    function = getattr(holder, attribute, None)
    if holder is not None and not callable(function):
        names = public_callables(holder)
        near = close_to(attribute, names)
        fault = f"{module} has no {attribute!r}"
        if hasattr(holder, attribute):
            fault = f"{attribute!r} of {module} is not a function"
        raise ValueError(
            f"{setting} = {name!r}: "
            + (f"{fault}; " if attribute else "name a function of the file, file.py:function; ")
            + (f"did you mean {near!r}? " if near else "")
            + (f"it has {', '.join(names)}" if names else f"it defines no function; {hint}")
        )
    if not callable(function):
        raise ValueError(f"{setting} = {name!r} is not a {what}; {hint}")
    return function
