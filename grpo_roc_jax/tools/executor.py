"""The interface every executor keeps, and the bookkeeping they share; what runs programs is elsewhere.

A decode loop calls `submit` when a row has emitted a complete call and `poll` between its steps; neither waits.
Results are matched by id and arrive in the order in which the calls end.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

from grpo_roc_jax.tools.config import ToolsConfig
from grpo_roc_jax.tools.observation import observe
from grpo_roc_jax.tools.registry import Job, Registry, default_registry
from grpo_roc_jax.types import ERROR_KINDS, INFRA_KINDS, ToolResult

log = logging.getLogger(__name__)
SAMPLES = 4096
"""Latencies kept for the percentiles of `stats`."""
COUNT_AT = 256
"""Results after which they are counted."""
counted_of = attrgetter(
    "kind", "truncated", "policy_denied", "rolled_back", "stdout_bytes", "stderr_bytes", "max_rss_kb", "wall_ms",
    "cpu_ms", "queue_ms",
)  # fmt: skip
EMPTY = vars(ToolResult("ok"))
CLOSED = "the executor was closed while the call ran"


@dataclass(frozen=True)
class CodeCall:
    """One call to be run."""

    id: str
    """Unique in the run, such as `step/problem/sample/turn/index`."""
    tool: str
    """Name of a registered tool."""
    arguments: Mapping[str, Any]
    session: str | None
    """Trajectory id, for stateful tools; None for stateless ones."""
    seed: int = 0
    """Seeds the program's `random` and `numpy.random`."""


@dataclass(frozen=True)
class Capabilities:
    """What an executor reached at start."""

    level: str
    """Isolation level, `L0` to `L4`; `remote` where the service decides, `fake` where nothing runs."""
    missing: tuple[str, ...] = ()
    """Layers that a stronger level would add and why they are not here."""
    layers: tuple[str, ...] = ()
    """Layers in force."""
    versions: Mapping[str, str] = field(default_factory=dict)
    workers: int = 0


class IsolationUnavailable(RuntimeError):
    """The host does not offer the wanted isolation level; the message holds the table and the remedy."""


class ExecutorFailed(RuntimeError):
    """The executor could not be started, or is closed."""


class ToolExecutor(Protocol):
    """What the rollout engine calls; thread-safe."""

    capabilities: Capabilities

    def start(self) -> Capabilities: ...

    def submit(self, call: CodeCall) -> None: ...

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, ToolResult]]: ...

    def cancel(self, ids: Iterable[str]) -> None: ...

    def close_session(self, session: str) -> None: ...

    def run(self, calls: Sequence[CodeCall]) -> list[ToolResult]: ...

    async def arun(self, call: CodeCall) -> ToolResult: ...

    def stats(self) -> dict[str, float]: ...

    def close(self) -> None: ...


@dataclass
class Ticket:
    """A call on its way; `sink` takes the result where somebody waits for this very call."""

    call: CodeCall
    job: Job | None
    submitted: float
    attempt: int = 1
    sink: Callable[[ToolResult], None] | None = None


