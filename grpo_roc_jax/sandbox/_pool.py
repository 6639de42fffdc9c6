"""Starts, watches and replaces roots and workers, in the executor process. Standard library only."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections import deque
from typing import ClassVar

from . import _messages, _start, _wire
from ._calls import PendingCall
from ._messages import IsolationPlan

FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 5.0
"""Seconds before a lost worker is replaced; doubled while no worker stays up."""
STORM = 8
"""Number of workers lost in a row, with no call answered in between, that opens the breaker."""
SPAWN_LIMIT_S, ROOT_LIMIT_S = 20.0, 120.0
"""Seconds until a worker that does not come up, or a root that does not finish its imports, is killed."""


class ProcessLink:
    """The executor process's end of its connection to a root or a worker.

    Subclasses implement `on_message`, and `lost` for the end of the connection.
    """

    kinds: ClassVar[_messages.Kinds]

    def __init__(self, pool: "WorkerPool", sock: socket.socket) -> None:
        self.pool, self.sock = pool, sock
        self.gone = False
        self.fault = ""
        pool.owner.loop.watch(sock, self.on_event)

    def send(self, message: _messages.Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message. A process that cannot receive it is ending, which will be seen as an event."""
        with contextlib.suppress(OSError):
            _messages.send(self.sock, message, fds)

    def on_event(self, _: int) -> None:
        if self.gone:
            return
        try:
            message, _fds = _messages.receive(self.sock, self.kinds)
        except (OSError, ValueError):
            message = None
        if message is None:
            self.lost()
        elif isinstance(message, _messages.Failed):
            self.fault = message.message
        else:
            self.on_message(message)

    def forget(self) -> None:
        """Hang up, which ends the process at the other end."""
        if not self.gone:
            self.gone = True
            self.pool.owner.loop.forget(self.sock)
            self.sock.close()


class WorkerLink(ProcessLink):
    kinds = _messages.FROM_WORKER

    def __init__(self, pool: "WorkerPool", root: "RootLink", slot: int, sock: socket.socket) -> None:
        super().__init__(pool, sock)
        self.root, self.slot, self.born = root, slot, time.monotonic()
        self.call: PendingCall | None = None
        self.session: str | None = None
        self.up, self.pid = False, 0

    def on_message(self, message: _messages.Message) -> None:
        if isinstance(message, _messages.WorkerUp):
            self.pool.worker_up(self, message)
        elif isinstance(message, _messages.WorkerBorn):
            self.pid = message.pid
        else:
            self.pool.owner.on_worker_message(self, message)

    def lost(self) -> None:
        self.forget()
        self.pool.worker_lost(self)
        self.pool.owner.on_worker_end(self)

    def drop(self) -> None:
        """End the worker, and its session with it."""
        self.forget()
        self.pool.remove(self)
        if self.call is not None:
            self.pool.owner.release(self.call)
            self.call = None

    def kill(self) -> None:
        """End a worker that may be stuck and would not notice that its connection ended."""
        if self.pid and not self.gone:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
        self.lost()


class RootLink(ProcessLink):
    """A root, which this starts."""

    kinds = _messages.FROM_ROOT

    def __init__(self, pool: "WorkerPool") -> None:
        sock, other = _wire.pair()
        self.process = _start.start("_warm_interpreter", other.fileno(), pool.name, interpreter=pool.plan.interpreter)
        other.close()
        self.ready, self.workers, self.born = False, set(), time.monotonic()
        _messages.send(sock, pool.plan)
        super().__init__(pool, sock)

    def on_message(self, message: _messages.RootReady) -> None:
        self.ready = True
        self.pool.versions = message.versions
        self.pool.grow()

    def lost(self) -> None:
        self.forget()
        self.pool.root_lost(self)


