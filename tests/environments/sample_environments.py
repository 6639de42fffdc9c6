"""Environments of every kind of behavior, found by path, since some tests send them to other processes."""

import asyncio
import contextlib
import os
import sqlite3
import time
import uuid
from pathlib import Path

from grpo_roc_jax.environments.environment import Environment, Observation
from grpo_roc_jax.tools import ToolUnavailable
from grpo_roc_jax.types import ToolResult

ATTEMPTS: list[str] = []
"""What `Flaky` did, in this process."""


class Echo(Environment):
    """Answers each turn with its text; pays its length at the third and ends."""

    def reset(self, problem):
        self.turns = 0
        return f" seed {self.seed % 7}."

    async def step(self, turn):
        self.turns += 1
        return Observation(f"you said {turn.text}", reward=float(self.turns), done=self.turns == 3)

    async def get_reward(self):
        return 10.0


class Tools(Environment):
    """The tool of the executor alone."""

    uses = ("python",)


class Sharing:
    """In TRL's form; it changes the columns of its row and the arguments of its calls, which have odd names."""

    def reset(self, board=(), function="", self_=None, **row):
        self.board = board

    def note(self, numbers: list[int], function: str) -> str:
        """Notes numbers."""
        self.board.append(sorted(numbers)[0])
        numbers.sort()
        return f"{function}: {self.board}"


class Napping(Tools):
    """Its one tool is slow; its end does nothing."""

    def nap(self):
        """Sleeps."""
        time.sleep(0.2)


class Counter:
    """The class of TRL's documentation: no base class, typed methods as tools, a reward."""

    def reset(self, start=0, **row):
        self.n, self.row, self.there = start, row, 0
        return f" Start: {self.n}."

    def add(self, k: int) -> int:
        """Add to the counter.

        Args:
            k: How much.
        """
        self.n += k
        return self.n

    async def meet(self) -> str:
        """Waits for another one: two only end if both run at once."""
        self.there += 1
        while self.there < 2:
            await asyncio.sleep(0.001)
        return "met"

    @staticmethod
    def limit() -> str:
        """Says where the counter ends."""
        return "100"

    @classmethod
    def not_a_tool(cls):
        raise AssertionError

    def _hidden(self):
        raise AssertionError

    def get_reward(self) -> float:
        return float(self.n == 5)


def make_counter():
    return Counter()


ERRORS = {
    "reset": (RuntimeError, "no server"),
    "reset once": (ValueError, "not yet"),
    "look": (ToolUnavailable, "closed today"),
    "look once": (ConnectionResetError, "gone for a moment"),
    "look error": (ValueError, "nothing there"),
    "step": (KeyError, "bug"),
    "step exits": (SystemExit, None),
    "reward": (ValueError, "lost count"),
}


class Flaky(Environment):
    """Fails as its problem says, and counts what was asked of it."""

    def reset(self, problem):
        self.how = problem.extra["how"]
        return self._answer("reset", 7 if self.how == "reset type" else None)

    def look(self) -> str:
        """Looks."""
        return self._answer("look", "a door")

    def step(self, turn):
        return self._answer("step", Observation(reward=0.5, done=True) if self.how == "several" else None)

    def get_reward(self):
        return self._answer("reward", {"no reward": None, "several": {"speed": 3, "absent": None}}.get(self.how, 1.0))

    def close(self):
        ATTEMPTS.append("close")

    def _answer(self, method, value):
        ATTEMPTS.append(method)
        if self.how == "step crashes" and method == "step":
            os._exit(3)
        if self.how == f"{method} hangs":
            time.sleep(60)
        if self.how.startswith(method) and self.how in ERRORS:
            kind, text = ERRORS[self.how]
            if "once" not in self.how or ATTEMPTS.count(method) == 1:
                raise kind(text)
        return value


class Elsewhere(Environment):
    """Has a tool of another origin, and answers some calls itself."""

    schemas = ({"name": "add", "inputSchema": {"properties": {"name": {"type": ["integer", "null"]}}}},)

    async def call_tool(self, name, /, **arguments):
        return f"{name} {arguments}"


