"""Settings of the tool executor: limits of a call, isolation, size of the pool, remote engines."""

import os
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from grpo_roc_jax.sandbox.process import workers_for
from grpo_roc_jax.settings.options import (
    AtLeast1,
    Axis,
    Count,
    NotNegative,
    Positive,
    as_text,
    default_of,
    fields_of,
    kind,
    settings,
)

LEVELS = ("L0", "L1", "L2", "L3", "L4")
"""Isolation levels from weakest to strongest; the documentation of `sandbox` says what each adds."""


class ExecutorKind(Axis, axis="tools.executor"):
    """The executor of programs."""


@kind("local")
class LocalPool(ExecutorKind):
    """In a pool of processes on this host."""


@kind("cgroup")
class PoolInCgroup(LocalPool):
    """In a pool of processes on this host, in a cgroup (version 2) of their own; an error where the host has none."""

    memory_mb: AtLeast1 = 16384
    """Memory of all processes of the pool together, files in memory included, in MiB. The kernel ends the largest
    program beyond it, which then counts as a crash: leave room for `tools.workers` programs."""
    processes: AtLeast1 = 4096
    """Processes and threads of the pool together."""
    parent: str = ""
    """Directory of the group to make it in; empty tries the group of the trainer and the one above it."""


@kind("ray")
class RayActors(ExecutorKind):
    """In Ray actors with a pool each, on any host of the cluster; needs the extra `ray`."""

    actors: AtLeast1 = 2
    """Number of actors."""
    cpus: Positive = 1.0
    """Cores that Ray reserves per actor. They size the actor's pool if `tools.workers` is 0."""
    batch: AtLeast1 = 16
    """Calls per message to an actor."""
    timeout_s: Positive = 60.0
    """Seconds until an actor that has not answered counts as lost."""


@settings
class RemoteService(ExecutorKind):
    """In an existing HTTP service, which limits and isolates them by itself."""

    reads: ClassVar[tuple[str, ...]] = (
        "executor", "enabled", "wall_s", "output_kb", "observation", "hide_addresses", "share_results",
    )  # fmt: skip
    """Settings of `tools` that have an effect in addition to those of this kind."""

    url: str = "http://127.0.0.1:8080"
    """Base address. Requests carry the bearer token in the environment variable `GRPO_TOOLS_TOKEN`, if it is set."""
    concurrency: AtLeast1 = 32
    """Requests in flight."""
    retries: AtLeast1 = 3
    """Attempts after transport errors and queue time-outs; nothing else is retried."""
    timeout_s: Positive = 60.0
    """Seconds of wall-clock time per call, all attempts together."""


@kind("sandbox_fusion")
class SandboxFusion(RemoteService):
    """In a SandboxFusion service, or one that `grpo-roc serve-tools` runs."""

    reads = (*RemoteService.reads, "memory_mb")


@kind("code_judge")
class CodeJudge(RemoteService):
    """In a code-judge service."""

    batch: AtLeast1 = 32
    """Calls per request."""


