"""Calls and sessions as the executor process holds them, and how their bytes go in and come out.

Program texts are matched against a few patterns to choose a root and a way of rolling back; these choices cost time at
worst and decide nothing about the result. Standard library only.
"""

import os
import re
import sys
import time
from collections import deque

RESULT_CAP = 1 << 20
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
"""Names with which running a cell again might not give the same; such sessions keep a copy of every state instead."""


class Call:
    """A call between its arrival and its answer."""

    __slots__ = (
        "arrived",
        "attempt",
        "code",
        "deadline",
        "fds",
        "id",
        "n",
        "nonce",
        "seed",
        "session",
        "started",
        "stdin",
        "worker",
    )

    def __init__(self, n: int, header: dict, data: bytes) -> None:
        self.n, self.id = n, header["id"]
        self.session, self.seed = header.get("session"), header.get("seed", 0)
        self.code, self.stdin = data[: header["code"]], data[header["code"] :]
        self.attempt = header.get("attempt", 1)
        self.arrived, self.started = time.monotonic(), 0.0
        self.worker, self.fds, self.nonce, self.deadline = None, (), b"", 0.0


class SessionState:
    """Cells of one session run in order, all on one worker."""

    def __init__(self) -> None:
        self.worker = None
        self.queue: deque[Call] = deque()
        self.running: Call | None = None
        self.used = time.monotonic()
        self.lost = ""
        """Why its worker is gone; empty while it is not."""


def needs_packages(code: bytes) -> bool:
    """Whether a program may import more than the standard library; only decides which root runs it, never a verdict."""
    if DYNAMIC.search(code):
        return True
    for source, names in IMPORTS.findall(code):
        for name in (source or names).split(b","):
            words = name.split()
            if words and words[0].split(b".")[0].decode(errors="replace") not in sys.stdlib_module_names:
                return True
    return False


def lost(reason: str) -> dict:
    """The result of a cell whose session is gone."""
    message = f"the session is gone: {reason}"[:500]
    return {"kind": "sandbox_error", "error_type": "SessionLost", "error_message": message}


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def read_ends(fd: int, size: int, keep: int) -> tuple[str, bool]:
    """Text of a stream, its middle left out where it is longer than `keep` bytes."""
    if size <= keep:
        return os.pread(fd, keep, 0).decode("utf-8", "replace"), False
    half = keep // 2
    head = os.pread(fd, half, 0).decode("utf-8", "replace").rstrip("\ufffd")
    tail = os.pread(fd, half, size - half).decode("utf-8", "replace").lstrip("\ufffd")
    return f"{head}\n[... {size - 2 * half} bytes omitted ...]\n{tail}", True
