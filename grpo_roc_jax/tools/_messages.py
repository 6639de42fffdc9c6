"""Messages between the processes of the executor: one dataclass each, encoded and decoded only here.

The trainer and the executor process exchange frames; the executor process, roots and workers exchange datagrams (see
`_wire`). Both carry a JSON object with the name of the message as `op` and its fields, without those at their default.
Standard library only.
"""

import socket
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_origin

from ._settings import ExecutorSettings, IsolationPlan
from ._wire import BadFrame, receive_datagram, send_datagram

# Trainer to executor process.


@dataclass(frozen=True)
class StartExecutor:
    """The first message; answered by `ExecutorReady`, `LevelUnavailable` or `StartFailed`."""

    config: ExecutorSettings


@dataclass(frozen=True)
class SubmitCall:
    """Run a program; its text and its standard input follow the header. `_wire.pack_call` encodes it."""

    id: str
    session: str | None
    seed: int
    code: int
    """Bytes of the program; the rest is its standard input."""
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
    """Number of the request, repeated in the answer."""


# Executor process to trainer.


@dataclass(frozen=True)
class ExecutorReady:
    """The first workers are up; says what was achieved."""

    level: str
    missing: tuple[str, ...]
    fixed_addresses: bool
    """Whether programs run with a fixed address layout."""
    layers: tuple[str, ...]
    workers: int
    versions: dict[str, str]
    """Of the preloaded modules."""
    collapsed: int
    """Bytes of a root's heap on huge pages."""


@dataclass(frozen=True)
class LevelUnavailable:
    message: str


@dataclass(frozen=True)
class StartFailed:
    message: str


@dataclass(frozen=True)
class ExecutorDied:
    """The executor process ends because of an error in itself."""

    message: str
    """The traceback."""


@dataclass(frozen=True)
class CallResult:
    """How a call ended; its stdout and stderr follow the header."""

    id: str
    out: int
    """Bytes of stdout; the rest is stderr."""
    fields: dict[str, Any]
    """Fields of `types.ToolResult` that differ from their defaults (`_outcome.ProgramOutcome.changed_fields`)."""


@dataclass(frozen=True)
class ExecutorStats:
    n: int
    numbers: dict[str, float]


# Executor process to a root, and back.


@dataclass(frozen=True)
class StartRoot:
    """The first message; answered by `RootReady` or `StepFailure`."""

    plan: IsolationPlan


@dataclass(frozen=True)
class SpawnWorker:
    """Fork a worker; the descriptor of its connection comes with the message."""

    slot: int


@dataclass(frozen=True)
class RootReady:
    versions: dict[str, str]
    collapsed: int


@dataclass(frozen=True)
class StepFailure:
    """A root or a worker could not be set up."""

    step: str
    """What failed, and why."""


# Executor process to a worker.


@dataclass(frozen=True)
class RunProgram:
    """Run a stateless call; descriptors: code, stdin, stdout, stderr, record."""

    n: int
    """Number of the call, repeated in the answer."""
    seed: int


@dataclass(frozen=True)
class RunCell:
    """Run a cell of the worker's session; the first one turns the worker into a session."""

    n: int
    seed: int
    exact: bool = False
    """Running the cell again may give another state."""


@dataclass(frozen=True)
class KillCall:
    n: int


# Worker to executor process.


@dataclass(frozen=True)
class WorkerBorn:
    pid: int


@dataclass(frozen=True)
class WorkerUp:
    """The worker is isolated and waits for calls; says what it achieved."""

    level: str
    landlock: int
    proc: bool
    """Whether it has a /proc."""


@dataclass(frozen=True)
class DeadlineExtended:
    """The answer to a call may come this much later."""

    n: int
    s: float


@dataclass(frozen=True)
class CallRefused:
    """The host had no process for the call."""

    n: int
    errno: int


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
    """Number of the cell in its session."""
    rolled_back: bool = False
    """The session is back in its state before the cell."""


Message = Any
"""One of the dataclasses above."""


Kinds = dict[str, type]
"""Messages that may arrive at one end of a connection, by the name under which they travel."""

TO_EXECUTOR: Kinds = {
    "start": StartExecutor,
    "call": SubmitCall,
    "cancel": CancelCalls,
    "close": CloseSession,
    "stats": RequestStats,
}
TO_TRAINER: Kinds = {
    "ready": ExecutorReady,
    "unavailable": LevelUnavailable,
    "failed": StartFailed,
    "died": ExecutorDied,
    "result": CallResult,
    "stats": ExecutorStats,
}
TO_ROOT: Kinds = {"start": StartRoot, "spawn": SpawnWorker}
FROM_ROOT: Kinds = {"ready": RootReady, "failed": StepFailure}
TO_WORKER: Kinds = {"call": RunProgram, "cell": RunCell, "kill": KillCall}
FROM_WORKER: Kinds = {
    "born": WorkerBorn,
    "up": WorkerUp,
    "failed": StepFailure,
    "extended": DeadlineExtended,
    "refused": CallRefused,
    "done": CallDone,
}

_NAMES = {
    kind: name
    for kinds in (TO_EXECUTOR, TO_TRAINER, TO_ROOT, FROM_ROOT, TO_WORKER, FROM_WORKER)
    for name, kind in kinds.items()
}


def encode(message: Message) -> dict[str, Any]:
    """The JSON object of a message."""
    header = {"op": _NAMES[type(message)]}
    for name, default in _defaults(type(message)):
        value = getattr(message, name)
        if value != default:
            header[name] = asdict(value) if is_dataclass(value) else value
    return header


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple((one.name, one.default) for one in fields(kind))


def decode(header: dict[str, Any], kinds: Kinds) -> Message:
    """The message of a JSON object.

    Args:
        kinds: The messages that may arrive here, such as `TO_WORKER`.

    Raises:
        BadFrame: it is none of them.
    """
    try:
        kind = kinds[header.pop("op")]
        return kind(**(_build(kind, header) if kind in _NESTED else header))
    except (KeyError, TypeError) as error:
        raise BadFrame(f"not a message that may arrive here: {error!r}") from error


_NESTED = (StartExecutor, StartRoot)
"""Messages with dataclasses or tuples inside, which JSON turned into objects and lists."""


def _build(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    types = {one.name: one.type for one in fields(kind)}
    return {name: _restore(types[name], value) for name, value in values.items()}


def _restore(kind: Any, value: Any) -> Any:
    if is_dataclass(kind):
        return kind(**_build(kind, value))
    return tuple(value) if get_origin(kind) is tuple else value


def send(sock: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    """Send a message as one datagram with descriptors."""
    send_datagram(sock, encode(message), fds)


def receive(sock: socket.socket, kinds: Kinds) -> tuple[Message | None, list[int]]:
    """The message of one datagram and its descriptors; None at the end of the connection."""
    header, fds = receive_datagram(sock)
    return None if header is None else decode(header, kinds), fds
