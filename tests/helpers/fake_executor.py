"""An executor that runs nothing, and a tool of the kind that users register."""

from typing import Literal

from grpo_roc_jax.sandbox.program import Ticket
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.executor import BaseExecutor
from grpo_roc_jax.tools.interface import Capabilities
from grpo_roc_jax.types import ToolResult


class FakeExecutor(BaseExecutor):
    """Answers each program by a function, at once or when the test asks for it."""

    def __init__(self, answer=None, *, manual: bool = False, config=None, registry=None) -> None:
        """By default a program is `ok` with its code as its output; `manual` holds results back until `release`."""
        super().__init__(config or ToolsConfig(), registry)
        self._answer = answer or (lambda program: ToolResult("ok", stdout=program.code, stdout_bytes=len(program.code)))
        self._manual, self.held, self.refused = manual, [], set()

    def _open(self) -> Capabilities:
        return Capabilities(level="fake")

    def _launch(self, ticket: Ticket) -> None:
        if ticket.program.id in self.refused:
            raise RuntimeError(f"{ticket.program.id} is refused")
        if self._manual:
            self.held.append(ticket.program.id)
        else:
            self._finish(ticket.program.id, self._answer(ticket.program))

    def release(self, call_id: str) -> None:
        """Finish a held call."""
        self.held.remove(call_id)
        self._finish(call_id, self._answer(self._tickets[call_id].program))

    def _drop(self, ids: list[str]) -> None:
        self.held = [call_id for call_id in self.held if call_id not in ids]

    def close_session(self, session: str) -> None:
        """There are none."""


def area(width: float, height: float = 1.0, unit: Literal["cm", "m"] = "cm") -> str:
    """Area of a rectangle.

    Args:
        width: Of the rectangle,
            in the unit.
        unit: Of all lengths.
    """
    return f"{width * height} {unit}"