class Answering(Elsewhere):
    answers_calls = True

    def step(self, turn):
        count = sum(result is None for result in turn.results)
        if "too few" in turn.text:
            return Observation()
        wrong = "wrong type" in turn.text
        return Observation(results=("text",) * count if wrong else (ToolResult("ok", echo="mine"),) * count)


class Hostile(Environment):
    """A coroutine that does what its problem says."""

    def reset(self, problem):
        self.how = problem.extra.get("how")
        return "x" * 50_000_000 if self.how == "reset floods" else None

    async def look(self) -> str:
        """Looks."""
        if self.how == "exits":
            raise SystemExit
        return ToolResult("ok", echo=3) if self.how == "cannot be sent" else "o" * 50_000_000

    async def step(self, turn):
        if turn.calls:
            return None
        if self.how == "exits":
            raise SystemExit
        if self.how == "cancels itself":
            raise asyncio.CancelledError
        if self.how == "floods":
            return "<answer>" * 5_000_000
        if self.how == "cannot be sent":
            return type("Local", (str,), {})("here")
        if self.how == "forks and dies":
            if os.fork() == 0:
                os.setsid()
                time.sleep(20)
                os._exit(0)
            os._exit(3)
        if self.how == "writes to every connection":
            for fd in map(int, os.listdir("/proc/self/fd")):
                with contextlib.suppress(OSError):
                    os.write(fd, b"\0\0\0\4oops" if fd > 2 else b"")
        return None


class Ledger(Environment):
    """Keeps its state in a database, whose connection works in the thread alone that opened it."""

    def reset(self, problem):
        self.book = sqlite3.connect(":memory:")
        self.book.execute("CREATE TABLE turns (text TEXT)")

    def count(self) -> int:
        """Counts the turns so far."""
        return self.book.execute("SELECT COUNT(*) FROM turns").fetchone()[0]

    def step(self, turn):
        self.book.execute("INSERT INTO turns VALUES (?)", (turn.text,))
        return None if turn.calls else "go on"

    def get_reward(self):
        return float(self.count())

    def close(self):
        self.book.close()
        ATTEMPTS.append("closed")


def fails(error):
    raise error


Mute = type("Mute", (ValueError,), {"__str__": lambda self: fails(RuntimeError("no words"))})


class Reader(Environment):
    """Reads a number from each turn, and has mistakes of its own."""

    def step(self, turn):
        text = turn.text.strip()
        answers = {
            "own": lambda: self.absent,
            "module": lambda: os.absent,
            "exhausted": lambda: next(iter(())),
            "wrong type": dict,
            "endless": lambda: Observation("more", reward=10**400),
            "raw": lambda: Observation("\n> <answer>", role="raw"),  # goes on in the policy's own turn
            "mute": lambda: fails(Mute()),
            "offline": lambda: fails(OSError("no route to host")),
            "unprepared": lambda: fails(RuntimeError("no session")),
        }
        return answers[text]() if text in answers else Observation(f"next {int(text)}", reward=1.0)


class Held(Environment):
    """Holds a file of its problem's folder from its reset to its end, and leaves others there for what must not be."""

    def reset(self, problem):
        self.how, self.folder = problem.extra["how"], Path(problem.extra["folder"])
        self.file = self.folder / str(uuid.uuid4())
        self.file.touch()
        if self.how == "reset fails":
            raise ConnectionError("no server")
        return "x" * 1000 * (self.how == "too long")

    def step(self, turn):
        if self.how == "hangs":
            time.sleep(60)
        return "go on"

    def get_reward(self):
        if self.how == "pays late":
            time.sleep(60)
        (self.folder / "paid").touch()
        return 1.0

    def close(self):
        if not self.file.exists():
            (self.folder / "closed twice").touch()
        self.file.unlink()


class SlowToMake(Environment):
    """Made when its problem has been given up, or its time is over."""

    def __init__(self):
        time.sleep(2.5)
        ATTEMPTS.append("made")

    def reset(self, problem):
        ATTEMPTS.append("reset")

    def close(self):
        ATTEMPTS.append("closed")
