"""Tool calls on top of an executor of programs: arguments are checked, trusted functions run in the trainer, and every
result gets the text that the policy sees."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from grpo_roc_jax.sandbox.base import ProgramExecutor, cut
from grpo_roc_jax.sandbox.program import Program
from grpo_roc_jax.sandbox.result import ToolResult
from grpo_roc_jax.settings.points import reach
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.interface import CodeCall
from grpo_roc_jax.tools.observation import observe
from grpo_roc_jax.tools.registry import Job, Registry, default_registry


class BaseExecutor(ProgramExecutor):
    """A `ToolExecutor` whose subclasses run the programs of calls."""

    def __init__(self, config: ToolsConfig, registry: Registry | None = None, **pool: Any) -> None:
        super().__init__(share_results=config.share_results, **pool)
        self.config = config
        self.registry = registry or default_registry(config.enabled)

    def submit(self, call: CodeCall) -> None:
        """Start a call; `poll` delivers its result."""
        reach("tool.submit")
        self._begin(call, None)

    def _begin(self, call: CodeCall, sink: Callable[[ToolResult], None] | None) -> None:
        self._check_open()
        prepared = self.registry.prepare(call.tool, call.arguments, call.session)
        job = prepared if isinstance(prepared, Job) else Job("")
        ticket = self._admit(Program(call.id, job.code, job.stdin, job.session, call.seed), sink)
        if isinstance(prepared, ToolResult):
            self._finish(call.id, prepared)
        elif job.function is not None:
            self._run_trusted(call.id, job)
        else:
            self._run_program(ticket)

    def _run_trusted(self, call_id: str, job: Job) -> None:
        """Run a trainer-side tool in a thread of its own, which is abandoned if the tool takes too long."""

        def body() -> None:
            result = self.registry.run_trusted(job, self.config.wall_s)
            keep = self.config.output_kb << 10
            texts = {name: cut(getattr(result, name), keep) for name in ("stdout", "stderr", "echo")}
            timer.cancel()
            self._finish(call_id, replace(result, **texts))

        late = ToolResult("timeout", limit_hit="wall", wall_ms=1000 * self.config.wall_s)
        timer = threading.Timer(self.config.wall_s, self._finish, (call_id, late))
        timer.daemon = True
        timer.start()
        threading.Thread(target=body, daemon=True, name="trusted-tool").start()

    def _observation(self, result: ToolResult, code: str) -> str:
        return observe(result, code, self.config)
