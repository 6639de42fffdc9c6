"""Runs untrusted Python programs: fast, isolated, with typed results. Needs nothing of the rest of the library.

from grpo_roc_jax.sandbox import Executor, Program

with Executor() as executor:
    [result] = executor.run([Program("1", "print(6 * 7)")])
"""

from grpo_roc_jax.sandbox._messages import Capabilities, ExecutorSettings, ProgramLimits
from grpo_roc_jax.sandbox.cgroup import CgroupLimits
from grpo_roc_jax.sandbox.executor import Executor, Supervision
from grpo_roc_jax.sandbox.program import ExecutorFailed, IsolationUnavailable, Program
from grpo_roc_jax.sandbox.result import ToolResult

__all__ = [
    "Capabilities", "CgroupLimits", "Executor", "ExecutorFailed", "ExecutorSettings", "IsolationUnavailable", "Program",
    "ProgramLimits", "Supervision", "ToolResult",
]  # fmt: skip
