"""What a caller and an executor agree on: calls, capabilities, errors and the methods of `ToolExecutor`.

A decode loop calls `submit` when a row has emitted a complete call, and `poll` between its steps; neither waits.
Results are matched to calls by id and arrive in the order in which the calls end.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from grpo_roc_jax.sandbox._messages import Capabilities
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.observation import observe
from grpo_roc_jax.types import ToolResult


@dataclass(frozen=True)
class CodeCall:
    """A call of a tool."""

    id: str
    """Unique in the run, such as `step/problem/sample/turn/index`."""
    tool: str
    arguments: Mapping[str, Any]
    session: str | None
    """Trajectory id, for stateful tools; None for stateless ones."""
    seed: int = 0
    """Seeds `random` and `numpy.random`, see `sandbox.Program.seed`."""


class ToolExecutor(Protocol):
    """The interface that the rollout engine uses. Thread-safe."""

    capabilities: Capabilities

    def start(self) -> Capabilities: ...
    def submit(self, call: CodeCall) -> None: ...
    def poll(self, timeout_s: float = 0.0, ids: Container[str] | None = None) -> list[tuple[str, ToolResult]]: ...
    def cancel(self, ids: Iterable[str]) -> bool: ...
    def close_session(self, session: str) -> None: ...
    def run(self, calls: Sequence[CodeCall]) -> list[ToolResult]: ...
    async def arun(self, call: CodeCall) -> ToolResult: ...
    def stats(self) -> dict[str, float]: ...
    def close(self) -> None: ...


def malformed_result(message: str, config: ToolsConfig | None = None) -> ToolResult:
    """The result of a call whose text could not be parsed; such calls never reach an executor.

    Args:
        message: What is wrong with the text, in words for the policy (`ToolCall.message`).
    """
    result = ToolResult("malformed_call", error_type="MalformedCall", error_message=message[:500])
    return replace(result, observation=observe(result, "", config or ToolsConfig()))
