"""Disks that are full, and what reaches them when."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path, size):
    """A file system of this size at `path`; skips the test where none may be mounted."""
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def filled(disk):
    """A file that takes all that is left."""
    stats = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(b"0" * (stats.f_bavail * stats.f_frsize))
    return filler


@pytest.fixture
def synced(monkeypatch):
    """The files in the order in which they reach the disk; what a rename names is among them."""
    order, fsync, replace = [], os.fsync, os.replace

    def sync(descriptor):
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def rename(source, target):
        replace(source, target)
        order.append(Path(target))

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    return order
