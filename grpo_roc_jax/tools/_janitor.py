"""Deleting scratch directories where nobody waits for it: on some disks that takes seconds. Standard library only."""

import contextlib
import os
import subprocess
import threading
import time

PAUSE_S = 0.5
LAST_S = 2.0
"""How long the end of the executor waits for its own deleting, before it leaves the rest to `rm`."""


class Janitor:
    """Empties a directory in a thread of its own."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.stop = threading.Event()
        os.mkdir(directory, 0o700)
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self) -> None:
        while not self.stop.wait(PAUSE_S):
            for name in os.listdir(self.directory):
                remove_tree(os.path.join(self.directory, name), self.stop)

    def end(self, base: str) -> None:
        """Delete everything, with help if it takes long."""
        self.stop.set()
        self.thread.join(LAST_S)
        late = threading.Event()
        timer = threading.Timer(LAST_S, late.set)
        timer.daemon = True
        timer.start()
        remove_tree(base, late)
        timer.cancel()
        if os.path.exists(base):
            subprocess.Popen(["/bin/rm", "-rf", "--", base], start_new_session=True)


def remove_tree(top: str, stop: threading.Event) -> None:
    """Delete a directory of any depth: what lies deeper is moved up into `top` first, so nothing recurses."""
    todo, moved = [top], 0
    while todo and not stop.is_set():
        directory = todo.pop()
        with contextlib.suppress(OSError):
            os.chmod(directory, 0o700)
            with os.scandir(directory) as entries:
                found = list(entries)
            for entry in found:
                with contextlib.suppress(OSError):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.path)
                        continue
                    moved += 1
                    place = os.path.join(top, f".{time.monotonic_ns()}-{moved}")
                    os.rename(entry.path, place)
                    todo.append(place)
            if directory != top:
                os.rmdir(directory)
    with contextlib.suppress(OSError):
        os.rmdir(top)
