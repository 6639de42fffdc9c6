"""The probe on hosts of several kinds, each imitated by a filter with the same denials; refused and weaker levels."""

import os
import struct
import subprocess
import sys

import pytest

from grpo_roc_jax.sandbox import _landlock, _probing, _seccomp, isolation

FILTER = """
import os, struct, sys
sys.path.insert(0, {cwd!r})
from grpo_roc_jax.sandbox import _kernel
from grpo_roc_jax.sandbox import _seccomp

def deny(numbers, code):
    op = _seccomp.op
    program = [op(_seccomp.LD, 0)]
    for number in numbers:
        program += [op(_seccomp.JEQ, number, 0, 1), op(_seccomp.RET, _seccomp.ERRNO | code)]
    program.append(op(_seccomp.RET, _seccomp.ALLOW))
    _kernel.prctl("prctl", _kernel.PR_SET_NO_NEW_PRIVS, 1)
    _seccomp.Filter(b"".join(program)).install(os.getpid())

UNSHARE, MOUNT, SETNS, PIVOT, MOUNT_SETATTR, SECCOMP = 272, 165, 308, 155, 442, 317
LANDLOCK = (444, 445, 446)
"""
RUN = """
from grpo_roc_jax.tools import *
executor = make_executor(ToolsConfig(workers=1, preload=(), {settings}))
try:
    executor.start()
except IsolationUnavailable as error:
    print("refused", "remedy" in str(error), "min_level" in str(error))
    sys.exit()
call = CodeCall("a", "python_code_with_standard_io", {{"code": "print(1)"}}, None)
texts = ["x = 1", "import os; os._exit(1)", "x"]
cells = [CodeCall(str(i), "jupyter_code", {{"code": text}}, "s") for i, text in enumerate(texts)]
results = [executor.run([one])[0] for one in (call, *cells)]
print(executor.capabilities.level, *(result.kind for result in results), results[3].echo, results[0].isolation)
print("missing", *executor.capabilities.missing, sep="|")
executor.close()
"""


def under(denials: str, script: str) -> str:
    code = FILTER.format(cwd=os.getcwd()) + denials + script
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def needs_everything() -> None:
    if "L3" not in _probing.probe_host().available:
        pytest.skip("this host is itself too restricted to imitate others")


CONTAINER = "deny((UNSHARE, MOUNT, SETNS, PIVOT, MOUNT_SETATTR), 1)\n"
OLD_KERNEL = "deny(LANDLOCK, 38)\n"
NO_SECCOMP = "deny((SECCOMP,), 1)\n"


@pytest.mark.parametrize(
    ("denials", "levels"),
    [
        (CONTAINER, ("L0", "L1", "L2")),
        ("deny((MOUNT,), 13)\n", ("L0", "L1", "L2")),
        (CONTAINER + OLD_KERNEL, ("L0", "L1")),
        (NO_SECCOMP, ("L0",)),
    ],
)
def test_probe_distinguishes_hosts(denials: str, levels: tuple[str, ...]) -> None:
    script = "from grpo_roc_jax.sandbox._probing import probe_host\nprint(*probe_host().available)\n"
    assert tuple(under(denials, script).split()) == levels


def test_without_landlock_namespaces_still_reach_l3_and_say_what_is_missing() -> None:
    answer = under(OLD_KERNEL, RUN.format(settings=""))
    assert answer.split()[0] in ("L3", "L4")
    assert "missing|landlock" in answer


def test_a_container_runs_at_l2() -> None:
    answer = under(CONTAINER, RUN.format(settings=""))
    assert answer.splitlines()[0] == "L2 ok ok exception ok 1 L2"


def test_below_the_minimum_is_refused_unless_lowered() -> None:
    assert under(CONTAINER + OLD_KERNEL, RUN.format(settings="")).split() == ["refused", "True", "True"]
    lowered = under(CONTAINER + OLD_KERNEL, RUN.format(settings="min_level='L1'"))
    assert lowered.splitlines()[0].startswith("L1 ok")


def test_a_level_that_the_host_lacks_is_refused() -> None:
    assert under(CONTAINER, RUN.format(settings="level='L3'")).split()[0] == "refused"


def outcome(program: bytes, number: int, *arguments: int, arch: int = _seccomp.AUDIT_ARCH_X86_64) -> str:
    """What the filter answers to a system call, by running its program as the kernel does."""
    data = struct.pack("<II", number, arch) + bytes(8) + struct.pack("<6Q", *arguments, *[0] * (6 - len(arguments)))
    position = accumulator = 0
    while True:
        code, yes, no, value = struct.unpack_from("<HBBI", program, 8 * position)
        position += 1
        if code == _seccomp.LD:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == _seccomp.AND:
            accumulator &= value
        elif code == _seccomp.RET:
            return {_seccomp.ALLOW: "allow", _seccomp.NOTIFY: "notify"}.get(value, f"errno {value & 0xFFFF}")
        else:
            tests = {_seccomp.JEQ: accumulator == value, _seccomp.JGE: accumulator >= value}
            tests |= {_seccomp.JGT: accumulator > value, _seccomp.JSET: bool(accumulator & value)}
            position += yes if tests[code] else no