class BaseExecutor:
    """Ids, results, waiting and counting; subclasses implement `_launch`, `_drop`, `_open` and `_shut`."""

    def __init__(self, config: ToolsConfig, registry: Registry | None = None) -> None:
        self.config = config
        self.registry = registry or default_registry(config.enabled)
        self.capabilities = Capabilities(level="")
        self._tickets: dict[str, Ticket] = {}
        self._finished: list[tuple[str, ToolResult]] = []
        self._mutex = threading.RLock()
        self._ready = threading.Condition(self._mutex)
        self._counts: dict[str, float] = {}
        self._uncounted: list[tuple] = []
        self._samples: dict[str, deque[float]] = {name: deque(maxlen=SAMPLES) for name in ("wall", "cpu", "queue")}
        self._started = self._closed = False

    def _open(self) -> Capabilities:
        raise NotImplementedError

    def _launch(self, ticket: Ticket) -> None:
        """Begin a prepared call; must not wait."""
        raise NotImplementedError

    def _drop(self, ids: list[str]) -> None:
        """Kill calls whose results nobody wants any more."""

    def _shut(self) -> None:
        """Release everything."""

    def start(self) -> Capabilities:
        """Block until calls can run; a second call changes nothing."""
        with self._ready:
            if self._closed:
                raise ExecutorFailed("this executor is closed; make a new one")
            if self._started:
                return self.capabilities
        self.capabilities = self._open()
        self._started = True
        missing = "; missing: " + ", ".join(self.capabilities.missing) if self.capabilities.missing else ""
        log.info("tool executor at isolation level %s%s", self.capabilities.level, missing)
        return self.capabilities

    def submit(self, call: CodeCall) -> None:
        """Begin a call; its result will come out of `poll`."""
        self._begin(call, None)

    def _begin(self, call: CodeCall, sink: Callable[[ToolResult], None] | None) -> None:
        if not self._started or self._closed:
            raise ExecutorFailed("submit needs a running executor: call start() first and submit before close()")
        prepared = self.registry.prepare(call.tool, call.arguments, call.session)
        ticket = Ticket(call, prepared if isinstance(prepared, Job) else None, time.monotonic(), sink=sink)
        with self._mutex:
            if call.id in self._tickets:
                raise ValueError(f"call id {call.id!r} is in flight already; ids must be unique in the run")
            self._tickets[call.id] = ticket
        if isinstance(prepared, ToolResult):
            self._finish(call.id, prepared)
        elif prepared.function is not None:
            self._run_trusted(ticket)
        else:
            self._launch(ticket)

    def _run_trusted(self, ticket: Ticket) -> None:
        """A tool that lives in the trainer runs in a thread of its own; its time-out abandons the thread."""

        def body() -> None:
            self._finish(ticket.call.id, self.registry.run_trusted(ticket.job))

        def late() -> None:
            seconds = self.config.wall_s
            self._finish(ticket.call.id, ToolResult("timeout", limit_hit="wall", wall_ms=1000 * seconds))

        timer = threading.Timer(self.config.wall_s, late)
        timer.daemon = True
        timer.start()
        threading.Thread(target=body, daemon=True, name="trusted-tool").start()

    def _finish(self, call_id: str, result: ToolResult) -> None:
        """Deliver a result once; a second one for the same id, or one for a cancelled call, is dropped."""
        with self._mutex:
            self._finish_with(call_id, vars(result))

    def _finish_with(self, call_id: str, fields: Mapping[str, Any]) -> None:
        """The same for a result that is not made yet, called with `_mutex`: thousands a step feel each copy."""
        ticket = self._tickets.pop(call_id, None)
        if ticket is None:
            return
        result = object.__new__(ToolResult)
        whole = vars(result)
        whole.update(EMPTY)
        whole.update(fields)
        job = ticket.job
        whole["observation"] = observe(result, job.code if job else "", self.config)
        if not result.isolation:
            whole["isolation"] = self.capabilities.level
        if ticket.attempt > result.attempt:
            whole["attempt"] = ticket.attempt
        self._uncounted.append(counted_of(result))
        if len(self._uncounted) >= COUNT_AT:
            self._count()
        if ticket.sink is None:
            self._finished.append((call_id, result))
        else:
            ticket.sink(result)
        self._announce()

    def _announce(self) -> None:
        """Let those that wait look again; called with `_mutex`."""
        self._ready.notify_all()

    def _await(self, satisfied: Callable[[], Any], timeout_s: float | None) -> None:
        """Return when `satisfied` holds, the executor is closed or the time is over; None waits for ever."""
        with self._ready:
            self._ready.wait_for(lambda: satisfied() or self._closed, timeout_s)

    def _expect(self, amount: int) -> None:
        """So many more results are awaited by nobody inside `_await`; negative when they are there."""

    def _count(self) -> None:
        """Add up what was not counted yet: many results in a row take a tenth of what they take one by one."""
        counts, samples = self._counts, self._samples
        for kind, truncated, denied, rolled_back, out, err, rss_kb, wall, cpu, queue in self._uncounted:
            flags = (("truncated", truncated), ("policy_denied", denied), ("rolled_back", rolled_back))
            for name in ("calls", "kind/" + kind, *(name for name, on in flags if on)):
                counts[name] = counts.get(name, 0) + 1
            counts["bytes_out"] = counts.get("bytes_out", 0) + out + err
            counts["max_rss_kb"] = max(counts.get("max_rss_kb", 0), rss_kb)
            if kind == "timeout":
                counts["timeout_cpu_s"] = counts.get("timeout_cpu_s", 0) + cpu / 1000
            samples["wall"].append(wall)
            samples["cpu"].append(cpu)
            samples["queue"].append(queue)
        self._uncounted.clear()

    def poll(self, timeout_s: float = 0.0) -> list[tuple[str, ToolResult]]:
        """Finished calls in completion order; waits at most `timeout_s` for the first."""
        self._await(lambda: self._finished, timeout_s)
        with self._mutex:
            done, self._finished = self._finished, []
        return done

    def cancel(self, ids: Iterable[str]) -> None:
        """Kill calls; none of them delivers a result afterwards, not even one that is finished but not yet polled."""
        wanted = set(ids)
        with self._ready:
            dropped = [call_id for call_id in wanted if self._tickets.pop(call_id, None) is not None]
            self._finished = [entry for entry in self._finished if entry[0] not in wanted]
            self._counts["cancelled"] = self._counts.get("cancelled", 0) + len(dropped)
        if dropped:
            self._drop(dropped)

    def close_session(self, session: str) -> None:
        """End a session; its process is gone shortly afterwards."""

    def run(self, calls: Sequence[CodeCall]) -> list[ToolResult]:
        """Results in the order of `calls`; blocks until the last one is there."""
        results: dict[str, ToolResult] = {}
        for call in calls:
            self._begin(call, partial(results.__setitem__, call.id))
        self._await(lambda: len(results) == len(calls), None)
        closed = ToolResult("sandbox_error", error_message=CLOSED)
        return [results.get(call.id, closed) for call in calls]

    async def arun(self, call: CodeCall) -> ToolResult:
        """The result of one call; cancelling the awaiting task kills the call."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ToolResult] = loop.create_future()

        def settle(result: ToolResult) -> None:
            if not future.done():
                future.set_result(result)

        def sink(result: ToolResult) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, result)

        self._begin(call, sink)
        self._expect(1)
        try:
            return await future
        except asyncio.CancelledError:
            self.cancel([call.id])
            raise
        finally:
            self._expect(-1)

    def stats(self) -> dict[str, float]:
        """Counts, rates per kind, and percentiles of the last calls, named `tools/...`."""
        with self._mutex:
            self._count()
            counts = dict(self._counts)
            samples = {name: sorted(values) for name, values in self._samples.items()}
            in_flight = len(self._tickets)
        calls = counts.get("calls", 0.0)
        infra = sum(counts.get(f"kind/{kind}", 0.0) for kind in INFRA_KINDS)
        errors = sum(counts.get(f"kind/{kind}", 0.0) for kind in ERROR_KINDS)
        numbers = {f"tools/{name}": float(value) for name, value in counts.items()}
        numbers |= {f"tools/rate/{name[5:]}": n / calls for name, n in counts.items() if name.startswith("kind/")}
        numbers["tools/calls"] = calls
        numbers["tools/in_flight"] = float(in_flight)
        numbers["tools/infra_rate"] = infra / calls if calls else 0.0
        numbers["tools/error_rate"] = errors / (calls - infra) if calls > infra else 0.0
        numbers["tools/truncated_rate"] = counts.get("truncated", 0.0) / calls if calls else 0.0
        numbers["tools/level"] = float(level_number(self.capabilities.level))
        for name, values in samples.items():
            for share in (50, 90, 99):
                numbers[f"tools/{name}_ms_p{share}"] = percentile(values, share)
        return numbers

    def close(self) -> None:
        """Kill what runs and release everything; calls in flight deliver nothing."""
        with self._ready:
            if self._closed:
                return
            self._closed = True
            waiting = [ticket for ticket in self._tickets.values() if ticket.sink]
            self._tickets.clear()
            self._ready.notify_all()
        for ticket in waiting:
            ticket.sink(ToolResult("sandbox_error", error_message=CLOSED))
        if self._started:
            self._shut()

    def __enter__(self) -> "BaseExecutor":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` per cent of the ordered values lie; 0 of an empty list."""
    if not ordered:
        return 0.0
    return float(ordered[min(len(ordered) - 1, max(0, math.ceil(share / 100 * len(ordered)) - 1))])


