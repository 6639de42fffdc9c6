"""Agents that are programs: one process for each rollout, started, or forked from one that has made its imports."""

import json
import logging
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from grpo_roc_jax.environments.config import AgentCommand
from grpo_roc_jax.environments.hosts import end_group
from grpo_roc_jax.serving.agent_ends import MOST_PAY_BYTES, AgentCall, Pay, ProgramEnd, read_pay

log = logging.getLogger(__name__)
REWARD_VARIABLE = "GRPO_REWARD_FD"
"""Environment variable with the number of the descriptor that a program writes its reward to."""
GUARD_VARIABLE = "GRPO_PROGRAM_GUARD"
"""Environment variable by which the guard knows a program that was started in the moment in which this process died."""
PRINTED = 1 << 16
"""Bytes kept of what a program has printed."""
FLOOD_S = 0.01
"""How long a program that fills its pipe waits before it is read again."""
FORKED = Path(__file__).with_name("_fork_server.py")
GUARD = Path(__file__).with_name("_program_guard.py")
START_S = 120.0
"""Seconds for the imports of a fork server."""
FLAGS = frozenset(["-u", "-B", "-O", "-OO"])
"""Options of Python that a fork has too."""


class ProgramAgent:
    """Runs a program for each rollout. Thread-safe."""

    def __init__(self, choice: AgentCommand):
        self._choice, self.words = choice, shlex.split(choice.command)
        self._live: dict[str, Any] = {}
        self._forks: ForkServer | None = None
        self._guard: ProgramGuard | None = None
        self._mutex = threading.Lock()

    @property
    def live(self) -> int:
        """Number of programs that run."""
        return len(self._live)

    def play(self, name: str, call: AgentCall) -> ProgramEnd:
        """One rollout to its end; waits for it."""
        texts = {"{prompt}": call.prompt, "{base_url}": call.base_url, "{api_key}": call.api_key}
        pattern = "|".join(map(re.escape, texts))
        words = [re.sub(pattern, lambda match: texts[match[0]], word) for word in self.words]
        environment = os.environ | variables(call)
        started = time.perf_counter()
        reading, writing = os.pipe()
        with tempfile.TemporaryFile() as row:
            row.write(json.dumps(call.row, default=str).encode())
            row.seek(0)
            try:
                program, pipes = self._start(words, environment, row, writing)
            except (OSError, ValueError) as error:  # a prompt may hold what no argument can
                os.close(reading)
                return ProgramEnd(127, Pay(), str(error))
            finally:
                os.close(writing)
        out, errors = map(Printed, pipes)
        paid = Printed(os.fdopen(reading, "rb"), first=MOST_PAY_BYTES + 1)
        self._live[name] = program
        try:
            status: int | None = program.wait(self._choice.timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(program)
            self._live.pop(name, None)
            if self._guard is not None:
                self._guard.ended(program.pid)
        pay, unread = read_pay(paid.content())
        printed = out.text().strip().rpartition("\n")[2][:MOST_PAY_BYTES]
        return ProgramEnd(status, pay, errors.text(), unread, printed, time.perf_counter() - started)

    def _start(
        self, words: Sequence[str], environment: Mapping[str, str], row: IO[bytes], pay: int
    ) -> tuple[Any, tuple[IO[bytes], IO[bytes]]]:
        """(the program, its output and error output)."""
        if (forks := self._forks_of(words)) is not None:
            out, errors = os.pipe(), os.pipe()
            descriptors = (row.fileno(), out[1], errors[1], pay)
            try:
                program = forks.start(words, environment, descriptors)
            finally:
                os.close(out[1])
                os.close(errors[1])
            if program is not None:
                return program, (os.fdopen(out[0], "rb"), os.fdopen(errors[0], "rb"))
            os.close(out[0])
            os.close(errors[0])
        with self._mutex:
            if self._guard is None:
                self._guard = ProgramGuard()
        started = subprocess.Popen(
            words,
            env={**environment, REWARD_VARIABLE: str(pay), GUARD_VARIABLE: self._guard.mark},
            start_new_session=True,
            pass_fds=[pay],
            stdin=row,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert started.stdout is not None and started.stderr is not None
        self._guard.begun(started.pid)
        return started, (started.stdout, started.stderr)

    def _forks_of(self, words: Sequence[str]) -> "ForkServer | None":
        """What forks these words, if they are a Python program and can be forked."""
        split = python_words(words) if self._choice.warm else None
        if split is None:
            return None
        with self._mutex:
            if self._forks is None:
                self._forks = ForkServer(words[:split], split)
        return self._forks if self._forks.usable else None

    def kill(self) -> None:
        """Ends what runs."""
        for program in list(self._live.values()):
            end_group(program)

    def close(self) -> None:
        """Ends everything."""
        self.kill()
        if self._forks is not None:
            self._forks.close()
        if self._guard is not None:
            self._guard.close()


def variables(call: AgentCall) -> dict[str, str]:
    """The environment variables that tell a program where the policy is."""
    address, key = call.base_url, call.api_key
    values = {"OPENAI_BASE_URL": address, "OPENAI_API_KEY": key}
    values |= {"ANTHROPIC_BASE_URL": address.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
    near = ",".join(dict.fromkeys(filter(None, ("127.0.0.1", "localhost", urlsplit(address).hostname))))
    return values | {name: near for name in ("NO_PROXY", "no_proxy")}


def python_words(words: Sequence[str]) -> int | None:
    """Number of words of the interpreter with its options, where the rest is a file or `-m module` with arguments; None
    for any other program."""
    if not words or not re.fullmatch(r"python(3(\.\d+)?)?", os.path.basename(words[0])):
        return None
    split = next((i for i, word in enumerate(words) if i and word not in FLAGS), len(words))
    rest = words[split:]
    module = len(rest) > 1 and rest[0] == "-m"
    return split if module or (rest and rest[0].endswith(".py") and not rest[0].startswith("-")) else None


class ProgramGuard:
    """A process that outlives this one, if this one is killed, by as long as it takes to kill the programs that were
    started here; see `_program_guard.py`. Forked programs end with their fork server. Thread-safe."""

    def __init__(self) -> None:
        self.mark = secrets.token_hex(8)
        words = [sys.executable, "-S", str(GUARD), f"{GUARD_VARIABLE}={self.mark}"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)

    def begun(self, pid: int) -> None:
        """A program that leads a process group has been started."""
        self._tell(f"+{pid}\n")

    def ended(self, pid: int) -> None:
        """It has ended."""
        self._tell(f"-{pid}\n")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the guard was killed, or closed while programs end that it knows
            self._process.stdin.write(line.encode())  # so short a line is written whole

    def close(self) -> None:
        """Ends the process."""
        self._tell("close\n")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class ForkServer:
    """A process of an interpreter that forks programs; see `_fork_server.py`. Thread-safe."""

    def __init__(self, interpreter: Sequence[str], split: int):
        """
        Args:
            interpreter: Its words, with options.
            split: Their number, after which the words of a run begin.
        """
        self._split, self.usable = split, True
        link, other = socket.socketpair()
        self._link, self._mutex = link, threading.Lock()
        self._runs: dict[int, ForkedProgram] = {}
        self._number = 0
        environment = os.environ | {
            name: "" for name in variables(AgentCall({}, "", "", "")) if "PROXY" not in name.upper()
        }
        try:
            self._process: subprocess.Popen | None = subprocess.Popen(
                [*interpreter, str(FORKED), str(other.fileno())],
                env=environment,
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:  # a plain start says why
            self._process, self.usable = None, False
            link.close()
            return
        finally:
            other.close()
        threading.Thread(target=self._read, daemon=True, name="agent-forks").start()

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> "ForkedProgram | None":
        """A run that has begun; None if it cannot be forked, and then no other one can.

        Args:
            words: Of the program, with those of the interpreter.
            environment: Variables; the number of the last descriptor is added to them.
            descriptors: Of its standard input, output, error, and the reward.
        """
        if any("\0" in word for word in words):
            raise ValueError("embedded null byte")
        program = ForkedProgram(words)
        with self._mutex:
            self._number += 1
            number, self._runs[self._number] = self._number, program
            request = {"number": number, "words": list(words[self._split :]), "environment": dict(environment)}
            request |= {"pay": REWARD_VARIABLE, "unbuffered": "-u" in words[: self._split]}
            data = json.dumps(request).encode() + b"\n"
            try:
                sent = socket.send_fds(self._link, [data], list(descriptors))
                self._link.sendall(data[sent:])
            except OSError:
                self._lost()
        if not program.begun.wait(START_S):
            log.warning("environment.warm: imports took longer than %g s; programs are started, not forked", START_S)
            self.close()
            program.begun.wait()
        return program if program.pid else None

    def _read(self) -> None:
        with suppress(OSError), self._link.makefile("rb") as lines:
            for line in lines:
                report = json.loads(line)
                program = self._runs[report["number"]]
                if "pid" in report:
                    program.pid = report["pid"]
                    program.begun.set()
                    continue
                del self._runs[report["number"]]
                if "refused" in report and self.usable:
                    self.usable = False
                    log.warning(
                        "environment.warm: programs are started, not forked: %s; set warm false", report["refused"]
                    )
                program.ended(report.get("status"))
        with self._mutex:
            self._lost()

    def _lost(self) -> None:
        """The process has ended: so have its runs."""
        self.usable = False
        while self._runs:
            self._runs.popitem()[1].ended(-signal.SIGKILL)

    def close(self) -> None:
        """Ends the process and all runs."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            end_group(self._process)


class ForkedProgram:
    """A run of a fork server, with what is used of `subprocess.Popen`."""

    def __init__(self, words: Sequence[str]):
        self.args, self.pid = words, 0
        self.returncode: int | None = None
        self.begun, self._over = threading.Event(), threading.Event()

    def ended(self, status: int | None) -> None:
        """Notes the end, with its status."""
        if self.returncode is None:
            self.returncode = status
        self.begun.set()
        self._over.set()

    def wait(self, timeout: float | None = None) -> int | None:
        """The status, once it has ended. Raises `subprocess.TimeoutExpired` as `Popen` does."""
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        return self.returncode


class Printed:
    """Reads what a program writes to a pipe, and keeps its end, or so many of its first bytes."""

    def __init__(self, pipe: IO[bytes], first: int = 0):
        self._pipe, self._first, self._bytes = pipe, first, b""
        self._thread = threading.Thread(target=self._read, daemon=True, name="agent-output")
        self._thread.start()

    def _read(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), PRINTED):
                self._bytes = (self._bytes + chunk)[: self._first] if self._first else (self._bytes + chunk)[-PRINTED:]
                if len(chunk) == PRINTED:
                    time.sleep(FLOOD_S)

    def content(self) -> bytes:
        """What was kept, once the program has ended. Something that it has started may still write."""
        self._thread.join(1.0)
        return self._bytes

    def text(self) -> str:
        """The same as text."""
        return self.content().decode(errors="replace")
