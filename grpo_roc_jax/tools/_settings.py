"""What the processes of the executor are given at start: limits of programs, settings of the pool, isolation.

Standard library only: every process of the executor imports this module.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProgramLimits:
    """What a program may use. The fields of `ToolsConfig` with the same names are documented there."""

    wall_s: float
    cpu_s: float
    cpu_floor_s: float
    memory_mb: int
    scratch_mb: int
    scratch_files: int
    file_mb: int
    descriptors: int
    threads: int
    processes: int
    output_kb: int
    output_kill_mb: int
    session_replay_ms: float
    nproc: int = 0
    """RLIMIT_NPROC; depends on the isolation level and is set once that is known."""


@dataclass(frozen=True)
class ExecutorSettings:
    """The part of `ToolsConfig` that the executor process needs, with automatic choices made."""

    limits: ProgramLimits
    level: str
    min_level: str
    pool_size: int
    root_count: int
    cpu_list: tuple[int, ...]
    """Cores of the executor; empty leaves the choice to the kernel."""
    preload: tuple[str, ...]
    bare_root: bool
    interpreter: str
    read_paths: tuple[str, ...]
    scratch_dir: str
    uid_base: int
    sessions: int
    session_idle_s: float
    queue_timeout_s: float


@dataclass(frozen=True)
class IsolationPlan:
    """How roots and workers isolate programs; made once by `sandbox.make_plan`."""

    level: str
    base: str
    """Private directory of the executor."""
    seccomp: bool
    landlock: int
    """Version of the kernel's interface; 0 where landlock is not used."""
    namespaces: bool
    own_uid: bool
    read: tuple[str, ...]
    """Paths that programs may read."""
    limits: ProgramLimits
    preload: tuple[str, ...] = ()
    interpreter: str = ""
    uid_base: int = 0
    """First of the user ids given to workers, with `own_uid`."""
    outer_uid: int = 0
    """The host's user id that programs get in a user namespace."""

    @property
    def rank(self) -> int:
        """0 for L0 to 4 for L4."""
        return int(self.level[1])
