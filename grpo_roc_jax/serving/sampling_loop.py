"""One thread that owns the devices: takes jobs from other threads, samples them, reports what is drawn.

A job is one HTTP request: some samples of one prompt. Reports are collected over a chunk of decode steps and delivered
together, so that the other side is woken once for all of them.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from grpo_roc_jax.engine.decode import ID_BITS, ID_MASK
from grpo_roc_jax.engine.engine import Engine
from grpo_roc_jax.engine.protocol import Finish, RolloutStats, RunOptions, SingleTurn, TurnEnd
from grpo_roc_jax.engine.publish import SamplerParams
from grpo_roc_jax.engine.steering import RowSteering
from grpo_roc_jax.types import Problem, RolloutRequest, Trajectory

IDLE_S = 0.1
"""How long an idle loop waits for a job before it looks at its other duties."""
GATHER_S, GATHER_SHARE = 0.002, 0.06
"""How long an idle loop waits for a further job after one, since those that come during a chunk wait for its end: in
seconds, or as a share of a chunk's time if that is longer. Clients whose answers ended together ask again together."""
PLACES = 1 << 31
"""Numbers of jobs, which random keys hold as 32 bits."""


@dataclass(eq=False)
class SampleJob:
    """What to sample, and whom to tell."""

    prompt: np.ndarray
    """int32: ids of the whole context."""
    max_tokens: int
    report: Callable[[str, int, Any], None]
    """(event, sample, value), called by the thread that delivers: `seated` with (cached tokens, seconds waited),
    `drawn` with (ids, log-probabilities), `ended` with the trajectory, `failed` with the exception."""
    count: int = 1
    temperature: float | None = None
    place: int = 0
    """Part of the random key."""
    step: int = 0
    """The same."""
    stop_ids: frozenset[int] = frozenset()
    find_stop: Callable[[np.ndarray, np.ndarray], int | None] | None = None
    """How many of the new ids to keep, given them and the last ones before, if a stop text ends among them."""
    goes_on: Callable[[np.ndarray], bool] | None = None
    """Whether an answer of these ids goes on after the stop id that it ends with."""
    steering: Sequence[RowSteering | None] = ()
    """What each sample asks of its draws; empty for nothing."""
    adapter: int = 0
    """Number of its adapter in an engine that samples with several (`decode.split_adapters`)."""
    created_s: float = field(default_factory=time.perf_counter)


