"""Where episodes live: in this process, in processes of their own, or in Ray actors, under one interface.

What an episode is, its settings say: that of an environment (`episode.EpisodeSettings`), or the rollout of an agent's
function (`serving.agent_functions.FunctionSettings`).

`python -m grpo_roc_jax.environments.hosts FD` is such a process: it reads operations from a connection, runs them side
by side, and writes their answers as they end.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from multiprocessing.connection import Connection
from pickle import PicklingError
from typing import Any, Protocol

from grpo_roc_jax.environments.config import Host, HostActors, HostProcesses
from grpo_roc_jax.environments.episode import Answer
from grpo_roc_jax.environments.failure import plain_failure

BLOCKING = 256
"""Calls that block in threads of one loop at a time (`asyncio.to_thread`). Python's own bound is four more than there
are processors: rollouts beyond it would wait for each other's answers."""
CLOSE_S = 5.0
"""Seconds that environments have to close when their host ends."""


class HostLost(ConnectionError):
    """The process that held an episode is gone."""


class HeldSettings(Protocol):
    """What a host makes its episodes from; sent to the processes that hold them."""

    passed: Mapping[str, Callable[..., Any]]
    """Classes and functions passed by the caller, by their paths."""
    repeats: bool
    """Whether Ray may run an operation again whose actor was lost."""

    def prepare(self) -> tuple[Callable[[], Any], bool]:
        """(what makes an episode, whether its `open` runs no code of the user's). An episode has a coroutine function
        for each operation, `never_waits(operation, arguments)`, and `release`, which gives up what it holds and returns
        what to await until that is done, if anything."""


class EpisodeHost(Protocol):
    """Runs the operations of episodes; thread-safe."""

    def call(self, key: str, operation: str, *arguments: Any) -> "Future[Answer]":
        """Starts an operation of the episode of that key: `open`, `play`, `end`, or `drop`, which releases it."""

    def abandon(self, key: str) -> None:
        """Nothing came of an operation of this episode: kill what runs it, if it can be killed."""

    def close(self) -> None:
        """Releases the episodes that are left, within `CLOSE_S`, and ends everything."""