FORK, THREAD, MARK = _seccomp.FORK_FLAGS, 0x3D0F00, _seccomp.PID_MARK
GOLDEN = [  # call, its arguments, what programs get, what they get where several processes are allowed
    ("read", (0,), "allow", "allow"),
    ("process_vm_readv", (310,), "errno 1", "errno 1"),
    ("process_vm_writev", (311,), "errno 1", "errno 1"),
    ("ptrace", (101,), "errno 1", "errno 1"),
    ("socket", (41, 2, 1), "errno 1", "errno 1"),
    ("connect", (42,), "errno 1", "errno 1"),
    ("sendto", (44,), "allow", "allow"),
    ("sendmsg on its channel", (46, 7), "allow", "allow"),
    ("sendmsg elsewhere", (46, 8), "errno 1", "errno 1"),
    ("socketpair of streams", (53, 1, 1 | 0o2000000), "allow", "allow"),
    ("socketpair of packets", (53, 1, 5), "allow", "allow"),
    ("socketpair of datagrams", (53, 1, 2), "errno 1", "errno 1"),
    ("socketpair of the internet", (53, 2, 1), "errno 1", "errno 1"),
    ("fork", (56, FORK), "notify", "allow"),
    ("vfork by clone", (56, 0x4111), "errno 1", "allow"),
    ("a thread", (56, THREAD), "allow", "allow"),
    ("a thread of musl", (56, THREAD | 0x400000), "allow", "allow"),
    ("a thread with descriptors of its own", (56, THREAD & ~0x400), "errno 1", "errno 1"),
    ("a process that shares memory", (56, 0x10900), "errno 1", "errno 1"),
    ("a thread with a parent of its own", (56, THREAD | 0x8000), "errno 1", "errno 1"),
    ("close_range", (436, 3, 9, 0), "allow", "allow"),
    ("close_range that marks", (436, 3, 9, 4), "allow", "allow"),
    ("close_range that unshares", (436, 3, 9, 2), "errno 1", "errno 1"),
    ("close_range that unshares and marks", (436, 3, 9, 6), "errno 1", "errno 1"),
    ("a namespace", (56, FORK | 0x10000000), "errno 1", "errno 1"),
    ("vfork", (58,), "errno 1", "allow"),
    ("execve", (59,), "errno 1", "allow"),
    ("kill itself", (62, MARK, 9), "allow", "allow"),
    ("kill another", (62, 1, 9), "errno 1", "errno 1"),
    ("fcntl F_SETOWN", (72, 3, 8), "errno 1", "errno 1"),
    ("fcntl F_SETOWN and more", (72, 3, 8 | 1 << 32), "errno 1", "errno 1"),
    ("fcntl F_SETSIG", (72, 3, 10), "errno 1", "errno 1"),
    ("fcntl F_SETOWN_EX", (72, 3, 15), "errno 1", "errno 1"),
    ("fcntl F_SETLEASE", (72, 3, 1024), "errno 1", "errno 1"),
    ("fcntl F_GETFD", (72, 3, 1), "allow", "allow"),
    ("fcntl F_NOTIFY", (72, 3, 1026), "errno 1", "errno 1"),
    ("fcntl F_SETPIPE_SZ", (72, 3, 1031), "errno 1", "errno 1"),
    ("fcntl F_ADD_SEALS", (72, 3, 1033), "errno 1", "errno 1"),
    ("fcntl F_SET_RW_HINT", (72, 3, 1036), "errno 1", "errno 1"),
    ("fcntl of the future", (72, 3, 1040), "errno 1", "errno 1"),
    ("fcntl F_SETFL to append", (72, 3, 4, 0o2000), "allow", "allow"),
    ("fcntl F_SETFL O_DIRECT", (72, 3, 4, 0o42000), "errno 22", "errno 22"),
    ("fcntl F_GETLK", (72, 3, 5), "allow", "allow"),
    ("fcntl F_SETLK", (72, 3, 6), "errno 0", "allow"),
    ("fcntl F_OFD_SETLKW", (72, 3, 38), "errno 0", "allow"),
    ("flock", (73, 3, 2), "errno 0", "allow"),
    ("open to read", (2, 0, 0), "allow", "allow"),
    ("openat to write", (257, 0, 0, 0o1), "errno 13", "allow"),
    ("openat to read and truncate", (257, 0, 0, 0o1000), "errno 13", "errno 13"),
    ("open to write, waiting for the disk", (2, 0, 0o4010001), "errno 22", "errno 22"),
    ("openat O_DIRECT", (257, 0, 0, 0o40000), "errno 22", "errno 22"),
    ("fsync", (74, 3), "errno 0", "errno 0"),
    ("fdatasync", (75, 3), "errno 0", "errno 0"),
    ("sync", (162,), "errno 1", "errno 1"),
    ("syncfs", (306, 3), "errno 1", "errno 1"),
    ("sync_file_range", (277, 3), "errno 1", "errno 1"),
    ("posix_fadvise", (221, 3, 0, 0, 4), "errno 0", "errno 0"),
    ("msync MS_SYNC", (26, 0, 0, 4), "errno 0", "errno 0"),
    ("msync MS_ASYNC", (26, 0, 0, 1), "allow", "allow"),
    ("pwritev2, which may wait for the disk", (328, 3), "errno 1", "errno 1"),
    ("fallocate", (285, 3, 1, 0, 4096), "errno 95", "errno 95"),
    ("mkdir", (83, 0, 0o700), "errno 13", "allow"),
    ("mkdir that nobody can read", (83, 0, 0o300), "errno 13", "errno 1"),
    ("mkdirat that nobody can enter", (258, 3, 0, 0o677), "errno 13", "errno 1"),
    ("umask", (95, 0o077), "allow", "allow"),
    ("umask that hides directories", (95, 0o400), "errno 0", "errno 0"),
    ("unlink", (87,), "errno 13", "allow"),
    ("truncate", (76,), "errno 13", "errno 1"),
    ("chmod", (90,), "errno 0", "errno 0"),
    ("utimensat", (280,), "errno 0", "errno 0"),
    ("getxattr", (191,), "errno 95", "errno 95"),
    ("terminal ioctl", (16, 0, 0x5401), "errno 25", "errno 25"),
    ("prctl PR_SET_NAME", (157, 15), "allow", "allow"),
    ("prctl PR_SET_DUMPABLE", (157, 4), "errno 1", "errno 1"),
    ("prlimit of another", (302, 1), "errno 1", "errno 1"),
    ("mount", (165,), "errno 1", "errno 1"),
    ("unshare", (272,), "errno 1", "errno 1"),
    ("bpf", (321,), "errno 1", "errno 1"),
    ("io_uring_setup", (425,), "errno 38", "errno 38"),
    ("clone3", (435,), "errno 38", "errno 38"),
    ("an x32 call", (0x40000000,), "errno 38", "errno 38"),
]