class JobRows(SingleTurn):
    """The environment of the rows of a job: the first turn is the answer, and what is drawn is reported."""

    def __init__(self, job: SampleJob, report: Callable[[SampleJob, str, int, Any], None], context: int = 0):
        """`context`: last ids of the prompt, which the engine counts to the turn."""
        self._job, self._report, self._context = job, report, context
        self.find_stop = self._find_stop if job.stop_ids or job.find_stop else None

    def turn_ended(self, row: int, turn: TurnEnd) -> Finish:
        return Finish("eos" if turn.reason == "stop" else "length")

    def seated(self, row: int, cached: int) -> None:
        self._report(self._job, "seated", row, (cached, time.perf_counter() - self._job.created_s))

    def drawn(self, row: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        self._report(self._job, "drawn", row, (tokens & ID_MASK, logprobs))

    def completed(self, row: int, trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, tokens=trajectory.tokens & ID_MASK) if self._job.adapter else trajectory

    def steering(self, row: int) -> RowSteering | None:
        return self._job.steering[row] if self._job.steering else None

    def goes_on(self, row: int, tokens: np.ndarray) -> bool:
        tokens = tokens & ID_MASK
        if self._job.goes_on is None or int(tokens[-1]) in self._job.stop_ids:
            return False
        return self._job.goes_on(tokens[self._context :])

    def _find_stop(self, row: int, new_tokens: np.ndarray, before: np.ndarray) -> int | None:
        # Ids of the prompt are no part of the answer, so a stop text does not begin among them.
        new_tokens, before = new_tokens & ID_MASK, before[self._context :] & ID_MASK
        ends = [i + 1 for i, token in enumerate(new_tokens.tolist()) if token in self._job.stop_ids][:1]
        if self._job.find_stop and (end := self._job.find_stop(new_tokens, before)) is not None:
            ends.append(end)
        return min(ends, default=None)


class SamplingLoop:
    """Jobs of other threads on one engine. `start` gives it a thread; without one the caller calls `turn`."""

    def __init__(
        self,
        engine: Engine,
        sampler: SamplerParams | None,
        deliver: Callable[[Callable[[], None]], None],
        duty: Callable[[], SamplerParams | None] = lambda: None,
        *,
        gather_s: float = GATHER_S,
    ):
        """
        Args:
            engine: Used by the thread that runs the loop, and by no other.
            sampler: From its `publish`; None if it is set before the first turn.
            deliver: Runs a function on the thread of those who submit jobs, such as `call_soon_threadsafe`.
            duty: Called between chunks; weights that it returns are sampled with from then on.
            gather_s: Seconds that an idle loop waits for jobs that come with the first one, at least.
        """
        self.engine, self.sampler, self._deliver, self.duty = engine, sampler, deliver, duty
        self.stats = RolloutStats()
        """Statistics of the engine since the loop began."""
        self.idle_s = 0.0
        """Seconds for which the loop had no job, and waited for one."""
        self._inbox: queue.SimpleQueue[tuple[SampleJob, bool] | None] = queue.SimpleQueue()
        self._tickets: dict[SampleJob, range] = {}
        self._jobs: dict[int, tuple[SampleJob, int]] = {}
        self._events: list[tuple[SampleJob, str, int, Any]] = []
        self._closed = False
        self._gather_s, self.chunk_s = gather_s, 0.0
        """Seconds that the last chunk took."""
        self._thread: threading.Thread | None = None

    @property
    def room(self) -> int:
        """Longest context with its answer."""
        return self.engine.config.max_row_tokens

    def budget(self, length: int) -> int:
        """Tokens that can be sampled after a context of that length; below 1 if it is too long."""
        config = self.engine.config
        return config.max_response_tokens - max(0, length - config.max_prompt_tokens)

    @property
    def idle(self) -> bool:
        """Whether there is no job; for the thread that calls `turn`."""
        return not self._tickets and self._inbox.empty()

    @property
    def jobs(self) -> Collection[SampleJob]:
        """The jobs that have begun and not ended; for the thread that calls `turn`."""
        return self._tickets.keys()

    @property
    def forgets(self) -> str:
        """Why the cache may not hold the earlier turns of a conversation although there is room; empty if it does."""
        programs = self.engine.programs
        if programs.model.delta is not None:
            return "recurrent layers keep one state for each row, so every turn writes its whole context again"
        if programs.shards > 1:
            return f"a turn whose slot is on another of the {programs.shards} row shards writes its whole context again"
        return ""

    def submit(self, job: SampleJob) -> None:
        """Queues a job; thread-safe."""
        self._inbox.put((job, True))

    def cancel(self, job: SampleJob) -> None:
        """Ends a job whose answer nobody waits for; thread-safe."""
        self._inbox.put((job, False))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True, name="sampling")
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; what is in flight is dropped."""
        self._closed = True
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            try:
                self.turn(IDLE_S)
            except Exception as error:  # every job learns of it, and new ones begin with an empty pool
                self.fail(error)
        self.engine.release()

    def turn(self, wait_s: float) -> None:
        """Takes what has been submitted, samples a chunk, reports; with nothing to do it waits for a job."""
        began, idle = time.perf_counter(), self.idle
        self._take(wait_s if not self._jobs else 0.0)
        begun = time.perf_counter()
        self.idle_s += begun - began if idle else 0.0
        if (sampler := self.duty()) is not None:
            self.sampler = sampler
        for ticket, trajectory in self.engine.advance(0.0):
            job, sample = self._jobs.pop(ticket)
            if not any(other in self._jobs for other in self._tickets[job]):
                del self._tickets[job]
            self._events.append((job, "ended", sample, trajectory))
        self.chunk_s = time.perf_counter() - begun
        self._report()

    def _take(self, wait_s: float) -> None:
        """Jobs that were submitted. An idle loop waits for the first, and for others that come with it."""
        idle, until_s, gap_s = wait_s > 0, 0.0, max(self._gather_s, GATHER_SHARE * self.chunk_s)
        try:
            while True:
                item = self._inbox.get(wait_s > 0, wait_s)
                now = time.perf_counter()
                until_s = until_s or now + self.chunk_s
                wait_s = gap_s if idle and now < until_s else 0.0
                if item is None:
                    return
                job, begins = item
                if begins:
                    self._begin(job)
                else:
                    for ticket in self._tickets.get(job, ()):
                        self.engine.cancel(ticket)
        except queue.Empty:
            return

    def _begin(self, job: SampleJob) -> None:
        self._tickets[job] = range(0)  # so that it learns of whatever fails here
        first = self.engine.config.max_prompt_tokens
        prompt = job.prompt + (job.adapter << ID_BITS)
        rest = tuple(prompt[first:].tolist())  # the engine bounds the first part and the rest, not the row
        request = RolloutRequest(
            Problem(f"job-{job.place}", "", "", "serve"),
            job.place % PLACES,
            job.count,
            temperature=job.temperature,
            prefix=rest,
            step=job.step,
            budget=len(rest) + job.max_tokens,
            prompt=prompt[:first],
        )
        rows = JobRows(job, lambda *event: self._events.append(event), context=len(rest))
        try:
            options = RunOptions(purpose="chat", keep_cache=True)
            tickets = self.engine.submit(self.sampler, [request], rows, options)
        except ValueError as error:
            del self._tickets[job]
            self._events.append((job, "failed", 0, error))
            return
        self.stats = self.engine.stats
        self._tickets[job] = tickets
        self._jobs |= {ticket: (job, i) for i, ticket in enumerate(tickets)}

    def release(self) -> RolloutStats:
        """Ends all jobs and frees the engine's pool; what it has counted."""
        with suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if item is not None and item[1]:
                    self._tickets[item[0]] = range(0)
        stats = self.engine.release()
        self.fail(RuntimeError("sampling has ended"))
        return stats

    def fail(self, error: Exception) -> None:
        """Ends all jobs with an error and frees the engine's pool."""
        self.engine.release()
        self._events += [(job, "failed", 0, error) for job in self._tickets]
        self._tickets.clear()
        self._jobs.clear()
        self._report()

    def _report(self) -> None:
        events, self._events = self._events, []
        if events:
            self._deliver(lambda: [job.report(*event) for job, *event in events])


def sampled(trajectory: Trajectory) -> slice:
    """Where the sampled tokens of a job's row lie."""
    mask = trajectory.policy_mask
    return slice(len(mask) - int(mask.sum()), len(mask))
