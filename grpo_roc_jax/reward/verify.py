"""Symbolic comparison of answers by math-verify, in processes that can be killed.

Algebra on text that a policy wrote can loop, exhaust memory or crash, so it never runs in the trainer. Each worker is
a fresh interpreter (never a fork of a process that holds a device) with a clean environment and the executor's
restrictions: no network, no files but its libraries. It gets one comparison at a time and counts its own CPU seconds,
so neither a queue nor a busy machine causes a timeout. A worker that dies is replaced.
"""

import atexit
import contextlib
import json
import os
import queue
import re
import select
import signal
import site
import subprocess
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal

from grpo_roc_jax.reward.notation import Goal, compare, expressions, refused
from grpo_roc_jax.sandbox._start import command, environment

Comparison = Literal["correct", "wrong", "unparseable", "timeout", "crash"]

STARTUP_S = 120.0
"""Wall-clock seconds for importing the symbolic library; only a broken installation needs more."""
RECYCLE_AFTER = 5000
"""Comparisons before a worker is replaced, since the caches of the symbolic library grow without bound."""
FIRST_LOOK_S = 0.5
"""CPU seconds in which nearly all comparisons end; every comparison gets them, unless its shape is slow so far."""
SHORT_LOOK_S = 0.1
"""CPU seconds of a first look for further comparisons of a shape that is slow so far."""
SAMPLED = 8
"""Comparisons of one shape whose first looks decide how long the first looks of the others are."""
LATER_LOOKS = 24
"""Further looks of one step may take so many times `timeout_s`, all of them together."""
GROWTH = 3
"""Each look is so many times as long as the one before, up to `timeout_s`."""
GIVEN_UP = 3
"""Comparisons of one shape that used up `timeout_s` before others of that shape get no further look."""
MAX_CHARS = 500
"""Longer answers count as unparseable unless they equal the reference as text or numbers, or it is half as long."""


Looks = Sequence[tuple[Goal, float]]
"""Goals, each with the CPU seconds that it may take."""


def look_in_turns(
    goals: Sequence[Goal],
    ask: Callable[[Looks], list[Comparison]],
    *,
    timeout_s: float,
    workers: int,
    first_look_s: float = FIRST_LOOK_S,
) -> dict[Goal, Comparison]:
    """The verdict on each goal. Those that a first look cuts off get more time in turns.

    Turns go to the shapes that used the least so far: goals of one shape differ in their numbers and names only. Each
    look is longer than the one before. So an honest answer that takes a second is graded however many slow ones there
    are, and a step full of slow answers takes `LATER_LOOKS` times `timeout_s` beyond the first looks at most.

    Args:
        goals: Distinct goals.
        ask: Returns the verdicts of some looks, `timeout` for those that ran out of time.
        timeout_s: Longest look, in CPU seconds.
        workers: Looks that run at the same time.
        first_look_s: CPU seconds of the first look at each goal, unless its shape is slow so far.
    """
    shapes: dict[str, list[Goal]] = {}
    for goal in goals:
        shapes.setdefault(_shape(goal), []).append(goal)
    first = [(goal, first_look_s) for same in shapes.values() for goal in same[:SAMPLED]]
    known = dict(zip((goal for goal, _ in first), ask(first), strict=True))
    slow = {shape for shape, same in shapes.items() if all(known[goal] == "timeout" for goal in same[:SAMPLED])}
    looks = [
        (goal, SHORT_LOOK_S if shape in slow else first_look_s)
        for shape, same in shapes.items()
        for goal in same[SAMPLED:]
    ]
    known |= dict(zip((goal for goal, _ in looks), ask(looks), strict=True))
    waiting = {
        shape: deque((goal, first_look_s * GROWTH) for goal in same if known[goal] == "timeout")
        for shape, same in shapes.items()
    }
    waiting = {shape: queue for shape, queue in waiting.items() if queue and timeout_s > first_look_s}
    used = dict.fromkeys(waiting, 0.0)
    given_up: Counter[str] = Counter()
    budget = LATER_LOOKS * timeout_s
    while waiting and budget > 0:
        turns = []
        for shape in sorted(waiting, key=used.__getitem__)[:workers]:
            goal, limit = waiting[shape].popleft()
            turns.append((shape, goal, timeout_s if limit * GROWTH > 2 * timeout_s else limit))
        for (shape, goal, limit), verdict in zip(turns, ask([turn[1:] for turn in turns]), strict=True):
            known[goal] = verdict
            used[shape] += limit
            budget -= limit
            last = limit >= timeout_s
            if verdict == "timeout" and not last:
                waiting[shape].appendleft((goal, limit * GROWTH))
            given_up[shape] += verdict == "timeout" and last
            if not waiting[shape] or given_up[shape] >= GIVEN_UP:
                del waiting[shape]
    return known


