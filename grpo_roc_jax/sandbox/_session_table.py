"""Sessions in the executor process: the cells of each run in order, all on one worker. Standard library only."""

import time
from collections import deque

from ._calls import PendingCall, ProgramOutcome


class SessionState:
    """One session: its worker, the cell that runs or is the next to run, those after it, and why it is lost."""

    def __init__(self) -> None:
        self.worker = self.running = None
        self.queue: deque[PendingCall] = deque()
        self.used, self.lost = time.monotonic(), ""


def lost_session(reason: str) -> ProgramOutcome:
    message = f"the session is gone: {reason}"[:500]
    return ProgramOutcome("sandbox_error", error_type="SessionLost", error_message=message)


class SessionTable:
    """All sessions by name. `owner` is the `Supervisor`, which answers calls and holds the pools."""

    def __init__(self, owner) -> None:
        self.owner = owner
        self.states: dict[str, SessionState] = {}
        self.ready: deque[PendingCall] = deque()
        """Cells whose session has a worker, and which wait until fewer calls are running."""

    def with_worker(self) -> dict[str, SessionState]:
        return {name: state for name, state in self.states.items() if state.worker is not None}

    def add(self, call: PendingCall) -> None:
        state = self.states.setdefault(call.session, SessionState())
        state.used = time.monotonic()
        state.queue.append(call)
        self._advance(state)

    def _advance(self, state: SessionState) -> None:
        """Let the next cell of a session wait for a worker, if the previous one has ended."""
        if state.running is not None or not state.queue:
            return
        call = state.running = state.queue.popleft()
        if state.lost:
            self.owner.answer(call, lost_session(state.lost))
        elif state.worker is not None:
            self.ready.append(call)
        else:
            self.owner.pools["full"].pending.append(call)

    def take_worker(self, call: PendingCall):
        """The worker of a cell's session; None after the cell was answered because the session is gone."""
        state = self.states.get(call.session)
        if state is not None and state.worker is not None:
            return state.worker
        self.owner.answer(call, lost_session(state.lost if state else "it was closed"))
        return None

    def cell_finished(self, call: PendingCall) -> None:
        state = self.states.get(call.session)
        if state is not None and state.running is call:
            state.running, state.used = None, time.monotonic()
            self._advance(state)

    def remove(self, call: PendingCall) -> None:
        """Forget a cell that has not been started."""
        state = self.states.get(call.session)
        for queue in (self.ready, *([state.queue] if state else [])):
            if call in queue:
                queue.remove(call)
        if state is not None and state.running is call:
            state.running = None
            self._advance(state)

    def close(self, name: str) -> None:
        state = self.states.pop(name, None)
        if state is None:
            return
        for call in [state.running, *state.queue]:
            if call is not None and call.id in self.owner.calls:
                closed = ProgramOutcome("sandbox_error", error_type="SessionClosed", error_message="closed")
                self.owner.answer(call, closed)
                self.owner.remove_waiting(call)
        if state.worker is not None:
            state.worker.drop()

    def worker_ended(self, worker) -> None:
        """Note that the worker of a session is lost, and its variables with it."""
        state = self.states.get(worker.session)
        if state is not None and state.worker is worker:
            state.lost, state.worker = f"its worker ended: {worker.fault or 'no reason known'}", None

    def make_room(self, most: int) -> None:
        """Evict the least recently used idle session if there are `most` already."""
        live = self.with_worker()
        idle = {name: state for name, state in live.items() if state.running is None and not state.queue}
        if len(live) >= most and idle:
            self.evict(min(idle, key=lambda name: idle[name].used))

    def evict_idle(self, limit_s: float) -> None:
        now = time.monotonic()
        for name, state in list(self.states.items()):
            if state.worker and not state.running and now - state.used > limit_s:
                self.evict(name)

    def evict(self, name: str) -> None:
        """End a session's process. Later cells are answered as lost; they never run in an empty session."""
        self.owner.counts["sessions_evicted"] += 1
        state = self.states[name]
        worker, state.worker, state.lost = state.worker, None, "it was closed to make room or after standing idle"
        if worker is not None:
            worker.session = None
            worker.drop()
