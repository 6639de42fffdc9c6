"""Isolation levels: what each consists of, applying one to a process, and finding out what a host offers.

| level | adds |
|---|---|
| L0 | hard resource limits, private directory, clean environment, closed descriptors, no capabilities |
| L1 | seccomp: no fork, exec, sockets or foreign signals; files read-only |
| L2 | landlock: an allowlist of paths, a writable scratch directory |
| L3 | user, process, mount, network, IPC and host name namespaces; a minimal read-only root |
| L4 | L3 with real root: one user id per worker instead of a user namespace |

Availability is found by doing each step in a throw-away child, never by version numbers. Standard library only: roots,
workers and the executor process import it.
"""

import os
import resource
import sys
import sysconfig
import tempfile
from dataclasses import dataclass

from . import _kernel, _landlock, _seccomp, _spaces

LEVELS = ("L0", "L1", "L2", "L3", "L4")
LAYERS = ("limits", "seccomp", "landlock", "namespaces", "own uid")
REMEDIES = {
    "limits": "Linux is needed; elsewhere use tools.executor = ray or sandbox_fusion with a Linux host",
    "seccomp": "allow the seccomp system call in the container's profile (Docker's default profile does)",
    "landlock": "a kernel from 5.13 on with `landlock` in its list of security modules (boot option lsm=landlock,...)",
    "namespaces": "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0) or run privileged; L2 needs neither",
    "own uid": "run as real root with CAP_SETUID, CAP_SYS_ADMIN; L3 is as strong against single programs",
}
SYSTEM_PATHS = ("/usr/lib", "/lib", "/lib64", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")


@dataclass(frozen=True)
class Layer:
    """One row of the probe's table."""

    name: str
    ok: bool
    detail: str
    """The failing call and its errno, or what was found."""


@dataclass(frozen=True)
class Probe:
    """What this host offers."""

    layers: tuple[Layer, ...]

    @property
    def available(self) -> tuple[str, ...]:
        """Levels that can be reached, weakest first; L3 stands without landlock where namespaces work."""
        ok = {layer.name for layer in self.layers if layer.ok}
        needs = {
            "L0": {"limits"},
            "L1": {"limits", "seccomp"},
            "L2": {"limits", "seccomp", "landlock"},
            "L3": {"limits", "seccomp", "namespaces"},
            "L4": {"limits", "seccomp", "own uid"},
        }
        return tuple(level for level in LEVELS if needs[level] <= ok)

    def table(self) -> str:
        """Layers with what is missing and what to do about it, as text."""
        rows = [f"{'layer':<12} {'works':<6} detail"]
        for layer in self.layers:
            rows.append(f"{layer.name:<12} {'yes' if layer.ok else 'NO':<6} {layer.detail}")
            if not layer.ok:
                rows.append(f"{'':<12} {'':<6} remedy: {REMEDIES[layer.name]}")
        return "\n".join([*rows, "levels: " + (" ".join(self.available) or "none")])

    def missing(self, level: str) -> tuple[str, ...]:
        """Layers that `level` goes without, with the reason."""
        top = LEVELS.index(level)
        absent = []
        for position, layer in enumerate(self.layers):
            if not layer.ok:
                absent.append(f"{layer.name} ({layer.detail})")
            elif position > top and not (layer.name == "landlock" and top >= 2):
                absent.append(f"{layer.name} (not asked for)")
        return tuple(absent)


def choose(probe: Probe, wanted: str, minimum: str) -> str:
    """The level to run at.

    Raises:
        LookupError: it cannot be reached; the message holds the table and the remedies.
    """
    best = probe.available[-1] if probe.available else None
    level = best if wanted == "best" else wanted
    if level in probe.available and LEVELS.index(level) >= LEVELS.index(minimum):
        return level
    target = minimum if wanted == "best" else wanted
    raise LookupError(
        f"isolation level {target} cannot be reached here; the best is {best or 'none'}\n{probe.table()}\n"
        "to run with weaker isolation knowingly, lower tools.min_level (and tools.level)"
    )


def make_plan(limits: dict, level: str, layers: list[str], base: str) -> dict:
    """Everything that roots and workers must know, as plain data.

    Args:
        limits: Fields of `ToolsConfig` by name.
        level: The level to apply.
        layers: Names of the layers that work here; L3 and L4 take landlock along where it does.
        base: An existing private directory.
    """
    rank = LEVELS.index(level)
    return {
        "level": level,
        "rank": rank,
        "base": base,
        "seccomp": rank >= 1,
        "landlock": _landlock.abi() if rank >= 2 and "landlock" in layers else 0,
        "namespaces": rank >= 3,
        "own_uid": rank == 4,
        "read": readable_paths(list(limits.get("read_paths", ()))),
        "limits": limits,
    }


def readable_paths(extra: list[str]) -> list[str]:
    """What a program must be able to read: the interpreter's library, its packages, shared objects, time zones."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = [*SYSTEM_PATHS, *SYSTEM_FILES, *(sysconfig.get_paths()[name] for name in names), *extra]
    paths += [os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix)]
    paths += [os.path.realpath(path) for path in paths]
    return sorted({os.path.abspath(path) for path in paths if path and os.path.exists(path)} - {"/"})


def make_filter(plan: dict, *, session: bool) -> _seccomp.Filter:
    """The system call filter of a plan; sessions may ask the worker for a fork, to keep a copy of their state."""
    fork = "allow" if plan["limits"]["processes"] > 1 else "notify" if session else "deny"
    return _seccomp.Filter(
        _seccomp.build(
            write_files=plan["rank"] >= 2,
            fork=fork,
            own_pid_namespace=plan["namespaces"],
            truncate=plan["landlock"] >= 3 or plan["namespaces"],
        )
    )


def make_ruleset(plan: dict, scratch: str | None) -> int:
    """Landlock's ruleset of a plan; a rule belongs to an inode, so a renewed scratch directory needs a new one."""
    execute = plan["limits"]["processes"] > 1
    read = [*plan["read"], *(("/usr/bin", "/bin") if execute else ())]
    return _landlock.build(plan["landlock"], read, list(_spaces.DEVICES), scratch, execute=execute)


def base_memory() -> int:
    """Address space of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def set_limits(limits: dict, base: int, *, session: bool = False) -> None:
    """Hard resource limits; soft equals hard, so none can be lifted again."""
    mib = 1 << 20
    values = {
        resource.RLIMIT_AS: base + limits["memory_mb"] * mib,
        resource.RLIMIT_FSIZE: max(limits["file_mb"], limits["output_kill_mb"] + 1) * mib,
        resource.RLIMIT_NOFILE: limits["descriptors"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_STACK: 8 * mib,
        resource.RLIMIT_NPROC: limits["nproc"],
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    if not session:
        # Whole seconds, rounded up: the worker's own clock enforces the exact limit, this one survives the worker.
        values[resource.RLIMIT_CPU] = int(limits["cpu_s"]) + 2
    for kind, value in values.items():
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))


def lock_down(
    plan: dict, base: int, uid: int | None, ruleset: int, filter_: _seccomp.Filter | None, *, session: bool = False
) -> int:
    """Bind this process for good, in the only order that works; a listener's descriptor for sessions, else 0."""
    set_limits(plan["limits"], base, session=session)
    if uid is not None:
        if plan["own_uid"]:
            os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _kernel.set_capabilities()
    _kernel.prctl("prctl(PR_SET_DUMPABLE)", _kernel.PR_SET_DUMPABLE, 1)
    _kernel.prctl("prctl(PR_SET_PDEATHSIG)", _kernel.PR_SET_PDEATHSIG, 9)
    _kernel.prctl("prctl(PR_SET_NO_NEW_PRIVS)", _kernel.PR_SET_NO_NEW_PRIVS, 1)
    if plan["landlock"]:
        _landlock.restrict(ruleset)
    if filter_ is None:
        return 0
    return filter_.install(os.getpid(), listener=session and plan["limits"]["processes"] == 1)


def probe_host() -> Probe:
    """Try every layer in throw-away children."""
    base = tempfile.mkdtemp(prefix="tools-probe-")
    # Others' user ids must be able to reach what is built on it.
    os.chmod(base, 0o755)
    layers = []
    try:
        for name, test in zip(
            LAYERS, (_try_limits, _try_seccomp, _try_landlock, _try_namespaces, _try_uid), strict=True
        ):
            fault = _kernel.supported() or (_seccomp.supported() if name != "limits" else "")
            ok, detail = (False, fault) if fault else _in_child(lambda test=test: test(base))
            layers.append(Layer(name, ok, detail))
    finally:
        os.rmdir(base)
    return Probe(tuple(layers))


def _in_child(test) -> tuple[bool, str]:
    """Run a test in a child; it returns a detail, or raises with the failing call."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            detail = test()
            status = 0
        except BaseException as error:
            detail = str(error) or type(error).__name__
        try:
            os.write(write_end, detail.encode(errors="replace")[:4000])
        finally:
            os._exit(status)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        detail = file.read().decode(errors="replace")
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return False, f"ended by signal {os.WTERMSIG(status)}"
    return os.WEXITSTATUS(status) == 0, detail


_PROBE_LIMITS = {
    "memory_mb": 512, "file_mb": 32, "output_kill_mb": 8, "descriptors": 64, "nproc": 4096, "cpu_s": 5, "processes": 1,
}  # fmt: skip


def _probe_plan(level: str, landlock: int) -> dict:
    return {
        "level": level, "rank": LEVELS.index(level), "landlock": landlock, "namespaces": level >= "L3",
        "own_uid": level == "L4", "limits": _PROBE_LIMITS, "read": readable_paths([]),
    }  # fmt: skip


def _try_limits(base: str) -> str:
    lock_down(_probe_plan("L0", 0), base_memory(), None, -1, None)
    return "hard limits, no capabilities, no new privileges"


def _expect_denied(what: str, action) -> None:
    try:
        action()
    except OSError:
        return
    raise RuntimeError(f"{what} was still possible afterwards")


def _try_seccomp(base: str) -> str:
    import socket

    plan = _probe_plan("L1", 0)
    lock_down(plan, base_memory(), None, -1, make_filter(plan, session=False))
    _expect_denied("opening a socket", socket.socket)
    _expect_denied("fork", os.fork)
    return "filter binds: no sockets, no fork"


def _try_landlock(base: str) -> str:
    version = _landlock.abi()
    plan = _probe_plan("L2", version)
    ruleset = make_ruleset(plan, None)
    lock_down(plan, base_memory(), None, ruleset, make_filter(plan, session=False))
    _expect_denied("listing /", lambda: os.listdir("/"))
    os.listdir(os.path.dirname(os.__file__))
    return f"ABI {version}, paths bind"


def _in_namespaces(level: str, base: str, uid: int, inner: int) -> str:
    """The whole sequence of a worker and its child; some hosts let it begin and deny it in the middle."""
    plan = _probe_plan(level, 0)
    _spaces.enter(user_namespace=level == "L3", outer_uid=uid)

    def inside() -> str:
        _spaces.build_root(base, plan["read"], proc=False)
        _spaces.mount_scratch(1, 64, inner)
        _kernel.empty_bounding_set()
        # Without /proc the address space cannot be read; the limit is tried with a large one.
        lock_down(plan, 64 << 30, inner, -1, make_filter(plan, session=False))
        with open(_spaces.SCRATCH + "/probe", "w") as file:
            file.write("x")
        os.listdir(os.path.dirname(os.__file__))
        _expect_denied("opening a file of the host", lambda: os.close(os.open("/etc/passwd", os.O_RDONLY)))
        return f"process {os.getpid()} of its own namespace, minimal root"

    ok, detail = _in_child(inside)
    if not ok:
        raise RuntimeError(detail)
    return detail


def _try_namespaces(base: str) -> str:
    return _in_namespaces("L3", base, 65534 if os.geteuid() == 0 else os.geteuid(), _spaces.INNER_ID)


def _try_uid(base: str) -> str:
    if os.geteuid() != 0:
        raise RuntimeError(f"running as user {os.geteuid()}, not as root")
    return _in_namespaces("L4", base, 58000, 58000)
