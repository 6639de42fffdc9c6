"""The memory of this process: a heap that stays flat, and what it takes."""

import ctypes
import os
from pathlib import Path

M_ARENA_MAX = -8
"""Of glibc's `malloc.h`."""


def few_arenas() -> None:
    """Lets the threads of this process share two arenas of glibc's heap, unless MALLOC_ARENA_MAX says otherwise.

    Each save of a checkpoint starts threads. With an arena for each of them freed memory is scattered, and the process
    grows by 0.5 MB with each of the first forty saves.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(M_ARENA_MAX, 2)


def resident_bytes(key: str = "VmRSS") -> int:
    """The memory that this process takes now, or at most so far with `VmHWM`; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)
