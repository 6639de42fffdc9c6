"""Calls in the executor process: their memory files, and how they ended. Standard library only.

The outcome is a pure function of what was observed of the child. Facts from outside the process (limits that were
enforced, exit status) outrank what the process reports about itself, and nothing reads the program's output. Program
texts are matched against a few patterns to choose a root and a way to roll back; a wrong choice costs time and does not
affect the result.
"""

import codecs
import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field, fields
from typing import Any

from ._messages import CallDone, ProgramLimits
from ._wire import close_all, discard, file_size, make_memory_file

NONCE_BYTES = 32
REPORTED_KINDS = ("ok", "exception", "syntax_error", "memory_limit", "output_limit")
"""Kinds that a child may claim about its own program; none of them is an infrastructure failure."""
TEXTS = ("kind", "error_type", "error_message", "traceback", "echo")
NOTE_CHARS = 64
"""Room for the child's note about what it left out of a long echo."""
QUOTED_BYTES, RECORD_ROOM = 12, 1 << 17
"""Most bytes of a character in a child's record, and of the record without its echo. No more of it is read."""

IMPORTS = re.compile(rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import|import[ \t]+([^#\n;]+))", re.M)
DYNAMIC = re.compile(
    rb"__import__|importlib|\bexec\b|\beval\b|;[ \t]*(?:import|from)\b|:[ \t]*(?:import|from)[ \t]|\\\n"
)
INEXACT = re.compile(
    rb"\b(?:time|datetime|urandom|secrets|uuid\d?|SystemRandom|Random|default_rng|RandomState|seed|SeedSequence|PCG64\w*|"
    rb"MT19937|Philox|SFC64|os|sys|io|open|pathlib|Path|tempfile|shutil|"
    rb"threading|thread|_thread|concurrent|asyncio|signal|input|id|gc|weakref|ctypes|mmap|socket|__\w+__|getattr|exec|"
    rb"eval|globals|vars|importlib|builtins|inspect|atexit|multiprocessing|subprocess)\b"
)
"""Names in a cell that may give another state if it is run again; sessions with such cells copy every state instead."""


@dataclass
class ProgramOutcome:
    """The part of a result that is known so far; every field except `suspicious` is one of `types.ToolResult`, with its
    default.

    `decide` fills in how the program ended, the executor process the output and the times.
    """

    kind: str
    limit_hit: str = ""
    exit_code: int | None = None
    signal: int | None = None
    suspicious: bool = False
    """The record contradicts how the process ended. Counted by the executor process, not sent."""
    error_type: str = ""
    error_message: str = ""
    error_line: int | None = None
    traceback: str = ""
    echo: str = ""
    policy_denied: bool = False
    """The fields from `error_type` to here are what the child reported."""
    stdout: str = ""
    stderr: str = ""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    truncated: bool = False
    wall_ms: float = 0.0
    cpu_ms: float = 0.0
    queue_ms: float = 0.0
    max_rss_kb: int = 0
    worker_id: int | None = None
    attempt: int = 1
    session_id: str | None = None
    cell: int | None = None
    rolled_back: bool = False

    def changed_fields(self) -> dict[str, Any]:
        """The fields to send to the trainer, which reads thousands of results per step: those unlike their defaults.

        Output is not among them, since it is sent as bytes.
        """
        return {
            name: round(value, 3) if type(value) is float else value
            for name, value in vars(self).items()
            if value != _DEFAULTS[name] and name not in _NOT_A_FIELD
        }


_DEFAULTS = {field_.name: field_.default for field_ in fields(ProgramOutcome)}
_NOT_A_FIELD = ("stdout", "stderr", "suspicious")


def parse_record(data: bytes, nonce: bytes, keep: int) -> ProgramOutcome | None:
    """The child's report; None if it is malformed. `keep` is the most characters of the last expression."""
    if data[:NONCE_BYTES] != nonce or data[NONCE_BYTES : 2 * NONCE_BYTES] != nonce:
        return None
    size = data[2 * NONCE_BYTES : 2 * NONCE_BYTES + 8]
    if not size.isdigit():
        return None
    try:
        record = json.loads(data[2 * NONCE_BYTES + 8 : 2 * NONCE_BYTES + 8 + int(size)])
    except (ValueError, RecursionError):
        return None
    return reported(record, keep)


def reported(record: Any, keep: int) -> ProgramOutcome | None:
    """What a program's process reports, each field checked for its type and cut to its length; None if malformed."""
    if not isinstance(record, dict) or not all(isinstance(record.get(name), str) for name in TEXTS):
        return None
    if record["kind"] not in REPORTED_KINDS:
        return None
    return ProgramOutcome(
        record["kind"],
        error_type=record["error_type"][:200],
        error_message=record["error_message"][:500],
        traceback=record["traceback"][:8000],
        echo=record["echo"][: keep + NOTE_CHARS],
        policy_denied=bool(record.get("denied")),
        truncated=bool(record.get("truncated")) or len(record["echo"]) > keep + NOTE_CHARS,
        error_line=_small(record.get("error_line")),
        exit_code=_small(record.get("exit_code")),
    )


def _small(value: Any) -> int | None:
    """A number of at most 31 bits; None for any other value."""
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def decide(
    done: CallDone, record: ProgramOutcome | None, sizes: tuple[int, int, int], limits: ProgramLimits
) -> ProgramOutcome:
    """How a call ended: from the worker's observations, the child's report, and the bytes of stdout, stderr, record."""
    if done.fault:
        return ProgramOutcome("sandbox_error", error_type="LockDown", error_message=done.fault[:500])
    ended_by = os.WTERMSIG(done.status) if os.WIFSIGNALED(done.status) else None
    code = None if ended_by is not None or done.alive else os.waitstatus_to_exitcode(done.status)
    outcome = _enforced(done, sizes, limits, ended_by)
    if outcome is None and ended_by is not None:
        outcome = ProgramOutcome("crash", suspicious=record is not None)
    elif outcome is None and record is not None and code in (0, None):
        outcome = record
        outcome.limit_hit = {"memory_limit": "memory", "output_limit": "output"}.get(record.kind, "")
    elif outcome is None:
        how = "by itself with" if record is None else "with"
        outcome = _exception("EarlyExit", f"the process ended {how} exit code {code}")
        outcome.suspicious = record is not None
    if outcome.exit_code is None:
        outcome.exit_code = code
    outcome.signal = ended_by
    return outcome


def _enforced(
    done: CallDone, sizes: tuple[int, int, int], limits: ProgramLimits, ended_by: int | None
) -> ProgramOutcome | None:
    """The outcome of a program that a limit ended; None for any other."""
    if done.why == "protocol":
        return _exception("ProtocolViolation", "the program wrote to the connection of its session", "protocol")
    if done.why in ("wall", "cpu", "starved"):
        return ProgramOutcome("timeout", limit_hit="cpu" if done.why == "cpu" else "wall")
    if ended_by == signal.SIGXCPU or (ended_by == signal.SIGKILL and done.cpu >= limits.cpu_s):
        return ProgramOutcome("timeout", limit_hit="cpu")
    if done.why == "output" or max(sizes) > limits.output_kill_mb << 20:
        return ProgramOutcome("output_limit", limit_hit="output")
    if done.why == "scratch":
        text = f"No space left: the directory may hold {limits.scratch_mb} MiB, {limits.scratch_files} files"
        return _exception("OSError", text, "scratch")
    if done.why == "memory":
        return ProgramOutcome("memory_limit", limit_hit="memory")
    if done.why == "threads":
        return _exception("RuntimeError", f"more than {limits.threads} threads", "threads")
    return None


def _exception(error_type: str, message: str, limit_hit: str = "") -> ProgramOutcome:
    return ProgramOutcome("exception", error_type=error_type, error_message=message, limit_hit=limit_hit)


@dataclass(eq=False, slots=True)
class PendingCall:
    """A call from its arrival to its answer."""

    n: int
    id: str
    session: str | None
    seed: int
    code: bytes
    stdin: bytes
    attempt: int = 1
    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0
    deadline: float = 0.0
    worker: object = None
    """The `WorkerLink` that runs the call."""
    nonce: bytes = b""
    """Starts the record; known only to the executor process and the child."""
    fds: tuple[int, ...] = ()
    """Memory files of stdout, stderr and the record, while it runs."""

    def open_files(self) -> tuple[int, ...]:
        """Creates the files code, stdin, stdout, stderr and record. If that raises OSError, nothing stays open."""
        self.nonce = os.urandom(16).hex().encode()
        files: list[int] = []
        try:
            for content in (self.code, self.stdin):
                files.append(make_memory_file(content, sealed=True))
            for content in (b"", b"", self.nonce):
                files.append(make_memory_file(content))
        except OSError:
            close_all(files)
            raise
        self.fds = tuple(files[2:])
        return tuple(files)

    def close_files(self) -> None:
        """Close the files, and empty them: a session may have kept them open."""
        discard(self.fds)
        self.fds = ()

    def outcome(self, done: CallDone, limits: ProgramLimits) -> ProgramOutcome:
        out, err, record_fd = self.fds
        lengths = tuple(os.fstat(fd).st_size for fd in self.fds)
        sizes = tuple(file_size(fd) for fd in self.fds)
        keep = limits.output_kb << 10
        most = min(lengths[2], QUOTED_BYTES * (keep + NOTE_CHARS) + RECORD_ROOM)
        record = parse_record(os.pread(record_fd, most, 0), self.nonce, keep)
        outcome = decide(done, record, sizes, limits)
        outcome.stdout, cut_out = read_ends(out, lengths[0], keep)
        outcome.stderr, cut_err = read_ends(err, lengths[1], keep)
        outcome.truncated = outcome.truncated or cut_out or cut_err
        outcome.stdout_bytes, outcome.stderr_bytes = lengths[:2]
        outcome.wall_ms, outcome.cpu_ms, outcome.max_rss_kb = 1000 * done.wall, 1000 * done.cpu, done.rss
        if self.session is not None:
            outcome.cell, outcome.rolled_back = done.cell, done.rolled_back
        return outcome


def needs_packages(code: bytes) -> bool:
    """Whether a program may import more than the standard library. Decides which root runs it, never a verdict."""
    if DYNAMIC.search(code):
        return True
    for source, names in IMPORTS.findall(code):
        for name in (source or names).split(b","):
            words = name.split()
            if words and words[0].split(b".")[0].decode(errors="replace") not in sys.stdlib_module_names:
                return True
    return False


def read_ends(fd: int, size: int, keep: int) -> tuple[str, bool]:
    """Text of a stream, without its middle if it is longer than `keep` bytes, and whether the middle was left out."""
    if size <= keep:
        return os.pread(fd, keep, 0).decode("utf-8", "replace"), False
    half = keep // 2
    # Bytes of a character that the cut parts are left out; others that are no UTF-8 stay visible.
    head = codecs.getincrementaldecoder("utf-8")("replace").decode(os.pread(fd, half, 0))
    end = os.pread(fd, half, size - half)
    start = next((i for i in range(min(3, len(end))) if end[i] & 0xC0 != 0x80), min(3, len(end)))
    tail = end[start:].decode("utf-8", "replace")
    return f"{head}\n[... {size - 2 * half} bytes omitted ...]\n{tail}", True
