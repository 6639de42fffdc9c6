"""Probes what a host offers, and derives the isolation level, the plan and the number of workers.

Isolation levels are found by performing each step in a throw-away child, never by version numbers. Standard library
only.
"""

import contextlib
import os
import resource
import tempfile
from dataclasses import dataclass, replace
from typing import NamedTuple

from . import _kernel, _landlock, _scratch_cleanup, _seccomp, _spaces, _worker, isolation
from ._messages import Capabilities, ExecutorSettings, IsolationPlan, ProgramLimits
from .isolation import LAYERS, LEVELS, base_memory, lock_down, make_filter, make_ruleset, outer_uid, readable_paths

REMEDIES = {
    "limits": "Linux is needed; elsewhere use tools.executor = ray or sandbox_fusion with a Linux host",
    "seccomp": "allow the seccomp system call in the container's profile (Docker's default profile does)",
    "landlock": "a kernel from 5.13 on with `landlock` in its list of security modules (boot option lsm=landlock,...)",
    "namespaces": "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0) or run privileged; L2 needs neither",
    "own uid": "run as real root with CAP_SETUID, CAP_SYS_ADMIN; L3 is as strong against single programs",
}


@dataclass(frozen=True)
class ProbedLayer:
    name: str
    ok: bool
    detail: str
    """The failing call and its errno, or what was found."""


@dataclass(frozen=True)
class Probe:
    """What this host offers."""

    layers: tuple[ProbedLayer, ...]

    @property
    def available(self) -> tuple[str, ...]:
        """Levels that can be reached, weakest first. L3 does not need landlock where namespaces work."""
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
        rows = [f"{'layer':<12} {'works':<6} detail"]
        for layer in self.layers:
            rows.append(f"{layer.name:<12} {'yes' if layer.ok else 'NO':<6} {layer.detail}")
            if not layer.ok:
                rows.append(f"{'':<12} {'':<6} remedy: {REMEDIES[layer.name]}")
        return "\n".join([*rows, "levels: " + (" ".join(self.available) or "none")])

    def missing(self, level: str) -> tuple[str, ...]:
        """Layers that `level` lacks, each with the reason."""
        top = LEVELS.index(level)
        absent = []
        for position, layer in enumerate(self.layers):
            if not layer.ok or (position > top and not (layer.name == "landlock" and top >= 2)):
                absent.append(f"{layer.name} ({'not asked for' if layer.ok else layer.detail})")
        return tuple(absent)


def choose(probe: Probe, requested: str, minimum: str) -> str:
    """The isolation level to run at; `best` requests the strongest that the host offers.

    Raises:
        LookupError: the level cannot be reached, or is below the minimum; the message holds the table and the remedies.
    """
    best = probe.available[-1] if probe.available else None
    level = best if requested == "best" else requested
    if level in probe.available and LEVELS.index(level) >= LEVELS.index(minimum):
        return level
    target = minimum if requested == "best" else requested
    raise LookupError(
        f"isolation level {target} cannot be reached here; the best is {best or 'none'}\n{probe.table()}\n"
        "to run with weaker isolation knowingly, lower tools.min_level (and tools.level)"
    )


def probe_host(machine: str = _kernel.MACHINE) -> Probe:
    """Tries each layer in a child of this process, as on a machine of that name."""
    base = tempfile.mkdtemp(prefix="tools-probe-")
    # Other user ids must be able to reach what is built on it.
    os.chmod(base, 0o755)
    layers = []
    try:
        tests = (_try_limits, _try_seccomp, _try_landlock, _try_namespaces, _try_uid)
        for name, test in zip(LAYERS, tests, strict=True):
            fault = _kernel.supported() or (_seccomp.supported(machine) if name != "limits" else "")
            ok, detail = (False, fault) if fault else in_child(lambda test=test: test(base))
            layers.append(ProbedLayer(name, ok, detail))
    finally:
        os.rmdir(base)
    return Probe(tuple(layers))


