"""A cgroup around the executor: one limit on the memory, and one on the processes, of all programs together.

The trainer makes the group and moves the executor process into it before that process starts any other. Version 2 of
the kernel's interface only (Linux, `Documentation/admin-guide/cgroup-v2.rst`).
"""

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from grpo_roc_jax.sandbox.program import IsolationUnavailable

PREFIX = "grpo-tools-"
CONTROLLERS = ("memory", "pids")
END_S = 2.0
"""Seconds that the processes of a group have to end."""
REMEDY = (
    "run where the user may make groups (a systemd session, `systemd-run --user --scope`, or a container with a "
    "writable /sys/fs/cgroup), or name such a directory in tools.executor.parent"
)


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of all programs of a pool together."""

    memory_mb: int = 16384
    """Memory, files in memory included, in MiB. The kernel ends the largest program beyond it."""
    processes: int = 4096
    """Number of processes and threads."""
    parent: str = ""
    """Directory of the group to make it in; empty tries the group of this process and the one above it."""


@dataclass(frozen=True)
class Cgroup:
    """A control group of this trainer."""

    directory: Path

    def add(self, pid: int) -> None:
        """Move a process into the group; processes that it starts later belong to it too."""
        (self.directory / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """End what is left in the group, and remove it."""
        with contextlib.suppress(OSError):
            (self.directory / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + END_S
        while not _removed(self.directory) and time.monotonic() < deadline:
            time.sleep(0.01)


def make_cgroup(limits: CgroupLimits) -> Cgroup:
    """A group with the limits of `limits`, without processes.

    Raises:
        IsolationUnavailable: The host lacks cgroups, or this user may not make one; the message says what to do.
    """
    faults = []
    try:
        parents = [Path(limits.parent)] if limits.parent else own_groups()
        for parent in parents:
            try:
                return _make_in(parent, limits)
            except OSError as error:
                faults.append(f"{error.filename or parent}: {error.strerror or error}")
    except OSError as error:
        faults.append(str(error))
    raise IsolationUnavailable(f"no cgroup can be made here ({'; '.join(faults)})\nremedy: {REMEDY}")


def own_groups(proc: Path = Path("/proc/self")) -> list[Path]:
    """Directories of the group of this process and the one above it, if the host mounts version 2.

    A group with processes of its own cannot pass its controllers on, so the one above is often the first that can.
    """
    for line in (proc / "mountinfo").read_text().splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            root, mount = fields.split()[3:5]
            break
    else:
        raise FileNotFoundError("no cgroups of version 2 are mounted")
    entries = (proc / "cgroup").read_text().splitlines()
    name = next(line for line in entries if line.startswith("0::")).removeprefix("0::")
    group = Path(mount) / os.path.relpath(name, root)
    return [group, group.parent] if group != Path(mount) else [group]


def _make_in(parent: Path, limits: CgroupLimits) -> Cgroup:
    lacking = set(CONTROLLERS) - set((parent / "cgroup.controllers").read_text().split())
    if lacking:
        raise OSError(f"version 2 has no controller {' or '.join(sorted(lacking))} here")
    for old in parent.glob(f"{PREFIX}*"):
        if not os.path.exists(f"/proc/{old.name.removeprefix(PREFIX).partition('-')[0]}"):
            _removed(old)  # of a trainer that was killed
    if not set(CONTROLLERS) <= set((parent / "cgroup.subtree_control").read_text().split()):
        (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
    group = Cgroup(Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent)))
    try:
        values = {"memory.max": limits.memory_mb << 20, "memory.swap.max": 0, "pids.max": limits.processes}
        for name, value in values.items():
            if name != "memory.swap.max" or (group.directory / name).exists():  # absent where the kernel has no swap
                (group.directory / name).write_text(str(value))
    except OSError:
        group.remove()
        raise
    return group


def _removed(directory: Path) -> bool:
    """Removes a group without processes. Returns whether it is gone."""
    with contextlib.suppress(OSError):
        directory.rmdir()
    return not directory.exists()