def level_number(level: str) -> int:
    """0 to 4 for `L0` to `L4`; -1 where the level is not ours to know."""
    return int(level[1]) if len(level) == 2 and level[0] == "L" else -1


class FakeExecutor(BaseExecutor):
    """Runs nothing: answers each job by a function, at once or when the test says so."""

    def __init__(
        self,
        answer: Callable[[Job, CodeCall], ToolResult] | None = None,
        *,
        manual: bool = False,
        config: ToolsConfig | None = None,
        registry: Registry | None = None,
    ) -> None:
        """
        Args:
            answer: The result of a job; by default `ok` with the code as its output.
            manual: Hold results back until `release` is called.
        """
        super().__init__(config or ToolsConfig(), registry)
        self._answer = answer or (lambda job, call: ToolResult("ok", stdout=job.code, stdout_bytes=len(job.code)))
        self._manual = manual
        self.held: list[str] = []
        self.closed_sessions: list[str] = []
        self.cancelled: list[str] = []

    def _open(self) -> Capabilities:
        return Capabilities(level="fake")

    def _launch(self, ticket: Ticket) -> None:
        if self._manual:
            self.held.append(ticket.call.id)
        else:
            self._finish(ticket.call.id, self._answer(ticket.job, ticket.call))

    def release(self, call_id: str) -> None:
        """Let a held call finish now."""
        self.held.remove(call_id)
        ticket = self._tickets.get(call_id)
        if ticket is not None:
            self._finish(call_id, self._answer(ticket.job, ticket.call))

    def _drop(self, ids: list[str]) -> None:
        self.cancelled.extend(ids)
        self.held = [call_id for call_id in self.held if call_id not in ids]

    def close_session(self, session: str) -> None:
        self.closed_sessions.append(session)


