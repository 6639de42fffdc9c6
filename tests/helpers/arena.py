"""Targets of attacks, checked from outside: files, services and a neighbor process that must stay untouched."""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_roc_jax.tools import CodeCall, ToolsConfig, make_executor
from grpo_roc_jax.tools.executor import BaseExecutor
from grpo_roc_jax.types import ToolResult
from tests.helpers.attacks import Attack

TOOL = "python_code_with_standard_io"
MARK = "arena-secret-environment"
WALL_S = 1.5
GROWTH_KB = 64 << 10
LEFT_FILES = tuple(f"{folder}/grpo-attack-left" for folder in ("/tmp", "/var/tmp", "/dev/shm"))
CLEAN = "import os\nprint(sorted(os.listdir('.')), 6 * 7)"


def wait_until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Waits for a condition, longer than any load of the host delays it; returns what it gave last."""
    deadline = time.monotonic() + seconds
    while not (value := holds()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


def descendants(pid: int) -> set[int]:
    """Process ids of all descendants of a process."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    pids, todo = set(), [pid]
    while todo:
        for child in children.get(todo.pop(), ()):
            pids.add(child)
            todo.append(child)
    return pids


def resident_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    return 0


class Arena:
    """An executor at one level, with everything it must protect."""

    def __init__(self, level: str, **settings: object) -> None:
        self.level, self.numbers, self.stuck = level, itertools.count(), 0
        self.directory = Path(tempfile.mkdtemp(prefix="grpo-arena-"))
        self.secret, self.canary = self.directory / "secret.txt", self.directory / "canary.txt"
        self.visits: list[str] = []
        os.environ["ARENA_TOKEN"] = MARK
        self.neighbour = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        self.services = self._open_services()
        config = ToolsConfig(
            level=level, min_level=level, workers=3, roots=1, wall_s=WALL_S, cpu_s=WALL_S, memory_mb=384,
            scratch_mb=32, scratch_files=4000, **settings,
        )  # fmt: skip
        self.executor: BaseExecutor = make_executor(config)
        self.executor.start()
        self.repair()
        self.run("warm-up", "import numpy")
        self.memory = resident_kb(self.executor.pid)
        self.at_rest = self._settled()

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
            threading.Thread(target=self._accept, args=(service, name), daemon=True).start()
        threading.Thread(target=self._receive, args=(datagram,), daemon=True).start()
        return [tcp, named, abstract, datagram]

    def _accept(self, service: socket.socket, name: str) -> None:
        with contextlib.suppress(OSError):
            while True:
                service.accept()[0].close()
                self.visits.append(name)

    def _receive(self, service: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                service.recv(64)
                self.visits.append("datagram")

    def repair(self) -> None:
        """Restore the canaries."""
        for path, text in ((self.secret, "SECRET-4711\n"), (self.canary, "alive\n")):
            path.unlink(missing_ok=True)
            path.write_text(text)
            path.chmod(0o640)
        self.canary_info = self.canary.stat()
        for name in ("new", "canary.txt.gone"):
            (self.directory / name).unlink(missing_ok=True)
        for name in LEFT_FILES:
            Path(name).unlink(missing_ok=True)
        self.visits.clear()

    def fill_in(self, code: str) -> str:
        """The program with the names of this arena filled in."""
        words = {
            "SECRET": self.secret, "CANARY": self.canary, "PORT": self.port, "ABSTRACT": self.abstract,
            "SOCKET": self.path, "NEIGHBOUR": self.neighbour.pid, "EXECUTOR": self.executor.pid, "MARK": MARK,
        }  # fmt: skip
        for word, value in words.items():
            code = code.replace(f"@{word}@", str(value))
        return code

    def call(self, name: str, code: str, stdin: str = "") -> CodeCall:
        return CodeCall(f"{next(self.numbers)}/{name}", TOOL, {"code": code, "input": stdin}, None)

    def run(self, name: str, code: str, stdin: str = "") -> ToolResult:
        return self.executor.run([self.call(name, code, stdin)])[0]

    def _settled(self) -> int:
        """Number of the executor's processes while no call runs."""
        last = -1
        for _ in range(60):
            count = len(descendants(self.executor.pid))
            if count == last:
                return count
            last = count
            time.sleep(0.05)
        return last

    def attack(self, *attacks: Attack) -> list[str]:
        """Run attacks together with a good call, and two calls after them. Returns what went wrong, in words."""
        calls = [self.call(attack.name, self.fill_in(attack.code), attack.stdin) for attack in attacks]
        *results, beside = self.executor.run([*calls, self.call("beside", "print(sum(range(100)))")])
        after = self.executor.run([self.call("after", CLEAN) for _ in range(2)])
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
        faults = [f"next call: {r.kind} {r.stdout!r} {r.error_message}" for r in after if r.stdout != "[] 42\n"]
        info = self.canary.stat() if self.canary.exists() else None
        if info is None or self.canary.read_text() != "alive\n" or info.st_mode != self.canary_info.st_mode:
            faults.append("the canary was changed")
        elif (info.st_mtime_ns, info.st_ino) != (self.canary_info.st_mtime_ns, self.canary_info.st_ino):
            faults.append("the canary was touched")
        if sorted(path.name for path in self.directory.iterdir()) != ["canary.txt", "secret.txt", "socket"]:
            faults.append("files appeared beside the canary")
        faults += [f"left {name}" for name in LEFT_FILES if os.path.exists(name)]
        if self.neighbour.poll() is not None or "TracerPid:\t0" not in self._status():
            faults.append("the neighbour was harmed")
        if self.visits:
            faults.append(f"connections: {self.visits}")
        if resident_kb(self.executor.pid) > self.memory + GROWTH_KB:
            faults.append(f"the executor grew to {resident_kb(self.executor.pid)} KiB")
        if faults:
            self.repair()
        return faults

    def _status(self) -> str:
        return Path(f"/proc/{self.neighbour.pid}/status").read_text()

    def strays(self) -> list[str]:
        """Processes that the executor does not have when no call runs."""
        count = self._settled()
        workers = int(self.executor.stats()["tools/workers_alive"] + self.executor.stats()["tools/roots_alive"])
        return [] if count <= workers else [f"{count} processes where {workers} belong"]

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
