"""The bookkeeping that all executors of programs share: ids, results, waiting and counting. Subclasses run the
programs."""

import asyncio
import contextlib
import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from grpo_roc_jax.sandbox._messages import Capabilities
from grpo_roc_jax.sandbox.program import ExecutorFailed, Program, Ticket
from grpo_roc_jax.sandbox.result import ERROR_KINDS, INFRA_KINDS, ToolResult
from grpo_roc_jax.sandbox.shared_results import SharedResults

log = logging.getLogger(__name__)
SAMPLES = 4096
"""Number of latencies that are stored, for the percentiles of `stats`."""
COUNT_AT = 256
"""Number of results that are collected before they are counted together."""
counted_of = attrgetter(
    "kind", "truncated", "policy_denied", "rolled_back", "stdout_bytes", "stderr_bytes", "max_rss_kb", "wall_ms",
    "cpu_ms", "queue_ms",
)  # fmt: skip
EMPTY = vars(ToolResult("ok"))
CLOSED = "the executor was closed while the call ran"


class ProgramExecutor:
    """Ids, results, waiting and counting; subclasses implement `_launch`, `_drop`, `_open` and `_shut`. Thread-safe.

    `submit` starts a program and `poll` delivers results in the order in which the programs end; neither waits.
    """

    def __init__(self, *, share_results: bool = False) -> None:
        self.capabilities = Capabilities(level="")
        self._tickets: dict[str, Ticket] = {}
        self._shared = SharedResults() if share_results else None
        self._finished: list[tuple[str, ToolResult]] = []
        self._mutex = threading.RLock()
        self._ready = threading.Condition(self._mutex)
        self._counts: Counter[str] = Counter()
        self._uncounted: list[tuple] = []
        self._samples: dict[str, deque[float]] = {name: deque(maxlen=SAMPLES) for name in ("wall", "cpu", "queue")}
        self._started = self._closed = False

    def _open(self) -> Capabilities:
        raise NotImplementedError

    def _launch(self, ticket: Ticket) -> None:
        """Start a program. Must not block."""
        raise NotImplementedError

    def _proven(self, tickets: list[Ticket]) -> bool:
        """Whether no failure of the executor kept these calls from running. Called with `_mutex`."""
        return True

    def _drop(self, ids: list[str]) -> None:
        """Kill cancelled calls."""

    def _shut(self) -> None:
        """Release everything."""

    def start(self) -> Capabilities:
        """Block until calls can run. Calling it again has no effect."""
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

    @property
    def in_flight(self) -> list[str]:
        """Ids of the calls whose results are awaited."""
        return list(self._tickets)

    def submit(self, program: Program) -> None:
        """Start a program; `poll` delivers its result.

        Raises:
            ExecutorFailed: The executor is not started, or closed.
            ValueError: A program of that id is in flight already.
        """
        self._begin(program, None)

    def _begin(self, program: Program, sink: Callable[[ToolResult], None] | None) -> None:
        self._check_open()
        self._run_program(self._admit(program, sink))

    def _check_open(self) -> None:
        if not self._started or self._closed:
            raise ExecutorFailed("submit needs a running executor: call start() first and submit before close()")

    def _admit(self, program: Program, sink: Callable[[ToolResult], None] | None) -> Ticket:
        """The ticket of a program whose result is now awaited."""
        ticket = Ticket(program, sink=sink)
        with self._mutex:
            if program.id in self._tickets:
                raise ValueError(f"call id {program.id!r} is in flight already; ids must be unique in the run")
            self._tickets[program.id] = ticket
        return ticket

    def _run_program(self, ticket: Ticket) -> None:
        ticket.can_share = self._shared is not None and ticket.program.session is None
        try:
            if ticket.can_share:
                self._share(ticket)
            else:
                self._launch(ticket)
        except BaseException:
            self._take_back(ticket)
            raise

    def _take_back(self, ticket: Ticket) -> None:
        """Await no result of a call that could not be started. Its id may be used again."""
        with self._mutex:
            if self._tickets.get(ticket.program.id) is ticket:
                del self._tickets[ticket.program.id]
            heir = self._shared.leave(ticket) if ticket.can_share else None
        self._go_on_with([heir], self._launch)

    def _go_on_with(self, tickets: Iterable[Ticket | None], begin: Callable[[Ticket], None]) -> None:
        """Begin calls that waited for another one. Their submitters have returned, so one that cannot be started ends
        with an error."""
        for ticket in tickets:
            if ticket is None or ticket.program.id not in self._tickets:
                continue
            try:
                begin(ticket)
            except Exception as error:
                message = f"the program could not be started: {error}"
                self._finish(
                    ticket.program.id,
                    ToolResult("sandbox_error", error_type=type(error).__name__, error_message=message),
                )

    def _share(self, ticket: Ticket) -> None:
        """Answer a program by the result of another one with the same text, or launch it."""
        with self._mutex:
            known = self._shared.result_of(ticket)
            self._counts["shared"] += known is not None
            waits = known is None and self._shared.joins(ticket)
        if known is not None:
            self._finish_with(ticket.program.id, known)
        elif not waits:
            self._launch(ticket)

    def _finish(self, call_id: str, result: ToolResult) -> None:
        """Deliver a result. A second result for the same id, or one for a cancelled call, is dropped."""
        self._finish_with(call_id, vars(result))

    def _finish_with(self, call_id: str, fields: Mapping[str, Any]) -> None:
        """Builds a result from its fields and delivers it. Called without `_mutex`, since the text of a result may be
        long.

        With thousands of results per step each copy counts, so the result is made without its `__init__`.
        """
        ticket = self._tickets.get(call_id)
        if ticket is None:
            return
        result = object.__new__(ToolResult)
        attributes = vars(result)
        attributes.update(EMPTY)
        attributes.update(fields)
        attributes["observation"] = self.observation_text(result, ticket.program.code)
        if not result.isolation:
            attributes["isolation"] = self.capabilities.level
        if ticket.attempt > result.attempt:
            attributes["attempt"] = ticket.attempt
        with self._mutex:
            if self._tickets.pop(call_id, None) is None:
                return
            self._uncounted.append(counted_of(result))
            if len(self._uncounted) >= COUNT_AT:
                self._count()
            if ticket.sink is None:
                self._finished.append((call_id, result))
            else:
                ticket.sink(result)
            self._announce()
            waiting = self._shared.settle(ticket, fields) if self._shared and ticket.can_share else []
        self._go_on_with(waiting, self._share)

    def observation_text(self, result: ToolResult, code: str) -> str:
        """The text of a result in a dialogue; empty if programs are not part of one. Called without a lock, since long
        output takes a while and other threads submit and cancel meanwhile."""
        return ""

    def _announce(self) -> None:
        """Wake the threads that wait for results. Called with `_mutex`."""
        self._ready.notify_all()

    def _await(self, satisfied: Callable[[], Any], timeout_s: float | None) -> None:
        """Return when `satisfied` holds, the executor is closed or the time is over; None waits forever."""
        with self._ready:
            self._ready.wait_for(lambda: satisfied() or self._closed, timeout_s)

    def _expect(self, amount: int) -> None:
        """Records that `amount` more results are awaited outside `_await`; negative once they have arrived."""

    def _count(self) -> None:
        """Count the collected results; many at once take a tenth of the time that they take one by one."""
        counts, samples = self._counts, self._samples
        for kind, truncated, denied, rolled_back, out, err, rss_kb, wall, cpu, queue in self._uncounted:
            flags = (("truncated", truncated), ("policy_denied", denied), ("rolled_back", rolled_back))
            for name in ("calls", "kind/" + kind, *(name for name, on in flags if on)):
                counts[name] += 1
            counts["bytes_out"] += out + err
            counts["max_rss_kb"] = max(counts["max_rss_kb"], rss_kb)
            if kind == "timeout":
                counts["timeout_cpu_s"] += cpu / 1000
            samples["wall"].append(wall)
            samples["cpu"].append(cpu)
            samples["queue"].append(queue)
        self._uncounted.clear()

    def poll(self, timeout_s: float = 0.0, ids: Container[str] | None = None) -> list[tuple[str, ToolResult]]:
        """Results in the order in which the calls ended. Waits at most `timeout_s` for the first. With `ids`, results
        of other calls stay for their own caller."""
        if ids is None:
            self._await(lambda: self._finished, timeout_s)
        else:
            self._await(lambda: any(call_id in ids for call_id, _ in self._finished), timeout_s)
        with self._mutex:
            done, self._finished = self._finished, []
            if ids is not None and not all(call_id in ids for call_id, _ in done):
                self._finished = [entry for entry in done if entry[0] not in ids]
                done = [entry for entry in done if entry[0] in ids]
        return done

    def cancel(self, ids: Iterable[str]) -> bool:
        """Kill calls. None of them delivers a result afterwards, not even a finished call that was not polled yet.

        Returns False if one of them may never have run because the executor is down, or was.
        """
        cancelled = set(ids)
        with self._ready:
            tickets = [ticket for call_id in cancelled if (ticket := self._tickets.pop(call_id, None))]
            dropped, proven = [ticket.program.id for ticket in tickets], self._proven(tickets)
            self._finished = [entry for entry in self._finished if entry[0] not in cancelled]
            self._counts["cancelled"] += len(dropped)
            left = [self._shared.leave(ticket) for ticket in tickets if ticket.can_share] if self._shared else []
        if dropped:
            self._drop(dropped)
        self._go_on_with(left, self._launch)
        return proven

    def close_session(self, session: str) -> None:
        """End a session. Its process ends shortly afterwards."""

    def run(self, programs: Iterable[Program]) -> list[ToolResult]:
        """Run programs and return their results in the same order. Blocks until all have ended; an exception ends those
        that still run.

        Raises:
            ExecutorFailed: The executor is not started, or closed.
            ValueError: Two of the programs have the same id, or one of that id is in flight already.
        """
        programs = list(programs)
        results: dict[str, ToolResult] = {}
        sinks = {program.id: partial(results.__setitem__, program.id) for program in programs}
        if len(sinks) < len(programs):
            [(repeated, count)] = Counter(program.id for program in programs).most_common(1)
            raise ValueError(f"call id {repeated!r} is there {count} times; ids must be unique in the run")
        try:
            for program in programs:
                self._begin(program, sinks[program.id])
            self._await(lambda: len(results) == len(programs), None)
        except BaseException:
            self.cancel([i for i, sink in sinks.items() if (ticket := self._tickets.get(i)) and ticket.sink is sink])
            raise
        closed = ToolResult("sandbox_error", error_message=CLOSED)
        return [results.get(program.id, closed) for program in programs]

    async def arun(self, program: Program) -> ToolResult:
        """Run one program. Cancelling the awaiting task kills it."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ToolResult] = loop.create_future()

        def sink(result: ToolResult) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: future.done() or future.set_result(result))

        self._begin(program, sink)
        self._expect(1)
        try:
            return await future
        except asyncio.CancelledError:
            self.cancel([program.id])
            raise
        finally:
            self._expect(-1)

    def stats(self) -> dict[str, float]:
        """Counts, rates per kind, and percentiles of the last calls, named `tools/...`."""
        with self._mutex:
            self._count()
            counts = Counter(self._counts)
            samples = {name: sorted(values) for name, values in self._samples.items()}
            in_flight = len(self._tickets)
        calls = float(counts["calls"])
        infra = sum(counts[f"kind/{kind}"] for kind in INFRA_KINDS)
        errors = sum(counts[f"kind/{kind}"] for kind in ERROR_KINDS)
        numbers = {f"tools/{name}": float(value) for name, value in counts.items()}
        numbers |= {f"tools/rate/{name[5:]}": n / calls for name, n in counts.items() if name.startswith("kind/")}
        numbers |= {
            "tools/calls": calls, "tools/in_flight": float(in_flight), "tools/infra_rate": infra / (calls or 1.0),
            "tools/error_rate": errors / (calls - infra) if calls > infra else 0.0,
            "tools/truncated_rate": counts["truncated"] / (calls or 1.0),
            "tools/level": float(level_number(self.capabilities.level)),
        }  # fmt: skip
        for name, values in samples.items():
            for share in (50, 90, 99):
                numbers[f"tools/{name}_ms_p{share}"] = percentile(values, share)
        return numbers

    def close(self) -> None:
        """Kill running calls, whose results are not delivered, and release everything."""
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

    def __enter__(self) -> "ProgramExecutor":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def cut(text: str, keep: int) -> str:
    """Text without its middle if it has more than `keep` characters."""
    if len(text) <= keep:
        return text
    return f"{text[: keep // 2]}\n[... {len(text) - keep} characters omitted ...]\n{text[-keep // 2 :]}"


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` percent of the ordered values lie; 0 for an empty list."""
    if not ordered:
        return 0.0
    return float(ordered[min(len(ordered) - 1, max(0, math.ceil(share / 100 * len(ordered)) - 1))])


def level_number(level: str) -> int:
    """0 to 4 for `L0` to `L4`; -1 where a service decides the level."""
    return int(level[1]) if len(level) == 2 and level[0] == "L" else -1
