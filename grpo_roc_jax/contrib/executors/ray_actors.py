"""Ray actors with a local pool each: programs run on many hosts, with the same code and the same kinds of results.

Each actor holds one `sandbox.executor.Executor`. Programs are sent in batches, and results return as they end, so an
endless loop does not delay other calls. Needs the `ray` extra.
"""

import dataclasses
import threading
import time
from collections import deque
from typing import Any

from grpo_roc_jax.process.installing import install_command
from grpo_roc_jax.sandbox._messages import Capabilities, ExecutorSettings
from grpo_roc_jax.sandbox.base import level_number
from grpo_roc_jax.sandbox.executor import Executor
from grpo_roc_jax.sandbox.program import ExecutorFailed, IsolationUnavailable, Program, Ticket
from grpo_roc_jax.sandbox.result import ToolResult
from grpo_roc_jax.tools.config import LocalPool, ToolsConfig
from grpo_roc_jax.tools.executor import BaseExecutor, settings_of
from grpo_roc_jax.tools.registry import Registry

POLL_S = 0.25
"""Seconds that an actor waits for a first result before it answers a poll."""
RESTARTS = 3
RECOVERY_S = 60.0
"""Seconds that an actor has to restart."""


class PoolActor:
    """The part that runs in the actor's process."""

    def __init__(self, settings: ExecutorSettings, start_timeout_s: float) -> None:
        self.executor = Executor(settings, start_timeout_s=start_timeout_s)
        self.failure = ""
        try:
            self.executor.start()
        except (IsolationUnavailable, ExecutorFailed) as error:
            self.failure = str(error)

    def capabilities(self) -> tuple[Capabilities, str]:
        return self.executor.capabilities, self.failure

    def submit(self, programs: list[Program]) -> None:
        for program in programs:
            self.executor.submit(program)

    def poll(self) -> list[tuple[str, ToolResult]]:
        return self.executor.poll(POLL_S)

    def do(self, method: str, *arguments: Any) -> Any:
        """Call another method of the executor."""
        return getattr(self.executor, method)(*arguments)


