"""A cgroup around the executor: in a directory that behaves like one, in none, and in a real one where there is one."""

import errno
import os
import signal
from pathlib import Path

import pytest

from grpo_roc_jax.commands.probe import cgroup_verdict
from grpo_roc_jax.sandbox import cgroup
from grpo_roc_jax.tools import CodeCall, IsolationUnavailable, ToolsConfig, make_executor
from grpo_roc_jax.tools.config import PoolInCgroup

FILES = ("cgroup.procs", "memory.max", "memory.swap.max", "pids.max")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A group with the controllers of cgroups; the kernel makes the files of groups below it, and removes them."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    make, remove = os.mkdir, os.rmdir

    def mkdir(path: str, mode: int = 0o777) -> None:
        make(path, mode)
        if Path(path).parent == tmp_path:
            for name in FILES:
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


def groups(tree: Path) -> list[Path]:
    return sorted(tree.glob("grpo-tools-*"))


def call(code: str) -> CodeCall:
    return CodeCall("1", "python_code_with_standard_io", {"code": code}, None)


def test_the_executor_runs_in_its_group_which_ends_with_it(tree: Path) -> None:
    for pid in (os.getppid(), 2**22 + 1):  # a trainer that runs, and one that was killed
        (tree / f"grpo-tools-{pid}-old").mkdir()
    pool = PoolInCgroup(memory_mb=700, processes=90, parent=str(tree))
    with make_executor(ToolsConfig(executor=pool, workers=1, roots=1, preload=(), bare_root=False)) as executor:
        other, group = sorted(groups(tree), key=lambda path: path.name.endswith("old"), reverse=True)
        assert other.name == f"grpo-tools-{os.getppid()}-old"
        assert [(group / name).read_text() for name in FILES] == [str(executor.pid), str(700 << 20), "0", "90"]
        assert (tree / "cgroup.subtree_control").read_text() == "+memory +pids"
        assert executor.capabilities.layers[-1] == "cgroup"
        os.kill(executor.pid, signal.SIGKILL)
        assert executor.run([call("print(1)")])[0].ok
        assert not group.exists()
        [second] = set(groups(tree)) - {other}
        assert (second / "cgroup.procs").read_text() == str(executor.pid)
    assert groups(tree) == [other]


def test_a_host_without_cgroups_is_an_error_that_says_what_to_do(tree: Path) -> None:
    def refused(fault: str) -> None:
        with pytest.raises(IsolationUnavailable, match=f"no cgroup can be made here .*{fault}") as caught:
            make_executor(ToolsConfig(executor=PoolInCgroup(parent=str(tree)), workers=1, preload=())).start()
        assert "remedy: run where" in str(caught.value) and groups(tree) == []

    control = tree / "cgroup.subtree_control"
    control.unlink()
    control.mkdir()
    refused("cgroup.subtree_control: ")
    (tree / "cgroup.controllers").write_text("cpu pids")
    refused("no controller memory here")
    (tree / "cgroup.controllers").unlink()
    refused("cgroup.controllers: No such file")


def test_a_process_that_may_not_enter_ends(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entering: list[int] = []

    def add(group: cgroup.Cgroup, pid: int) -> None:
        entering.append(pid)
        raise PermissionError(errno.EACCES, "denied")

    limits = PoolInCgroup(parent=str(tree))
    assert cgroup_verdict(limits) == (True, f"memory.max and pids.max below {tree}")
    monkeypatch.setattr(cgroup.Cgroup, "add", add)
    assert cgroup_verdict(limits) == (False, f"no process may enter a cgroup below {tree} ([Errno 13] denied)")
    with pytest.raises(IsolationUnavailable, match=r"may not enter its cgroup: .* denied"):
        make_executor(ToolsConfig(executor=PoolInCgroup(parent=str(tree)), workers=1, preload=())).start()
    assert groups(tree) == [] and not os.path.exists(f"/proc/{entering[0]}")


@pytest.mark.parametrize(
    ("mount", "name", "expected"),
    [
        ("1 2 0:3 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", "0::/a/b", ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a"]),
        ("1 2 0:3 /a /grp rw - cgroup2 none rw", "1:name=systemd:/x\n0::/a/b", ["/grp/b", "/grp"]),
        ("1 2 0:3 / /sys/fs/cgroup/unified rw - cgroup2 none rw", "0::/", ["/sys/fs/cgroup/unified"]),
    ],
)
def test_the_groups_to_try_are_found(tmp_path: Path, mount: str, name: str, expected: list[str]) -> None:
    (tmp_path / "mountinfo").write_text(f"9 2 0:9 / /sys/fs/cgroup rw - tmpfs none rw\n{mount}\n")
    (tmp_path / "cgroup").write_text(name + "\n")
    assert list(map(str, cgroup.own_groups(tmp_path))) == expected
    (tmp_path / "mountinfo").write_text("9 2 0:9 / /sys/fs/cgroup rw - tmpfs none rw\n")
    with pytest.raises(FileNotFoundError, match="version 2"):
        cgroup.own_groups(tmp_path)


def test_a_real_group_limits_all_programs_together() -> None:
    works, detail = cgroup_verdict()
    if not works:
        pytest.skip(detail)
    pool = PoolInCgroup(memory_mb=400, processes=60)
    with make_executor(ToolsConfig(executor=pool, workers=2, roots=1, preload=(), memory_mb=2000)) as executor:
        large, after = (executor.run([call(code)])[0] for code in ("x = bytes(1 << 20) * 900", "print(1)"))
        assert (large.kind, large.signal) == ("crash", 9) and after.ok
        thread = "threading.Thread(target=time.sleep, args=(2,), daemon=True).start()\n"
        [many] = executor.run([call("import threading, time\n" + 60 * thread)])
        assert many.error_type == "RuntimeError"
    assert not list(Path(detail.split()[-1]).glob(f"grpo-tools-{os.getpid()}-*"))