@settings
class ToolsConfig:
    """The executor that runs the policy's Python."""

    executor: ExecutorKind = field(default_factory=LocalPool)
    """The executor of programs: a pool on this host (in a cgroup or not), Ray actors with a pool each, or an existing
    HTTP service."""
    enabled: tuple[str, ...] = ("python_code_with_standard_io", "jupyter_code")
    """Names of the built-in tools the policy may call; further tools are registered in code."""
    level: Literal["best", "L0", "L1", "L2", "L3", "L4"] = "best"
    """Isolation level to run at; `best` takes the strongest that the probe could really perform."""
    min_level: Literal["L0", "L1", "L2", "L3", "L4"] = "L2"
    """Refuse to start below this level. L2 needs no root and keeps programs from files, processes and the network, but
    not from seeing the host's figures or forging their own status; `docs/sandbox.md` lists what remains."""
    workers: Count = 0
    """Calls in flight; 0 takes 16 per core up to 256 (a call that loops for ever must not hold up the others)."""
    roots: Count = 0
    """Warm interpreters that workers are forked from; 0 takes a quarter of `workers`: forks of one root contend."""
    cpus: str = ""
    """Cores of the executor, such as `2-15,20`; empty leaves the choice to the kernel."""
    preload: tuple[str, ...] = ("numpy", "sympy")
    """Modules imported once per root; a program that imports one of them pays nothing for it."""
    bare_root: bool = True
    """Run programs that import the standard library only from a small root, at about half the cost of a call."""
    interpreter: str = ""
    """Python of the roots; empty takes the trainer's. Must have `preload` installed."""
    wall_s: Positive = 5.0
    """Seconds a call may take, without its time in the queue. Short, since an endless loop always takes all of it."""
    cpu_s: Positive = 5.0
    """CPU seconds of a call, over all its threads."""
    cpu_floor_s: NotNegative = 0.5
    """A call that had less CPU time than this by `wall_s` (at most a tenth of `wall_s`) because it waited for a core is
    not charged for that wait. It may take up to `wall_s` + 10 s in all (2 s if the kernel does not count the wait),
    with ever less CPU being enough, and then gets one more attempt among fewer calls: the load of the host is no
    time-out of the program."""
    memory_mb: AtLeast1 = 512
    """Address space above the warm interpreter's, in MiB. Files in memory that programs get are emptied once a call is
    answered. A session shares it with the copy of its state: one that uses
    more than half is not copied, and starts empty after a cell that had to be ended."""
    scratch_mb: AtLeast1 = 64
    """Total size of a call's scratch directory, in MiB, deleted files that are open included. From L3 up a mount bounds
    it; below, it is counted by looking, so a fast program may exceed it for a moment before it is ended."""
    scratch_files: Count = 4096
    """Files and directories in the scratch directory."""
    file_mb: AtLeast1 = 32
    """Largest single file, in MiB."""
    descriptors: Annotated[int, Ge(16)] = 64
    """Open descriptors of a call, for all threads together; an interpreter needs 16."""
    threads: AtLeast1 = 64
    """Threads of a call, its main thread included."""
    processes: AtLeast1 = 1
    """1: a call is one process. With more, programs can fork and execute what they can reach (from L3 up there is no
    other program). `threads` then bounds threads and processes together, and memory limits hold for each process. In a
    session, they end with their cell. Locks, queues and pools of `multiprocessing` need L3: their semaphores lie in the
    scratch directory."""
    output_kb: Annotated[int, Ge(1), Le(2048)] = 64
    """Output kept per stream, head and tail, in KiB."""
    output_kill_mb: AtLeast1 = 8
    """Output per stream beyond which the call ends as `output_limit`, in MiB."""
    sessions: AtLeast1 = 512
    """Live sessions; beyond it the least recently used one is closed. About 16 MiB each."""
    session_idle_s: NotNegative = 1800.0
    """Seconds without a call after which a session is closed."""
    session_replay_ms: NotNegative = 50.0
    """CPU time of the cells that may be run again to return to the state before a cell that had to be ended. Beyond it
    the state is copied. 0 copies after every cell, which costs 2 to 3 ms and as much again in page faults of later
    cells. Sessions that use the clock or files are always copied."""
    queue_timeout_s: NotNegative = 300.0
    """Seconds in the queue after which a call ends as `queue_timeout`, an infrastructure failure."""
    start_timeout_s: NotNegative = 60.0
    """Seconds until the first worker must be ready."""
    observation: Literal["plain", "rstar2"] = "plain"
    """Wording of what the policy sees; `rstar2` is the official release's, without its timing line."""
    hide_addresses: bool = True
    """Replace memory addresses in observations, so that a resumed run sees the same text."""
    share_results: bool = False
    """Run a program once, and give its result to all calls of the same program with the same input, until 1,024 other
    programs have been used. For short programs, which rollouts of one problem often repeat word for word. A program
    that reads the clock or random numbers shows its first result again. Sessions, and programs that a limit or the host
    ended, run each time."""
    read_paths: tuple[str, ...] = ()
    """Further files and directories that programs may read at L2 and above."""
    scratch_dir: str = ""
    """Parent of the scratch directories below L3; empty takes the system's temporary directory."""
    uid_base: Count = 58000
    """First of the user ids that L4 gives to workers, one each."""

    def __post_init__(self) -> None:
        if self.level != "best" and LEVELS.index(self.level) < LEVELS.index(self.min_level):
            raise ValueError(
                f"tools.level {self.level} is below tools.min_level {self.min_level}; "
                "lower min_level as well for weaker isolation"
            )
        if isinstance(self.executor, RemoteService):
            fields = {
                name: setting for name, setting in fields_of(ToolsConfig).items() if name not in self.executor.reads
            }
            unread = [name for name, setting in fields.items() if getattr(self, name) != default_of(setting)]
            if unread:
                raise ValueError(
                    f"tools.{unread[0]} = {as_text(getattr(self, unread[0]))} has no effect with tools.executor "
                    f"{self.executor.kind}, whose service runs the programs; leave out "
                    f"{', '.join(f'tools.{name}' for name in unread)}, or set tools.executor to local or ray"
                )

    @property
    def pool_size(self) -> int:
        """Number of workers; resolves the automatic choice."""
        if self.workers:
            return self.workers
        return workers_for(len(parse_cpus(self.cpus)) if self.cpus else len(os.sched_getaffinity(0)))

    @property
    def root_count(self) -> int:
        """Number of warm interpreters; resolves the automatic choice."""
        return self.roots or max(1, self.pool_size // 4)


def parse_cpus(text: str) -> set[int]:
    """The core numbers of a list such as `0-3,8`.

    Raises:
        ValueError: The text is not such a list.
    """
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or int(last or first) < int(first):
            raise ValueError(f"tools.cpus is {text!r}; must be a list such as '0-3,8'")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
