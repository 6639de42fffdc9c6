"""A program to run, and the data that an executor has on it until it has a result."""

import operator
from collections.abc import Callable
from dataclasses import dataclass

from grpo_roc_jax.sandbox._wire import MAX_FRAME
from grpo_roc_jax.sandbox.result import ToolResult

MOST_TEXT = MAX_FRAME - (1 << 16)
"""Most bytes of a program's code, input and names together: they travel to the executor process in one frame."""
NAME_BYTES = 12
"""Bytes that a character of a name may take there."""


@dataclass(frozen=True)
class Program:
    """A Python program, or a cell of a session."""

    id: str
    """Unique among the programs in flight; its result comes under this id."""
    code: str
    stdin: str = ""
    session: str | None = None
    """Programs with the same session share their variables and run in the order in which they were submitted."""
    seed: int = 0
    """Seeds `random` and `numpy.random` of the program. In a session only the first cell's counts: later cells draw on,
    also from a seed that an earlier one set."""

    def __post_init__(self) -> None:
        for name in ("id", "code", "stdin", *(("session",) if self.session is not None else ())):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(f"Program.{name} is {value!r:.80} ({type(value).__name__}); must be text")
        if type(self.seed) is not int:
            try:
                object.__setattr__(self, "seed", operator.index(self.seed))
            except TypeError:
                got = f"{self.seed!r:.80} ({type(self.seed).__name__})"
                raise TypeError(f"Program.seed is {got}; must be a whole number") from None
        names = NAME_BYTES * (len(self.id) + len(self.session or ""))
        if 4 * (len(self.code) + len(self.stdin)) + names > MOST_TEXT:
            size = sum(len(text.encode("utf-8", "surrogatepass")) for text in (self.code, self.stdin)) + names
            if size > MOST_TEXT:
                raise ValueError(
                    f"program {self.id!r:.80} has {size} bytes of code, input and names; must be at most {MOST_TEXT}; "
                    "let it read long data from a file (`read_paths`)"
                )


@dataclass
class Ticket:
    """A program between `submit` and its result."""

    program: Program
    attempt: int = 1
    sink: Callable[[ToolResult], None] | None = None
    """Receives the result; None delivers it through `poll`."""
    can_share: bool = False
    """Whether the result may be that of another program with the same text and input."""

    @property
    def text(self) -> tuple[str, str]:
        """What determines the result of a program without a session: its code and its input."""
        return self.program.code, self.program.stdin


class IsolationUnavailable(RuntimeError):
    """The host does not offer the requested isolation level; the message holds the table and the remedy."""


class ExecutorFailed(RuntimeError):
    """The executor could not be started, or it is closed."""