def _shape(goal: Goal) -> str:
    """What is the same in goals that differ in their numbers and in the length of their names."""
    return re.sub(r"[0-9]+", "0", re.sub(r"[a-z]+", "a", json.dumps(goal)))


class Verifier:
    """A thread-safe pool of comparison workers, which start when the first pair needs one."""

    def __init__(
        self,
        workers: int = 2,
        timeout_s: float = 5.0,
        memory_mb: int = 2048,
        *,
        strict: bool = False,
        first_look_s: float = FIRST_LOOK_S,
        folder: str = os.path.dirname(__file__),
    ) -> None:
        """
        Args:
            workers: Number of worker processes.
            timeout_s: CPU seconds of the longest look at a comparison.
            memory_mb: Memory of a worker.
            strict: Compare decimals to more digits.
            first_look_s: See `look_in_turns`.
            folder: Directory of the program of a worker, `_verify_worker.py`.
        """
        self.workers, self.timeout_s, self.memory_mb, self.strict = workers, timeout_s, memory_mb, strict
        self._first_look_s, self._folder = first_look_s, folder
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self.started = 0
        """Worker processes started so far; more than `workers` means that some were killed or recycled."""
        self.asked = 0
        """Number of looks that workers were asked for."""
        self.layers: tuple[str, ...] = ()
        """Layers of the executor's isolation that hold for the workers."""

    def compare(self, pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
        """A verdict for each (answer, gold), in order. What forms and numbers decide needs no worker."""
        decided = {pair: self._decide(*pair) for pair in dict.fromkeys(pairs)}
        goals = {pair: goal for pair, goal in decided.items() if not isinstance(goal, str)}
        distinct = list(dict.fromkeys(goals.values()))
        limits = {"timeout_s": self.timeout_s, "workers": self.workers, "first_look_s": self._first_look_s}
        known = look_in_turns(distinct, self._ask_each, **limits)
        return [known[goals[pair]] if pair in goals else decided[pair] for pair in pairs]

    def check_gold(self, answers: Sequence[str]) -> list[bool]:
        """Whether each reference answer can be parsed; to be called when data is loaded, not while training."""
        texts = {answer: expressions(answer, strict=self.strict) for answer in answers}
        goals = list(dict.fromkeys(("parsed", text) for group in texts.values() for text in group))
        parsed = dict(zip(goals, self._ask_each([(goal, self.timeout_s) for goal in goals]), strict=True))
        return [all(parsed["parsed", text] == "parsed" for text in texts[answer]) for answer in answers]

    def close(self) -> None:
        """Ends the workers; a closed pool accepts no further work."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=self.timeout_s + 5)

    def _decide(self, answer: str, gold: str) -> Comparison | Goal:
        goal = compare(answer, gold, strict=self.strict)
        if isinstance(goal, bool):
            return "correct" if goal else "wrong"
        if len(answer) > max(MAX_CHARS, 2 * len(gold)) or refused(goal):
            return "unparseable"
        return goal

    def _ask_each(self, looks: Looks) -> list[Comparison]:
        """The workers' verdicts on goals."""
        pending = []
        for goal, limit_s in looks:
            request = {"goal": goal, "strict": self.strict, "limit_s": min(limit_s, self.timeout_s)}
            pending.append(self._enqueue(json.dumps(request) + "\n"))
        return [future.result() for future in pending]

    def _enqueue(self, line: str) -> Future:
        with self._lock:
            if self._closed:
                raise RuntimeError("this verifier is closed; make a new one with make_scorer")
            self.asked += 1
            if not self._threads:
                self._start_threads()
        future: Future = Future()
        self._jobs.put((line, future))
        return future

    def _start_threads(self) -> None:
        for index in range(self.workers):
            thread = threading.Thread(target=self._serve, name=f"verify-{index}", daemon=True)
            thread.start()
            self._threads.append(thread)
        atexit.register(self.close)

    def _serve(self) -> None:
        """The thread of one worker: passes it jobs one at a time and replaces it when it dies."""
        worker: _Worker | None = None
        while (job := self._jobs.get()) is not None:
            line, future = job
            try:
                for last in (False, True):
                    if worker is None or worker.served >= RECYCLE_AFTER:
                        if worker is not None:
                            worker.end()
                        with self._lock:
                            self.started += 1
                        worker = _Worker(self.timeout_s, self.memory_mb, self._folder)
                        self._note_layers(worker.layers)
                    verdict = worker.ask(line)
                    if not worker.alive:
                        worker.end()
                        worker = None
                    if verdict != "crash" or last:
                        break
                future.set_result(verdict)
            except Exception as error:
                future.set_exception(error)
        if worker is not None:
            worker.end()

    def _note_layers(self, layers: tuple[str, ...]) -> None:
        if "seccomp" not in layers and not self.layers:
            warnings.warn(
                "verification workers run without a system call filter here: they parse the policy's answers with "
                "network and files within reach; grpo-roc probe says what this host lacks",
                stacklevel=2,
            )
        self.layers = layers or ("none",)


class _Worker:
    """One process and its two pipes."""

    def __init__(self, timeout_s: float, memory_mb: int, folder: str) -> None:
        # Wall-clock limit for a worker that neither answers nor uses CPU (stopped, swapped out). It is generous,
        # because the worker enforces the real limit itself.
        self.backstop_s = 30.0 + 20.0 * timeout_s
        self.served = 0
        self.alive = True
        self.process = subprocess.Popen(
            command("_verify_worker", str(memory_mb), folder=folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=environment() | {"PYTHONPATH": os.pathsep.join(filter(None, packages()))},
            start_new_session=True,
        )
        ready = self._read(STARTUP_S)
        if not ready:
            self.end()
            raise RuntimeError(
                f"a verification worker did not start (exit status {self.process.returncode}); "
                "check that math-verify imports: python -c 'import math_verify'"
            )
        self.layers = tuple(ready[1:])

    def ask(self, line: str) -> str:
        """The worker's verdict; `timeout` or `crash` if it died."""
        self.served += 1
        with contextlib.suppress(OSError):
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        verdict = self._read(self.backstop_s)
        if verdict is not None:
            return verdict
        hung = False
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            hung = True
        self.end()
        return "timeout" if hung or self.process.returncode == -signal.SIGXCPU else "crash"

    def _read(self, seconds: float) -> str | list[str] | None:
        poller = select.poll()  # select.select refuses descriptors above 1023
        poller.register(self.process.stdout, select.POLLIN)
        line = self.process.stdout.readline() if poller.poll(1000 * seconds) else b""
        if not line.endswith(b"\n"):
            self.alive = False
            return None
        return json.loads(line)

    def end(self) -> None:
        """Kills the process and its process group, and reaps it."""
        self.alive = False
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


def packages() -> tuple[str, ...]:
    """Directories of packages that an interpreter without this process's environment would not find."""
    return os.environ.get("PYTHONPATH", ""), site.getusersitepackages() if site.ENABLE_USER_SITE else ""