class ThreadHost:
    """Episodes in this process."""

    def __init__(self, settings: HeldSettings):
        self._make, self._opens_at_once = settings.prepare()
        self._episodes: dict[str, Any] = {}
        self._last: dict[str, Future[Answer]] = {}
        """Operations that the loop runs, the last one of each episode."""
        self._leaving: set[Future[Answer]] = set()
        """Those of them that release an episode."""
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(BLOCKING, thread_name_prefix="blocking"))
        threading.Thread(target=self._loop.run_forever, daemon=True, name="environments").start()

    def call(self, key: str, operation: str, *arguments: Any) -> "Future[Answer]":
        work = self._run(key, operation, arguments)
        if key not in self._last and self._never_waits(key, operation, arguments):
            future: Future[Answer] = Future()
            future.set_result(finished(work))
            return future
        self._last[key] = future = asyncio.run_coroutine_threadsafe(work, self._loop)
        future.add_done_callback(lambda done: self._last.pop(key) if self._last.get(key) is done else None)
        if operation == "drop":
            self._leaving.add(future)
            future.add_done_callback(self._leaving.discard)
        return future

    def abandon(self, key: str) -> None:
        self.call(key, "drop")

    def close(self) -> None:
        for key in {*self._episodes, *self._last}:
            self.call(key, "drop")
        wait(list(self._leaving), CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _never_waits(self, key: str, operation: str, arguments: tuple) -> bool:
        episode = self._episodes.get(key)
        if operation in ("open", "drop"):
            return episode is None and (self._opens_at_once or operation == "drop")
        return episode is None or episode.never_waits(operation, arguments)

    async def _run(self, key: str, operation: str, arguments: tuple) -> Answer:
        before = self._episodes.pop(key, None) if operation in ("open", "drop") else None
        if operation == "open":
            self._episodes[key] = self._make()
        episode = self._episodes.get(key)
        if before is not None and (released := before.release()) is not None:
            await released
        if operation == "drop":
            return Answer()
        if episode is None:
            return Answer(failure=plain_failure("its process", "the environment is gone: its process ended"))
        answer = await getattr(episode, operation)(*arguments)
        if operation == "end" and self._episodes.get(key) is episode:
            del self._episodes[key]
        return answer


def finished(work: Coroutine[Any, Any, Answer]) -> Answer:
    """The answer of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("an operation that never waits has waited")


def end_group(program: subprocess.Popen) -> None:
    """Kills a program that leads a process group, and what it has started in that group."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


class WorkerProcess:
    """A process with episodes; `pending` holds what it has not answered."""

    def __init__(self, settings: HeldSettings):
        mine, other = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(other.fileno())]
        path = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))  # what the caller can import, it can
        self.process = subprocess.Popen(
            command,
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        other.close()
        self._socket, self._mutex = mine, threading.Lock()
        self._link = Connection(os.dup(mine.fileno()))
        self._pending: dict[int, Future[Answer]] = {}
        self._number, self.lost = 0, False
        try:
            self._link.send(settings)
        except (PicklingError, AttributeError, TypeError) as error:
            self.end()
            raise ValueError(
                f"environment {', '.join(settings.passed)} cannot be sent to another process ({error}); name it by its "
                "path"
            ) from error
        self._reader, watch = (
            threading.Thread(target=part, daemon=True, name="environment-process") for part in (self._read, self._watch)
        )
        self._reader.start()
        watch.start()

    def call(self, *words: Any) -> "Future[Answer]":
        future: Future[Answer] = Future()
        with self._mutex:
            self._number += 1
            number, self._pending[self._number] = self._number, future
            try:
                if self.lost:
                    raise BrokenPipeError
                self._link.send((number, *words))
            except OSError:
                del self._pending[number]
                future.set_exception(HostLost("the process of the environment ended"))
        return future

    def _read(self) -> None:
        while True:
            try:
                number, answer = self._link.recv()
            except Exception:  # it ended, or something else was written to the connection
                break
            with self._mutex:
                future = self._pending.pop(number)
            future.set_result(answer)
        with self._mutex:
            self.end()
            self.lost, pending = True, list(self._pending.values())
            self._pending.clear()
        for future in pending:
            future.set_exception(HostLost("the process of the environment ended"))

    def _watch(self) -> None:
        """Ends the connection when the process ends: one that an environment has forked may hold the other end."""
        with suppress(OSError):  # it was waited for already
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self._socket.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Lets the process close its environments and end."""
        with suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_WR)

    def end(self, patience_s: float = 0.0) -> None:
        """Kills the process, unless it ends within these seconds."""
        if patience_s:
            self._reader.join(patience_s)
        if not self.lost:
            end_group(self.process)


class WorkersHost:
    """Episodes spread over processes or Ray actors, each of which is replaced if it ends."""

    def __init__(self, start: Callable[[], Any], workers: int):
        self._start, self._mutex = start, threading.Lock()
        self.workers = [start() for _ in range(workers)]
        """What holds the episodes; another one is put in the place of one that ends."""
        self._homes: dict[str, int] = {}
        self._ending: set[str] = set()
        """Episodes whose `end` runs. They keep their homes, since they may be dropped meanwhile."""

    def call(self, key: str, operation: str, *arguments: Any) -> "Future[Answer]":
        with self._mutex:
            if operation == "open" and (key not in self._homes or key in self._ending):
                self._ending.discard(key)
                loads = Counter(self._homes.values())
                self._homes[key] = min(range(len(self.workers)), key=lambda i: loads[i])
            home = self._homes.get(key, 0)
            if operation == "drop":
                self._forget(key)
            elif self.workers[home].lost:
                self.workers[home] = self._start()
            if operation == "end":
                self._ending.add(key)
            future = self.workers[home].call(key, operation, arguments)
        if operation == "end":
            future.add_done_callback(lambda _: self._ended(key))
        return future

    def _ended(self, key: str) -> None:
        with self._mutex:
            if key in self._ending:
                self._forget(key)

    def _forget(self, key: str) -> int | None:
        self._ending.discard(key)
        return self._homes.pop(key, None)

    def abandon(self, key: str) -> None:
        with self._mutex:
            home = self._forget(key)
            if home is not None:
                self.workers[home].end()

    def close(self) -> None:
        due_s = time.monotonic() + CLOSE_S
        for worker in self.workers:
            worker.leave()
        for worker in self.workers:
            worker.end(max(0.0, due_s - time.monotonic()))


class WorkerActor:
    """A Ray actor with episodes, which Ray restarts if it ends."""

    lost = False

    def __init__(self, settings: HeldSettings, cpus: float):
        import ray

        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
        retries = 3 if settings.repeats else 0
        options = {"num_cpus": cpus, "max_concurrency": 1024, "max_restarts": -1, "max_task_retries": retries}
        self._ray, self._actor = ray, ray.remote(HostActor).options(**options).remote(settings)

    def call(self, *words: Any) -> "Future[Answer]":
        return self._actor.call.remote(*words).future()

    def leave(self) -> None:
        """Lets the actor close its environments."""
        self._left = self._actor.close.remote()

    def end(self, patience_s: float = 0.0) -> None:
        """Kills the actor; after `leave` once it has closed its environments, or after these seconds."""
        self.lost = True  # another actor takes its place, since this one may answer until it is killed
        if patience_s:
            self._ray.wait([self._left], timeout=patience_s)
        self._ray.kill(self._actor)


class HostActor:
    """The part that runs in the actor's process."""

    def __init__(self, settings: HeldSettings):
        self._host = ThreadHost(settings)

    def call(self, key: str, operation: str, arguments: tuple) -> Answer:
        """The answer of one operation."""
        return self._host.call(key, operation, *arguments).result()

    def close(self) -> None:
        """Closes the environments."""
        self._host.close()


def make_host(
    choice: Host,
    settings: HeldSettings,
    *,
    process: Callable[..., Any] = WorkerProcess,
    actor: Callable[..., Any] = WorkerActor,
) -> EpisodeHost:
    """The host that a configuration names; `process` and `actor` start its workers."""
    if isinstance(choice, HostActors):
        return WorkersHost(lambda: actor(settings, choice.cpus), choice.workers)
    if isinstance(choice, HostProcesses):
        return WorkersHost(lambda: process(settings), choice.workers)
    return ThreadHost(settings)


def main(descriptor: int) -> None:
    """Serves the other end of a connection until it is closed or a signal asks this process to end."""
    link, mutex = Connection(descriptor), threading.Lock()
    host = ThreadHost(link.recv())

    def send(number: int, future: "Future[Answer]") -> None:
        with mutex:
            try:
                link.send((number, future.result()))
            except Exception as error:  # it raised, or holds what no other process can read
                failure = plain_failure("its answer", f"{type(error).__name__}: {error}")
                with suppress(OSError):  # nobody reads any more
                    link.send((number, Answer(failure=failure)))

    for ends in (signal.SIGTERM, signal.SIGUSR1):  # a job's end is announced to all of its processes
        signal.signal(ends, lambda *_: sys.exit())
    try:
        while True:
            number, key, operation, arguments = link.recv()
            host.call(key, operation, *arguments).add_done_callback(lambda future, n=number: send(n, future))
    except (EOFError, OSError, SystemExit):
        for ends in (signal.SIGTERM, signal.SIGUSR1):  # a second one would cut the closing short
            signal.signal(ends, signal.SIG_IGN)
        host.close()
        os.killpg(os.getpid(), signal.SIGKILL)  # threads that hang, and what environments have started, end too


if __name__ == "__main__":
    main(int(sys.argv[1]))
