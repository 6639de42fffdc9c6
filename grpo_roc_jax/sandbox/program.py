"""A program to run, and the data that an executor has on it until it has a result."""

from collections.abc import Callable
from dataclasses import dataclass

from grpo_roc_jax.sandbox.result import ToolResult


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
    """Seeds the program's `random` and `numpy.random`."""

    def __post_init__(self) -> None:
        for name in ("id", "code", "stdin", *(("session",) if self.session is not None else ())):
            if not isinstance(value := getattr(self, name), str):
                raise TypeError(f"Program.{name} is {value!r:.80} ({type(value).__name__}); must be text")


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
