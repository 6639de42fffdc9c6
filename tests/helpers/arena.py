"""Executors of several levels: with targets of attacks that are checked from outside, or with shorthands for cells."""

import contextlib
import itertools
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_roc_jax.sandbox import _probing
from grpo_roc_jax.tools import CodeCall, ToolsConfig, make_executor
from grpo_roc_jax.tools.executor import BaseExecutor
from grpo_roc_jax.types import ToolResult
from tests.helpers.attacks import Attack

TOOL = "python_code_with_standard_io"
MARK = "arena-secret-environment"
LEFT_FILES = tuple(f"{folder}/grpo-attack-left" for folder in ("/tmp", "/var/tmp", "/dev/shm"))


def wait_until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Waits for a condition, longer than any load of the host delays it; returns what it gave last."""
    deadline = time.monotonic() + seconds
    while not (value := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


def drain(executor: BaseExecutor, count: int) -> dict[str, ToolResult]:
    """The results of so many calls by their ids."""
    results: dict = {}
    assert wait_until(lambda: results.update(executor.poll(1.0)) or len(results) == count)
    return results


def program_call(name: str, code: str = "print(1)", **more: object) -> CodeCall:
    return CodeCall(name, TOOL, {"code": code, **more}, None)


def of_proc(pid: int, name: str) -> str:
    """A file of a process in /proc; empty if there is none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    return ""


def stat_of(pid: int) -> list[str]:
    """State, parent and the following fields of a process, as in proc(5); state X if there is none."""
    return of_proc(pid, "stat").rpartition(")")[2].split() or ["X", *["0"] * 50]


def alive(pid: int) -> bool:
    return stat_of(pid)[0] not in "ZX"


def descendants(pid: int) -> set[int]:
    """Process ids of all descendants of a process."""
    parents = {int(name): int(stat_of(int(name))[1]) for name in os.listdir("/proc") if name.isdigit()}
    pids, new = set(), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        pids |= new
    return pids


def ticks_of(pid: int) -> dict[int, int]:
    """CPU time of each process below `pid`, in hundredths of a second."""
    return {child: sum(map(int, stat_of(child)[11:13])) for child in descendants(pid)}


def spent(pid: int, seconds: float) -> float:
    """CPU seconds that the processes below `pid` use in this time."""
    before = ticks_of(pid)
    time.sleep(seconds)
    return sum(sum(map(int, stat_of(child)[11:13])) - ticks for child, ticks in before.items()) / 100


def resident_kb(pid: int) -> int:
    return 4 * int(stat_of(pid)[21])


def require(level: str) -> None:
    """Skips a test of a level that this host lacks."""
    if level not in ("best", *_probing.probe_host().available):
        pytest.skip(f"{level} cannot be reached here\n{_probing.probe_host().table()}")


class Notebook:
    """An executor at a level, and shorthands for programs and for cells of sessions."""

    def __init__(self, level: str, **settings: object) -> None:
        self.level, self.numbers = level, itertools.count()
        self.executor = make_executor(ToolsConfig(level=level, min_level="L0", roots=1, **settings))

    def call(self, session: str | None, code: str, seed: int = 0) -> CodeCall:
        tool = TOOL if session is None else "jupyter_code"
        return CodeCall(f"n{next(self.numbers)}", tool, {"code": code}, session, seed)

    def cell(self, session: str | None, code: str, seed: int = 0) -> ToolResult:
        return self.executor.run([self.call(session, code, seed)])[0]

    def cells(self, session: str, *codes: str) -> list[ToolResult]:
        """The results of the last cells of a session."""
        results = [self.cell(session, code) for code in codes]
        self.executor.close_session(session)
        return results


def notebook_at(level: str, **settings: object) -> Iterator[Notebook]:
    require(level)
    notebook = Notebook(level, **settings)
    with notebook.executor:
        yield notebook