def test_the_filter_answers_as_the_golden_table_says() -> None:
    """Other layers would hide a hole at the strongest level, so the program itself is run."""
    options = {"own_pid_namespace": False, "truncate": False, "channel": 7}
    strict = _seccomp.build(False, "notify", **options)
    several = _seccomp.build(True, "allow", **options)
    rows = [(name, call, outcome(strict, *call), outcome(several, *call)) for name, call, _, _ in GOLDEN]
    assert rows == GOLDEN
    assert outcome(strict, 0, arch=0x40000003) == "errno 1", "a 32-bit call"


def test_files_are_opened_for_writing_from_the_second_level_on_and_locked_at_none() -> None:
    """There landlock or mounts say which; at the first level nothing would."""
    for level, answer in (("L1", "errno 13"), ("L2", "allow"), ("L3", "allow")):
        program = isolation.make_filter(_probing.probe_plan(level, landlock=3), session=False).program
        assert outcome(program, 257, 0, 0, 0o1) == answer, level
        assert {outcome(program, 72, 3, 6), outcome(program, 72, 3, 37), outcome(program, 73, 3, 2)} == {"errno 0"}


CONTAINED = """
import socket
from grpo_roc_jax.sandbox import isolation
print(*isolation.contain(4096))
try:
    socket.socket()
except PermissionError as error:
    print(error.strerror)
"""


def test_a_contained_process_is_filtered() -> None:
    layers, denied = under("", CONTAINED).splitlines()
    assert layers.split()[:2] == ["limits", "seccomp"] and denied == "Operation not permitted"


def test_a_process_may_signal_itself_and_no_other() -> None:
    options = {"own_pid_namespace": False, "truncate": False, "channel": 7}
    filled = _seccomp.Filter(_seccomp.build(False, "deny", **options))
    filled.write_pid(1234)
    program = filled.program
    assert [outcome(program, 62, pid, 9) for pid in (1234, 1235, MARK)] == ["allow", "errno 1", "errno 1"]
    assert outcome(program, 302, 1234) == "allow"


def test_the_verdict_about_landlock_says_what_the_filter_does_in_its_place() -> None:
    """Only its newest versions stop signals by themselves, which `fcntl` lets the kernel send."""
    oldest, newest = _landlock.verdict(1), _landlock.verdict(6)
    assert "filter alone stops signals" in oldest and "truncating by path is denied" in oldest
    assert "filter alone" not in newest


def test_unknown_machines_get_no_filter() -> None:
    probe = _probing.probe_host("aarch64")
    assert probe.available == ("L0",)
    assert "aarch64" in probe.table()
