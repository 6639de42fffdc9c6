"""Symbolic comparison of answers by math-verify, in processes that can be killed.

Algebra on text that a policy wrote can loop, exhaust memory or crash, so it never runs in the trainer. Each worker is
a fresh interpreter (never a fork of a process that holds a device). It gets one comparison at a time and counts its own
CPU seconds, so neither a queue nor a busy machine causes a timeout. A worker that dies is replaced.
"""

import atexit
import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

from grpo_roc_jax.reward.answer import as_fraction, as_integer, decide, normalize

Comparison = Literal["correct", "wrong", "unparseable", "timeout", "crash"]

_WORKER = Path(__file__).with_name("_verify_worker.py")
STARTUP_S = 120.0
"""Wall-clock seconds for importing the symbolic library; only a broken installation needs more."""
RECYCLE_AFTER = 5000
"""Comparisons before a worker is replaced, since the caches of the symbolic library grow without bound."""


class Verifier:
    """A thread-safe pool of comparison workers, which start when the first pair needs one."""

    def __init__(self, workers: int = 2, timeout_s: float = 5.0, memory_mb: int = 2048, max_chars: int = 500) -> None:
        self.workers, self.timeout_s, self.memory_mb, self.max_chars = workers, timeout_s, memory_mb, max_chars
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self.started = 0
        """Worker processes started so far; more than `workers` means that some were killed or recycled."""

    def compare(self, pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
        """A verdict for each (answer, gold), in order. Pairs of integers or fractions are decided without a worker."""
        pending = [self._submit(answer, gold) for answer, gold in pairs]
        return [verdict.result() if isinstance(verdict, Future) else verdict for verdict in pending]

    def check_gold(self, answers: Sequence[str]) -> list[bool]:
        """Whether each reference answer can be parsed; to be called when data is loaded, not while training."""
        plain = [as_integer(text) is not None or as_fraction(text) is not None for text in map(normalize, answers)]
        pending = [None if ok else self._enqueue(None, answer) for ok, answer in zip(plain, answers, strict=True)]
        return [future is None or future.result() == "parsed" for future in pending]

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

    def _submit(self, answer: str, gold: str) -> "Comparison | Future":
        verdict = decide(answer, gold)
        if verdict is not None:
            return "correct" if verdict else "wrong"
        if len(answer) > self.max_chars:
            return "unparseable"
        return self._enqueue(normalize(answer), normalize(gold))

    def _enqueue(self, answer: str | None, gold: str) -> Future:
        with self._lock:
            if self._closed:
                raise RuntimeError("this verifier is closed; make a new one with make_scorer")
            if not self._threads:
                self._start_threads()
        future: Future = Future()
        self._jobs.put((json.dumps({"answer": answer, "gold": gold}) + "\n", future))
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
                        worker = _Worker(self.timeout_s, self.memory_mb)
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


class _Worker:
    """One process and its two pipes."""

    def __init__(self, timeout_s: float, memory_mb: int) -> None:
        # Wall-clock limit for a worker that neither answers nor uses CPU (stopped, swapped out). It is generous,
        # because the worker enforces the real limit itself.
        self.backstop_s = 30.0 + 20.0 * timeout_s
        self.served = 0
        self.alive = True
        self.process = subprocess.Popen(
            # -P: the worker's own directory must not shadow modules of the libraries it imports.
            [sys.executable, "-P", str(_WORKER), str(timeout_s), str(memory_mb)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        if self._read(STARTUP_S) != "ready":
            self.end()
            raise RuntimeError(
                f"a verification worker did not start (exit status {self.process.returncode}); "
                "check that math-verify imports: python -c 'import math_verify'"
            )

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

    def _read(self, seconds: float) -> str | None:
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