class Arena:
    """An executor at one level, with everything it must protect."""

    def __init__(self, level: str) -> None:
        self.level, self.numbers, self.stuck = level, itertools.count(), 0
        self.directory = Path(tempfile.mkdtemp(prefix="grpo-arena-"))
        self.secret, self.canary = self.directory / "secret.txt", self.directory / "canary.txt"
        self.visits: list[str] = []
        os.environ["ARENA_TOKEN"] = MARK
        self.neighbour = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        self.services = self._open_services()
        config = ToolsConfig(
            level=level, min_level=level, workers=3, roots=1, wall_s=1.5, cpu_s=1.5, memory_mb=384, scratch_mb=32,
            scratch_files=4000,
        )  # fmt: skip
        self.executor: BaseExecutor = make_executor(config)
        self.executor.start()
        self.repair()
        self.executor.run([self.call("warm-up", "import numpy")])
        self.memory = resident_kb(self.executor.pid)

    def _open_services(self) -> list[socket.socket]:
        self.abstract, self.path = f"arena-{os.getpid()}-{id(self)}", str(self.directory / "socket")
        tcp = socket.create_server(("127.0.0.1", 0))
        self.port = tcp.getsockname()[1]
        named, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        named.bind(self.path)
        abstract.bind("\0" + self.abstract)
        datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        datagram.bind("\0" + self.abstract + "-dgram")
        for service, name in ((tcp, "tcp"), (named, "named"), (abstract, "abstract")):
            service.listen()
            self._serve(name, lambda service=service: service.accept()[0].close())
        self._serve("datagram", lambda: datagram.recv(64))
        return [tcp, named, abstract, datagram]

    def _serve(self, name: str, visit: Callable[[], object]) -> None:
        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    visit()
                    self.visits.append(name)

        threading.Thread(target=serve, daemon=True).start()

    def repair(self) -> None:
        """Restore the canaries."""
        for path, text in ((self.secret, "SECRET-4711\n"), (self.canary, "alive\n")):
            path.unlink(missing_ok=True)
            path.write_text(text)
            path.chmod(0o640)
        self.canary_info = self.canary.stat()
        for path in (*map(Path, LEFT_FILES), self.directory / "new", self.directory / "canary.txt.gone"):
            path.unlink(missing_ok=True)
        self.visits.clear()

    def fill_in(self, code: str) -> str:
        """The program with the names of this arena filled in."""
        words = {
            "SECRET": self.secret, "CANARY": self.canary, "PORT": self.port, "ABSTRACT": self.abstract,
            "SOCKET": self.path, "NEIGHBOUR": self.neighbour.pid, "EXECUTOR": self.executor.pid, "MARK": MARK,
        }  # fmt: skip
        return re.sub("@([A-Z]+)@", lambda word: str(words[word[1]]), code)

    def call(self, name: str, code: str, stdin: str = "") -> CodeCall:
        return program_call(f"{next(self.numbers)}/{name}", code, input=stdin)

    def attack(self, *attacks: Attack) -> list[str]:
        """Run attacks together with a good call, and two calls after them. Returns what went wrong, in words."""
        calls = [self.call(attack.name, self.fill_in(attack.code), attack.stdin) for attack in attacks]
        *results, beside = self.executor.run([*calls, self.call("beside", "print(sum(range(100)))")])
        clean = "import os\nprint(sorted(os.listdir('.')), 6 * 7)"
        after = self.executor.run([self.call("after", clean) for _ in range(2)])
        faults: list[str] = []
        for attack, result in zip(attacks, results, strict=True):
            if self.level not in attack.through.split():
                faults += [f"{attack.name}: {fault}" for fault in self.inside(attack, result)]
        names = ", ".join(attack.name for attack in attacks)
        if beside.kind != "ok" or beside.stdout != "4950\n":
            faults.append(f"{names}: harmed the call beside it: {beside.kind} {beside.error_message}")
        through = any(self.level in attack.through.split() for attack in attacks)
        faults += [] if through else [f"{names}: {fault}" for fault in self.outside(after)]
        if (stuck := self.executor.stats().get("tools/workers_stuck", 0)) > self.stuck:
            self.stuck = stuck
            faults.append(f"{names}: kept its worker from answering")
        if through:
            self.repair()
        return faults

    def inside(self, attack: Attack, result: ToolResult) -> list[str]:
        """What is wrong with the result of an attack, in words."""
        faults, expected = [], attack.expect.split("|")
        if result.infra:
            faults.append(f"was taken for an infrastructure failure: {result.kind} {result.error_message}")
        if "blocked" in expected:
            if "REACHED" in result.stdout.split():
                faults.append(f"got through: {result.stdout[-200:]!r}")
        elif result.kind not in expected:
            faults.append(f"ended as {result.kind} ({result.error_type}: {result.error_message[:120]})")
        return faults

    def outside(self, after: list[ToolResult]) -> list[str]:
        """Effects of an attack outside its process, in words."""
        info = self.canary.stat() if self.canary.exists() else None
        changed = info is None or self.canary.read_text() != "alive\n" or info.st_mode != self.canary_info.st_mode
        known = (self.canary_info.st_mtime_ns, self.canary_info.st_ino)
        files = sorted(path.name for path in self.directory.iterdir())
        traced, memory = "TracerPid:\t0" not in of_proc(self.neighbour.pid, "status"), resident_kb(self.executor.pid)
        harm = {
            "the canary was changed": changed,
            "the canary was touched": not changed and (info.st_mtime_ns, info.st_ino) != known,
            "files appeared beside the canary": files != ["canary.txt", "secret.txt", "socket"],
            "the neighbour was harmed": self.neighbour.poll() is not None or traced,
            f"connections: {self.visits}": self.visits,
            f"the executor grew to {memory} KiB": memory > self.memory + (64 << 10),
        }
        faults = [f"next call: {r.kind} {r.stdout!r} {r.error_message}" for r in after if r.stdout != "[] 42\n"]
        faults += [words for words, happened in harm.items() if happened]
        faults += [f"left {name}" for name in LEFT_FILES if os.path.exists(name)]
        if faults:
            self.repair()
        return faults

    def strays(self) -> list[str]:
        """Processes that the executor does not have when no call runs."""

        def more() -> str:
            count, numbers = len(descendants(self.executor.pid)), self.executor.stats()
            workers = int(numbers["tools/workers_alive"] + numbers["tools/roots_alive"])
            return f"{count} processes where {workers} belong" if count > workers else ""

        return [] if wait_until(lambda: not more(), 3.0) else [more()]

    def close(self) -> None:
        self.executor.close()
        self.neighbour.kill()
        self.neighbour.wait()
        os.environ.pop("ARENA_TOKEN", None)
        for service in self.services:
            with contextlib.suppress(OSError):
                service.shutdown(socket.SHUT_RDWR)
            service.close()
        for path in self.directory.iterdir():
            path.unlink()
        self.directory.rmdir()
