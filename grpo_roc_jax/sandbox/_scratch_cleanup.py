"""Deletes scratch directories in the background, since it takes seconds on some disks. Standard library only."""

import contextlib
import os
import subprocess
import tempfile
import threading
import time

PAUSE_S, BUSY_PAUSE_S = 0.5, 0.02
"""Seconds between two searches for something to delete, and after a search that found something: workers wait if much
is left."""
LAST_S = 2.0
"""Seconds for which the executor deletes files at its end, before it leaves the rest to `rm`."""
PREFIX = "grpo-tools-"
OWNER = "owner"
"""File in a base directory that holds the process id of its executor."""


def make_base(parent: str) -> str:
    """Create a private base directory that names its owner."""
    base = tempfile.mkdtemp(prefix=PREFIX, dir=parent or None)
    with open(os.path.join(base, OWNER), "w") as file:
        file.write(str(os.getpid()))
    return base


def abandoned(parent: str) -> list[str]:
    """Base directories of this user that killed executors could not remove."""
    bases = []
    for name in os.listdir(parent):
        base = os.path.join(parent, name)
        with contextlib.suppress(OSError, ValueError):
            if not name.startswith(PREFIX) or os.stat(base).st_uid != os.geteuid():
                continue
            with open(os.path.join(base, OWNER)) as file:
                owner = int(file.read())
            if not os.path.exists(f"/proc/{owner}"):
                bases.append(base)
    return bases


class ScratchCleanup:
    """Empties a directory in a thread of its own, and removes base directories that killed executors left."""

    def __init__(self, base: str, directory: str) -> None:
        self.base, self.directory = base, directory
        self.stop = threading.Event()
        os.mkdir(directory, 0o700)
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        with contextlib.suppress(OSError):
            for old in abandoned(os.path.dirname(self.base)):
                remove_tree(old, self.stop)
        pause_s = PAUSE_S
        while not self.stop.wait(pause_s):
            names = os.listdir(self.directory)
            for name in names:
                remove_tree(os.path.join(self.directory, name), self.stop)
            pause_s = BUSY_PAUSE_S if names else PAUSE_S

    def end(self) -> None:
        """Deletes everything; a separate process continues if that takes long."""
        self.stop.set()
        self.thread.join(LAST_S)
        late = threading.Event()
        timer = threading.Timer(LAST_S, late.set)
        timer.daemon = True
        timer.start()
        remove_tree(self.base, late)
        timer.cancel()
        if os.path.exists(self.base):
            subprocess.Popen(["/bin/rm", "-rf", "--", self.base], start_new_session=True)


def remove_tree(top: str, stop: threading.Event) -> None:
    """Delete a directory of any depth. Directories inside are moved up into `top` first, which avoids recursion."""
    todo, moved = [top], 0
    while todo and not stop.is_set():
        directory = todo.pop()
        with contextlib.suppress(OSError):
            os.chmod(directory, 0o700)
            with os.scandir(directory) as entries:
                listed = list(entries)
            for entry in listed:
                with contextlib.suppress(OSError):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                        continue
                    moved += 1
                    target = os.path.join(top, f".{time.monotonic_ns()}-{moved}")
                    os.rename(entry.path, target)
                    todo.append(target)
            if directory != top:
                os.rmdir(directory)
    with contextlib.suppress(OSError):
        os.rmdir(top)
