"""The probe on hosts of several kinds, each imitated by a filter with the same denials; refused and weaker levels."""

import os
import subprocess
import sys

import pytest

from grpo_roc_jax.tools import _probing

FILTER = """
import os, struct, sys
sys.path.insert(0, {cwd!r})
from grpo_roc_jax.tools import _kernel, _seccomp

def deny(numbers, code):
    op = _seccomp._op
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
    script = "from grpo_roc_jax.tools._probing import probe_host\nprint(*probe_host().available)\n"
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


OWNERS = """
import fcntl, os, struct
from grpo_roc_jax.tools import _landlock, _probing, sandbox
from grpo_roc_jax.tools._seccomp import FCNTL_DENIED

def attempt(level, version):
    plan = _probing._probe_plan(level, version)
    ruleset = sandbox.make_ruleset(plan, None) if version else -1
    sandbox.lock_down(plan, sandbox.base_memory(), None, ruleset, sandbox.make_filter(plan, session=False))
    end, passed = os.pipe()[0], []
    for command in (*FCNTL_DENIED, 8 | 1 << 32):
        try:
            passed.append(libc.syscall(72, ctypes.c_long(end), ctypes.c_long(command), ctypes.c_long(owner)) == 0)
        except OSError:
            pass
    return str(any(passed))

import ctypes
libc, owner = ctypes.CDLL(None), os.getpid()
for level, version in [("L1", 0), *(("L2", v) for v in range(1, _landlock.abi() + 1))]:
    print(level, version, *_probing._in_child(lambda: attempt(level, version)))
    if version:
        print(_landlock.verdict(version))
"""


def test_no_kernel_lets_programs_make_it_send_signals() -> None:
    """With each version of landlock that this kernel can imitate: only the newest stops signals by itself."""
    lines = under("", OWNERS).splitlines()
    attempts, verdicts = [one for one in lines if one[0] == "L"], [one for one in lines if one[0] == "A"]
    assert len(attempts) >= 2
    assert all(one.endswith("True False") for one in attempts), attempts
    assert "filter alone stops signals" in verdicts[0] and "truncating by path is denied" in verdicts[0]
    newest = verdicts[-1]
    assert ("filter alone" in newest) == (int(newest.split()[1].strip(",;")) < 6)


def test_unknown_machines_get_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_probing._kernel, "MACHINE", "aarch64")
    probe = _probing.probe_host()
    assert probe.available == ("L0",)
    assert "aarch64" in probe.table()
