"""The tools of the policy: their registry, the Python tool, and the text of observations. Programs run in `sandbox`.

from grpo_roc_jax.tools import CodeCall, ToolsConfig, make_executor

with make_executor(ToolsConfig()) as executor:
    [result] = executor.run([CodeCall("1", "python_code_with_standard_io", {"code": "print(6 * 7)"}, None)])
"""

from grpo_roc_jax.sandbox import Capabilities, ExecutorFailed, IsolationUnavailable
from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.executor import make_executor
from grpo_roc_jax.tools.interface import CodeCall, ToolExecutor, malformed_result
from grpo_roc_jax.tools.observation import observe, sanitize
from grpo_roc_jax.tools.registry import Registry, ToolUnavailable, default_registry

__all__ = [
    "Capabilities", "CodeCall", "ExecutorFailed", "IsolationUnavailable", "Registry", "ToolExecutor", "ToolUnavailable",
    "ToolsConfig", "default_registry", "make_executor", "malformed_result", "observe", "sanitize",
]  # fmt: skip
