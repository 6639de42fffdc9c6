"""Kills programs that have lost the process that started them: `python _program_guard.py`.

Standard input has the line `+PID` when a program begins, which leads a process group, and `-PID` when it has ended.
Once standard input is closed, as it is when the process at its other end is killed, the groups that run are killed.
"""

import contextlib
import os
import signal
import sys

running = set()
for line in sys.stdin:
    (running.add if line.startswith("+") else running.discard)(int(line[1:]))
for pid in running:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
