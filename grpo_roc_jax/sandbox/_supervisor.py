"""The executor process: one event loop between the trainer and the workers. It never runs or parses a program.

It starts roots, which fork workers. It passes each call to an idle worker in memory files, reads what the child left
there, and answers by id. All other processes end with it, and it ends with the trainer. Standard library only.
"""

import itertools
import os
import signal
import socket
import time
import traceback
from collections import Counter
from dataclasses import replace

from . import _kernel, _messages, _pool, _probing, _wire, _worker
from ._calls import INEXACT, PendingCall, ProgramOutcome, needs_packages
from ._loop import EventLoop, TrainerLink, Width
from ._messages import CallDone, CallRefused, DeadlineExtended, ExecutorSettings
from ._session_table import SessionTable

GRACE_S = 10.0
"""A worker that has not answered this long after its limit counts as stuck. Long enough for hosts under load."""


class Supervisor:
    """State of the executor process."""

    def __init__(self, sock: socket.socket) -> None:
        self.loop = EventLoop()
        self.link = TrainerLink(self.loop, sock, self.on_message)
        self.numbers = itertools.count(1)
        self.calls: dict[str, PendingCall] = {}
        self.running: dict[int, PendingCall] = {}
        self.sessions = SessionTable(self)
        self.counts: Counter[str] = Counter()
        self.pools: dict[str, _pool.WorkerPool] = {}
        self.width = Width(self.loop, 0)
        self.startup: _probing.Startup | None = None
        """None until the trainer's first message."""
        self.announced = False
        self.free_slots, self.slots = [], itertools.count()
        """Small numbers that no worker uses now; at L4 a worker's user id derives from its number."""

    def main(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _kernel.prctl("prctl(PR_SET_CHILD_SUBREAPER)", _kernel.PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            while True:
                self.loop.turn()
                self.dispatch()
                self.send_results()
        except (EOFError, ConnectionError, _wire.BadFrame):
            pass
        except Exception:
            # An error in this process: the trainer logs the traceback and starts another executor process.
            self.link.send(_messages.Failed(traceback.format_exc()[-4000:]))
        finally:
            self.end()

    def on_message(self, message: _messages.Message, payload: bytes) -> None:
        if isinstance(message, _messages.SubmitCall):
            self.submit(message, payload)
        elif isinstance(message, _messages.CancelCalls):
            self.cancel(message.ids)
        elif isinstance(message, _messages.CloseSession):
            self.sessions.close(message.session)
        elif isinstance(message, _messages.RequestStats):
            self.link.send(_messages.ExecutorStats(message.n, self.stats()))
        else:
            self.start(message)

    def send_results(self) -> None:
        """Send the results of this turn of the loop, or hold them a little longer while calls wait for workers."""
        waiting = bool(self.sessions.ready) or any(pool.pending for pool in self.pools.values())
        self.link.end_turn(calls_wait=waiting)

    def start(self, settings: ExecutorSettings) -> None:
        """Choose the isolation level and start the first roots; `Capabilities` follow when workers are up."""
        try:
            self.startup = _probing.prepare(settings)
        except (LookupError, OSError) as error:
            self.link.send(_messages.Failed(str(error), no_level=isinstance(error, LookupError)))
            return
        plan, settings = self.startup.plan, self.startup.settings
        workers, roots = settings.pool_size, settings.root_count
        self.pools["full"] = _pool.WorkerPool(self, "full", plan, workers, roots)
        if settings.bare_root:
            self.pools["bare"] = _pool.WorkerPool(self, "bare", plan, workers, max(1, roots // 2))
        self.width = Width(self.loop, workers)
        for pool in self.pools.values():
            pool.grow()
        self.loop.later(1.0, self.housekeeping)

    def worker_up(self) -> None:
        """Announce that calls can run, once each pool has a worker."""
        if not self.announced and all(pool.ever_up for pool in self.pools.values()):
            self.announced = True
            self.link.send(replace(self.startup.ready, versions=self.pools["full"].versions))

    def submit(self, header: _messages.SubmitCall, data: bytes) -> None:
        code, stdin = data[: header.code], data[header.code :]
        n = next(self.numbers)
        call = PendingCall(n, header.id, header.session, header.seed, code, stdin, header.attempt)
        self.calls[call.id] = call
        if call.session is None:
            self.pool_for(call).pending.append(call)
        else:
            self.sessions.add(call)

    def pool_for(self, call: PendingCall) -> _pool.WorkerPool:
        bare = self.pools.get("bare")
        return self.pools["full"] if bare is None or call.session or needs_packages(call.code) else bare

    def cancel(self, ids: list[str]) -> None:
        for call_id in ids:
            call = self.calls.pop(call_id, None)
            if call is None:
                continue
            self.counts["cancelled"] += 1
            if call.worker is not None:
                call.worker.send(_messages.KillCall(call.n))
            else:
                self.remove_waiting(call)

    def remove_waiting(self, call: PendingCall) -> None:
        for pool in self.pools.values():
            if call in pool.pending:
                pool.pending.remove(call)
        self.sessions.remove(call)

    def stats(self) -> dict[str, float]:
        waiting = sum(len(pool.pending) for pool in self.pools.values()) + len(self.sessions.ready)
        numbers = {f"tools/{name}": value for name, value in self.counts.items()}
        numbers |= {"tools/running": len(self.running), "tools/queued": waiting}
        numbers["tools/sessions_open"] = len(self.sessions.with_worker())
        totals: Counter[str] = Counter()
        for name, pool in self.pools.items():
            gauges = pool.numbers()
            numbers |= {f"tools/{name}/{key}": value for key, value in gauges.items()}
            totals.update(gauges)
        return numbers | {f"tools/{key}": value for key, value in totals.items()}

    def dispatch(self) -> None:
        """Give waiting calls to idle workers, up to the present width."""
        while self.sessions.ready and len(self.running) < self.width.calls:
            call = self.sessions.ready.popleft()
            worker = self.sessions.take_worker(call)
            if worker is not None:
                self.launch(call, worker)
        for pool in self.pools.values():
            while pool.pending and len(self.running) < self.width.calls:
                worker = pool.take()
                if worker is None:
                    break
                call = pool.pending.popleft()
                if call.session is not None:
                    self.sessions.make_room(self.startup.settings.sessions)
                    worker.session = call.session
                    self.sessions.states[call.session].worker = worker
                    pool.lend(worker)
                self.launch(call, worker)
            if pool.pending and not pool.idle and len(pool.workers) < pool.target:
                pool.grow()

    def launch(self, call: PendingCall, worker: _pool.WorkerLink) -> None:
        try:
            files = call.open_files()
        except OSError:
            self.put_back(call, worker)
            return
        limit_s = self.startup.settings.limits.wall_s + GRACE_S
        call.worker, call.started = worker, time.monotonic()
        worker.call = call
        self.running[call.n] = call
        call.deadline = call.started + limit_s
        self.loop.later(limit_s, lambda: self.overdue(call))
        exact = bool(call.session and INEXACT.search(call.code))
        worker.send(_messages.RunCode(call.n, call.seed, cell=bool(call.session), exact=exact), files)
        _wire.close_all(files[:2])

    def put_back(self, call: PendingCall, worker: _pool.WorkerLink) -> None:
        """Let a call wait because the host has no descriptor or process to spare, and run fewer at a time."""
        self.counts["put_back"] += 1
        self.width.narrow(len(self.running), least=1)
        worker.call = None
        if call.session:
            self.sessions.ready.append(call)
        else:
            worker.pool.give_back(worker)
            worker.pool.pending.appendleft(call)

    def overdue(self, call: PendingCall) -> None:
        """Kill a worker that should have ended its call long ago."""
        if self.running.get(call.n) is not call:
            return
        now = time.monotonic()
        if now < call.deadline:
            self.loop.later(call.deadline - now, lambda: self.overdue(call))
            return
        self.counts["workers_stuck"] += 1
        call.worker.kill()

    def on_worker_message(self, worker: _pool.WorkerLink, message: DeadlineExtended | CallRefused | CallDone) -> None:
        call = worker.call
        if call is None or call.n != message.n:
            return
        if isinstance(message, CallDone):
            self.on_done(call, worker, message)
        elif isinstance(message, DeadlineExtended):
            call.deadline += message.s
            self.counts["extended"] += 1
        else:
            self.release(call)
            call.worker = None
            self.put_back(call, worker)

    def on_done(self, call: PendingCall, worker: _pool.WorkerLink, done: CallDone) -> None:
        outcome = call.outcome(done, self.startup.settings.limits)
        if outcome.suspicious:
            self.counts["suspicious_records"] += 1
        self.release(call)
        worker.call = None
        if worker.session is None:
            worker.pool.give_back(worker)
        worker.pool.failures = 0
        if call.id not in self.calls:
            self.sessions.cell_finished(call)
            return
        # A call that got no core because of the executor's own load proves nothing: try it again, among fewer calls.
        starved = done.why == "starved" and call.session is None
        if call.attempt == 1 and (starved or outcome.kind == "sandbox_error"):
            if starved:
                self.width.narrow(len(self.running))
            self.retry(call, last=starved)
        else:
            self.answer(call, outcome)

    def release(self, call: PendingCall) -> None:
        self.running.pop(call.n, None)
        call.close_files()

    def retry(self, call: PendingCall, *, last: bool = False) -> None:
        """Try a call again after an infrastructure failure, before the calls that wait or (`last`) after them."""
        self.counts["retries"] += 1
        call.attempt += 1
        call.worker = None
        if call.session is None:
            pending = self.pool_for(call).pending
            pending.append(call) if last else pending.appendleft(call)
        else:
            self.sessions.ready.append(call)

    def answer(self, call: PendingCall, outcome: ProgramOutcome) -> None:
        self.calls.pop(call.id, None)
        outcome.queue_ms = 1000 * ((call.started or time.monotonic()) - call.arrived)
        outcome.attempt, outcome.session_id = call.attempt, call.session
        outcome.worker_id = call.worker.slot if call.worker else None
        out, err = (text.encode("utf-8", "surrogatepass") for text in (outcome.stdout, outcome.stderr))
        self.link.send_soon(_messages.CallResult(call.id, len(out), outcome.changed_fields()), out, err)
        self.sessions.cell_finished(call)

    def on_worker_end(self, worker: _pool.WorkerLink) -> None:
        """Try the call of a lost worker once more; its session is lost."""
        call = worker.call
        self.sessions.worker_ended(worker)
        if call is None or call.n not in self.running:
            return
        self.release(call)
        worker.call = None
        if call.id not in self.calls:
            self.sessions.cell_finished(call)
        elif call.attempt == 1 and call.session is None:
            self.retry(call)
        elif self.startup.plan.level == "L0" and call.session is None and not worker.pool.breaker_open():
            # Only at L0 can a program reach its worker. If that ends twice while others live, the program ended it.
            self.answer(call, ProgramOutcome("crash", signal=int(signal.SIGKILL)))
        else:
            message = f"its worker ended: {worker.fault or 'no reason known'}"[:500]
            self.answer(call, ProgramOutcome("sandbox_error", error_type="WorkerLost", error_message=message))

    def housekeeping(self) -> None:
        """Once a second: answer calls that waited too long, evict idle sessions, reap processes, start workers."""
        now = time.monotonic()
        for pool in self.pools.values():
            while pool.pending and now - pool.pending[0].arrived > self.startup.settings.queue_timeout_s:
                call = pool.pending.popleft()
                self.answer(call, ProgramOutcome("queue_timeout", error_type="QueueTimeout", error_message="no worker"))
            pool.grow()
        self.sessions.evict_idle(self.startup.settings.session_idle_s)
        # Orphans of dead roots. Roots themselves are reaped by their Popen.
        _worker.reap_except({root.process.pid for pool in self.pools.values() for root in pool.roots})
        self.loop.later(1.0, self.housekeeping)

    def end(self) -> None:
        """Kill everything and remove the files."""
        for pool in self.pools.values():
            pool.end()
        for pool in self.pools.values():
            pool.await_end()
        # Programs become children of this process when their roots end. They have been killed by then; reap them.
        _worker.end_children(lambda: _worker.children_of(os.getpid()), seconds=3.0)
        if self.startup is not None:
            self.startup.cleanup.end()


def main(arguments: list[str]) -> None:
    """Entry of the process; its argument is the descriptor of the trainer's connection."""
    Supervisor(socket.socket(fileno=int(arguments[0]))).main()