def in_child(test) -> tuple[bool, str]:
    """Run a test in a child. The test returns a detail, or raises an error that names the failing call."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            # Programs may have few descriptors, and none of this process's.
            os.closerange(3, write_end)
            os.closerange(write_end + 1, 1 << 16)
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


_PROBE_LIMITS = ProgramLimits(
    wall_s=5, cpu_s=5, cpu_floor_s=0.5, memory_mb=512, scratch_mb=1, scratch_files=64, file_mb=32, descriptors=64,
    threads=64, processes=1, output_kb=64, output_kill_mb=8, session_replay_ms=0, nproc=4096,
)  # fmt: skip


def probe_plan(level: str, landlock: int = 0) -> IsolationPlan:
    """The plan of a child that tries a level, with a version of landlock; 0 for none."""
    return IsolationPlan(
        level, base="", seccomp=level >= "L1", landlock=landlock, namespaces=level >= "L3", own_uid=level == "L4",
        read=readable_paths(), limits=_PROBE_LIMITS,
    )  # fmt: skip


def _try_limits(base: str) -> str:
    lock_down(probe_plan("L0"), base_memory(), None, -1, None)
    return "hard limits, no capabilities, no new privileges"


def _expect_denied(what: str, action) -> None:
    try:
        action()
    except OSError:
        return
    raise RuntimeError(f"{what} was still possible afterwards")


def _try_seccomp(base: str) -> str:
    import socket

    plan = probe_plan("L1")
    lock_down(plan, base_memory(), None, -1, make_filter(plan, session=False))
    _expect_denied("opening a socket", socket.socket)
    _expect_denied("fork", os.fork)
    return "filter binds: no sockets, no fork"


def _try_landlock(base: str) -> str:
    version = _landlock.abi()
    plan = probe_plan("L2", version)
    ruleset = make_ruleset(plan, None)
    lock_down(plan, base_memory(), None, ruleset, make_filter(plan, session=False))
    _expect_denied("listing /", lambda: os.listdir("/"))
    os.listdir(os.path.dirname(os.__file__))
    return _landlock.verdict(version)


def _in_namespaces(level: str, base: str, uid: int, inner: int) -> str:
    """Try the whole sequence of a worker and its child, since some hosts allow its start and deny a later step."""
    plan = probe_plan(level)
    _spaces.enter(user_namespace=level == "L3", outer_uid=uid)

    def inside() -> str:
        _spaces.build_root(base, plan.read, proc=False)
        scratch = _spaces.scratch_name(plan.read)
        _spaces.mount_scratch(scratch, 1, 64, inner)
        _kernel.empty_bounding_set()
        # Without /proc the size of the address space is unknown, so the limit is tried with a large one.
        lock_down(plan, 64 << 30, inner, -1, make_filter(plan, session=False))
        with open(scratch + "/probe", "w") as file:
            file.write("x")
        os.listdir(os.path.dirname(os.__file__))
        _expect_denied("opening a file of the host", lambda: os.close(os.open("/etc/passwd", os.O_RDONLY)))
        return f"process {os.getpid()} of its own namespace, minimal root"

    ok, detail = in_child(inside)
    if not ok:
        raise RuntimeError(detail)
    return detail


def _try_namespaces(base: str) -> str:
    return _in_namespaces("L3", base, outer_uid(), _spaces.INNER_ID)


def _try_uid(base: str) -> str:
    if os.geteuid() != 0:
        raise RuntimeError(f"running as user {os.geteuid()}, not as root")
    return _in_namespaces("L4", base, 58000, 58000)


class Startup(NamedTuple):
    settings: ExecutorSettings
    """Settings from the trainer, reduced to what the host has room for."""
    plan: IsolationPlan
    ready: Capabilities
    """The answer to the trainer, without what roots report."""
    cleanup: _scratch_cleanup.ScratchCleanup


def prepare(settings: ExecutorSettings) -> Startup:
    """Probe the host, choose the level and make the plan. Binds this process to its cores and hides its memory.

    Raises LookupError, with the table and the remedies, if the level cannot be reached.
    """
    if settings.cpu_list:
        try:
            os.sched_setaffinity(0, settings.cpu_list)
        except OSError as error:
            raise OSError(f"tools.cpus {settings.cpu_list}: no such cores here ({error})") from error
    probe = probe_host()
    # The texts of all programs will be in this process; nobody of the same user may read its memory. After the
    # probe only: its children inherit this, and would not be allowed to write their own user maps.
    _kernel.prctl("prctl(PR_SET_DUMPABLE)", _kernel.PR_SET_DUMPABLE, 0)
    level = choose(probe, settings.level, settings.min_level)
    base = _scratch_cleanup.make_base(settings.scratch_dir)
    # The cleanup is a thread, so it starts after the probe, which forks.
    cleanup = _scratch_cleanup.ScratchCleanup(base, os.path.join(base, _worker.TRASH))
    # RLIMIT_NPROC of a call: exact if it has a user of its own, else well above the user's present count.
    nproc = settings.limits.threads if level in ("L3", "L4") else tasks_of_user() + 1024
    settings = replace(settings, limits=replace(settings.limits, nproc=nproc))
    plan = isolation.make_plan(settings, level, [layer.name for layer in probe.layers if layer.ok], base)
    _kernel.fix_addresses()
    settings = fit_to_host(settings)
    layers = isolation.layers_in_force(plan)
    return Startup(settings, plan, Capabilities(level, probe.missing(level), layers, {}, settings.pool_size), cleanup)


def tasks_of_user() -> int:
    """Tasks of this user on the host, which RLIMIT_NPROC counts."""
    uid, total = os.geteuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == uid:
                    total += len(os.listdir(f"/proc/{name}/task"))
    return total


def fit_to_host(settings: ExecutorSettings) -> ExecutorSettings:
    """The settings with as many workers, roots and sessions as this host's own limits leave room for."""
    workers, sessions = settings.pool_size, settings.sessions
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if files != resource.RLIM_INFINITY:
        # A connection per worker of either pool and three memory files per call; the rest is for this process itself.
        workers = min(workers, max(1, (files - 64) // 6))
        sessions = min(sessions, max(1, (files - 64) // 3 - 2 * workers))
    tasks = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if tasks != resource.RLIM_INFINITY and os.geteuid() != 0:
        # Two workers of either pool and their children per unit of width, besides the roots.
        workers = min(workers, max(1, (tasks - tasks_of_user() - 8) // 4))
    roots = max(1, min(settings.root_count, workers))
    return replace(settings, pool_size=workers, root_count=roots, sessions=sessions)
