"""`grpo-roc probe`: which isolation levels this host offers, what is missing, what to do.

Each step is tried in a forked child, so the probe runs in a process of its own. The last line says whether the executor
can be put into a cgroup (`tools.executor cgroup`), which no level needs.
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict

from grpo_roc_jax.sandbox import cgroup
from grpo_roc_jax.sandbox._probing import in_child, probe_host
from grpo_roc_jax.sandbox.isolation import LEVELS
from grpo_roc_jax.sandbox.program import IsolationUnavailable
from grpo_roc_jax.tools.config import PoolInCgroup, ToolsConfig


def cgroup_verdict(limits: PoolInCgroup | None = None) -> tuple[bool, str]:
    """Whether this host offers a cgroup, and an explanation. Makes one, lets a child enter it, and removes it."""
    try:
        group = cgroup.make_cgroup(limits or PoolInCgroup())
    except IsolationUnavailable as error:
        return False, str(error).partition("\n")[0]
    works, fault = in_child(lambda: group.add(os.getpid()) or "")
    group.remove()
    below = f"below {group.directory.parent}"
    return works, f"memory.max and pids.max {below}" if works else f"no process may enter a cgroup {below} ({fault})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Exit status 0 if the minimum level can be reached, else 5."""
    parser = argparse.ArgumentParser(prog="grpo-roc probe", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--min-level", default=ToolsConfig.min_level, choices=LEVELS, help="level that is needed")
    options = parser.parse_args(arguments)
    probe = probe_host()
    enough = any(level >= options.min_level for level in probe.available)
    grouped, detail = cgroup_verdict()
    if options.json:
        group = {"ok": grouped, "detail": detail}
        print(json.dumps(asdict(probe) | {"levels": probe.available, "enough": enough, "cgroup": group}))
    else:
        best = probe.available[-1] if probe.available else "none"
        print(
            f"{probe.table()}\nbest: {best}; {'' if enough else 'NOT '}enough for tools.min_level {options.min_level}"
        )
        print(f"cgroup around the executor: {detail if grouped else f'NO, {detail}; to have one, {cgroup.REMEDY}'}")
    return 0 if enough else 5
