"""Isolation levels: what each consists of, and applying one to a process.

| level | adds |
|---|---|
| L0 | hard resource limits, private directory, clean environment, closed descriptors, no capabilities |
| L1 | seccomp: no fork, exec, sockets or foreign signals; files read-only |
| L2 | landlock: an allowlist of paths, a writable scratch directory |
| L3 | user, process, mount, network, IPC and host name namespaces; a minimal read-only root |
| L4 | L3 with real root: one user id per worker instead of a user namespace |

L0 contains accidents only. A program can read and change what this user can, and it can kill its own worker. A call
that does so ends as a crash. A session that does so is lost, and its later cells count as infrastructure failures.

`_probing` finds out which of them a host offers. Standard library only: roots, workers and the executor process import
this module.
"""

import contextlib
import os
import resource
import sys
import sysconfig
from collections.abc import Sequence

from . import _kernel, _landlock, _seccomp, _spaces
from ._messages import LEVELS, ExecutorSettings, IsolationPlan, ProgramLimits

LAYERS = ("limits", "seccomp", "landlock", "namespaces", "own uid")
SYSTEM_PATHS = ("/usr/lib", "/lib", "/lib64", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")


def make_plan(settings: ExecutorSettings, level: str, layers: list[str], base: str) -> IsolationPlan:
    """Everything that roots and workers must know; made in the executor process.

    Args:
        layers: Names of the layers that work here; L3 and L4 use landlock too if it does.
        base: An existing private directory.
    """
    rank = LEVELS.index(level)
    # Executors that run at the same time should not share user ids.
    uid_base = settings.uid_base + 1024 * (os.getpid() % 6)
    return IsolationPlan(
        level, base, seccomp=rank >= 1, landlock=_landlock.abi() if rank >= 2 and "landlock" in layers else 0,
        namespaces=rank >= 3, own_uid=rank == 4, read=readable_paths(settings.read_paths), limits=settings.limits,
        preload=settings.preload, interpreter=settings.interpreter, uid_base=uid_base, outer_uid=outer_uid(),
        links=settings.links,
    )  # fmt: skip


def outer_uid() -> int:
    """The host's user id that programs get in a user namespace: with real root `nobody`, else this process's own."""
    return 65534 if os.geteuid() == 0 else os.geteuid()


def layers_in_force(plan: IsolationPlan) -> tuple[str, ...]:
    applied = (True, plan.seccomp, plan.landlock, plan.namespaces, plan.own_uid)
    return tuple(layer for layer, on in zip(LAYERS, applied, strict=True) if on)


def readable_paths(extra: Sequence[str] = ()) -> tuple[str, ...]:
    """Paths that programs must be able to read: the interpreter's library, packages, shared objects, time zones."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = [*SYSTEM_PATHS, *SYSTEM_FILES, *(sysconfig.get_paths()[name] for name in names), *extra]
    paths += [os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix)]
    paths += [os.path.realpath(path) for path in paths]
    return tuple(sorted({os.path.abspath(path) for path in paths if path and os.path.exists(path)} - {"/"}))


def make_filter(plan: IsolationPlan, *, session: bool) -> _seccomp.Filter:
    """The system call filter of a plan. A session may ask its worker for a fork, to copy its state."""
    fork = "allow" if plan.limits.processes > 1 else "notify" if session else "deny"
    truncate = plan.landlock >= 3 or plan.namespaces
    # A session must not continue its copy, which the worker has stopped.
    any_target = plan.namespaces and fork != "notify"
    channel = descriptor_limit(plan.limits)
    program = _seccomp.build(plan.rank >= 2, fork, own_pid_namespace=any_target, truncate=truncate, channel=channel)
    return _seccomp.Filter(program)


def descriptor_limit(limits: ProgramLimits) -> int:
    """Open descriptors of a program. A session's greeting uses the next number, which no program can then have."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return limits.descriptors if hard == resource.RLIM_INFINITY else min(limits.descriptors, hard - 1)


def make_ruleset(plan: IsolationPlan, scratch: str | None) -> int:
    """Landlock's ruleset of a plan. Rules refer to inodes, so a renewed scratch directory needs a new ruleset."""
    execute = plan.limits.processes > 1
    read = [*plan.read, *(("/usr/bin", "/bin") if execute else ())]
    return _landlock.build(plan.landlock, read, list(_spaces.DEVICES), scratch, execute=execute)


def base_memory() -> int:
    """Address space of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def set_limits(limits: ProgramLimits, base: int, *, session: bool = False) -> None:
    """Set hard resource limits. Soft limits equal them, so programs cannot raise any."""
    mib = 1 << 20
    values = {
        resource.RLIMIT_AS: base + limits.memory_mb * mib,
        resource.RLIMIT_FSIZE: max(limits.file_mb, limits.output_kill_mb + 1) * mib,
        resource.RLIMIT_NOFILE: descriptor_limit(limits),
        resource.RLIMIT_STACK: 8 * mib,
        resource.RLIMIT_NPROC: limits.nproc,
        resource.RLIMIT_SIGPENDING: 256,
    }
    for name in ("CORE", "MEMLOCK", "MSGQUEUE", "NICE", "RTPRIO"):
        values[getattr(resource, f"RLIMIT_{name}")] = 0
    if not session:
        # Whole seconds, rounded up. The worker enforces the exact limit; this one holds even if the worker has ended.
        values[resource.RLIMIT_CPU] = int(limits.cpu_s) + 2
    for kind, value in values.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def offer_to_oom_killer(proc: int) -> None:
    """If the host runs out of memory, let the kernel end this process before any other.

    Args:
        proc: An open directory, the host's /proc.
    """
    with contextlib.suppress(OSError, _kernel.StepFailed):
        # Files of a process that cannot be dumped belong to root.
        _kernel.prctl("prctl(PR_SET_DUMPABLE)", _kernel.PR_SET_DUMPABLE, 1)
        file = os.open("self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(file, b"1000")
        finally:
            os.close(file)


def lock_down(
    plan: IsolationPlan, base: int, uid: int | None, ruleset: int, filter_: _seccomp.Filter | None, *,
    session: bool = False,
) -> int:  # fmt: skip
    """Restrict this process permanently, in the only order that works; returns a session's listener, else 0."""
    set_limits(plan.limits, base, session=session)
    if uid is not None:
        if plan.own_uid:
            os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _kernel.set_capabilities()
    _kernel.prctl("prctl(PR_SET_DUMPABLE)", _kernel.PR_SET_DUMPABLE, 1)
    _kernel.prctl("prctl(PR_SET_PDEATHSIG)", _kernel.PR_SET_PDEATHSIG, 9)
    _kernel.prctl("prctl(PR_SET_NO_NEW_PRIVS)", _kernel.PR_SET_NO_NEW_PRIVS, 1)
    if plan.landlock:
        _landlock.restrict(ruleset)
    if filter_ is None:
        return 0
    return filter_.install(os.getpid(), listener=session and plan.limits.processes == 1)


def contain(memory_mb: int) -> tuple[str, ...]:
    """Restrict this process permanently to arithmetic and reading its libraries, for workers outside the executor.

    No sockets, no other processes or programs, no files but the libraries', nothing written. Returns the layers in
    force: seccomp and landlock where the host has them.

    Args:
        memory_mb: Limit of the whole address space, in MiB.
    """
    limits = ProgramLimits(
        wall_s=1, cpu_s=1 << 30, cpu_floor_s=0, memory_mb=memory_mb, scratch_mb=1, scratch_files=0, file_mb=1,
        descriptors=64, threads=1, processes=1, output_kb=0, output_kill_mb=0, session_replay_ms=0, nproc=4096,
    )  # fmt: skip
    try:
        version = _landlock.abi()
    except _kernel.StepFailed:
        version = 0
    plan = IsolationPlan(
        "L1", base="", seccomp=not _seccomp.supported(), landlock=version, namespaces=False, own_uid=False,
        read=readable_paths(sys.path), limits=limits,
    )  # fmt: skip
    ruleset = make_ruleset(plan, None) if version else -1
    with contextlib.suppress(OSError):
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        offer_to_oom_killer(proc)
        os.close(proc)
    lock_down(plan, 0, None, ruleset, make_filter(plan, session=False) if plan.seccomp else None)
    return layers_in_force(plan)
