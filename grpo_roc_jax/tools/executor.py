"""Tool calls on top of an executor of programs: arguments are checked, trusted functions run in the trainer, and every
result gets the text that the policy sees. `PythonExecutor` runs programs on this host, in the pool of
`sandbox.executor`; `make_executor` makes the executor that a configuration names."""

import importlib
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from grpo_roc_jax.checks import expect
from grpo_roc_jax.process.points import reach
from grpo_roc_jax.sandbox._messages import ExecutorSettings, ProgramLimits
from grpo_roc_jax.sandbox.base import ProgramExecutor, cut
from grpo_roc_jax.sandbox.executor import Executor, Supervision
from grpo_roc_jax.sandbox.process import ExecutorProcess
from grpo_roc_jax.sandbox.program import Program
from grpo_roc_jax.sandbox.result import ToolResult
from grpo_roc_jax.tools.config import PoolInCgroup, ToolsConfig, parse_cpus
from grpo_roc_jax.tools.interface import CodeCall, ToolExecutor
from grpo_roc_jax.tools.observation import observe
from grpo_roc_jax.tools.registry import Job, Registry, default_registry, failed_result


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
            try:
                self._run_trusted(call.id, job)
            except BaseException:
                self._take_back(ticket)
                raise
        else:
            self._run_program(ticket)

    def _run_trusted(self, call_id: str, job: Job) -> None:
        """Run a trainer-side tool in a thread of its own, which is abandoned if the tool takes too long."""

        def body() -> None:
            keep = self.config.output_kb << 10
            try:
                result = self.registry.run_trusted(job, self.config.wall_s)
                texts = {name: cut(getattr(result, name), keep) for name in ("stdout", "stderr", "echo")}
                shorter = any(text != getattr(result, name) for name, text in texts.items())
                result = replace(result, **texts, truncated=result.truncated or shorter)
            except BaseException as error:  # such as a ToolResult whose texts are none
                result = failed_result(error, self.config.wall_s)
            timer.cancel()
            self._finish(call_id, result)

        late = ToolResult("timeout", limit_hit="wall", wall_ms=1000 * self.config.wall_s)
        timer = threading.Timer(self.config.wall_s, self._finish, (call_id, late))
        timer.daemon = True
        timer.start()
        try:
            threading.Thread(target=body, daemon=True, name="trusted-tool").start()
        except BaseException:
            timer.cancel()  # another call may have this id
            raise

    def observation_text(self, result: ToolResult, code: str) -> str:
        return observe(result, code, self.config)


def settings_of(config: ToolsConfig) -> ExecutorSettings:
    """The configuration as the executor process receives it, with automatic choices resolved."""
    limits = {field.name: getattr(config, field.name) for field in fields(ProgramLimits) if field.name != "nproc"}
    cpus = tuple(sorted(parse_cpus(config.cpus))) if config.cpus else ()
    names = {field.name for field in fields(ExecutorSettings)} - {"limits", "cpu_list", "links"}
    copied = {name: getattr(config, name) for name in names}
    return ExecutorSettings(limits=ProgramLimits(**limits), cpu_list=cpus, **copied)


class PythonExecutor(BaseExecutor, Executor):
    """Runs calls on this host."""

    def __init__(
        self, config: ToolsConfig, registry: Registry | None = None, *, supervision: Supervision | None = None
    ) -> None:
        cgroup = config.executor if isinstance(config.executor, PoolInCgroup) else None
        pool = {"settings": settings_of(config), "cgroup": cgroup, "start_timeout_s": config.start_timeout_s}
        super().__init__(config, registry, **pool, supervision=supervision)

    def _start_process(self) -> ExecutorProcess:
        reach("tool.restart")
        return super()._start_process()


EXECUTORS = {
    "local": "tools.executor:PythonExecutor",
    "cgroup": "tools.executor:PythonExecutor",
    "ray": "contrib.executors.ray_actors:RayExecutor",
    "sandbox_fusion": "contrib.executors.remote:SandboxFusionExecutor",
    "code_judge": "contrib.executors.remote:CodeJudgeExecutor",
}
"""Kind -> module and class of its executor; imported when the kind is chosen."""


def executor_class(kind: str) -> type[BaseExecutor]:
    """The executor of a kind of `tools.executor`."""
    module, _, name = EXECUTORS[kind].partition(":")
    return getattr(importlib.import_module(f"grpo_roc_jax.{module}"), name)


def make_executor(config: ToolsConfig, registry: Registry | None = None) -> ToolExecutor:
    """The executor that `config.executor` names, not yet started.

    Args:
        config: Section `tools`: which executor runs programs, and their limits.
        registry: Tools that may be called; by default the built-in ones that `config.enabled` lists.

    Raises:
        ValueError: its settings are not usable.
        TypeError: `config` is another section, or `registry` is no `Registry`.
    """
    expect(config, ToolsConfig, "config", "a ToolsConfig, such as config.tools")
    expect(registry, Registry | None, "registry", "a Registry: registry = Registry(), then registry.add(function)")
    return executor_class(config.executor.kind)(config, registry)
