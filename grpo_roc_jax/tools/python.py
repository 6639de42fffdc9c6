"""The policy's Python on this host: calls of tools in the pool of `sandbox.executor`."""

from dataclasses import fields

from grpo_roc_jax.sandbox._messages import ExecutorSettings, ProgramLimits
from grpo_roc_jax.sandbox.executor import Executor
from grpo_roc_jax.sandbox.process import ExecutorProcess
from grpo_roc_jax.settings.points import reach
from grpo_roc_jax.tools.base import BaseExecutor
from grpo_roc_jax.tools.config import PoolInCgroup, ToolsConfig, parse_cpus
from grpo_roc_jax.tools.registry import Registry


def settings_of(config: ToolsConfig) -> ExecutorSettings:
    """The configuration as the executor process receives it, with automatic choices resolved."""
    limits = {field.name: getattr(config, field.name) for field in fields(ProgramLimits) if field.name != "nproc"}
    cpus = tuple(sorted(parse_cpus(config.cpus))) if config.cpus else ()
    names = {field.name for field in fields(ExecutorSettings)} - {"limits", "cpu_list", "links"}
    copied = {name: getattr(config, name) for name in names}
    return ExecutorSettings(limits=ProgramLimits(**limits), cpu_list=cpus, **copied)


class PythonExecutor(BaseExecutor, Executor):
    """Runs calls on this host."""

    def __init__(self, config: ToolsConfig, registry: Registry | None = None) -> None:
        cgroup = config.executor if isinstance(config.executor, PoolInCgroup) else None
        pool = {"settings": settings_of(config), "cgroup": cgroup, "start_timeout_s": config.start_timeout_s}
        super().__init__(config, registry, **pool)

    def _start_process(self) -> ExecutorProcess:
        reach("tool.restart")
        return super()._start_process()
