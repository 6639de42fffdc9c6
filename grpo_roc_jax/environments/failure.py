"""What failed outside the policy, in words: which operation, which exception, where; and whose fault it is."""

import asyncio
import csv
import re
import struct
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_roc_jax.settings.callables import message_of
from grpo_roc_jax.settings.secrets import hidden
from grpo_roc_jax.tools import registry

READING = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError),
    *(SyntaxError, RecursionError, re.error, csv.Error, struct.error),
)
"""What code raises that cannot read a text: the last five as `ast.literal_eval`, `json.loads`, `re.compile` and other
readers of the standard library. Others say that something is missing or broken: OSError, RuntimeError,
NameError, MemoryError, and the exceptions of other libraries."""
CALLERS = (str(Path(__file__).with_name("episode.py")), registry.__file__, str(Path(asyncio.__file__).parent))
"""Frames of these files call the user's code and say nothing about it."""
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""What would act in a terminal, or cannot be written: text of the policy ends up in messages."""
MOST_MESSAGE = 500
MOST_TRACEBACK = 8000
"""Characters of a traceback; its end is kept."""


@dataclass(frozen=True)
class Failure:
    """A failure of an environment or of a program that asks the policy."""

    text: str
    """One line: the operation, the exception, and where."""
    kind: str
    """The same without what differs from rollout to rollout."""
    traceback: str = ""
    by_policy: bool = False
    """Caused by what the policy said; the rollout scores 0."""

    def __bool__(self) -> bool:
        return True

    @property
    def whole(self) -> str:
        """The line with the traceback below it."""
        return f"{self.text}\n{self.traceback}" if self.traceback else self.text


def failure_of(operation: str, error: BaseException, *, by_policy: bool = False) -> Failure:
    """The failure that an exception of the user's code is."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(CALLERS)]
    name = type(error).__name__
    message = one_line(message_of(error))
    where = f" ({_place(frames)})" if frames else ""
    shown = traceback.TracebackException.from_exception(error, compact=True)
    shown.stack = traceback.StackSummary.from_list(frames)
    lines = "".join(shown.format()).rstrip() if frames else ""
    text = f"{operation}: {name}: {message}{where}" if message else f"{operation}: {name}{where}"
    return Failure(text, f"{operation}: {name}{where}", ending(lines), by_policy)


def plain_failure(operation: str, text: str) -> Failure:
    """A failure without an exception of the user's code, such as a deadline."""
    line = one_line(f"{operation}: {text}")
    return Failure(line, line)


def one_line(text: str) -> str:
    """A text as part of a message, without secrets."""
    text = hidden(text)
    return _printable(" ".join(text[: 8 * MOST_MESSAGE].split()))[:MOST_MESSAGE]


def ending(text: str) -> str:
    """The last lines of a text, without secrets."""
    return _printable(hidden(text)[-MOST_TRACEBACK:]).strip()


def _printable(text: str) -> str:
    return UNPRINTABLE.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def may_blame_policy(error: BaseException, environment: Any) -> bool:
    """Whether an exception is one that a text can cause; an attribute that the environment or a module lacks is not,
    nor is a file of code with a wrong syntax."""
    if isinstance(error, SyntaxError) and Path(error.filename or "").is_file():
        return False
    if isinstance(error, AttributeError) and isinstance(error.obj, type(environment) | type | ModuleType):
        return False
    return isinstance(error, READING)


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """File and line of the user's code: the last frame outside installed packages."""
    of_user = [frame for frame in frames if "/lib/python" not in frame.filename and "-packages/" not in frame.filename]
    last = (of_user or frames)[-1]
    return f"{last.filename.rpartition('/')[2]}, line {last.lineno}"
