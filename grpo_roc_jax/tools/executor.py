"""The executor that a configuration names; the only module that knows every implementation."""

from grpo_roc_jax.tools.base import BaseExecutor
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.interface import ToolExecutor
from grpo_roc_jax.tools.python import PythonExecutor
from grpo_roc_jax.tools.ray import RayExecutor
from grpo_roc_jax.tools.registry import Registry
from grpo_roc_jax.tools.remote import CodeJudgeExecutor, SandboxFusionExecutor

EXECUTORS: dict[str, type[BaseExecutor]] = {
    "local": PythonExecutor,
    "cgroup": PythonExecutor,
    "ray": RayExecutor,
    "sandbox_fusion": SandboxFusionExecutor,
    "code_judge": CodeJudgeExecutor,
}


def make_executor(config: ToolsConfig, registry: Registry | None = None) -> ToolExecutor:
    """The executor that `config.executor` names, not yet started.

    Args:
        registry: Tools that may be called; by default the built-in ones that `config.enabled` lists.

    Raises:
        ValueError: its settings are not usable.
    """
    return EXECUTORS[config.executor.kind](config, registry)