class WorkerPool:
    """Workers of one kind of root, up to a target number."""

    def __init__(self, owner, name: str, plan: IsolationPlan, target: int, root_target: int) -> None:
        self.owner, self.name, self.plan, self.target, self.root_target = owner, name, plan, target, root_target
        self.roots: list[RootLink] = []
        self.workers: set[WorkerLink] = set()
        self.idle: list[WorkerLink] = []
        self.lent: set[WorkerLink] = set()
        self.pending: deque[PendingCall] = deque()
        self.share = -(-target // root_target)
        self.peak = 0
        self.versions: dict[str, str] = {}
        self.failures = self.respawns = self.slots_down = 0
        self.delay_until = 0.0
        self.ever_up = self.retry_planned = False

    def numbers(self) -> dict[str, float]:
        up = [worker for worker in self.workers | self.lent if worker.up]
        usable = any(worker.up for worker in self.workers)
        return {
            "workers_alive": len(up), "workers_busy": sum(worker.call is not None for worker in up),
            "roots_alive": sum(root.ready for root in self.roots), "respawns": self.respawns,
            "slots_down": self.slots_down, "breaker_open": float(self.breaker_open() and not usable),
        }  # fmt: skip

    def breaker_open(self) -> bool:
        """Whether workers die one after the other; calls then wait, and end as infrastructure failures."""
        return self.failures >= STORM

    def demand(self) -> int:
        """Workers for the highest load so far: twice the number that it needs."""
        busy = sum(worker.call is not None for worker in self.workers)
        self.peak = max(self.peak, busy + len(self.pending))
        return min(self.target, max(self.share, 2 * self.peak))

    def grow(self) -> None:
        """Start missing roots one at a time, and missing workers one at a time per root."""
        if time.monotonic() < self.delay_until:
            self.plan_retry()
            return
        now = time.monotonic()
        for worker in [w for w in self.workers if not w.up and now - w.born > SPAWN_LIMIT_S]:
            if not worker.pid:  # not even forked: the root is frozen
                worker.root.process.kill()
            worker.kill()
        for root in [root for root in self.roots if not root.ready and now - root.born > ROOT_LIMIT_S]:
            root.process.kill()
        demand, complete = self.demand(), len(self.roots) == self.root_target
        for root in [root for root in self.roots if root.ready]:
            mine = [worker for worker in root.workers if worker.session is None]
            # Until all roots are up, the first ones fork more workers, to serve a burst of calls.
            most = self.share if complete else 4 * self.share
            if all(worker.up for worker in mine) and len(mine) < most and len(self.workers) < demand:
                self.spawn(root)
        needed = -(-demand // self.share)
        if all(root.ready for root in self.roots) and len(self.roots) < min(needed, self.root_target):
            try:
                self.roots.append(RootLink(self))
            except OSError as error:
                self.note_loss(f"starting a root: {error}")

    def spawn(self, root: RootLink) -> None:
        slot = self.owner.free_slots.pop() if self.owner.free_slots else next(self.owner.slots)
        try:
            sock, other = _wire.pair()
        except OSError as error:
            self.owner.free_slots.append(slot)
            self.note_loss(f"connection of a worker: {error}")
            return
        worker = WorkerLink(self, root, slot, sock)
        self.workers.add(worker)
        root.workers.add(worker)
        root.send(_messages.SpawnWorker(slot), (other.fileno(),))
        other.close()

    def worker_up(self, worker: WorkerLink, message: _messages.WorkerUp) -> None:
        """Accept a worker, if it reached the isolation level of the pool."""
        if (message.level, message.landlock) != (self.plan.level, self.plan.landlock):
            self.slots_down += 1
            worker.kill()
            return
        worker.up = self.ever_up = True
        self.idle.append(worker)
        self.owner.worker_up()
        self.grow()

    def take(self) -> WorkerLink | None:
        """An idle worker, from the root with the fewest busy ones, since forks of one root contend."""
        if len(self.roots) <= 1 or not self.idle:
            return self.idle.pop() if self.idle else None
        best = min(self.idle, key=lambda w: sum(x.call is not None for x in w.root.workers))
        self.idle.remove(best)
        return best

    def give_back(self, worker: WorkerLink) -> None:
        if not worker.gone:
            self.idle.append(worker)

    def lend(self, worker: WorkerLink) -> None:
        """Give a worker to a session for good; another one takes its place."""
        self.workers.discard(worker)
        self.lent.add(worker)
        self.grow()

    def remove(self, worker: WorkerLink) -> None:
        self.workers.discard(worker)
        self.lent.discard(worker)
        worker.root.workers.discard(worker)
        if worker in self.idle:
            self.idle.remove(worker)
        self.owner.free_slots.insert(0, worker.slot)

    def worker_lost(self, worker: WorkerLink) -> None:
        self.remove(worker)
        self.respawns += 1
        if not worker.up:
            self.slots_down += 1
        self.note_loss(worker.fault or "a worker ended unexpectedly")

    def root_lost(self, root: RootLink) -> None:
        if root in self.roots:
            self.roots.remove(root)
        for worker in list(root.workers):
            worker.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            root.process.wait(0.1)
        self.note_loss(root.fault or "a root ended unexpectedly")

    def note_loss(self, reason: str) -> None:
        """Replace what was lost: at once after a single loss, after growing pauses while no worker stays up."""
        self.failures += 1
        if not (self.ever_up or self.owner.announced) and self.failures >= 3:
            self.owner.link.send(_messages.Failed(reason))
        if self.failures > 2:
            delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(self.failures - 2, 10))
            self.delay_until = time.monotonic() + delay
        self.plan_retry()

    def plan_retry(self) -> None:
        if not self.retry_planned:
            self.retry_planned = True
            self.owner.loop.later(max(0.001, self.delay_until - time.monotonic()), self.retry)

    def retry(self) -> None:
        self.retry_planned = False
        self.grow()

    def end(self) -> None:
        for link in [*self.roots, *self.workers, *self.lent]:
            link.forget()

    def await_end(self) -> None:
        for root in self.roots:
            try:
                root.process.wait(3)
            except subprocess.TimeoutExpired:
                root.process.kill()
                root.process.wait()
