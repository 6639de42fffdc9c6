"""Settings of the tool executor: limits of a call, isolation, size of the pool, remote engines."""

import os
from typing import Literal

from grpo_roc_jax.settings.options import settings

LEVELS = ("L0", "L1", "L2", "L3", "L4")
"""Isolation levels from weakest to strongest; `sandbox` says what each adds."""


@settings
class ToolsConfig:
    """The executor that runs the policy's Python."""

    executor: Literal["local", "ray", "sandbox_fusion", "code_judge"] = "local"
    """Where programs run: a pool on this host, Ray actors with a pool each, or an existing HTTP service."""
    enabled: tuple[str, ...] = ("python_code_with_standard_io", "jupyter_code")
    """Names of the built-in tools the policy may call; own tools are registered in code."""
    level: Literal["best", "L0", "L1", "L2", "L3", "L4"] = "best"
    """Isolation level to run at; `best` takes the strongest that the probe could really perform."""
    min_level: Literal["L0", "L1", "L2", "L3", "L4"] = "L2"
    """Refuse to start below this level. L2 needs no root and stops all but status forging; lower it knowingly."""
    workers: int = 0
    """Calls in flight; 0 takes 16 per core up to 256 (a call that loops for ever must not hold up the others)."""
    roots: int = 0
    """Warm interpreters that workers are forked from; 0 takes a quarter of `workers`: forks of one root contend."""
    cpus: str = ""
    """Cores of the executor, such as `2-15,20`; empty leaves the choice to the kernel."""
    preload: tuple[str, ...] = ("numpy", "sympy")
    """Modules imported once per root; a program that imports one of them pays nothing for it."""
    bare_root: bool = True
    """Run programs that import the standard library only from a small root, at about half the cost of a call."""
    interpreter: str = ""
    """Python of the roots; empty takes the trainer's. Must have `preload` installed."""
    wall_s: float = 5.0
    """Seconds a call may take, time in our queue excluded. Short, since an endless loop always costs all of it."""
    cpu_s: float = 5.0
    """CPU seconds of a call, over all its threads."""
    cpu_floor_s: float = 0.5
    """A call that had less CPU than this by `wall_s` (at most a tenth of `wall_s`) because it waited for a core is not
    charged for that wait: it may take up to `wall_s` + 10 s in all (2 s where the kernel does not count the wait), with
    ever less CPU being enough, and then gets one more attempt among fewer calls. Our load is no time-out of the
    program."""
    memory_mb: int = 512
    """Address space above the warm interpreter's, in MiB."""
    scratch_mb: int = 64
    """Total size of a call's scratch directory, in MiB."""
    scratch_files: int = 4096
    """Files and directories in the scratch directory."""
    file_mb: int = 32
    """Largest single file, in MiB."""
    descriptors: int = 64
    """Open descriptors of a call."""
    threads: int = 64
    """Threads of a call, its main thread included."""
    processes: int = 1
    """1: a call is one process. Above 1 lets programs fork and execute what they can reach (from L3 up no other program
    is there); `threads` then bounds threads and processes together, and memory limits count for each process."""
    output_kb: int = 64
    """Output kept per stream, head and tail, in KiB."""
    output_kill_mb: int = 8
    """Output per stream beyond which the call ends as `output_limit`, in MiB."""
    sessions: int = 512
    """Live sessions; beyond it the least recently used one is closed. About 16 MiB each."""
    session_idle_s: float = 1800.0
    """Seconds without a call after which a session is closed."""
    session_replay_ms: float = 50.0
    """CPU time of the cells that may be run again to return to the state before a cell that had to be ended; beyond it
    the state is copied. 0 copies after every cell, for 2 to 3 ms each and as much in page faults of the cells after it;
    sessions that touch clock or files always do."""
    queue_timeout_s: float = 300.0
    """Seconds in our queue after which a call ends as `queue_timeout`, a fault of ours."""
    max_in_flight: int = 4096
    """Calls handed to the executor process at once; further ones wait in the trainer and are counted."""
    start_timeout_s: float = 60.0
    """Seconds until the first worker must be ready."""
    observation: Literal["plain", "rstar2"] = "plain"
    """Wording of what the policy sees; `rstar2` is the official release's, without its timing line."""
    hide_addresses: bool = True
    """Replace memory addresses in observations, so that a resumed run sees the same text."""
    read_paths: tuple[str, ...] = ()
    """Further files and directories that programs may read at L2 and above."""
    scratch_dir: str = ""
    """Parent of the scratch directories below L3; empty takes the system's temporary directory."""
    uid_base: int = 58000
    """First of the user ids that L4 gives to workers, one each."""
    url: str = "http://127.0.0.1:8080"
    """Base address of the remote service."""
    remote_concurrency: int = 32
    """Requests to the remote service in flight."""
    remote_batch: int = 32
    """Calls per request, where the service takes batches."""
    remote_retries: int = 3
    """Attempts after transport errors and queue time-outs; nothing else is retried."""
    remote_timeout_s: float = 60.0
    """Seconds of wall-clock time per call, all attempts together."""
    ray_actors: int = 2
    """Ray actors, each with a pool of its own."""
    ray_cpus: float = 1.0
    """Cores that Ray reserves per actor; the actor's pool is sized by it where `workers` is 0."""
    ray_batch: int = 16
    """Calls per message to an actor."""

    def __post_init__(self) -> None:
        if self.level != "best" and LEVELS.index(self.level) < LEVELS.index(self.min_level):
            raise ValueError(
                f"tools.level {self.level} is below tools.min_level {self.min_level}; "
                "lower min_level as well if weaker isolation is really wanted"
            )
        for name in ("wall_s", "cpu_s", "memory_mb", "scratch_mb", "file_mb", "output_kb", "output_kill_mb", "threads"):
            if getattr(self, name) <= 0:
                raise ValueError(f"tools.{name} is {getattr(self, name)}, but must be positive")
        if self.descriptors < 16:
            raise ValueError(f"tools.descriptors is {self.descriptors}; an interpreter needs at least 16")
        if min(self.workers, self.roots) < 0 or min(self.processes, self.sessions, self.max_in_flight) < 1:
            raise ValueError(
                "tools: workers and roots must be 0 or more; processes, sessions, max_in_flight at least 1"
            )

    @property
    def pool_size(self) -> int:
        """Workers after the automatic choice."""
        if self.workers:
            return self.workers
        cores = len(parse_cpus(self.cpus)) if self.cpus else len(os.sched_getaffinity(0))
        return 16 * cores if cores <= 16 else max(256, 2 * cores)

    @property
    def root_count(self) -> int:
        """Warm interpreters after the automatic choice."""
        return self.roots or max(1, self.pool_size // 4)


def parse_cpus(text: str) -> set[int]:
    """Core numbers of a list such as `0-3,8`.

    Raises:
        ValueError: the text is no such list.
    """
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ValueError(f"tools.cpus is {text!r}; a list such as '0-3,8' is wanted")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