class RayExecutor(BaseExecutor):
    """Spreads calls over actors: cells go to the actor of their session, other calls to the least loaded actor."""

    def __init__(self, config: ToolsConfig, registry: Registry | None = None) -> None:
        try:
            import ray
        except ImportError as error:
            raise ExecutorFailed(f"tools.executor = ray needs the package: {install_command('ray')}") from error
        super().__init__(config, registry)
        self._ray = ray
        self.actors: list[Any] = []
        self._loads: list[set[str]] = []
        self._outboxes: list[deque[Program]] = []
        self._homes: dict[str, int] = {}
        self._down, self._gone = set(), set()
        """Actors that are restarting, and sessions whose actor was lost."""
        self._guard = threading.Condition()

    def _open(self) -> Capabilities:
        ray, config, actors = self._ray, self.config, self.config.executor
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
        size = config.workers or max(1, int(16 * actors.cpus))
        settings = settings_of(dataclasses.replace(config, executor=LocalPool(), workers=size))
        # One call for polling, one for sending and one for everything else may run at a time.
        kind = ray.remote(PoolActor)
        options = {"num_cpus": actors.cpus, "max_concurrency": 3, "max_restarts": RESTARTS}
        self.actors = [kind.options(**options).remote(settings, config.start_timeout_s) for _ in range(actors.actors)]
        try:
            wait = config.start_timeout_s + RECOVERY_S
            reached = ray.get([actor.capabilities.remote() for actor in self.actors], timeout=wait)
        except ray.exceptions.RayError as error:
            raise ExecutorFailed(f"the Ray actors did not start: {error}") from error
        failures = [failure for _, failure in reached if failure]
        if failures:
            raise IsolationUnavailable(f"{len(failures)} of {len(reached)} actors could not start: {failures[0]}")
        self._loads = [set() for _ in self.actors]
        self._outboxes = [deque() for _ in self.actors]
        for index in range(len(self.actors)):
            for body in (self._send, self._receive):
                threading.Thread(target=body, args=(index,), daemon=True, name=f"ray-tool-{index}").start()
        weakest = min(
            (capabilities for capabilities, _ in reached), key=lambda capabilities: level_number(capabilities.level)
        )
        return dataclasses.replace(weakest, workers=sum(capabilities.workers for capabilities, _ in reached))

    def _launch(self, ticket: Ticket) -> None:
        program = ticket.program
        if program.session in self._gone:
            self._fail(ticket, "the session is gone: its actor ended")
            return
        with self._guard:
            live = [i for i in range(len(self._loads)) if i not in self._down] or list(range(len(self._loads)))
            if program.session is None:
                index = min(live, key=lambda i: len(self._loads[i]))
            else:
                fewest = min(live, key=lambda i: list(self._homes.values()).count(i))
                index = self._homes.setdefault(program.session, fewest)
            self._loads[index].add(program.id)
            self._outboxes[index].append(program)
            self._guard.notify_all()

    def _send(self, index: int) -> None:
        """Send pending calls to an actor, several per message."""
        while not self._closed:
            with self._guard:
                self._guard.wait_for(lambda: self._outboxes[index] or self._closed, 0.5)
                box = self._outboxes[index]
                batch = [box.popleft() for _ in range(min(len(box), self.config.executor.batch))]
            if batch:
                try:
                    self._ray.get(self.actors[index].submit.remote(batch), timeout=self.config.executor.timeout_s)
                except Exception as error:
                    self._recover(index, [call.id for call in batch], error)

    def _receive(self, index: int) -> None:
        while not self._closed:
            with self._guard:
                self._guard.wait_for(lambda: self._loads[index] or self._closed, 0.5)
                if not self._loads[index]:
                    continue
            try:
                done = self._ray.get(self.actors[index].poll.remote(), timeout=self.config.executor.timeout_s)
            except Exception as error:
                if not self._closed:
                    with self._guard:
                        ids = list(self._loads[index] - {call.id for call in self._outboxes[index]})
                    self._recover(index, ids, error)
                continue
            for call_id, result in done:
                with self._guard:
                    self._loads[index].discard(call_id)
                self._finish(call_id, result)

    def _recover(self, index: int, ids: list[str], error: Exception) -> None:
        """Gives the calls of a lost actor to others, and waits until Ray has restarted it."""
        with self._guard:
            self._down.add(index)
            self._gone |= {session for session, home in self._homes.items() if home == index}
        self._resubmit(index, ids, error)
        deadline = time.monotonic() + RECOVERY_S
        while not self._closed and time.monotonic() < deadline:
            try:
                self._ray.get(self.actors[index].capabilities.remote(), timeout=RECOVERY_S)
                with self._guard:
                    self._down.discard(index)
                return
            except Exception:
                time.sleep(0.5)

    def _resubmit(self, index: int, ids: list[str], error: Exception) -> None:
        """Try stateless calls of a lost actor once more, and answer its cells, whose sessions are lost."""
        for call_id in ids:
            with self._guard:
                if call_id not in self._loads[index]:
                    continue
                self._loads[index].discard(call_id)
            ticket = self._tickets.get(call_id)
            if ticket and (ticket.attempt > 1 or ticket.program.session is not None):
                self._fail(ticket, f"the actor was lost: {type(error).__name__}")
            elif ticket:
                ticket.attempt += 1
                self._launch(ticket)

    def _fail(self, ticket: Ticket, message: str) -> None:
        result = ToolResult("transport_error", error_message=message, session_id=ticket.program.session)
        self._finish(ticket.program.id, result)

    def _drop(self, ids: list[str]) -> None:
        dropped = set(ids)
        with self._guard:
            for index, load in enumerate(self._loads):
                mine = load & dropped
                load -= mine
                self._outboxes[index] = deque(call for call in self._outboxes[index] if call.id not in mine)
                if mine:
                    self.actors[index].do.remote("cancel", list(mine))

    def close_session(self, session: str) -> None:
        with self._guard:
            index = self._homes.pop(session, None)
            self._gone.discard(session)
        if index is not None:
            self.actors[index].do.remote("close_session", session)

    def stats(self) -> dict[str, float]:
        numbers = super().stats()
        try:
            parts = self._ray.get([actor.do.remote("stats") for actor in self.actors], timeout=5.0)
        except Exception:
            return numbers
        for key in ("workers_alive", "workers_busy", "roots_alive", "respawns", "sessions_open", "slots_down"):
            numbers[f"tools/{key}"] = sum(part.get(f"tools/{key}", 0.0) for part in parts)
        return numbers

    def _shut(self) -> None:
        with self._guard:
            self._guard.notify_all()
        for actor in self.actors:
            try:
                self._ray.get(actor.do.remote("close"), timeout=10)
            except Exception:
                continue
            finally:
                self._ray.kill(actor)