def malformed_result(message: str, config: ToolsConfig | None = None) -> ToolResult:
    """The result of a call whose text could not be read; such calls never reach an executor.

    Args:
        message: What is wrong with the text, in words for the policy (`ToolCall.message`).
    """
    result = ToolResult("malformed_call", error_type="MalformedCall", error_message=message[:500])
    return replace(result, observation=observe(result, "", config or ToolsConfig()))


def make_executor(config: ToolsConfig, registry: Registry | None = None) -> ToolExecutor:
    """The executor that `config.executor` names, not yet started.

    Args:
        registry: Tools that may be called; by default the built-in ones that `config.enabled` lists.
    """
    if config.executor == "local":
        from grpo_roc_jax.tools.python import PythonExecutor

        return PythonExecutor(config, registry)
    if config.executor == "ray":
        from grpo_roc_jax.tools.ray import RayExecutor

        return RayExecutor(config, registry)
    from grpo_roc_jax.tools.remote import CodeJudgeExecutor, SandboxFusionExecutor

    kinds = {"sandbox_fusion": SandboxFusionExecutor, "code_judge": CodeJudgeExecutor}
    if config.executor not in kinds:
        raise ValueError(f"tools.executor is {config.executor!r}; local, ray, {' or '.join(kinds)} is wanted")
    return kinds[config.executor](config, registry)
