"""Landlock: an allowlist of paths that no program can widen; needs no root. Standard library only."""

import os
import stat
import struct

from . import _kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
MAKE_CHAR, MAKE_SOCK, MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
READ = READ_FILE | READ_DIR


def abi() -> int:
    """Version of the interface. Raises StepFailed if the kernel has no landlock, or it is disabled."""
    return _kernel.syscall("landlock_create_ruleset", _kernel.LANDLOCK_CREATE, None, 0, 1)


COSTS = {
    2: "moving a file to another directory is denied",
    3: "truncating by path is denied",
    4: "the system call filter alone stops TCP",
    5: "the system call filter alone stops device ioctls",
    6: "the system call filter alone stops signals and abstract sockets",
}
"""What a kernel without this version of the interface loses."""


def verdict(version: int) -> str:
    """What this version enforces, in words for the probe."""
    return "; ".join([f"ABI {version}, paths bind", *(cost for newer, cost in COSTS.items() if version < newer)])


def handled(version: int) -> int:
    """All file rights of this version; each is denied unless a rule grants it."""
    newer = (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0) | (IOCTL_DEV if version >= 5 else 0)
    return 0x1FFF | newer


def create(version: int) -> int:
    """A ruleset that denies all file access; newer versions also TCP, abstract sockets and signals to the outside."""
    attributes = struct.pack("<Q", handled(version)) + struct.pack("<Q", 0b11) * ((version >= 4) + (version >= 6))
    return _kernel.syscall("landlock_create_ruleset", _kernel.LANDLOCK_CREATE, attributes, len(attributes), 0)


def allow(ruleset: int, path: str, rights: int) -> bool:
    """Grant rights below a path; False if it does not exist."""
    try:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not stat.S_ISDIR(os.fstat(target).st_mode):
            rights &= FILE_RIGHTS
        _kernel.syscall("landlock_add_rule", _kernel.LANDLOCK_ADD, ruleset, 1, struct.pack("<Qi", rights, target), 0)
        return True
    finally:
        os.close(target)


def build(version: int, read: list[str], devices: list[str], scratch: str | None, *, execute: bool = False) -> int:
    """The ruleset of a call, which may read some paths, use harmless devices and write the scratch directory."""
    known = handled(version)
    ruleset = create(version)
    try:
        for path in read:
            allow(ruleset, path, (READ | (EXECUTE if execute else 0)) & known)
        for path in devices:
            allow(ruleset, path, (READ_FILE | WRITE_FILE) & known)
        if scratch is not None:
            excluded = MAKE_CHAR | MAKE_BLOCK | MAKE_SOCK | IOCTL_DEV | (0 if execute else EXECUTE)
            if not allow(ruleset, scratch, known & ~excluded):
                raise _kernel.StepFailed("landlock_add_rule for the scratch directory", 2)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def restrict(ruleset: int) -> None:
    """Restrict this process permanently; needs no_new_privs."""
    _kernel.syscall("landlock_restrict_self", _kernel.LANDLOCK_RESTRICT, ruleset, 0)
