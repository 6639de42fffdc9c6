"""Messages between the processes of the executor: one dataclass each, encoded and decoded only here.

The trainer and the executor process exchange frames; the executor process, roots and workers exchange datagrams (see
`_wire`). Both carry a JSON object with the class of the message as `op` and its fields, without those at their default.
Standard library only: every process of the executor imports this module.
"""

import math
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin

from ._wire import BadFrame, encode_json, receive_datagram, rights

# Settings that processes get at start.

LEVELS = ("L0", "L1", "L2", "L3", "L4")
_LEAST = {
    "memory_mb": 1, "scratch_mb": 1, "file_mb": 1, "descriptors": 16, "threads": 1, "processes": 1, "sessions": 1,
}  # fmt: skip
"""Least value of a number; 0 for the others."""
_MOST = {"output_kb": 2048}
"""Greatest value of a number. Two streams of this size, in which a byte that is no text takes three, fit into a frame
with a report."""
_ABOVE_0 = ("wall_s", "cpu_s")


def _check_fields(settings: Any) -> None:
    """Refuses values of another type, and numbers out of range, before a process gets them.

    Raises:
        ValueError: The message names the field and what it must be.
    """
    for field_ in fields(settings):
        value = getattr(settings, field_.name)
        if must := _requirement(field_.name, field_.type, value):
            raise ValueError(f"{type(settings).__name__}.{field_.name} = {value!r:.80}; must be {must}")


def _requirement(name: str, kind: Any, value: Any) -> str:
    """What the value of a field must be; empty if it is that."""
    if kind in (int, float):
        least, above = _LEAST.get(name, 0), name in _ABOVE_0
        number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        most = _MOST.get(name, math.inf)
        fits = number and least <= value <= most and value != math.inf and not (above and value == least)
        must = f"a {'whole ' if kind is int else ''}number {'above' if above else 'of at least'} {least}"
        must += f" and at most {most}" if name in _MOST else ""
    elif get_origin(kind) is tuple:
        item = get_args(kind)[0]
        fits = isinstance(value, tuple | list) and all(isinstance(each, item) for each in value)
        must = "a tuple of whole numbers" if item is int else "a tuple of texts, such as ('numpy', 'sympy')"
    elif name in ("level", "min_level"):
        levels = LEVELS if name == "min_level" else ("best", *LEVELS)
        fits, must = value in levels, f"one of {', '.join(levels)}"
    else:
        fits, must = isinstance(value, kind), f"of type {kind.__name__}"
    return "" if fits else must


@dataclass(frozen=True)
class ProgramLimits:
    """What a program may use. `tools.config.ToolsConfig` documents the fields of the same names."""

    wall_s: float = 5.0
    cpu_s: float = 5.0
    cpu_floor_s: float = 0.5
    memory_mb: int = 512
    scratch_mb: int = 64
    scratch_files: int = 4096
    file_mb: int = 32
    descriptors: int = 64
    threads: int = 64
    processes: int = 1
    output_kb: int = 64
    output_kill_mb: int = 8
    session_replay_ms: float = 50.0
    nproc: int = 0
    """RLIMIT_NPROC; depends on the isolation level and is set once that is known."""

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class ExecutorSettings:
    """What the executor process needs to know; `ToolsConfig` documents the fields of the same names."""

    limits: ProgramLimits = ProgramLimits()
    level: str = "best"
    min_level: str = "L2"
    pool_size: int = 0
    """Programs in flight; 0 chooses by the number of cores (`process.workers_for`)."""
    root_count: int = 0
    """Warm interpreters; 0 takes a quarter of `pool_size`."""
    cpu_list: tuple[int, ...] = ()
    """Cores of the executor; empty leaves the choice to the kernel."""
    preload: tuple[str, ...] = ("numpy", "sympy")
    bare_root: bool = True
    interpreter: str = ""
    read_paths: tuple[str, ...] = ()
    scratch_dir: str = ""
    uid_base: int = 58000
    sessions: int = 512
    session_idle_s: float = 1800.0
    queue_timeout_s: float = 300.0
    links: tuple[str, ...] = ()
    """Names of directories beside the root, such as `app` for `/app`, that lead into the program's own; from L3 on."""

    def __post_init__(self) -> None:
        _check_fields(self)


@dataclass(frozen=True)
class IsolationPlan:
    """How roots and workers isolate programs; made once by `isolation.make_plan`."""

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
    links: tuple[str, ...] = ()
    """See `ExecutorSettings.links`."""

    @property
    def rank(self) -> int:
        """0 for L0 to 4 for L4."""
        return int(self.level[1])


# Trainer to executor process, after `ExecutorSettings`, which `Capabilities` or `Failed` answer.


@dataclass(frozen=True)
class SubmitCall:
    """Run a program. The header, encoded by `_wire.pack_call`, is followed by `code` bytes of text, then the input."""

    id: str
    session: str | None
    seed: int
    code: int
    attempt: int


@dataclass(frozen=True)
class CancelCalls:
    ids: list[str]


@dataclass(frozen=True)
class CloseSession:
    session: str


@dataclass(frozen=True)
class RequestStats:
    n: int
    """Repeated in the answer, as all numbers `n`."""


