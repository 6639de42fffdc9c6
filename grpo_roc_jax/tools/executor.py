"""The executor that a configuration names."""

import importlib

from grpo_roc_jax.tools.base import BaseExecutor
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.interface import ToolExecutor
from grpo_roc_jax.tools.registry import Registry

EXECUTORS = {
    "local": "tools.python:PythonExecutor",
    "cgroup": "tools.python:PythonExecutor",
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
        registry: Tools that may be called; by default the built-in ones that `config.enabled` lists.

    Raises:
        ValueError: its settings are not usable.
    """
    return executor_class(config.executor.kind)(config, registry)
