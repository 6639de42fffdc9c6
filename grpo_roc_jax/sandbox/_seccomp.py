"""The system call filter: an allowlist of what arithmetic needs; standard library only, x86-64.

Denied calls fail with EPERM, new and unknown ones with ENOSYS (so that libraries fall back). Some succeed without doing
anything: those that change metadata, since landlock does not govern them; locks of files, which other programs that
read the same libraries could see; and those that wait for the disk, since nothing can end such a wait at the deadline.
"""

import ctypes
import struct

from . import _kernel

AUDIT_ARCH_X86_64 = 0xC000003E
X32_BIT = 0x40000000
ALLOW, ERRNO, NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000
EPERM, EACCES, EINVAL, ENOTTY, ENOSYS, EOPNOTSUPP = 1, 13, 22, 25, 38, 95
LD, AND, JEQ, JGE, JGT, JSET, RET = 0x20, 0x54, 0x15, 0x35, 0x25, 0x45, 0x06
FLAG_NEW_LISTENER = 8
NOTIF_RECV, NOTIF_SEND, NOTIF_CONTINUE = 0xC0502100, 0xC0182101, 1
FORK_FLAGS = 0x01200011
"""What the C library's fork passes: CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID, SIGCHLD."""
CLONE_THREAD, NAMESPACE_FLAGS = 0x00010000, 0x7E020080
THREAD_FLAGS = (0x3D0F00, 0x7D0F00)
"""What the C libraries pass to start a thread: it shares memory, files, directory, signals. One that shares no files
would have a table of descriptors of its own, beyond the limit of the process."""
LAST_KNOWN = 334
"""Calls with higher numbers were added after 2018 and get ENOSYS, except for those listed."""