# Executor process to trainer.


@dataclass(frozen=True)
class Capabilities:
    """What an executor achieved at start; sent when the first workers are up."""

    level: str
    """Isolation level, `L0` to `L4`; `remote` where the service decides, `fake` where nothing runs."""
    missing: tuple[str, ...] = ()
    """Layers that a stronger level would add, and why they are missing."""
    layers: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the preloaded modules."""
    workers: int = 0


@dataclass(frozen=True)
class Failed:
    """The executor process could not start or ends with an error; from a root or worker: it could not be set up."""

    message: str
    no_level: bool = False
    """The requested isolation level cannot be reached."""


@dataclass(frozen=True)
class CallResult:
    """How a call ended. The header is followed by `out` bytes of stdout, then stderr."""

    id: str
    out: int
    fields: dict[str, Any]
    """Fields of `types.ToolResult` that differ from their defaults (`_calls.ProgramOutcome.changed_fields`)."""


@dataclass(frozen=True)
class ExecutorStats:
    n: int
    numbers: dict[str, float]


# Executor process to a root, after `IsolationPlan`, which `RootReady` or `Failed` answer; and back.


@dataclass(frozen=True)
class SpawnWorker:
    """Fork a worker; the descriptor of its connection comes with the message."""

    slot: int


@dataclass(frozen=True)
class RootReady:
    versions: dict[str, str]


# Executor process to a worker, and back.


@dataclass(frozen=True)
class RunCode:
    """Run a program; descriptors: code, stdin, stdout, stderr, record."""

    n: int
    seed: int
    cell: bool = False
    """Whether the program is a cell of the worker's session; the first cell turns the worker into a session."""
    exact: bool = False
    """Whether running the cell again may lead to another state."""


@dataclass(frozen=True)
class KillCall:
    n: int


@dataclass(frozen=True)
class WorkerBorn:
    pid: int


@dataclass(frozen=True)
class WorkerUp:
    """The worker is isolated and waits for calls; says what it achieved."""

    level: str
    landlock: int


@dataclass(frozen=True)
class DeadlineExtended:
    """The answer to a call may come this much later."""

    n: int
    s: float


@dataclass(frozen=True)
class CallRefused:
    """The host had no process for the call."""

    n: int


@dataclass(frozen=True)
class CallDone:
    """What the worker observed of a child."""

    n: int
    status: int
    """Wait status; 0 if the child is still alive."""
    why: str
    """The limit that the worker enforced; empty if the child ended by itself."""
    fault: str
    """Why the lock-down was not complete; empty if it was."""
    rss: int
    """Peak resident memory, in KiB."""
    wall: float
    cpu: float
    """Seconds."""
    alive: bool = False
    """A cell has ended and its session continues."""
    cell: int | None = None
    rolled_back: bool = False
    """The session is back in its state before the cell."""


Message = Any
"""One of the dataclasses above."""
Kinds = dict[str, type]
"""Messages that may arrive at one end of a connection, by name."""


def _by_name(*kinds: type) -> Kinds:
    return {kind.__name__: kind for kind in kinds}


TO_EXECUTOR = _by_name(ExecutorSettings, SubmitCall, CancelCalls, CloseSession, RequestStats)
TO_TRAINER = _by_name(Capabilities, Failed, CallResult, ExecutorStats)
TO_ROOT = _by_name(IsolationPlan, SpawnWorker)
FROM_ROOT = _by_name(RootReady, Failed)
TO_WORKER = _by_name(RunCode, KillCall)
FROM_WORKER = _by_name(WorkerBorn, WorkerUp, Failed, DeadlineExtended, CallRefused, CallDone)


def encode(message: Message) -> dict[str, Any]:
    header = {"op": type(message).__name__}
    for name, default in _defaults(type(message)):
        value = getattr(message, name)
        if value != default:
            header[name] = asdict(value) if is_dataclass(value) else value
    return header


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((field_.name, field_.default) for field_ in fields(kind))


def decode(header: dict[str, Any], kinds: Kinds) -> Message:
    """The message of a JSON object, one of those that may arrive here, such as `TO_WORKER`; else raises BadFrame."""
    try:
        kind = kinds[header.pop("op")]
        return _build(kind, header) if kind in (ExecutorSettings, IsolationPlan, Capabilities) else kind(**header)
    except (KeyError, TypeError) as error:
        raise BadFrame(f"not a message that may arrive here: {error!r}") from error


def _build(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass whose nested dataclasses are objects in JSON, and whose tuples are lists."""
    types = {field_.name: field_.type for field_ in fields(kind)}
    for name, value in values.items():
        if is_dataclass(types[name]):
            values[name] = _build(types[name], value)
        elif get_origin(types[name]) is tuple:
            values[name] = tuple(value)
    return kind(**values)


def send(sock: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    """Send a message as one datagram with descriptors."""
    sock.sendmsg([encode_json(encode(message)).encode()], rights(*fds))


def receive(sock: socket.socket, kinds: Kinds) -> tuple[Message | None, list[int]]:
    """The message of one datagram and its descriptors; None at the end of the connection."""
    header, fds = receive_datagram(sock)
    return None if header is None else decode(header, kinds), fds
