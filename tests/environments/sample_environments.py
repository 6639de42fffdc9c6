"""Environments of every kind of behavior, found by path, since some tests send them to other processes."""

import asyncio
import contextlib
import os
import sqlite3
import tempfile
import time
from pathlib import Path

from grpo_roc_jax import Environment, Observation, ToolUnavailable
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


class Sharing:
    """In TRL's form; it changes the columns of its row and the arguments of its calls, which have odd names."""

    def reset(self, board=(), function="", self_=None, **row):
        self.board = board

    def note(self, numbers: list[int], function: str) -> str:
        """Notes numbers."""
        self.board.append(sorted(numbers)[0])
        numbers.sort()
        return f"{function}: {self.board}"


class Counter:
    """The class of TRL's documentation: no base class, typed methods as tools, a reward."""

    def reset(self, start=0, **row):
        self.n, self.there = start, 0
        return f" Start: {self.n}."

    def add(self, k: int) -> int:
        """Add to the counter."""
        self.n += k
        return self.n

    async def meet(self) -> str:
        """Waits for another one: two only end if both run at once."""
        self.there += 1
        while self.there < 2:
            await asyncio.sleep(0.001)
        return "met"

    def get_reward(self) -> float:
        return float(self.n == 5)


ERRORS = {"reset": RuntimeError("x"), "reset once": ValueError("x"), "step": KeyError("x")}
ERRORS |= {"look": ToolUnavailable("x"), "look once": ConnectionResetError("x"), "look error": ValueError("x")}


class Flaky(Environment):
    """Fails as its problem says, and counts what was asked of it."""

    def reset(self, problem):
        self.how = problem.extra["how"]
        return self._answer("reset", None)

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
        time.sleep(60 * (self.how == f"{method} hangs"))
        again = "once" in self.how and ATTEMPTS.count(method) > 1
        if self.how.startswith(method) and self.how in ERRORS and not again:
            raise ERRORS[self.how]
        return value


class Elsewhere(Environment):
    """Has a tool of another origin, and answers some calls itself."""

    schemas = ({"name": "add", "inputSchema": {"properties": {"name": {"type": ["integer", "null"]}}}},)

    async def call_tool(self, name, /, **arguments):
        return f"{name} {arguments}"


class Answering(Elsewhere):
    answers_calls = True

    def step(self, turn):
        count = 0 if "too few" in turn.text else turn.results.count(None)
        return Observation(results=("text" if "wrong type" in turn.text else ToolResult("ok", echo="mine"),) * count)


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
        if self.how in ("exits", "cancels itself"):
            raise SystemExit if self.how == "exits" else asyncio.CancelledError
        if self.how == "forks and dies":
            if os.fork() == 0:
                os.setsid()
                time.sleep(20)
            os._exit(3)
        if self.how == "writes to every connection":
            for fd in range(3, 4096):
                with contextlib.suppress(OSError):
                    os.write(fd, b"\0\0\0\4oops")
        answers = {"floods": "<answer>" * 5_000_000, "cannot be sent": type("Local", (str,), {})("here")}
        return answers.get(self.how)


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


class Reader(Environment):
    """Reads a number from each turn, and has mistakes of its own."""

    def step(self, turn):
        answers = {
            "own": lambda: self.absent,
            "exhausted": lambda: next(iter(())),
            "wrong type": dict,
            "endless": lambda: Observation("more", reward=10**400),
            "raw": lambda: Observation("\n> <answer>", role="raw"),  # goes on in the policy's own turn
            "offline": lambda: fails(OSError("no route to host")),
        }
        return answers.get(turn.text.strip(), lambda: Observation(f"next {int(turn.text)}", reward=1.0))()


class SlowToMake(Environment):
    """Made when its problem has been given up, or its time is over."""

    def __init__(self):
        time.sleep(2.5)
        ATTEMPTS.append("made")

    def reset(self, problem):
        ATTEMPTS.append("reset")

    def close(self):
        ATTEMPTS.append("closed")


class Held(Environment):
    """Holds a folder of its own from its reset to its end, and leaves files beside it for what must not be."""

    def reset(self, problem):
        self.how, self.folder = problem.extra["how"], Path(problem.extra["folder"])
        self.kept = Path(tempfile.mkdtemp(dir=self.folder))
        if self.how == "reset fails":
            raise ConnectionError("no server")
        return "x" * 1000 * (self.how == "too long")

    def step(self, turn):
        time.sleep(60 * (self.how == "hangs"))
        return "go on"

    def get_reward(self):
        (self.folder / "paid").touch()
        return 1.0

    def close(self):
        if not self.kept.exists():
            (self.folder / "closed twice").touch()
        self.kept.rmdir()
