"""Calls in the executor process: their memory files, and their outcome. Standard library only.

Program texts are matched against a few patterns to choose a root and a way to roll back. A wrong choice costs time and
does not affect the result.
"""

import os
import re
import sys
import time
from dataclasses import dataclass, field

from . import _outcome
from ._messages import CallDone, ProgramLimits
from ._wire import close_all

RECORD_BYTES = 1 << 20
"""Bytes of a child's record that are read."""

IMPORTS = re.compile(rb"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import|import[ \t]+([^#\n;]+))", re.M)
DYNAMIC = re.compile(
    rb"__import__|importlib|\bexec\b|\beval\b|;[ \t]*(?:import|from)\b|:[ \t]*(?:import|from)[ \t]|\\\n"
)
INEXACT = re.compile(
    rb"\b(?:time|datetime|urandom|secrets|uuid\d?|SystemRandom|default_rng|os|sys|io|open|pathlib|Path|tempfile|shutil|"
    rb"threading|thread|_thread|concurrent|asyncio|signal|input|id|gc|weakref|ctypes|mmap|socket|__\w+__|getattr|exec|"
    rb"eval|globals|vars|importlib|builtins|inspect|atexit|multiprocessing|subprocess)\b"
)
"""Names in a cell that may give another state if it is run again; sessions with such cells copy every state instead."""


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
    """The `WorkerLink` that runs it."""
    nonce: bytes = b""
    """Starts the record; known only to the executor process and the child."""
    fds: tuple[int, ...] = ()
    """Memory files of stdout, stderr and the record, while it runs."""

    def open_files(self) -> tuple[int, ...]:
        """Create the files code, stdin, stdout, stderr and record. If that raises OSError, nothing stays open."""
        self.nonce = os.urandom(16).hex().encode()
        files: list[int] = []
        try:
            for content in (self.code, self.stdin, b"", b"", self.nonce):
                files.append(os.memfd_create("box", os.MFD_CLOEXEC))
                if content:
                    write_all(files[-1], content)
            os.lseek(files[1], 0, os.SEEK_SET)
        except OSError:
            close_all(files)
            raise
        self.fds = tuple(files[2:])
        return tuple(files)

    def close_files(self) -> None:
        close_all(self.fds)
        self.fds = ()

    def outcome(self, done: CallDone, limits: ProgramLimits) -> _outcome.ProgramOutcome:
        out, err, record_fd = self.fds
        sizes = tuple(os.fstat(fd).st_size for fd in self.fds)
        record = _outcome.parse_record(os.pread(record_fd, RECORD_BYTES, 0), self.nonce)
        outcome = _outcome.decide(done, record, sizes, limits)
        keep = limits.output_kb << 10
        outcome.stdout, cut_out = read_ends(out, sizes[0], keep)
        outcome.stderr, cut_err = read_ends(err, sizes[1], keep)
        outcome.truncated = outcome.truncated or cut_out or cut_err
        outcome.stdout_bytes, outcome.stderr_bytes = sizes[:2]
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


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_ends(fd: int, size: int, keep: int) -> tuple[str, bool]:
    """Text of a stream, without its middle if it is longer than `keep` bytes, and whether that was left out."""
    if size <= keep:
        return os.pread(fd, keep, 0).decode("utf-8", "replace"), False
    half = keep // 2
    head = os.pread(fd, half, 0).decode("utf-8", "replace").rstrip("\ufffd")
    tail = os.pread(fd, half, size - half).decode("utf-8", "replace").lstrip("\ufffd")
    return f"{head}\n[... {size - 2 * half} bytes omitted ...]\n{tail}", True
