"""How a tool call ended: the one value that the sandbox returns."""

from dataclasses import dataclass
from typing import Literal, get_args

ToolKind = Literal[
    "ok",
    "exception",
    "crash",
    "syntax_error",
    "timeout",
    "memory_limit",
    "output_limit",
    "malformed_call",
    "bad_arguments",
    "unknown_tool",
    "sandbox_error",
    "queue_timeout",
    "transport_error",
]
"""How a tool call ended. The last three are infrastructure failures and never count against the policy."""

INFRA_KINDS: frozenset[str] = frozenset({"sandbox_error", "queue_timeout", "transport_error"})
ERROR_KINDS: frozenset[str] = frozenset(get_args(ToolKind)) - INFRA_KINDS - {"ok"}


@dataclass(frozen=True)
class ToolResult:
    """Typed outcome of one call; verdicts come from `kind` and never from words in the output."""

    kind: ToolKind
    stdout: str = ""
    stderr: str = ""
    echo: str = ""
    """repr of the last expression; empty if there is none or it is None."""
    error_type: str = ""
    error_message: str = ""
    error_line: int | None = None
    traceback: str = ""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    truncated: bool = False
    exit_code: int | None = None
    signal: int | None = None
    limit_hit: str = ""
    policy_denied: bool = False
    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    queue_ms: float = 0.0
    max_rss_kb: int = 0
    isolation: str = ""
    worker_id: int | None = None
    session_id: str | None = None
    cell: int | None = None
    rolled_back: bool = False
    attempt: int = 1
    observation: str = ""
    """What the policy sees, before it is cut to a token budget."""
    shown: str = ""
    """The observation as the policy saw it, if it was escaped or cut; else empty."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ToolKind):
            raise ValueError(f"ToolResult.kind = {self.kind!r:.80}; must be one of {', '.join(get_args(ToolKind))}")

    @property
    def ok(self) -> bool:
        return self.kind == "ok"

    @property
    def counts_as_error(self) -> bool:
        """Whether the policy caused the outcome, so that it counts in the numerator of the tool-error rate."""
        return self.kind in ERROR_KINDS

    @property
    def infra(self) -> bool:
        """Whether it is an infrastructure failure; such calls count in neither numerator nor denominator."""
        return self.kind in INFRA_KINDS
