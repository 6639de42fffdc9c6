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
    with (notebook := Notebook(level, **settings)).executor:
        yield notebook


class Arena:
    """An executor at one level, with everything it must protect."""

    def __init__(self, level: str) -> None:
        self.level, self.numbers, self.stuck = level, itertools.count(), 0
        self.temporary = tempfile.TemporaryDirectory(prefix="grpo-arena-")
        self.directory = Path(self.temporary.name)
        self.secret, self.canary = self.directory / "secret.txt", self.directory / "canary.txt"
        self.visits: list[str] = []
        os.environ["ARENA_TOKEN"] = MARK
        self.neighbour = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        self.abstract, self.path = f"arena-{os.getpid()}-{id(self)}", str(self.directory / "socket")
        self.services = [socket.create_server(("127.0.0.1", 0))]
        self.port = self.services[0].getsockname()[1]
        stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
        for path, kind in ((self.path, stream), (f"\0{self.abstract}", stream), (f"\0{self.abstract}-dgram", datagram)):
            self.services.append(service := socket.socket(socket.AF_UNIX, kind))
            service.bind(path)
            if kind == stream:
                service.listen()
        for service in self.services:
            threading.Thread(target=self._serve, args=(service,), daemon=True).start()
        limits = {"wall_s": 1.5, "cpu_s": 1.5, "memory_mb": 384, "scratch_mb": 32, "scratch_files": 4000}
        self.executor = make_executor(ToolsConfig(level=level, min_level=level, workers=3, roots=1, **limits))
        self.executor.start()
        self.repair()
        self.executor.run([self.call("warm-up", "import numpy")])
        self.memory = resident_kb(self.executor.pid)

    def _serve(self, service: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                if service.type == socket.SOCK_DGRAM:
                    service.recv(64)
                else:
                    service.accept()[0].close()
                self.visits.append(str(service.getsockname()))

    def repair(self) -> None:
        """Restore the canaries."""
        gone = [self.directory / "new", self.directory / "canary.txt.gone", *map(Path, LEFT_FILES)]
        for path in (self.secret, self.canary, *gone):
            path.unlink(missing_ok=True)
        for path, text in ((self.secret, "SECRET-4711\n"), (self.canary, "alive\n")):
            path.write_text(text)
            path.chmod(0o640)
        self.known = self.marks()
        self.visits.clear()

    def call(self, name: str, code: str) -> CodeCall:
        """A call of the program with the names of this arena filled in."""
        words = {"SECRET": self.secret, "CANARY": self.canary, "PORT": self.port, "ABSTRACT": self.abstract}
        words |= {"SOCKET": self.path, "NEIGHBOUR": self.neighbour.pid, "EXECUTOR": self.executor.pid, "MARK": MARK}
        filled = re.sub("@([A-Z]+)@", lambda word: str(words[word[1]]), code)
        return program_call(f"{next(self.numbers)}/{name}", filled)

    def attack(self, *attacks: Attack) -> list[str]:
        """Run attacks together with a good call, and two calls after them. Returns what went wrong, in words."""
        calls = [self.call(attack.name, attack.code) for attack in attacks]
        *results, beside = self.executor.run([*calls, self.call("beside", "print(sum(range(100)))")])
        clean = "import os\nprint(sorted(os.listdir('.')), 6 * 7)"
        after = self.executor.run([self.call("after", clean) for _ in range(2)])
        held = [pair for pair in zip(attacks, results, strict=True) if self.level not in pair[0].through.split()]
        inside = [f"{attack.name}: {fault}" for attack, result in held for fault in self.inside(attack, result)]
        faults = self.outside(after) if len(held) == len(attacks) else (self.repair() or [])
        if beside.stdout != "4950\n":
            faults.append(f"harmed the call beside it: {beside.kind} {beside.error_message}")
        if (stuck := self.executor.stats().get("tools/workers_stuck", 0)) > self.stuck:
            self.stuck = stuck
            faults.append("kept its worker from answering")
        names = ", ".join(attack.name for attack in attacks)
        return inside + [f"{names}: {fault}" for fault in faults]

    def inside(self, attack: Attack, result: ToolResult) -> list[str]:
        """What is wrong with the result of an attack, in words."""
        expected, ended = attack.expect.split("|"), f"{result.kind} ({result.error_type}: {result.error_message[:120]})"
        wrong = {
            f"was taken for an infrastructure failure: {ended}": result.infra,
            f"got through: {result.stdout[-200:]!r}": "blocked" in expected and "REACHED" in result.stdout.split(),
            f"ended as {ended}": "blocked" not in expected and result.kind not in expected,
        }
        return [words for words, happened in wrong.items() if happened]

    def outside(self, after: list[ToolResult]) -> list[str]:
        """Effects of an attack outside its process, in words."""
        files = sorted(path.name for path in self.directory.iterdir())
        harm = {
            "the canary was changed": not self.canary.exists() or self.canary.read_text() != "alive\n",
            "the canary was touched": not self.canary.exists() or self.marks() != self.known,
            "files appeared beside the canary": files != ["canary.txt", "secret.txt", "socket"],
            "the neighbour was harmed": self.neighbour.poll() is not None,
            "the neighbour is traced": "TracerPid:\t0" not in of_proc(self.neighbour.pid, "status"),
            f"connections: {self.visits}": self.visits,
            "the executor grew": resident_kb(self.executor.pid) > self.memory + (64 << 10),
        }
        faults = [f"next call: {r.kind} {r.stdout!r} {r.error_message}" for r in after if r.stdout != "[] 42\n"]
        faults += [words for words, happened in harm.items() if happened]
        faults += [f"left {name}" for name in LEFT_FILES if os.path.exists(name)]
        if faults:
            self.repair()
        return faults

    def marks(self) -> tuple[int, int, int]:
        """What changes with the canary."""
        return (info := self.canary.stat()).st_mode, info.st_mtime_ns, info.st_ino

    def strays(self) -> list[str]:
        """Processes that the executor does not have when no call runs."""

        def few() -> bool:
            numbers = self.executor.stats()
            return len(descendants(self.executor.pid)) <= numbers["tools/workers_alive"] + numbers["tools/roots_alive"]

        return [] if wait_until(few, 3.0) else ["left processes"]

    def close(self) -> None:
        self.executor.close()
        self.neighbour.kill()
        self.neighbour.wait()
        os.environ.pop("ARENA_TOKEN", None)
        for service in self.services:
            with contextlib.suppress(OSError):
                service.shutdown(socket.SHUT_RDWR)
            service.close()
        self.temporary.cleanup()
