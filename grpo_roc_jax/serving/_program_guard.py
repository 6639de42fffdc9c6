"""Kills programs that have lost the process that started them: `python _program_guard.py NAME=MARK`.

Standard input has the line `+PID` when a program begins, which leads a process group, and `-PID` when it has ended.
Once standard input is closed, as it is when the process at its other end is killed, the groups that run are killed,
and every process with that environment variable: a program may have begun in the moment before its line was written.
After the line `close` the end is an ordinary one, and only the groups that run are killed.
"""

import contextlib
import os
import signal
import sys
import time

AGAIN_S = 0.2
"""Seconds in which a process that has been forked takes its environment."""


def marked(mark: bytes) -> list[int]:
    """Processes whose environment has that entry; none where there is no `/proc`."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()] if os.path.isdir("/proc") else []
    matches = []
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:  # of others, or gone
            if mark in file.read().split(b"\0"):
                matches.append(pid)
    return matches


running, killed = set(), True
for line in sys.stdin:
    if line == "close\n":
        killed = False
        break
    (running.add if line.startswith("+") else running.discard)(int(line[1:]))
for pid in running:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
for wait in (0.0, AGAIN_S) if killed else ():
    time.sleep(wait)
    for pid in marked(os.fsencode(sys.argv[1])):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
