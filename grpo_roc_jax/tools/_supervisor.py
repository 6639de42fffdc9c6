"""The executor process: one event loop between the trainer and the workers; it never runs or parses a program.

It starts roots, lets them fork workers, hands each call to an idle worker in memory files, reads what the child left
there, and answers by id. Everything ends with it, and it ends with the trainer. Standard library only.
"""

import heapq
import itertools
import os
import selectors
import signal
import socket
import time
import traceback
from collections import deque

from . import _janitor, _kernel, _outcome, _pool, _wire, _worker, sandbox
from ._calls import INEXACT, RESULT_CAP, Call, SessionState, lost, needs_packages, read_ends, write_all

GRACE_S = 10.0
"""A worker that has not answered this long after its limit is itself at fault. Long, for hosts under load."""
TOGETHER_S = 0.01
"""While calls wait for workers, results travel together for so long: the trainer is not needed to keep workers busy,
and waking it for each result costs it more than reading one. Short beside the time in the queue."""


class Supervisor:
    """State of the executor process."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self.reader, self.out = link, _wire.FrameReader(), bytearray()
        self.held = self.timed = False
        """Whether results wait to be sent, and whether a timer will send them."""
        self.selector = selectors.EpollSelector()
        self.timers: list = []
        self.order = itertools.count(1)
        self.calls: dict[str, Call] = {}
        self.running: dict[int, Call] = {}
        self.sessions: dict[str, SessionState] = {}
        self.cells: deque[Call] = deque()
        self.counts: dict[str, int] = {}
        self.pools: dict[str, _pool.Pool] = {}
        self.limits: dict = {}
        self.base = ""
        self.janitor: _janitor.Janitor | None = None
        self.announced = False
        self.free_slots: list[int] = []
        self.slots = itertools.count()

    def main(self) -> None:
        """Serve until the trainer hangs up."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _kernel.prctl("prctl(PR_SET_CHILD_SUBREAPER)", _kernel.PR_SET_CHILD_SUBREAPER, 1)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.link.setblocking(False)
        self.selector.register(self.link, selectors.EVENT_READ, self.on_link)
        try:
            while True:
                pause = max(0.0, self.timers[0][0] - time.monotonic()) if self.timers else None
                for key, events in self.selector.select(pause):
                    key.data(events)
                while self.timers and self.timers[0][0] <= time.monotonic():
                    heapq.heappop(self.timers)[2]()
                self.dispatch()
                self.let_go()
        except (EOFError, ConnectionError, _wire.BadFrame):
            pass
        except Exception:
            # A mistake of ours: say it where somebody reads it; the trainer starts another executor process.
            self.reply({"op": "died", "message": traceback.format_exc()[-4000:]})
        finally:
            self.end()

    def later(self, delay: float, action) -> None:
        heapq.heappush(self.timers, (time.monotonic() + delay, next(self.order), action))

    def take_slot(self) -> int:
        """A small number for a worker, used by no other one now; at L4 its user id derives from it."""
        return self.free_slots.pop() if self.free_slots else next(self.slots)

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount

    # The trainer's side.

    def on_link(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self.flush()
        if not events & selectors.EVENT_READ:
            return
        try:
            frames = self.reader.read(self.link)
        except BlockingIOError:
            return
        for header, payload in frames:
            getattr(self, "do_" + header["op"])(header, payload)

    def reply(self, header: dict, *parts: bytes) -> None:
        self.out += _wire.pack_frame(header, *parts)
        self.flush()

    def reply_soon(self, header: dict, *parts: bytes) -> None:
        """With what else comes in this turn of the loop, or within `TOGETHER_S` while calls wait for workers."""
        self.out += _wire.pack_frame(header, *parts)
        self.held = True

    def let_go(self) -> None:
        if not self.held:
            return
        if not (self.cells or any(pool.pending for pool in self.pools.values())):
            self.flush()
        elif not self.timed:
            self.timed = True
            self.later(TOGETHER_S, self.flush)

    def flush(self) -> None:
        self.held = self.timed = False
        try:
            while self.out:
                del self.out[: self.link.send(self.out[: 1 << 18])]
        except BlockingIOError:
            pass
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.out else 0)
        if self.selector.get_key(self.link).events != events:
            self.selector.modify(self.link, events, self.on_link)

    def do_start(self, header: dict, _: bytes) -> None:
        """Probe, choose the level, start the first roots; `ready` follows when workers are up."""
        self.limits = limits = header["config"]
        if limits["cpu_list"]:
            os.sched_setaffinity(0, limits["cpu_list"])
        probe = sandbox.probe_host()
        # The texts of all programs will be in this process; nobody of the same user may read its memory. After the
        # probe only: its children inherit this, and would not be allowed to write their own user maps.
        _kernel.prctl("prctl(PR_SET_DUMPABLE)", _kernel.PR_SET_DUMPABLE, 0)
        try:
            level = sandbox.choose(probe, limits["level"], limits["min_level"])
        except LookupError as error:
            self.reply({"op": "unavailable", "message": str(error)})
            return
        self.base = _janitor.make_base(limits["scratch_dir"])
        # Only now: the probe has forked for the last time.
        self.janitor = _janitor.Janitor(self.base, os.path.join(self.base, _worker.TRASH))
        limits["nproc"] = _pool.process_limit(limits["threads"], level)
        plan = sandbox.make_plan(limits, level, [layer.name for layer in probe.layers if layer.ok], self.base)
        plan["uid_base"] = limits["uid_base"] + 1024 * (os.getpid() % 6)
        plan["outer_uid"] = 65534 if os.geteuid() == 0 else os.geteuid()
        fixed = _kernel.fix_addresses()
        self.capabilities = {
            "level": level, "missing": probe.missing(level), "fixed_addresses": fixed, "versions": {},
            "layers": [x for x, on in zip(sandbox.LAYERS, (1, plan["seccomp"], plan["landlock"], plan["namespaces"], plan["own_uid"]), strict=True) if on],  # noqa: E501
        }  # fmt: skip
        workers, roots = _pool.fit_to_host(limits)
        self.capabilities["workers"] = workers
        self.pools["full"] = _pool.Pool(self, "full", plan, workers, roots)
        if limits["bare_root"]:
            self.pools["bare"] = _pool.Pool(self, "bare", plan, workers, max(1, roots // 2))
        self.width = workers
        for pool in self.pools.values():
            pool.grow()
        self.later(1.0, self.housekeeping)

    def worker_up(self, worker: "_pool.WorkerLink") -> None:
        if not self.announced and all(pool.ever_up for pool in self.pools.values()):
            self.announced = True
            self.capabilities["versions"] = self.pools["full"].report.get("versions", {})
            self.capabilities["collapsed"] = self.pools["full"].report.get("collapsed", 0)
            self.reply({"op": "ready"} | self.capabilities)

    def start_failed(self, message: str) -> None:
        if not self.announced:
            self.reply({"op": "failed", "message": message})

    def do_call(self, header: dict, data: bytes) -> None:
        call = Call(next(self.order), header, data)
        self.calls[call.id] = call
        if call.session is None:
            self.pool_for(call).pending.append(call)
        else:
            state = self.sessions.setdefault(call.session, SessionState())
            state.used = time.monotonic()
            state.queue.append(call)
            self.next_cell(state)

    def pool_for(self, call: Call) -> "_pool.Pool":
        bare = self.pools.get("bare")
        return self.pools["full"] if bare is None or call.session or needs_packages(call.code) else bare

    def next_cell(self, state: SessionState) -> None:
        """Put the session's next cell in line, once the one before it is done."""
        if state.running is not None or not state.queue:
            return
        call = state.running = state.queue.popleft()
        if state.lost:
            self.answer(call, lost(state.lost))
        elif state.worker is not None:
            self.cells.append(call)
        else:
            self.pools["full"].pending.append(call)

    def do_cancel(self, header: dict, _: bytes) -> None:
        for call_id in header["ids"]:
            call = self.calls.pop(call_id, None)
            if call is None:
                continue
            self.count("cancelled")
            if call.worker is not None:
                call.worker.send({"op": "kill", "n": call.n})
            else:
                self.remove_waiting(call)

    def remove_waiting(self, call: Call) -> None:
        places = [pool.pending for pool in self.pools.values()] + [self.cells]
        state = self.sessions.get(call.session)
        for place in places + ([state.queue] if state else []):
            if call in place:
                place.remove(call)
        if state is not None and state.running is call:
            state.running = None
            self.next_cell(state)

    def do_close(self, header: dict, _: bytes) -> None:
        self.close_session(header["session"])

    def close_session(self, name: str) -> None:
        state = self.sessions.pop(name, None)
        if state is None:
            return
        for call in [state.running, *state.queue]:
            if call is not None and call.id in self.calls:
                self.answer(call, {"kind": "sandbox_error", "error_type": "SessionClosed", "error_message": "closed"})
                self.remove_waiting(call)
        if state.worker is not None:
            state.worker.drop()

    def do_stats(self, header: dict, _: bytes) -> None:
        numbers = {f"tools/{name}": value for name, value in self.counts.items()}
        numbers |= {
            "tools/running": len(self.running),
            "tools/sessions_open": sum(state.worker is not None for state in self.sessions.values()),
            "tools/queued": sum(len(pool.pending) for pool in self.pools.values()) + len(self.cells),
        }  # fmt: skip
        for name, pool in self.pools.items():
            numbers |= {f"tools/{name}/{key}": value for key, value in pool.numbers().items()}
        for key in ("workers_alive", "workers_busy", "roots_alive", "slots_down", "respawns", "breaker_open"):
            numbers[f"tools/{key}"] = sum(pool.numbers()[key] for pool in self.pools.values())
        self.reply({"op": "stats", "n": header["n"], "numbers": numbers})

    # Calls.

    def dispatch(self) -> None:
        """Give waiting calls to idle workers, as far as the width of the pool allows."""
        while self.cells and len(self.running) < self.width:
            call = self.cells.popleft()
            state = self.sessions.get(call.session)
            if state is None or state.worker is None:
                self.answer(call, lost(state.lost if state else "it was closed"))
            else:
                self.launch(call, state.worker)
        for pool in self.pools.values():
            while pool.pending and len(self.running) < self.width:
                worker = pool.take()
                if worker is None:
                    break
                call = pool.pending.popleft()
                if call.session is not None:
                    self.make_room()
                    worker.session = call.session
                    self.sessions[call.session].worker = worker
                    pool.lend(worker)
                self.launch(call, worker)
            if pool.pending and not pool.idle and len(pool.workers) < pool.target:
                pool.grow()

    def launch(self, call: Call, worker: "_pool.WorkerLink") -> None:
        call.nonce = os.urandom(16).hex().encode()
        files: list[int] = []
        try:
            for content in (call.code, call.stdin, b"", b"", call.nonce):
                files.append(os.memfd_create("box", os.MFD_CLOEXEC))
                if content:
                    write_all(files[-1], content)
            os.lseek(files[1], 0, os.SEEK_SET)
        except OSError as error:
            for fd in files:
                os.close(fd)
            self.put_back(call, worker, f"memory file: {error}")
            return
        call.worker, call.fds, call.started = worker, tuple(files[2:]), time.monotonic()
        worker.call = call
        self.running[call.n] = call
        call.deadline = call.started + self.limits["wall_s"] + GRACE_S
        self.later(self.limits["wall_s"] + GRACE_S, lambda: self.overdue(call))
        message = {"op": "cell" if call.session else "call", "n": call.n, "seed": call.seed}
        if call.session:
            message["exact"] = INEXACT.search(call.code) is not None
        worker.send(message, tuple(files))
        for fd in files[:2]:
            os.close(fd)

    def put_back(self, call: Call, worker: "_pool.WorkerLink", reason: str) -> None:
        """The host had no descriptor or process to spare just now: wait a little, with fewer at a time."""
        self.count("put_back")
        self.narrow(1)
        worker.call = None
        if call.session:
            self.cells.append(call)
        else:
            worker.pool.give_back(worker)
            worker.pool.pending.appendleft(call)

    def narrow(self, least: int | None = None) -> None:
        """Run fewer calls at a time, for a while; never fewer than four times the cores but for want of resources."""
        least = least or 4 * len(os.sched_getaffinity(0))
        full = self.width == self.pools["full"].target
        self.width = min(self.width, max(least, 3 * len(self.running) // 4))
        if full and self.width < self.pools["full"].target:
            self.later(5.0, self.widen)

    def widen(self) -> None:
        self.width = min(self.pools["full"].target, self.width + 1)
        if self.width < self.pools["full"].target:
            self.later(0.5, self.widen)

    def overdue(self, call: Call) -> None:
        """The worker should have ended the call long ago: it is stuck, so it goes."""
        if self.running.get(call.n) is not call:
            return
        now = time.monotonic()
        if now < call.deadline:
            self.later(call.deadline - now, lambda: self.overdue(call))
            return
        self.count("workers_stuck")
        call.worker.kill()

    def on_done(self, worker: "_pool.WorkerLink", message: dict) -> None:
        """A worker answered."""
        call = worker.call
        if call is None or call.n != message["n"]:
            return
        if message["op"] == "extended":
            call.deadline += message["s"]
            self.count("extended")
            return
        if message["op"] == "refused":
            self.release(call)
            call.worker = None
            self.put_back(call, worker, f"fork: {os.strerror(message['errno'])}")
            return
        fields = self.collect(call, message)
        self.release(call)
        worker.call = None
        if worker.session is None:
            worker.pool.give_back(worker)
        worker.pool.well()
        if call.id in self.calls:
            # A call that our own load kept from running has shown nothing yet: once more, among fewer.
            starved = message["why"] == "starved" and call.session is None
            if call.attempt == 1 and (starved or fields["kind"] == "sandbox_error"):
                if starved:
                    self.narrow()
                self.retry(call, last=starved)
                return
            self.answer(call, fields)
        elif call.session in self.sessions:
            self.cell_finished(call)

    def collect(self, call: Call, done: dict) -> dict:
        """The typed result, out of the memory files and the worker's report."""
        out, err, record_fd = call.fds
        sizes = tuple(os.fstat(fd).st_size for fd in call.fds)
        record = _outcome.parse_record(os.pread(record_fd, RESULT_CAP, 0), call.nonce)
        fields = _outcome.decide(done, record, sizes, self.limits)
        if fields.pop("suspicious", False):
            self.count("suspicious_records")
        keep = self.limits["output_kb"] << 10
        fields["stdout"], cut_out = read_ends(out, sizes[0], keep)
        fields["stderr"], cut_err = read_ends(err, sizes[1], keep)
        fields["truncated"] = fields.get("truncated", False) or cut_out or cut_err
        fields |= {
            "stdout_bytes": sizes[0], "stderr_bytes": sizes[1], "wall_ms": 1000 * done["wall"],
            "cpu_ms": 1000 * done["cpu"], "max_rss_kb": done["rss"],
        }  # fmt: skip
        if call.session is not None:
            fields |= {"cell": done.get("cell"), "rolled_back": done.get("rolled_back", False)}
        return fields

    def release(self, call: Call) -> None:
        self.running.pop(call.n, None)
        for fd in call.fds:
            os.close(fd)
        call.fds = ()

    def retry(self, call: Call, *, last: bool = False) -> None:
        """Once more, after a fault of ours; not counted against anybody. `last`: behind all that wait."""
        self.count("retries")
        call.attempt += 1
        call.worker = None
        if call.session is None:
            pending = self.pool_for(call).pending
            pending.append(call) if last else pending.appendleft(call)
        else:
            self.cells.append(call)

    def answer(self, call: Call, fields: dict) -> None:
        self.calls.pop(call.id, None)
        out = fields.pop("stdout", "").encode("utf-8", "surrogatepass")
        err = fields.pop("stderr", "").encode("utf-8", "surrogatepass")
        worker = call.worker
        fields |= {
            "queue_ms": 1000 * ((call.started or time.monotonic()) - call.arrived), "attempt": call.attempt,
            "worker_id": worker.slot if worker else None, "session_id": call.session,
        }  # fmt: skip
        # The trainer reads thousands of these a step; what is empty there anyway need not travel.
        said = {
            name: round(value, 3) if type(value) is float else value
            for name, value in fields.items()
            if value is not None and value is not False and value != ""
        }
        self.reply_soon({"op": "result", "id": call.id, "out": len(out), "fields": said}, out, err)
        self.cell_finished(call)

    def cell_finished(self, call: Call) -> None:
        state = self.sessions.get(call.session)
        if state is not None and state.running is call:
            state.running, state.used = None, time.monotonic()
            self.next_cell(state)

    def on_worker_end(self, worker: "_pool.WorkerLink") -> None:
        """A worker is gone: its call is tried once more, its session is lost."""
        call, state = worker.call, self.sessions.get(worker.session)
        if state is not None and state.worker is worker:
            state.lost, state.worker = f"its worker ended: {worker.fault or 'no reason known'}", None
        if call is None or call.n not in self.running:
            return
        self.release(call)
        worker.call = None
        if call.id not in self.calls:
            self.cell_finished(call)
        elif call.attempt == 1 and call.session is None:
            self.retry(call)
        elif self.capabilities["level"] == "L0" and call.session is None and not worker.pool.stormy():
            # Only at L0 can a program reach its worker; twice the same end, while others live, is its own doing.
            self.answer(call, {"kind": "crash", "signal": int(signal.SIGKILL)})
        else:
            message = f"its worker ended: {worker.fault or 'no reason known'}"[:500]
            self.answer(call, {"kind": "sandbox_error", "error_type": "WorkerLost", "error_message": message})

    # Housekeeping.

    def make_room(self) -> None:
        """Close the least recently used idle session when there are too many."""
        live = {name: state for name, state in self.sessions.items() if state.worker is not None}
        if len(live) < self.limits["sessions"]:
            return
        idle = {name: state for name, state in live.items() if state.running is None and not state.queue}
        if idle:
            self.evict(min(idle, key=lambda name: idle[name].used))

    def evict(self, name: str) -> None:
        """The process goes; a later cell of this session is told that it is lost, never served from an empty one."""
        self.count("sessions_evicted")
        state = self.sessions[name]
        worker, state.worker, state.lost = state.worker, None, "it was closed to make room or after standing idle"
        if worker is not None:
            worker.session = None
            worker.drop()

    def housekeeping(self) -> None:
        """Once a second: old waiters, idle sessions, ended processes, missing workers."""
        now = time.monotonic()
        for pool in self.pools.values():
            while pool.pending and now - pool.pending[0].arrived > self.limits["queue_timeout_s"]:
                call = pool.pending.popleft()
                self.answer(call, {"kind": "queue_timeout", "error_type": "QueueTimeout", "error_message": "no worker"})
            pool.grow()
        for name, state in list(self.sessions.items()):
            if state.worker and not state.running and now - state.used > self.limits["session_idle_s"]:
                self.evict(name)
        _pool.reap({root.process.pid for pool in self.pools.values() for root in pool.roots})
        self.later(1.0, self.housekeeping)

    def end(self) -> None:
        """Kill everything and remove what lies on disk."""
        for pool in self.pools.values():
            pool.end()
        for pool in self.pools.values():
            pool.await_end()
        # Programs come to this process when their roots are gone; they are killed by then, and waited for.
        _worker.end_children(lambda: _worker.children_of(os.getpid()), seconds=3.0)
        if self.janitor is not None:
            self.janitor.end()


def main(arguments: list[str]) -> None:
    """Entry of the process: the descriptor of the trainer's connection."""
    Supervisor(socket.socket(fileno=int(arguments[0]))).main()
