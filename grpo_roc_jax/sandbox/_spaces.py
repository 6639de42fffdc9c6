"""Namespaces of a worker: own users, processes, mounts, network, IPC, host name; standard library only.

The worker becomes process 1 of its namespace, so no program can kill it and one `kill(-1)` removes every stray. Its
root is a small tree of read-only binds with a tmpfs for scratch.
"""

import contextlib
import os
from collections.abc import Iterable

from . import _kernel as k

INNER_ID = 1000
"""User and group id that programs see inside a user namespace."""
SCRATCHES = ("/scratch", "/scratch-of-call")
"""Names of the scratch directory: the first one, or the second where files of the host lie below the first."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SPACES = k.CLONE_NEWNS | k.CLONE_NEWPID | k.CLONE_NEWNET | k.CLONE_NEWIPC | k.CLONE_NEWUTS
WORKER_CAPABILITIES = (k.CAP_DAC_READ_SEARCH, k.CAP_KILL, k.CAP_SETGID, k.CAP_SETUID, k.CAP_SYS_ADMIN, k.CAP_SYS_NICE)
"""What a worker needs, all within its namespaces: to renew its scratch mount, drop users, end programs, and lower the
priority of long ones."""


def enter(*, user_namespace: bool, outer_uid: int) -> None:
    """Leave the host's namespaces; the next fork makes process 1. `outer_uid`: the host's user id of programs."""
    if user_namespace:
        _new_user_namespace(outer_uid)
    k.unshare("unshare of namespaces", SPACES)
    # This hides names of control groups only, and some kernels are built without it.
    with contextlib.suppress(k.StepFailed):
        k.unshare("unshare of cgroup namespace", k.CLONE_NEWCGROUP)


def _new_user_namespace(outer_uid: int) -> None:
    """Enter a user namespace. A helper outside writes its maps, which works with and without real root."""
    uid, gid, pid = os.geteuid(), os.getegid(), os.getpid()
    ready_read, ready_write = os.pipe()
    error_read, error_write = os.pipe()
    helper = os.fork()
    if helper == 0:
        try:
            os.close(ready_write)
            os.read(ready_read, 1)
            _write_maps(pid, uid, gid, outer_uid)
            os._exit(0)
        except OSError as error:
            os.write(error_write, f"{error.errno} {error.filename}".encode())
        finally:
            os._exit(1)
    os.close(error_write)
    try:
        k.unshare("unshare of user namespace", k.CLONE_NEWUSER)
    finally:
        os.close(ready_write)
        os.close(ready_read)
        os.waitpid(helper, 0)
        fault = os.read(error_read, 256).decode()
        os.close(error_read)
    if fault:
        code, _, name = fault.partition(" ")
        raise k.StepFailed(f"writing {os.path.basename(name)}", int(code))


def _write_maps(pid: int, uid: int, gid: int, outer_uid: int) -> None:
    def write(name: str, text: str) -> None:
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, name) from error
        finally:
            os.close(descriptor)

    if uid == 0:
        write("uid_map", f"0 0 1\n{INNER_ID} {outer_uid} 1\n")
        write("gid_map", f"0 0 1\n{INNER_ID} {outer_uid} 1\n")
    else:
        write("setgroups", "deny")
        write("uid_map", f"{INNER_ID} {uid} 1\n")
        write("gid_map", f"{INNER_ID} {gid} 1\n")


def build_root(base: str, read: Iterable[str], *, proc: bool, links: Iterable[str] = ()) -> bool:
    """Replace the file system by a small read-only tree on the directory `base`, with the paths `read` bound, and
    symbolic `links` into the scratch directory.

    Returns whether /proc could be mounted.
    """
    read = list(read)
    scratch = scratch_name(read)
    k.mount("making mounts private", None, "/", None, k.MS_REC | k.MS_PRIVATE)
    k.mount("mount tmpfs", "tmpfs", base, "tmpfs", k.MS_NOSUID | k.MS_NODEV, "size=1m,mode=755")
    for path in _outermost(read):
        _bind(path, base + path)
    _make_devices(base, scratch)
    os.mkdir(base + scratch)
    os.makedirs(base + "/tmp", exist_ok=True)
    for name in links:
        os.symlink(f"{scratch}/{name}", f"{base}/{name}")
    mounted = proc and _mount_proc(base + "/proc")
    old = base + "/.old"
    os.mkdir(old)
    k.pivot_root(base, old)
    os.chdir("/")
    k.umount("umount of the host's files", "/.old")
    os.rmdir("/.old")
    k.mount("read-only root", None, "/", None, k.MS_REMOUNT | k.MS_BIND | k.MS_RDONLY | k.MS_NOSUID | k.MS_NODEV)
    return mounted


def scratch_name(read: Iterable[str]) -> str:
    """The path of the scratch directory in a root with the paths `read`."""
    usual, other = SCRATCHES
    return other if any(path == usual or path.startswith(usual + "/") for path in read) else usual


def _outermost(paths: Iterable[str]) -> list[str]:
    """The existing paths that are not inside another one."""
    outermost: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths if os.path.exists(path)}):
        if not any(path == other or path.startswith(other + "/") for other in outermost):
            outermost.append(path)
    return outermost


def _bind(source: str, target: str, *, devices: bool = False) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    k.mount("bind mount", source, target, None, k.MS_BIND | k.MS_REC)
    if not devices:
        k.make_readonly("read-only bind", target)


def _make_devices(base: str, scratch: str) -> None:
    os.makedirs(base + "/dev", exist_ok=True)
    for path in DEVICES:
        if os.path.exists(path):
            _bind(path, base + path, devices=True)
    # Semaphores and shared memory of programs: bounded, and gone with the call, as all their files.
    if not os.path.exists(base + "/dev/shm"):  # programs may read files of the host there
        os.symlink(scratch, base + "/dev/shm")
    os.symlink("/proc/self/fd", base + "/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{base}/dev/{name}")


def _mount_proc(target: str) -> bool:
    """Mount /proc, which /dev/stdin and the like need; landlock keeps programs from reading the rest of it."""
    os.mkdir(target)
    for options in ("subset=pid,hidepid=ptraceable", ""):
        try:
            k.mount("mount proc", "proc", target, "proc", k.MS_NOSUID | k.MS_NODEV | k.MS_NOEXEC, options)
            return True
        except k.StepFailed:
            continue
    return False


def mount_scratch(path: str, size_mb: int, files: int, uid: int) -> None:
    options = f"size={size_mb}m,nr_inodes={files},mode=700,uid={uid},gid={uid}"
    k.mount("mount scratch", "tmpfs", path, "tmpfs", k.MS_NOSUID | k.MS_NODEV, options)
