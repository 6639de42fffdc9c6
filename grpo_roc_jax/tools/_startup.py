"""What the executor process decides before it starts roots: isolation level, plan, and how many workers fit the host.

Standard library only.
"""

import contextlib
import os
import resource
from dataclasses import replace
from typing import NamedTuple

from . import _janitor, _kernel, _probing, _worker, sandbox
from ._messages import Capabilities, ExecutorSettings, IsolationPlan


class Startup(NamedTuple):
    settings: ExecutorSettings
    """As the trainer sent them, reduced to what the host has room for."""
    plan: IsolationPlan
    ready: Capabilities
    """The answer to the trainer, without what roots report."""
    janitor: _janitor.Janitor


def prepare(settings: ExecutorSettings) -> Startup:
    """Probe the host, choose the level and make the plan. Binds this process to its cores and hides its memory.

    Raises LookupError, with the table and the remedies, if the level cannot be reached.
    """
    if settings.cpu_list:
        os.sched_setaffinity(0, settings.cpu_list)
    probe = _probing.probe_host()
    # The texts of all programs will be in this process; nobody of the same user may read its memory. After the
    # probe only: its children inherit this, and would not be allowed to write their own user maps.
    _kernel.prctl("prctl(PR_SET_DUMPABLE)", _kernel.PR_SET_DUMPABLE, 0)
    level = _probing.choose(probe, settings.level, settings.min_level)
    base = _janitor.make_base(settings.scratch_dir)
    # The janitor is a thread, so it starts after the probe, which forks.
    janitor = _janitor.Janitor(base, os.path.join(base, _worker.TRASH))
    # RLIMIT_NPROC of a call: exact if it has a user of its own, else well above the user's present count.
    nproc = settings.limits.threads if level in ("L3", "L4") else tasks_of_user() + 1024
    settings = replace(settings, limits=replace(settings.limits, nproc=nproc))
    plan = sandbox.make_plan(settings, level, [layer.name for layer in probe.layers if layer.ok], base)
    _kernel.fix_addresses()
    settings = fit_to_host(settings)
    layers = sandbox.layers_in_force(plan)
    return Startup(settings, plan, Capabilities(level, probe.missing(level), layers, {}, settings.pool_size), janitor)


def tasks_of_user() -> int:
    """Tasks of this user on the host, which RLIMIT_NPROC counts."""
    own, total = os.geteuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == own:
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
