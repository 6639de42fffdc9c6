"""The most memory that all programs of an executor can take together. Only a cgroup limits this sum."""

import os
from pathlib import Path

from grpo_roc_jax.tools.config import LocalPool, PoolInCgroup, RayActors, ToolsConfig

MIB, GIB = 1 << 20, 1 << 30
STREAMS = 3
"""Outputs of a program that stay in memory until its call is answered: stdout, stderr and its report."""


def program_bytes(config: ToolsConfig) -> int:
    """Most memory of one program: its address space above the warm interpreter's, its files, its output.

    From L3 up files are in memory; below, they are where `tools.scratch_dir` is, which may be memory too.
    """
    return (config.memory_mb + config.scratch_mb + STREAMS * config.output_kill_mb) * MIB * config.processes


def host_bytes() -> int:
    """Bytes of memory of the host, or the limit of this process's control group if that is lower."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(name).read_text(encoding="utf-8").strip() if os.path.exists(name) else ""
        sizes += [int(text)] if text.isdigit() else []
    return min(sizes)


def describe_call(config: ToolsConfig) -> str:
    """A line with the limit of one call and how many run at a time; empty if programs run elsewhere."""
    if isinstance(config.executor, PoolInCgroup) or not isinstance(config.executor, LocalPool | RayActors):
        return describe_memory(config)
    return f"a call may take {program_bytes(config) / GIB:.1f} GiB of memory, {config.pool_size} run at a time"


def describe_memory(config: ToolsConfig, host: int | None = None) -> str:
    """A line with the sum and what limits it; empty if programs run elsewhere. `host`: bytes of memory of the host,
    by default of this one."""
    if isinstance(config.executor, PoolInCgroup):
        return f"programs share {config.executor.memory_mb * MIB / GIB:.1f} GiB of memory, the limit of their cgroup"
    if not isinstance(config.executor, LocalPool | RayActors):
        return ""
    each = program_bytes(config)
    calls, sessions = config.pool_size * each / GIB, config.sessions * each / GIB
    room = host_bytes() if host is None else host
    where = " in each actor" if isinstance(config.executor, RayActors) else ""
    text = (
        f"{config.pool_size} calls at a time may take {calls:.1f} GiB of memory{where}, and {config.sessions} sessions "
        f"{sessions:.1f} GiB; this host has {room / GIB:.1f} GiB"
    )
    if (calls + sessions) * GIB <= room:
        return text
    return f"{text}; tools.executor cgroup would limit the sum"