ALWAYS = (
    # read write close stat fstat lstat poll lseek mmap mprotect munmap brk
    *(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
    # rt_sigaction rt_sigprocmask rt_sigreturn pread64 pwrite64 readv writev access pipe select sched_yield
    *(13, 14, 15, 17, 18, 19, 20, 21, 22, 23, 24),
    # mremap mincore madvise dup dup2 pause nanosleep getitimer alarm setitimer getpid
    *(25, 27, 28, 32, 33, 34, 35, 36, 37, 38, 39),
    # sendto recvfrom recvmsg shutdown getsockname getpeername getsockopt
    *(44, 45, 47, 48, 51, 52, 55),
    # exit wait4 uname ftruncate getdents getcwd chdir fchdir readlink
    *(60, 61, 63, 77, 78, 79, 80, 81, 89),
    # gettimeofday getrlimit getrusage sysinfo times getuid getgid geteuid getegid getppid getpgrp
    *(96, 97, 98, 99, 100, 102, 104, 107, 108, 110, 111),
    # getgroups getresuid getresgid getpgid getsid rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack
    *(115, 118, 120, 121, 124, 127, 128, 130, 131),
    # statfs fstatfs getpriority sched_getparam sched_getscheduler sched_get_priority_max/min arch_prctl
    *(137, 138, 140, 143, 145, 146, 147, 158),
    # gettid futex sched_getaffinity epoll_create getdents64 set_tid_address restart_syscall
    *(186, 202, 204, 213, 217, 218, 219),
    # clock_gettime clock_getres clock_nanosleep exit_group epoll_wait epoll_ctl waitid newfstatat readlinkat
    *(228, 229, 230, 231, 232, 233, 247, 262, 267),
    # faccessat pselect6 ppoll set_robust_list epoll_pwait eventfd eventfd2 epoll_create1 dup3 pipe2
    *(269, 270, 271, 273, 281, 284, 290, 291, 292, 293),
    # preadv pwritev getcpu getrandom membarrier statx rseq faccessat2 epoll_pwait2
    *(295, 296, 309, 318, 324, 332, 334, 439, 441),
)
WRITES = (
    # rename rmdir creat link unlink symlink truncate unlinkat renameat linkat symlinkat renameat2
    *(82, 84, 85, 86, 87, 88, 76, 263, 264, 265, 266, 316),
)
METADATA = (
    # chmod fchmod chown fchown lchown utime setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr
    *(90, 91, 92, 93, 94, 132, 188, 189, 190, 197, 198, 199),
    # utimes futimesat fchownat fchmodat utimensat
    *(235, 261, 260, 268, 280),
)
READ_XATTR = (191, 192, 193, 194, 195, 196)
SYNC = (74, 75, 187, 221)
"""fsync fdatasync. A process that waits for the disk cannot be killed before the disk answers; scratch files are
deleted after the call anyway. readahead fadvise64: hints, one of which takes files of libraries out of memory."""
MSYNC, MS_SYNC, FLOCK, FALLOCATE, CLOSE_RANGE, UMASK = 26, 4, 73, 285, 436, 95
MAKE_DIRECTORY = ((83, 1), (258, 2))
"""mkdir mkdirat, and the argument that holds the mode."""
OWNER = 0o700
"""Rights of its owner that a directory must have; the worker, which has the same owner, could not look into it."""
PROCESSES = (57, 58, 59, 109, 112, 322)
"""fork vfork execve setpgid setsid execveat: only where several processes are allowed."""
CLONE, SOCKETPAIR, KILL, TGKILL, PRCTL, PRLIMIT, IOCTL, OPEN, OPENAT = 56, 53, 62, 234, 157, 302, 16, 2, 257
FCNTL, SENDMSG = 72, 46
PRCTL_ALLOWED = (3, 15, 16, 0x53564D41)
"""PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_SET_VMA (malloc names its regions)."""
IOCTL_ALLOWED = (0x5421, 0x5450, 0x5451, 0x541B)
"""FIONBIO FIONCLEX FIOCLEX FIONREAD; all others, terminal queries among them, answer ENOTTY."""
FCNTL_ALLOWED = (0, 1, 2, 3, 5, 9, 11, 36, 1030, 1032, 1034)
"""F_DUPFD F_GETFD F_SETFD F_GETFL F_GETLK F_GETOWN F_GETSIG F_OFD_GETLK F_DUPFD_CLOEXEC F_GETPIPE_SZ F_GET_SEALS. Some
others reach processes and files outside: F_SETOWN, F_SETSIG, F_SETOWN_EX (the kernel sends any signal to any process of
the user), F_SETLEASE (others that open the file wait), F_NOTIFY (tells who reads a directory), write hints (others can
read them). F_SETPIPE_SZ takes memory, and F_ADD_SEALS would keep the executor from emptying its memory files."""
FCNTL_LOCKS = (6, 7, 37, 38)
"""F_SETLK F_SETLKW F_OFD_SETLK F_OFD_SETLKW. Who may read a library may lock its files, and others see that; each lock
also takes memory of the kernel that no limit counts. Within a process such locks never conflict."""
F_SETFL = 4
WRITE_FLAGS = 0o3 | 0o100 | 0o1000
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC."""
DISK_FLAGS = 0o10000 | 0o4000000 | 0o40000
"""O_DSYNC, O_SYNC, O_DIRECT: each write waits for the disk."""


def op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction of a filter; a comparison skips `yes` or `no` instructions."""
    return struct.pack("<HBBI", code, yes, no, value)


def _ret(value: int) -> bytes:
    return op(RET, value)


def _load_arg(index: int) -> bytes:
    return op(LD, 16 + 8 * index)


def _guard(number: int, body: list[bytes]) -> list[bytes]:
    """Run `body` for one call; it must return on every path."""
    return [op(JEQ, number, 0, len(body)), *body]


def _unless(bits: int, otherwise: int) -> list[bytes]:
    """Return `otherwise` if the loaded argument has one of these bits."""
    return [op(JSET, bits, 0, 1), _ret(otherwise)]


def _cases(values: tuple[int, ...], action: int) -> list[bytes]:
    """Return `found` if the loaded argument is one of the values."""
    return [step for value in values for step in (op(JEQ, value, 0, 1), _ret(action))]


def _one_of(index: int, values: tuple[int, ...], otherwise: int, action: int = ALLOW) -> list[bytes]:
    """Allow the call, or return `found`, if the low 32 bits of an argument are one of the values."""
    body = [_load_arg(index)]
    for position, value in enumerate(values):
        body.append(op(JEQ, value, len(values) - position, 0))
    return [*body, _ret(otherwise), _ret(action)]


def _ranges(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans


def _return_for(numbers: tuple[int, ...], value: int) -> list[bytes]:
    """One return value for a set of calls, range by range."""
    body: list[bytes] = []
    for first, last in _ranges(numbers):
        if first == last:
            body += [op(JEQ, first, 0, 1), _ret(value)]
        else:
            body += [op(JGE, first, 0, 2), op(JGT, last, 1, 0), _ret(value)]
    return body


PID_MARK = 0x7ABCDEF1
"""Placeholder for the process's own id, which `install` writes; no process id is that large."""


def build(write_files: bool, fork: str, *, own_pid_namespace: bool, truncate: bool, channel: int) -> bytes:
    """The filter program.

    Args:
        write_files: Let files be opened for writing; landlock or mounts then say which.
        fork: `deny`, `allow`, or `notify` to ask the worker about a plain fork.
        own_pid_namespace: Signals cannot reach foreign processes, so any target is allowed.
        truncate: Landlock governs truncation by path (ABI 3), so it may be allowed.
        channel: The only descriptor for `sendmsg`. Open files that are sent stay in the kernel and escape all limits.
    """
    denied, ignored = ERRNO | EPERM, ERRNO | 0
    program = [op(LD, 4), op(JEQ, AUDIT_ARCH_X86_64, 1, 0), _ret(denied)]
    program += [op(LD, 0), op(JGE, X32_BIT, 0, 1), _ret(ERRNO | ENOSYS)]
    always = ALWAYS + (PROCESSES if fork == "allow" else ())
    writes = WRITES if truncate else tuple(number for number in WRITES if number != 76)
    program += _return_for(always + (writes if write_files else ()), ALLOW)
    for number, index in ((OPENAT, 2), (OPEN, 1)):
        # O_TRUNC on a descriptor opened for reading would truncate without landlock's right to write.
        refusals = [op(JSET, 0o1000, 0, 2), op(JSET, 0o3, 1, 0), _ret(ERRNO | EACCES), _ret(ALLOW)]
        if not write_files:
            refusals = [op(JSET, WRITE_FLAGS, 0, 1), _ret(ERRNO | EACCES), _ret(ALLOW)]
        program += _guard(number, [_load_arg(index), *_unless(DISK_FLAGS, ERRNO | EINVAL), *refusals])
    for number, index in MAKE_DIRECTORY:
        # Without these rights the files below a directory could not be counted.
        owned = [_load_arg(index), op(AND, OWNER), op(JEQ, OWNER, 1, 0), _ret(denied), _ret(ALLOW)]
        program += _guard(number, owned if write_files else [_ret(ERRNO | EACCES)])
    program += _guard(UMASK, [_load_arg(0), *_unless(OWNER, ignored), _ret(ALLOW)])
    if not write_files:
        program += _return_for(WRITES, ERRNO | EACCES)
    program += _return_for(METADATA + SYNC, ignored)
    program += _guard(MSYNC, [_load_arg(2), *_unless(MS_SYNC, ignored), _ret(ALLOW)])
    # It would take space faster than anybody can look. The C library writes zeros instead.
    program += _guard(FALLOCATE, [_ret(ERRNO | EOPNOTSUPP)])
    # CLOSE_RANGE_UNSHARE would give a thread its own table of descriptors; CLOSE_RANGE_CLOEXEC would not.
    program += _guard(CLOSE_RANGE, _one_of(2, (0, 4), denied))
    program += _return_for(READ_XATTR, ERRNO | EOPNOTSUPP)
    clone = [_load_arg(0), *_unless(NAMESPACE_FLAGS, denied), op(JSET, CLONE_THREAD, 0, 4)]
    clone += [op(JEQ, THREAD_FLAGS[0], 2, 0), op(JEQ, THREAD_FLAGS[1], 1, 0), _ret(denied), _ret(ALLOW)]
    if fork == "allow":
        clone += [_ret(ALLOW)]
    else:
        clone += [op(JEQ, FORK_FLAGS, 0, 1), _ret(NOTIFY if fork == "notify" else denied), _ret(denied)]
    program += _guard(CLONE, clone)
    for number in (KILL, TGKILL):
        program += _guard(number, [_ret(ALLOW)] if own_pid_namespace else _one_of(0, (PID_MARK,), denied))
    # AF_UNIX without datagrams, which could be sent to any abstract address without connecting.
    stream = [_load_arg(1), op(AND, 0xF), op(JEQ, 1, 1, 0), op(JEQ, 5, 0, 1), _ret(ALLOW), _ret(denied)]
    program += _guard(SOCKETPAIR, [_load_arg(0), op(JEQ, 1, 1, 0), _ret(denied), *stream])
    program += _guard(SENDMSG, _one_of(0, (channel,), denied))
    # Processes of one program need their locks.
    locks = ALLOW if fork == "allow" else ignored
    program += _guard(FLOCK, [_ret(locks)])
    flags = [_load_arg(2), *_unless(DISK_FLAGS, ERRNO | EINVAL), _ret(ALLOW)]
    command = [_load_arg(1), op(JEQ, F_SETFL, 0, len(flags)), *flags, *_cases(FCNTL_LOCKS, locks)]
    program += _guard(FCNTL, [*command, *_one_of(1, FCNTL_ALLOWED, denied)])
    program += _guard(PRCTL, _one_of(0, PRCTL_ALLOWED, denied))
    program += _guard(PRLIMIT, _one_of(0, (0, PID_MARK), denied))
    program += _guard(IOCTL, _one_of(1, IOCTL_ALLOWED, ERRNO | ENOTTY))
    program += [op(JGT, LAST_KNOWN, 0, 1), _ret(ERRNO | ENOSYS), _ret(denied)]
    return b"".join(program)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


class Filter:
    """A filter program and the places in it where the process id is written."""

    def __init__(self, program: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(program, len(program))
        mark = struct.pack("<I", PID_MARK)
        self._places = [offset for offset in range(4, len(program), 8) if program[offset : offset + 4] == mark]
        self._struct = _Program(len(program) // 8, ctypes.addressof(self._buffer))

    @property
    def program(self) -> bytes:
        """The instructions as the kernel gets them."""
        return self._buffer.raw

    def write_pid(self, pid: int) -> None:
        """Write the id of the process that the filter restricts in the place of `PID_MARK`."""
        for offset in self._places:
            struct.pack_into("<I", self._buffer, offset, pid)

    def install(self, pid: int, *, listener: bool = False) -> int:
        """Restrict this process permanently; returns the listener's descriptor if one is requested, else 0."""
        self.write_pid(pid)
        flags = FLAG_NEW_LISTENER if listener else 0
        return _kernel.syscall("seccomp", _kernel.SECCOMP, 1, flags, ctypes.byref(self._struct))


def supported(machine: str = _kernel.MACHINE) -> str:
    """Why there is no filter for a machine, by default this one; empty if there is one."""
    if machine not in ("x86_64", "AMD64"):
        return f"no table of system calls for {machine}; use a remote executor or an x86-64 host"
    return ""
