"""A call between `submit` and its result."""

from collections.abc import Callable
from dataclasses import dataclass

from grpo_roc_jax.tools.interface import CodeCall
from grpo_roc_jax.tools.registry import Job
from grpo_roc_jax.types import ToolResult


@dataclass
class Ticket:
    """What an executor keeps of a call."""

    call: CodeCall
    job: Job | None
    attempt: int = 1
    sink: Callable[[ToolResult], None] | None = None
    """Takes the result; None delivers it through `poll`."""

    @property
    def can_share(self) -> bool:
        """Whether the call runs a program of its own in the sandbox, without a session."""
        return self.job is not None and self.job.function is None and self.job.session is None

    @property
    def program(self) -> tuple[str, str]:
        """What decides the result of such a call: the program and its input."""
        return self.job.code, self.job.stdin
