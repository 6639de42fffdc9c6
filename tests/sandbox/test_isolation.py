"""The probe on hosts of several kinds, each imitated by a filter with the same denials; weaker levels; cgroups."""

import errno
import os
import re
import signal
import struct
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo_roc_jax.commands.probe import cgroup_verdict
from grpo_roc_jax.sandbox import _landlock, _probing, _seccomp, cgroup, isolation
from grpo_roc_jax.tools import IsolationUnavailable, ToolsConfig, make_executor
from grpo_roc_jax.tools.config import PoolInCgroup
from tests.helpers.arena import program_call, require

FILTER = """
import os, socket, sys
sys.path.insert(0, {cwd!r})
from grpo_roc_jax.sandbox import _kernel, _probing, _seccomp, isolation
from grpo_roc_jax.tools import *

def deny(numbers, code):
    op = _seccomp.op
    denied = [(op(_seccomp.JEQ, n, 0, 1), op(_seccomp.RET, _seccomp.ERRNO | code)) for n in numbers]
    program = [op(_seccomp.LD, 0), *sum(denied, ()), op(_seccomp.RET, _seccomp.ALLOW)]
    _kernel.prctl("prctl", _kernel.PR_SET_NO_NEW_PRIVS, 1)
    _seccomp.Filter(b"".join(program)).install(os.getpid())
"""
RUN = """
print("available", *_probing.probe_host().available)
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
    require("L3")  # a host that is itself too restricted cannot imitate others
    code = FILTER.format(cwd=os.getcwd()) + denials + script
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


CONTAINER = "deny((272, 165, 308, 155, 442), 1)\n"  # unshare, mount, setns, pivot_root, mount_setattr
OLD_KERNEL = "deny((444, 445, 446), 38)\n"  # landlock


@pytest.mark.parametrize(
    ("denials", "settings", "output"),
    [
        (CONTAINER, "", "available L0 L1 L2\nL2 ok ok exception ok 1 L2\n"),
        (CONTAINER, "level='L3'", "available L0 L1 L2\nrefused"),
        (CONTAINER + OLD_KERNEL, "", "available L0 L1\nrefused True True"),
        (CONTAINER + OLD_KERNEL, "min_level='L1'", "available L0 L1\nL1 ok"),
        (OLD_KERNEL, "", r"available .*L3.*\nL[34] ok .*\nmissing\|landlock"),
        ("deny((317,), 1)\n", "", "available L0\nrefused True True"),  # seccomp
    ],
)
def test_probe_distinguishes_hosts_and_what_they_lack_is_refused_unless_lowered(denials, settings, output) -> None:
    assert re.match(output, answer := under(denials, RUN.format(settings=settings))), answer


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


OPTIONS = {"own_pid_namespace": False, "truncate": False, "channel": 7}
FORK, THREAD, MARK = _seccomp.FORK_FLAGS, 0x3D0F00, _seccomp.PID_MARK
GOLDEN = [  # what programs get, what they get where several processes are allowed, calls with their arguments
    # process_vm_readv, -writev, ptrace, connect; mount, unshare, bpf; sync, syncfs, sync_file_range, pwritev2
    ("errno 1", "errno 1", {n: (n,) for n in (310, 311, 101, 42, 165, 272, 321, 162, 306, 277, 328)}),
    # F_SETOWN, SETSIG, SETOWN_EX, SETLEASE, NOTIFY, SETPIPE_SZ, ADD_SEALS, SET_RW_HINT, and one of the future
    ("errno 1", "errno 1", {n: (72, 3, n) for n in (8, 8 | 1 << 32, 10, 15, 1024, 1026, 1031, 1033, 1036, 1040)}),
    ("errno 38", "errno 38", {n: (n,) for n in (425, 435, 0x40000000)}),  # io_uring_setup, clone3, x32
    ("allow", "allow", {"fcntl F_SETFL to append": (72, 3, 4, 0o2000), "socketpair streams": (53, 1, 1 | 0o2000000)}),
    ("allow", "allow", {"thread of musl": (56, THREAD | 0x400000), "close_range CLOEXEC": (436, 3, 9, 4)}),
    ("allow", "allow", {"sendmsg on its channel": (46, 7), "socketpair packets": (53, 1, 5), "thread": (56, THREAD)}),
    ("allow", "allow", {"msync MS_ASYNC": (26, 0, 0, 1), "prctl PR_SET_NAME": (157, 15), "kill itself": (62, MARK, 9)}),
    ("allow", "allow", {"close_range": (436, 3, 9, 0), "fcntl F_GETFD": (72, 3, 1), "fcntl F_GETLK": (72, 3, 5)}),
    ("allow", "allow", {"open to read": (2, 0, 0), "umask": (95, 0o077), "sendto": (44,), "read": (0,)}),
    ("errno 1", "errno 1", {"thread with own descriptors": (56, THREAD & ~0x400), "socketpair datagrams": (53, 1, 2)}),
    ("errno 1", "errno 1", {"thread with own parent": (56, THREAD | 0x8000), "process sharing memory": (56, 0x10900)}),
    ("errno 1", "errno 1", {"close_range UNSHARE|CLOEXEC": (436, 3, 9, 6), "a namespace": (56, FORK | 0x10000000)}),
    ("errno 1", "errno 1", {"close_range UNSHARE": (436, 3, 9, 2), "socketpair internet": (53, 2, 1)}),
    ("errno 1", "errno 1", {"prctl PR_SET_DUMPABLE": (157, 4), "prlimit of another": (302, 1), "socket": (41, 2, 1)}),
    ("errno 1", "errno 1", {"sendmsg elsewhere": (46, 8), "kill another": (62, 1, 9)}),
    ("notify", "allow", {"fork": (56, FORK)}),
    ("errno 1", "allow", {"vfork by clone": (56, 0x4111), "execve": (59,), "vfork": (58,)}),
    ("errno 22", "errno 22", {"F_SETFL O_DIRECT": (72, 3, 4, 0o42000), "openat O_DIRECT": (257, 0, 0, 0o40000)}),
    ("errno 22", "errno 22", {"open O_SYNC to write": (2, 0, 0o4010001)}),
    ("errno 0", "allow", {"fcntl F_OFD_SETLKW": (72, 3, 38), "fcntl F_SETLK": (72, 3, 6), "flock": (73, 3, 2)}),
    ("errno 13", "allow", {"openat to write": (257, 0, 0, 0o1), "mkdir": (83, 0, 0o700), "unlink": (87,)}),
    ("errno 13", "errno 13", {"openat to read and truncate": (257, 0, 0, 0o1000)}),
    ("errno 0", "errno 0", {"umask hides": (95, 0o400), "posix_fadvise": (221, 3, 0, 0, 4), "utimensat": (280,)}),
    ("errno 0", "errno 0", {"msync MS_SYNC": (26, 0, 0, 4), "fdatasync": (75, 3), "fsync": (74, 3), "chmod": (90,)}),
    ("errno 95", "errno 95", {"fallocate": (285, 3, 1, 0, 4096), "getxattr": (191,)}),
    ("errno 13", "errno 1", {"mkdirat": (258, 3, 0, 0o677), "mkdir unreadable": (83, 0, 0o300), "truncate": (76,)}),
    ("errno 25", "errno 25", {"terminal ioctl": (16, 0, 0x5401)}),
]


def test_the_filter_answers_as_the_golden_table_says() -> None:
    """Other layers would hide a hole at the strongest level, so the program itself is run."""
    strict, several = (_seccomp.build(*kind, **OPTIONS) for kind in ((False, "notify"), (True, "allow")))
    for answer, where_several, calls in GOLDEN:
        for name, call in calls.items():
            assert (outcome(strict, *call), outcome(several, *call)) == (answer, where_several), name
    assert outcome(strict, 0, arch=0x40000003) == "errno 1", "a 32-bit call"
    # What is opened for writing, landlock or mounts say from the second level on; at the first one nothing would.
    for level, answer in (("L1", "errno 13"), ("L2", "allow"), ("L3", "allow")):
        program = isolation.make_filter(_probing.probe_plan(level, landlock=3), session=False).program
        assert outcome(program, 257, 0, 0, 0o1) == answer, level
        assert {outcome(program, 72, 3, 6), outcome(program, 72, 3, 37), outcome(program, 73, 3, 2)} == {"errno 0"}


CONTAINED = """
print(*isolation.contain(4096))
try: socket.socket()
except PermissionError as error: print(error.strerror)"""


def test_the_verdict_about_landlock_says_what_the_filter_does_and_a_contained_process_is_filtered() -> None:
    """Only the newest versions of landlock stop signals by themselves, which `fcntl` lets the kernel send."""
    oldest, newest, probe = _landlock.verdict(1), _landlock.verdict(6), _probing.probe_host("aarch64")
    assert "filter alone stops signals" in oldest and "truncating by path is denied" in oldest
    assert "filter alone" not in newest
    assert probe.available == ("L0",) and "aarch64" in probe.table(), "unknown machines get no filter"
    filled = _seccomp.Filter(_seccomp.build(False, "deny", **OPTIONS))
    filled.write_pid(1234)
    assert [outcome(filled.program, 62, pid, 9) for pid in (1234, 1235, MARK)] == ["allow", "errno 1", "errno 1"]
    assert outcome(filled.program, 302, 1234) == "allow", "it may signal itself and no other"
    available = _probing.probe_host().available
    with ExitStack() as files:
        for _ in range(100):
            files.enter_context(open(os.devnull))
        assert _probing.probe_host().available == available, "programs may have fewer files open than this process"
    layers, denied = under("", CONTAINED).splitlines()
    assert layers.split()[:2] == ["limits", "seccomp"] and denied == "Operation not permitted"


FILES = ("cgroup.procs", "memory.max", "memory.swap.max", "pids.max")
ONE_WORKER = {"workers": 1, "roots": 1, "preload": (), "bare_root": False}


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A group with the controllers of cgroups; the kernel makes the files of groups below it, and removes them."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    make, remove = os.mkdir, os.rmdir

    def mkdir(path: str, mode: int = 0o777) -> None:
        make(path, mode)
        for name in FILES if Path(path).parent == tmp_path else ():
            (Path(path) / name).touch()

    def rmdir(path: str) -> None:
        if Path(path).parent == tmp_path:
            members = (Path(path) / "cgroup.procs").read_text()
            if members and os.path.exists(f"/proc/{members}"):
                raise OSError(errno.EBUSY, "busy")
            for file in Path(path).iterdir():
                file.unlink()
        remove(path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "rmdir", rmdir)
    return tmp_path


def groups(tree) -> list[Path]:
    return sorted(tree.glob("grpo-tools-*"))


def test_the_executor_runs_in_its_group_which_ends_with_it(tree) -> None:
    for pid in (os.getppid(), 2**22 + 1):  # a trainer that runs, and one that was killed
        (tree / f"grpo-tools-{pid}-old").mkdir()
    pool = PoolInCgroup(memory_mb=700, processes=90, parent=str(tree))
    with make_executor(ToolsConfig(executor=pool, **ONE_WORKER)) as executor:
        other, group = sorted(groups(tree), key=lambda path: path.name.endswith("old"), reverse=True)
        assert other.name == f"grpo-tools-{os.getppid()}-old"
        assert [(group / name).read_text() for name in FILES] == [str(executor.pid), str(700 << 20), "0", "90"]
        assert (tree / "cgroup.subtree_control").read_text() == "+memory +pids"
        assert executor.capabilities.layers[-1] == "cgroup"
        os.kill(executor.pid, signal.SIGKILL)
        assert executor.run([program_call("1")])[0].ok
        assert not group.exists()
        [second] = set(groups(tree)) - {other}
        assert (second / "cgroup.procs").read_text() == str(executor.pid)
    assert groups(tree) == [other]


def test_a_host_without_cgroups_is_an_error_that_says_what_to_do(tree) -> None:
    def refused(fault: str) -> None:
        with pytest.raises(IsolationUnavailable, match=f"no cgroup can be made here .*{fault}") as caught:
            make_executor(ToolsConfig(executor=PoolInCgroup(parent=str(tree)), **ONE_WORKER)).start()
        assert "remedy: run where" in str(caught.value) and groups(tree) == []

    (tree / "cgroup.controllers").write_text("cpu pids")
    refused("no controller memory here")
    (tree / "cgroup.controllers").unlink()
    refused("cgroup.controllers: No such file")


def test_a_process_that_may_not_enter_ends(tree, monkeypatch) -> None:
    entering = []

    def add(group, pid):
        entering.append(pid)
        raise PermissionError(errno.EACCES, "denied")

    limits = PoolInCgroup(parent=str(tree))
    assert cgroup_verdict(limits) == (True, f"memory.max and pids.max below {tree}")
    monkeypatch.setattr(cgroup.Cgroup, "add", add)
    assert cgroup_verdict(limits) == (False, f"no process may enter a cgroup below {tree} ([Errno 13] denied)")
    with pytest.raises(IsolationUnavailable, match=r"may not enter its cgroup: .* denied"):
        make_executor(ToolsConfig(executor=limits, **ONE_WORKER)).start()
    assert groups(tree) == [] and not os.path.exists(f"/proc/{entering[0]}")


def test_the_groups_to_try_are_found(tmp_path) -> None:
    for mount, name, expected in (
        ("1 2 0:3 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", "0::/a/b", ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a"]),
        ("1 2 0:3 /a /grp rw - cgroup2 none rw", "1:name=systemd:/x\n0::/a/b", ["/grp/b", "/grp"]),
        ("1 2 0:3 / /sys/fs/cgroup/unified rw - cgroup2 none rw", "0::/", ["/sys/fs/cgroup/unified"]),
    ):
        (tmp_path / "mountinfo").write_text(f"9 2 0:9 / /sys/fs/cgroup rw - tmpfs none rw\n{mount}\n")
        (tmp_path / "cgroup").write_text(name + "\n")
        assert list(map(str, cgroup.own_groups(tmp_path))) == expected
    (tmp_path / "mountinfo").write_text("9 2 0:9 / /sys/fs/cgroup rw - tmpfs none rw\n\n")
    with pytest.raises(FileNotFoundError, match="version 2"):
        cgroup.own_groups(tmp_path)
