"""System calls that Python does not offer, by ctypes; standard library only. Numbers are those of Linux on x86-64."""

import ctypes
import errno
import os
import platform
import struct
import sys

libc = ctypes.CDLL(None, use_errno=True)
_syscall = libc.syscall
_prctl = libc.prctl
MACHINE = platform.machine()

CAPSET, PIVOT_ROOT, SECCOMP = 126, 155, 317
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 36, 38
CAP_DAC_READ_SEARCH, CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN, CAP_SYS_NICE = 2, 5, 6, 7, 21, 23
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MNT_DETACH = 1, 2, 4, 8, 32, 2
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ADDR_NO_RANDOMIZE = 0x40000
MADV_COLLAPSE = 25
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4


class StepFailed(Exception):
    """A step of building the sandbox failed; names the call and its errno."""

    def __init__(self, step: str, code: int) -> None:
        super().__init__(f"{step}: {errno.errorcode.get(code, code)} ({os.strerror(code)})")


def check(step: str, value: int) -> int:
    if value < 0:
        raise StepFailed(step, ctypes.get_errno())
    return value


def syscall(step: str, number: int, *arguments: object) -> int:
    return check(step, _syscall(number, *arguments))


def prctl(step: str, option: int, *arguments: int) -> int:
    longs = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    return check(step, _prctl(option, *longs))


def unshare(step: str, flags: int) -> None:
    check(step, libc.unshare(flags))


def mount(step: str, source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [os.fsencode(text) if text is not None else None for text in (source, target, kind)]
    check(f"{step} on {target}", libc.mount(*encoded, ctypes.c_ulong(flags), os.fsencode(data) or None))


def umount(step: str, target: str) -> None:
    check(step, libc.umount2(os.fsencode(target), MNT_DETACH))


def make_readonly(step: str, target: str, *, devices: bool = False) -> None:
    """Take write access, set-uid and (unless `devices`) device access from a mount and all below it."""
    flags = _ATTR_RDONLY | _ATTR_NOSUID | (0 if devices else _ATTR_NODEV)
    attributes = struct.pack("<QQQQ", flags, 0, 0, 0)
    arguments = (_AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))
    syscall(f"{step} on {target}", MOUNT_SETATTR, *arguments)


def pivot_root(new_root: str, put_old: str) -> None:
    syscall("pivot_root", PIVOT_ROOT, os.fsencode(new_root), os.fsencode(put_old))


def set_capabilities(capabilities: tuple[int, ...] = ()) -> None:
    """Keep exactly these capabilities, permitted and effective, none inheritable."""
    mask = sum(1 << capability for capability in capabilities)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    syscall("capset", CAPSET, struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", low, low, 0, high, high, 0))


def empty_bounding_set() -> None:
    """Keep later programs from regaining a capability; without CAP_SETPCAP there are none to remove."""
    for capability in range(64):
        if _prctl(PR_CAPBSET_DROP, *(ctypes.c_ulong(value) for value in (capability, 0, 0, 0))) < 0:
            if ctypes.get_errno() == errno.EINVAL:
                return
            if ctypes.get_errno() != errno.EPERM:
                raise StepFailed("prctl(PR_CAPBSET_DROP)", ctypes.get_errno())


def fix_addresses() -> None:
    """Give programs executed from now on a fixed address layout, where the host allows it."""
    current = libc.personality(ctypes.c_ulong(0xFFFFFFFF))
    if current >= 0:
        libc.personality(ctypes.c_ulong(current | ADDR_NO_RANDOMIZE))


def collapse_heap() -> None:
    """Put private anonymous memory on huge pages where possible, which halves the cost of a fork."""
    huge = 1 << 21
    with open("/proc/self/maps") as maps:
        lines = maps.read().splitlines()
    for line in lines:
        span, mode, _, _, inode, *name = line.split(None, 5)
        if inode != "0" or not mode.startswith("rw") or (name and name[0] != "[heap]"):
            continue
        first, last = (int(text, 16) for text in span.split("-"))
        first = -(-first // huge) * huge
        for start in range(first, last - huge + 1, huge):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(huge), MADV_COLLAPSE)


def supported() -> str:
    """Why no isolation level can be reached on this machine; empty if a level may be reachable."""
    missing = f"{sys.platform} has none of the kernel's isolation calls; use Linux or a remote executor"
    return "" if sys.platform == "linux" else missing
