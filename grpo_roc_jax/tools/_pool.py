"""Roots and workers as the executor process sees them: starting, losing and replacing them. Standard library only."""

import contextlib
import os
import resource
import selectors
import signal
import subprocess
import time
from collections import deque

from . import _boot, _wire

FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 5.0
"""Pause before a lost worker is replaced; doubles while none stays up."""
STORM = 8
"""Workers lost in a row, without one call answered, after which the breaker counts as open."""
SPAWN_LIMIT_S = 20.0


def process_limit(threads: int, level: str) -> int:
    """RLIMIT_NPROC of a call: exact where it has a user of its own, above the user's present count elsewhere."""
    if level in ("L3", "L4"):
        return threads
    return tasks_of_user() + 1024


def tasks_of_user() -> int:
    """Tasks of this user on the host; what RLIMIT_NPROC counts."""
    own, total = os.geteuid(), 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == own:
                    total += len(os.listdir(f"/proc/{name}/task"))
    return total


def fit_to_host(limits: dict) -> tuple[int, int]:
    """Workers and roots that this host's own limits leave room for."""
    workers, roots = limits["pool_size"], limits["root_count"]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    if files != resource.RLIM_INFINITY:
        # Per worker of either pool a connection, per call three memory files; the rest is ours.
        workers = min(workers, max(1, (files - 64) // 6))
        limits["sessions"] = min(limits["sessions"], max(1, (files - 64) // 3 - 2 * workers))
    tasks = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if tasks != resource.RLIM_INFINITY and os.geteuid() != 0:
        # Two workers of either pool and their children per unit of width, besides the roots.
        workers = min(workers, max(1, (tasks - tasks_of_user() - 8) // 4))
    return workers, max(1, min(roots, workers))


def reap(keep: set[int]) -> None:
    """Collect orphans that a dead root left to us; roots themselves are collected by their Popen."""
    with contextlib.suppress(ChildProcessError):
        while True:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid in keep:
                return
            os.waitpid(found.si_pid, 0)


class WorkerLink:
    """Our end of one worker."""

    def __init__(self, pool: "Pool", root: "RootLink", slot: int, sock) -> None:
        self.pool, self.root, self.slot, self.sock = pool, root, slot, sock
        self.call = None
        self.session: str | None = None
        self.up = False
        self.born = time.monotonic()
        self.fault = ""
        self.gone = False
        self.pid = 0
        pool.owner.selector.register(sock, selectors.EVENT_READ, self.on_event)

    def send(self, message: dict, fds: tuple[int, ...] = ()) -> None:
        """A worker that cannot take a message is ending; its end will be seen as an event."""
        with contextlib.suppress(OSError):
            _wire.send(self.sock, message, fds)

    def on_event(self, _: int) -> None:
        if self.gone:
            return
        try:
            message, _fds = _wire.receive(self.sock)
        except (OSError, ValueError):
            message = None
        if message is None:
            self.lost()
        elif message["op"] == "up":
            self.pool.worker_up(self, message)
        elif message["op"] == "born":
            self.pid = message["pid"]
        elif message["op"] == "failed":
            self.fault = message["step"]
        else:
            self.pool.owner.on_done(self, message)

    def lost(self) -> None:
        self.forget()
        self.pool.worker_lost(self)
        self.pool.owner.on_worker_end(self)

    def forget(self) -> None:
        if not self.gone:
            self.gone = True
            self.pool.owner.selector.unregister(self.sock)
            self.sock.close()

    def drop(self) -> None:
        """Hanging up is what ends a worker, and its session with it."""
        call = self.call
        self.forget()
        self.pool.remove(self)
        if call is not None:
            self.pool.owner.release(call)
            self.call = None

    def kill(self) -> None:
        """A stuck worker does not notice that we hang up."""
        self.kill_process()
        self.lost()

    def kill_process(self) -> None:
        if self.pid and not self.gone:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


class RootLink:
    """Our end of one root."""

    def __init__(self, pool: "Pool") -> None:
        self.pool = pool
        self.sock, theirs = _wire.pair()
        self.process = _boot.start(
            "_root", str(theirs.fileno()), pool.name,
            interpreter=pool.plan["limits"]["interpreter"], fd=theirs.fileno(), isolated=False,
        )  # fmt: skip
        theirs.close()
        self.ready = self.gone = False
        self.fault = ""
        self.workers: set[WorkerLink] = set()
        _wire.send(self.sock, pool.plan)
        pool.owner.selector.register(self.sock, selectors.EVENT_READ, self.on_event)

    def send(self, message: dict, fds: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(OSError):
            _wire.send(self.sock, message, fds)

    def on_event(self, _: int) -> None:
        if self.gone:
            return
        try:
            message, _fds = _wire.receive(self.sock)
        except OSError:
            message = None
        if message is None:
            self.end()
            self.pool.root_lost(self)
        elif message["op"] == "ready":
            self.ready = True
            self.pool.root_ready(self, message)
        elif message["op"] == "failed":
            self.fault = message["step"]

    def end(self) -> None:
        if not self.gone:
            self.gone = True
            self.pool.owner.selector.unregister(self.sock)
            self.sock.close()


class Pool:
    """Workers of one kind of root, up to a target number."""

    def __init__(self, owner, name: str, plan: dict, target: int, root_target: int) -> None:
        self.owner, self.name, self.plan, self.target, self.root_target = owner, name, plan, target, root_target
        self.roots: list[RootLink] = []
        self.workers: set[WorkerLink] = set()
        self.idle: list[WorkerLink] = []
        self.lent: set[WorkerLink] = set()
        self.pending: deque = deque()
        self.share = -(-target // root_target)
        self.peak = 0
        self.report: dict = {}
        self.ever_up = False
        self.failures = 0
        self.respawns = self.slots_down = 0
        self.delay_until = 0.0
        self.retry_planned = False

    def numbers(self) -> dict[str, float]:
        """Gauges for `stats`."""
        up = [worker for worker in self.workers | self.lent if worker.up]
        usable = any(worker.up for worker in self.workers)
        return {
            "workers_alive": len(up), "workers_busy": sum(worker.call is not None for worker in up),
            "roots_alive": sum(root.ready for root in self.roots), "respawns": self.respawns,
            "slots_down": self.slots_down, "breaker_open": float(self.stormy() and not usable),
        }  # fmt: skip

    def stormy(self) -> bool:
        """Workers die one after the other: what is asked for now waits, and ends as a fault of ours."""
        return self.failures >= STORM

    def wanted(self) -> int:
        """Workers that the present load asks for: twice what is needed now, never shrinking."""
        busy = sum(worker.call is not None for worker in self.workers)
        self.peak = max(self.peak, busy + len(self.pending))
        return min(self.target, max(self.share, 2 * self.peak))

    def grow(self) -> None:
        """Ask for what is missing: one root at a time, one unborn worker per root."""
        if time.monotonic() < self.delay_until:
            self.plan_retry()
            return
        for worker in [w for w in self.workers if not w.up and time.monotonic() - w.born > SPAWN_LIMIT_S]:
            worker.kill()
        wanted, complete = self.wanted(), len(self.roots) == self.root_target
        for root in [root for root in self.roots if root.ready]:
            mine = [worker for worker in root.workers if worker.session is None]
            # Until the other roots are there, a burst is served by forking more from the first ones.
            most = self.share if complete else 4 * self.share
            if all(worker.up for worker in mine) and len(mine) < most and len(self.workers) < wanted:
                self.spawn(root)
        needed = -(-wanted // self.share)
        if all(root.ready for root in self.roots) and len(self.roots) < min(needed, self.root_target):
            self.start_root()

    def start_root(self) -> None:
        try:
            self.roots.append(RootLink(self))
        except OSError as error:
            self.unwell(f"starting a root: {error}")

    def spawn(self, root: RootLink) -> None:
        slot = self.owner.take_slot()
        try:
            mine, theirs = _wire.pair()
        except OSError as error:
            self.owner.free_slots.append(slot)
            self.unwell(f"connection of a worker: {error}")
            return
        worker = WorkerLink(self, root, slot, mine)
        self.workers.add(worker)
        root.workers.add(worker)
        root.send({"op": "spawn", "slot": slot}, (theirs.fileno(),))
        theirs.close()

    def root_ready(self, root: RootLink, report: dict) -> None:
        self.report = report
        self.grow()

    def worker_up(self, worker: WorkerLink, message: dict) -> None:
        """A worker counts only if it reached the level of the pool."""
        if (message["level"], message["landlock"]) != (self.plan["level"], self.plan["landlock"]):
            self.slots_down += 1
            worker.kill()
            return
        worker.up = self.ever_up = True
        self.idle.append(worker)
        self.owner.worker_up(worker)
        self.grow()

    def take(self) -> WorkerLink | None:
        """An idle worker, from the root with the fewest busy ones: forks of one root contend."""
        if not self.idle:
            return None
        if len(self.roots) > 1:
            best = min(self.idle, key=lambda w: sum(x.call is not None for x in w.root.workers))
            self.idle.remove(best)
            return best
        return self.idle.pop()

    def give_back(self, worker: WorkerLink) -> None:
        if not worker.gone:
            self.idle.append(worker)

    def lend(self, worker: WorkerLink) -> None:
        """The worker belongs to a session from now on; another one takes its place."""
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
        self.unwell(worker.fault or "a worker ended unexpectedly")

    def root_lost(self, root: RootLink) -> None:
        if root in self.roots:
            self.roots.remove(root)
        for worker in list(root.workers):
            worker.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            root.process.wait(0.1)
        self.unwell(root.fault or "a root ended unexpectedly")

    def well(self) -> None:
        self.failures = 0

    def unwell(self, reason: str) -> None:
        """Replace what was lost, at once after a single loss, ever later while nothing stays up."""
        self.failures += 1
        if not self.ever_up and self.failures >= 3:
            self.owner.start_failed(reason)
        if self.failures > 2:
            delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(self.failures - 2, 10))
            self.delay_until = time.monotonic() + delay
        self.plan_retry()

    def plan_retry(self) -> None:
        if not self.retry_planned:
            self.retry_planned = True
            self.owner.later(max(0.001, self.delay_until - time.monotonic()), self.retry)

    def retry(self) -> None:
        self.retry_planned = False
        self.grow()

    def end(self) -> None:
        for root in self.roots:
            root.end()
        for worker in list(self.workers | self.lent):
            worker.forget()

    def await_end(self) -> None:
        for root in self.roots:
            try:
                root.process.wait(3)
            except subprocess.TimeoutExpired:
                root.process.kill()
                root.process.wait()
