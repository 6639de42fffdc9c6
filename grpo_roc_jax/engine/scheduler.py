"""The rows of an engine: moves them between the queue, the devices and their environments.

Each round appends the environments' answers to the blocks of their rows, gives free slots to the next rows, enqueues a
chunk of decode steps and reads one. Rows that stopped in it go to their environment, which finishes them or submits
their calls. The host blocks on an environment only when nothing can be decoded. Rows come with `submit` at any time,
and leave as they finish; `adopt` changes the weights between two chunks.

A row takes blocks as it grows. If there are none left, the row that came last gives up its own: it is parked, keeps its
slot and its tokens, and is written again when there is room. The oldest row is never parked, so one always goes on.

`Admission` is the queue: free slots go to rows in order, rows of one prompt together, if the cache has room for what is
expected of them (`Lengths`). The head of the queue is never skipped, so a long row waits for room but does not starve.
"""

import logging
import math
import time
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from grpo_roc_jax.engine.config import NoStepLimit, RolloutConfig
from grpo_roc_jax.engine.decode import ID_MASK, ChunkReport
from grpo_roc_jax.engine.device_rows import DeviceRows, Prompts, Write
from grpo_roc_jax.engine.programs import SamplerPrograms
from grpo_roc_jax.engine.protocol import Finish, RolloutStats, RowEnvironment, RunOptions, TurnEnd, TurnReason
from grpo_roc_jax.engine.publish import SamplerParams
from grpo_roc_jax.engine.steering import RowSteering, steering_arrays
from grpo_roc_jax.engine.table import FREE, Full, SlotTable, awaits_observation, starting_point
from grpo_roc_jax.process.points import reach
from grpo_roc_jax.types import RolloutRequest, StopReason, Trajectory


def check_keys(requests: Sequence[RolloutRequest], step: int) -> None:
    """Refuses two rollouts of one key: their draws, their calls and their environment would be the same.

    Raises:
        ValueError: Naming the two requests.
    """
    seen: dict[tuple[int, int, int], int] = {}
    for index, request in enumerate(requests):
        known = step if request.step is None else request.step
        for sample in request.samples:
            first = seen.setdefault((known, request.place, sample), index)
            if first != index:
                raise ValueError(
                    f"requests {first} and {index} both ask for step {known}, place {request.place}, sample {sample}; "
                    "give each problem of a call its own `place`, or let `first_sample` follow the samples before"
                )


def expand(
    requests: Sequence[RolloutRequest], step: int, budget: int, temperature: float
) -> tuple[list[RolloutRequest], list[int]]:
    """(a request for each single rollout, in order, with what it names not filled in; the number of its prompt).

    Rows of one problem in one step have the same number where their prompts are equal: the engine writes that prompt
    once and copies it to the others.

    Args:
        requests: Rendered requests.
        step: The step of requests that name none; see `RunOptions.key_step`.
        budget: The token budget of requests that name none.
        temperature: The temperature of requests that name none.
    """
    rows: list[RolloutRequest] = []
    prompts: list[int] = []
    numbers: dict[tuple[int, int, bytes], int] = {}
    for request in requests:
        known = step if request.step is None else request.step
        number = numbers.setdefault((known, request.place, request.prompt.tobytes()), len(numbers))
        limit = budget if request.budget is None else request.budget
        heat = temperature if request.temperature is None else request.temperature
        single = replace(request, count=1, step=known, budget=limit, temperature=heat)
        rows += [replace(single, first_sample=i) for i in request.samples]
        prompts += [number] * request.count
    return rows, prompts


RESERVE = 0.35
"""Share of a row's expected further tokens that is kept free for it. In simulated hours with the lengths of GRPO-RoC
this holds twice the rows of whole reservations, and 1 % of the tokens are written again; without any, half are."""
REMEMBERED = 1024
"""Finished rows whose lengths are remembered."""


class Lengths:
    """What the finished rows say about the length of a row that has reached some length."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > REMEMBERED:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]

    def reserved(self, length: np.ndarray, total: np.ndarray) -> np.ndarray:
        """Tokens to keep room for, of rows with these lengths that end at `total` at the latest: the length and a share
        of what is expected to follow. Rows longer than all others are expected to reach their end."""
        known = np.asarray(self._sorted, np.float64)
        longer = np.append(np.cumsum(known[::-1])[::-1], 0.0)
        first = np.searchsorted(known, length, side="right")
        count = len(known) - first
        expected = np.where(count > 0, longer[first] / np.maximum(count, 1), total)
        return length + np.ceil(RESERVE * np.maximum(np.minimum(expected, total) - length, 0)).astype(np.int64)


class Admission:
    """The queue of rows that have no slot yet. Every data shard has a group of its own to take rows from."""

    def __init__(self, shards: int):
        self._unopened: deque[deque[int]] = deque()
        self._open: list[deque[int]] = [deque() for _ in range(shards)]
        self._prompt_of: dict[int, int] = {}
        self._siblings: Counter[int] = Counter()

    @property
    def waiting(self) -> int:
        return len(self._prompt_of)

    def extend(
        self, tickets: Sequence[int], rows: Sequence[RolloutRequest], prompts: Sequence[int], *, longest_first: bool
    ) -> None:
        """Appends rows.

        Args:
            tickets: The tickets of the rows.
            rows: One rollout each; see `expand`.
            prompts: Numbers of their prompts, which no earlier row has.
            longest_first: Order the new prompts by decreasing remaining length instead of by arrival.
        """
        siblings: dict[int, deque[int]] = {}
        for ticket, prompt in zip(tickets, prompts, strict=True):
            siblings.setdefault(prompt, deque()).append(ticket)
        order = list(siblings.values())
        if longest_first:
            # What is left to sample at most: rows that continue a prefix have less to do. Those that a step has cut
            # come first, so that each of them ends.
            left = {t: math.inf if r.resume else r.budget - r.begun for t, r in zip(tickets, rows, strict=True)}
            order.sort(key=lambda members: -max(left[ticket] for ticket in members))
        self._unopened.extend(order)
        self._prompt_of |= zip(tickets, prompts, strict=True)
        self._siblings.update(prompts)

    def siblings(self, prompt: int) -> int:
        """Rows of a prompt that are still in the queue."""
        return self._siblings[prompt]

    def take(self, shard: int, fits: Callable[[int], bool]) -> int | None:
        """The next row for a free slot of `shard`; None if the queue is empty or the row does not fit.

        Rows of the prompt that the shard has opened come first, then those of a new prompt. When all prompts are open,
        the shard takes a row from the shard with most left, and its prompt is written once more.
        """
        queue = self._open[shard]
        while not queue and self._unopened:  # one whose rows were all withdrawn is empty
            queue = self._open[shard] = self._unopened.popleft()
        queue = queue or max(self._open, key=len)
        if not queue or not fits(queue[0]):
            return None
        ticket = queue.popleft()
        self._leave(ticket)
        return ticket

    def withdraw(self, ticket: int) -> bool:
        """Takes a row that was not admitted out of the queue; False if it is not in the queue."""
        if ticket not in self._prompt_of:
            return False
        next(queue for queue in (*self._open, *self._unopened) if ticket in queue).remove(ticket)
        self._leave(ticket)
        return True

    def _leave(self, ticket: int) -> None:
        prompt = self._prompt_of.pop(ticket)
        self._siblings[prompt] -= 1
        if not self._siblings[prompt]:
            del self._siblings[prompt]

    def left(self) -> list[int]:
        """Tickets of the rows in the queue, ascending."""
        return sorted(self._prompt_of)


class RowSubmission:
    """What the rows of one `submit` have in common. Its environment numbers them from 0."""

    def __init__(
        self, environment: RowEnvironment, options: RunOptions, config: RolloutConfig, tickets: range, now_s: float
    ):
        self.environment, self.progress, self.tickets = environment, options.progress, tickets
        self.find_stop: Callable[[int, np.ndarray, np.ndarray], int | None] | None
        self.find_stop = getattr(environment, "find_stop", None)
        self.goes_on: Callable[[int, np.ndarray], bool] | None = getattr(environment, "goes_on", None)
        self.completed: Callable[[int, Trajectory], Trajectory] | None = getattr(environment, "completed", None)
        self.seated: Callable[[int, int], None] | None = getattr(environment, "seated", None)
        self.drawn: Callable[[int, np.ndarray, np.ndarray], None] | None = getattr(environment, "drawn", None)
        self.steering: Callable[[int], RowSteering | None] | None = getattr(environment, "steering", None)
        self.keep_cache = options.keep_cache
        self.cancel_policy = options.cancel_policy if config.early_exit else None
        self.before_chunk = options.before_chunk or (lambda: None)
        self.step_limit = config.step_limit if options.purpose == "train" else NoStepLimit()
        self.started_s, self.rounds, self.left = now_s, 0, len(tickets)

    def show(self, table: SlotTable, tokens: int) -> None:
        """Updates the progress display."""
        if self.progress is not None:
            mine = (table.row >= self.tickets.start) & (table.row < self.tickets.stop)
            self.progress.update(
                live=int((mine & table.live).sum()),
                waiting=int((mine & table.waiting).sum()),
                done=len(self.tickets) - self.left,
                total=len(self.tickets),
                tokens=tokens,
            )


@dataclass(eq=False)
class Row:
    """An unfinished rollout."""

    request: RolloutRequest
    prompt: int
    """Number of its prompt."""
    submission: RowSubmission
    index: int
    """The number of the row in its submission."""
    slot: int = FREE
    steering: RowSteering | None = None


log = logging.getLogger(__name__)
POLL_S = 1.0
"""Longest single wait for tools; deadlines are checked in between."""
SHARED_POLL_S = 0.01
"""Longest single wait for tools where several environments may answer."""


class Scheduler:
    """Rows in flight; a row is one rollout and has a ticket, tickets rise.

    `advance` makes rounds of public steps: `take_answers`, `check_deadlines`, admission, `make_room`, a chunk, and
    `end_turns` for the rows that stopped in it.
    """

    def __init__(
        self,
        programs: SamplerPrograms,
        seed: int,
        sampler: SamplerParams,
        clock: Callable[[], float] = time.perf_counter,
    ):
        config, model = programs.rollout, programs.model
        self.config, self.seed, self.clock = config, seed, clock
        self.temperature = programs.settings.sampling.temperature
        self.shards = programs.shards
        self.per_shard = config.slots // self.shards
        self.is_stop = np.zeros(model.vocab_size, bool)
        self.is_stop[list(programs.settings.stop_ids)] = True
        routes = (model.layers, model.experts.per_token) if model.experts.replay else None
        self.table = SlotTable(config.slots, config.max_row_tokens, routes=routes, recurrent=model.delta is not None)
        self.rows: dict[int, Row] = {}
        """The unfinished ones by ticket."""
        self.submissions: list[RowSubmission] = []
        self.finished: list[tuple[int, Trajectory]] = []
        self.next_ticket = self.next_prompt = 0
        self.admission, self.lengths = Admission(self.shards), Lengths()
        self.may_admit = True
        """False once a row was refused, until room becomes free."""
        self.stats = RolloutStats()
        self.shard_tokens = np.zeros(self.shards, np.int64)
        self.device = DeviceRows(programs, config, sampler, self.table, self.stats)
        self.prompts = Prompts(self.device, self.table, self.admission.siblings, self.stats)

    def submit(self, requests: Sequence[RolloutRequest], environment: RowEnvironment, options: RunOptions) -> range:
        """Tickets of the rollouts, request by request and sample by sample."""
        rows, prompts = expand(requests, options.key_step, self.config.max_response_tokens, self.temperature)
        tickets = range(self.next_ticket, self.next_ticket + len(rows))
        submission = RowSubmission(environment, options, self.config, tickets, self.clock())
        prompts = [self.next_prompt + prompt for prompt in prompts]
        self.next_ticket, self.next_prompt = tickets.stop, max(prompts) + 1
        self.rows |= {
            ticket: Row(row, prompt, submission, index, steering=submission.steering and submission.steering(index))
            for index, (ticket, row, prompt) in enumerate(zip(tickets, rows, prompts, strict=True))
        }
        self.admission.extend(tickets, rows, prompts, longest_first=self.config.admission == "longest")
        self.submissions.append(submission)
        self.stats.rollouts += len(rows)
        self.may_admit = True
        return tickets

    def drain(self) -> None:
        """Reads the chunk in flight and drops the weights, so that the next ones take their place in memory. `adopt`
        must follow."""
        self._take_flight()
        self.device.flush()
        self.device.sampler = None

    def adopt(self, sampler: SamplerParams, *, forget: bool = True) -> None:
        """Chunks enqueued from now on are drawn with these weights. Rows keep what earlier ones wrote; new rows do not
        find it, unless `forget` is false."""
        self.device.flush()
        self.device.sampler = sampler
        if not forget:
            return
        self.prompts.forget()
        for blocks in self.device.blocks:
            blocks.forget()

    def advance(self, timeout_s: float = float("inf")) -> list[tuple[int, Trajectory]]:
        """Rounds until a row has finished or the time is over; (ticket, trajectory) of the rows that have."""
        started = now = self.clock()
        while self.rows and not self.finished and now - started <= timeout_s:
            for submission in self.submissions:
                submission.before_chunk()
                submission.rounds += 1
            self.take_answers(started + timeout_s)
            self.check_deadlines()
            self._admit()
            self.device.flush()
            if self.table.live.any():
                self.make_room()
                self.device.flush()
            steered = self._steered()
            if self.table.live.any():
                read = self.device.chunk(steered)
            else:
                read = self.device.read() if self.device.flight is not None else None
            if read is not None:
                self.end_turns(self._take_report(*read))
            elif self.rows and not self._may_go_on():
                raise RuntimeError(f"{len(self.rows)} rollouts are left and none can go on: no room for the next one")
            for submission in self.submissions:
                submission.show(self.table, self.stats.sampled_tokens)
            now = self.clock()
        self.stats.seconds += now - started
        self.stats.shard_tokens = tuple(int(n) for n in self.shard_tokens)
        done, self.finished = self.finished, []
        return done

    def count_into(self, stats: RolloutStats) -> RolloutStats:
        """Counts into other statistics from now on; returns those before."""
        before, self.stats = self.stats, stats
        before.shard_tokens, self.shard_tokens[:] = tuple(map(int, self.shard_tokens)), stats.shard_tokens or 0
        self.device.stats = self.prompts.stats = stats
        return before

    def cut(self, ticket: int) -> Trajectory:
        """An unfinished row as it is now, with stop `cancelled`; the row goes on."""
        row = self.rows[ticket]
        if row.slot == FREE:
            return starting_point(row.request)
        trajectory = self.table.trajectory(row.slot, row.request, "cancelled", self.clock())
        completed = row.submission.completed
        return trajectory if completed is None else completed(row.index, trajectory)

    def cancel(self, ticket: int) -> None:
        """Ends a row with stop `cancelled`; nothing happens if it has ended."""
        if ticket not in self.rows:
            return
        if (slot := self.rows[ticket].slot) != FREE:
            self.end_early(slot, "cancelled")
        elif self.admission.withdraw(ticket):
            self._end_unadmitted(ticket, "cancelled")

    def abandon(self, tickets: Collection[int] | None = None) -> None:
        """Gives up unfinished rows, by default all: nobody takes them, and their environments drop what they hold."""
        for ticket, row in list(self.rows.items()):
            if tickets is not None and ticket not in tickets:
                continue
            environment, row.submission.cancel_policy = row.submission.environment, None
            with suppress(Exception):  # it must not keep the others from theirs
                getattr(environment, "abandoned", environment.cancelled)(row.index)
            with suppress(Exception):  # the interrupt may have come in the middle of a round
                if row.slot != FREE:
                    self.finish(row.slot, "cancelled")
                elif self.admission.withdraw(ticket):
                    self._end_unadmitted(ticket, "cancelled")
        self.finished = [pair for pair in self.finished if tickets is not None and pair[0] not in tickets]

    def _may_go_on(self) -> bool:
        """Whether rows can still be admitted, decode, or wait for an answer."""
        return self.may_admit or bool(np.any(self.table.live | self.table.waiting)) or self.device.flight is not None

    # Answers of the environments.

    def take_answers(self, until_s: float) -> None:
        """Takes the answers that have arrived; blocks only when no row can decode and no chunk is left to read."""
        table = self.table
        if not table.waiting.any():
            return
        admits = self.may_admit and (self.admission.waiting > 0 or bool(np.any(table.parked & ~table.waiting)))
        idle = not table.live.any() and self.device.flight is None and not admits
        start = self.clock()
        longest = POLL_S if len(self.submissions) == 1 else SHARED_POLL_S
        timeout = max(0.0, min(longest, self.seconds_to_deadline(), until_s - start)) if idle else 0.0
        answers = [(s, index, answer) for s in self.submissions for index, answer in s.environment.poll(timeout)]
        seconds = self.clock() - start
        if idle:
            self.stats.tool_wait_s += seconds
        else:
            self.stats.environment_s += seconds
        for submission, index, answer in answers:
            row = self.rows.get(submission.tickets[index])
            if row is None or row.slot == FREE or not table.waiting[row.slot]:
                continue
            if isinstance(answer, Finish):
                self.finish(row.slot, answer.stop)
            else:
                self._observe(row.slot, np.asarray(answer.ids, np.int32))

    def _observe(self, slot: int, ids: np.ndarray) -> None:
        table, length = self.table, int(self.table.length[slot])
        if length + len(ids) >= table.total[slot]:
            # No token could follow; the row ends with its call unanswered, as in the published environment.
            self.end_early(slot, "length")
            return
        end = length + len(ids) - 1
        has_room = not table.parked[slot] and self.ensure_room(slot, end)
        table.observe(slot, ids)
        self.stats.observation_tokens += len(ids)
        if not has_room:
            table.waiting[slot], self.may_admit = False, True
            return
        # The pending token comes first; the last of the observation is the next pending one.
        start = table.rewritten_from(slot, length - 1)
        if end > start:
            self.device.write(Write(slot, table.tokens[slot, start:end].copy(), start))
        table.go(slot, self.config.max_turn_tokens)

    # Ends of turns and rows.

    def end_turns(self, stopped: Mapping[int, bool]) -> None:
        """Hands the turns of stopped rows to their environments: slot -> whether the row stopped at a stop text."""
        table = self.table
        for slot, at_stop_text in stopped.items():
            if table.row[slot] == FREE:  # the end of a row before it in this loop cancelled this one
                continue
            turn, row = table.end_turn(slot), self.rows[int(table.row[slot])]
            reason: TurnReason = "turn_length"
            if turn.end >= table.total[slot]:
                reason = "length"
            elif at_stop_text or self.is_stop[table.tokens[slot, turn.end - 1] & ID_MASK]:
                reason = "stop"
            tokens, logprobs = (of[slot, turn.start : turn.end].copy() for of in (table.tokens, table.logprobs))
            before = self.clock()
            try:
                reach("rollout.turn")
                ended = TurnEnd(row.index, turn.start, tokens, logprobs, reason=reason)
                answer = row.submission.environment.turn_ended(row.index, ended)
            except Exception:  # a fault in one trajectory costs that trajectory
                if not self.stats.stops["infrastructure"]:
                    log.exception("a turn could not be taken; its rollout ends as an infrastructure failure")
                with suppress(Exception):
                    row.submission.environment.cancelled(row.index)
                reason, answer = "turn_length", Finish("infrastructure")
            self.stats.environment_s += self.clock() - before
            if reason == "length":
                self.finish(slot, "length")
            elif isinstance(answer, Finish):
                self.finish(slot, answer.stop)
            else:
                table.waiting[slot] = True
                table.waiting_since_s[slot] = self.clock()

    def finish(self, slot: int, stop: StopReason) -> None:
        """Ends the row of a slot, which becomes free."""
        table, ticket = self.table, int(self.table.row[slot])
        row = self.rows[ticket]
        trajectory = table.trajectory(slot, row.request, stop, self.clock())
        written = trajectory.tokens[:-1] if row.submission.keep_cache else None
        self.prompts.leave(slot, row.prompt, len(row.request.prompt) - 1, written)
        table.free(slot)
        row.slot = FREE
        self.lengths.add(trajectory.length)
        self.may_admit = True
        self.record(ticket, trajectory)

    def record(self, ticket: int, trajectory: Trajectory) -> None:
        """Takes the trajectory of a row that has ended; its submission may cancel other rows."""
        row = self.rows.pop(ticket)
        submission = row.submission
        if submission.completed is not None:
            trajectory = submission.completed(row.index, trajectory)
        self.finished.append((ticket, trajectory))
        submission.left -= 1
        if not submission.left:
            self.submissions.remove(submission)
            submission.show(self.table, self.stats.sampled_tokens)
        self.stats.stops[trajectory.stop] += 1
        if submission.cancel_policy is not None:
            for other in submission.cancel_policy(row.index, trajectory):
                self.cancel(submission.tickets[other])

    def end_early(self, slot: int, stop: StopReason) -> None:
        """Ends a row for a reason of the engine's own; its environment drops its calls. A deadline that a call missed
        because the executor was down is an infrastructure failure."""
        row = self.rows[int(self.table.row[slot])]
        proven = row.submission.environment.cancelled(row.index)
        self.finish(slot, "infrastructure" if stop == "deadline" and proven is False else stop)

    def _end_unadmitted(self, ticket: int, stop: StopReason) -> None:
        """Ends a row that never got a slot, as it stood before."""
        self.record(ticket, replace(starting_point(self.rows[ticket].request), stop=stop))

    # Deadlines.

    def check_deadlines(self) -> None:
        """Ends rows whose turn or trajectory took too long, and those of steps that have reached their limit."""
        config, table = self.config, self.table
        limited = [submission for submission in self.submissions if submission.step_limit.seconds]
        if not (config.turn_timeout_s or config.trajectory_timeout_s or limited):
            return
        now = self.clock()
        late = np.zeros(len(table.row), bool)
        if config.turn_timeout_s:
            late |= table.waiting & (now - table.waiting_since_s > config.turn_timeout_s)
        if config.trajectory_timeout_s:
            late |= table.occupied & (now - table.admitted_s > config.trajectory_timeout_s)
        for slot in np.flatnonzero(late):
            if table.row[slot] != FREE:
                self.end_early(int(slot), "deadline")
        # A step has at least one round, and what its last chunk drew counts, so that rows go on however short it is.
        over = [s for s in limited if s.rounds > 1 and s.step_limit.seconds < now - s.started_s]
        if over:
            self._take_flight()
        for submission in over:
            self._end_step(submission)

    def _end_step(self, submission: RowSubmission) -> None:
        """Ends every row of a submission. Under `partial` all can be resumed. Under `drop` a row that waits for its
        tool missed the deadline by its own tool use, and every other row is an infrastructure failure."""
        resumes = submission.step_limit.partial
        for ticket in [ticket for ticket, row in self.rows.items() if row.submission is submission]:
            if ticket not in self.rows:  # the policy of early exit cancelled it
                continue
            if (slot := self.rows[ticket].slot) != FREE:
                late: StopReason = "deadline" if self.table.waiting[slot] else "infrastructure"
                self.end_early(slot, "cancelled" if resumes else late)
            elif self.admission.withdraw(ticket):
                self._end_unadmitted(ticket, "cancelled" if resumes else "infrastructure")

    def seconds_to_deadline(self) -> float:
        """Seconds to the nearest deadline, at least a millisecond."""
        config, table, now = self.config, self.table, self.clock()
        ends = [float("inf")]
        if config.turn_timeout_s:
            ends.append(float(table.waiting_since_s[table.waiting].min()) + config.turn_timeout_s)
        if config.trajectory_timeout_s:
            ends.append(float(table.admitted_s[table.occupied].min()) + config.trajectory_timeout_s)
        ends += [s.started_s + s.step_limit.seconds for s in self.submissions if s.step_limit.seconds]
        return max(1e-3, min(ends) - now)

    # Admission.

    def _admit(self) -> None:
        """Gives blocks to parked rows, then slots to new ones, while what is expected of them fits; the shard with
        least in use first."""
        if not self.may_admit:
            return
        table, self.may_admit = self.table, False
        for shard in sorted(range(self.shards), key=lambda shard: self.device.blocks[shard].used):
            slots = np.arange(shard * self.per_shard, (shard + 1) * self.per_shard)
            parked = slots[table.parked[slots] & ~table.waiting[slots]]
            if not all(map(self._seat_again, parked[np.argsort(table.row[parked])].tolist())):
                continue
            for slot in slots[table.row[slots] == FREE].tolist():
                ticket = self.admission.take(shard, self._fitting(shard))
                if ticket is None:
                    break
                self._occupy(slot, ticket)

    def _fitting(self, shard: int) -> Callable[[int], bool]:
        """Whether the cache of a shard has room for a row of the queue."""

        def fits(ticket: int) -> bool:
            row = self.rows[ticket]
            total = len(row.request.prompt) + row.request.budget
            return self._fits(shard, row.prompt, starting_point(row.request).length, total)

        return fits

    def _fits(self, shard: int, prompt: int, length: int, total: int) -> bool:
        """Whether there is room for a row with `length` tokens, beside what is expected of the rows of the shard."""
        table, blocks = self.table, self.device.blocks[shard]
        seated = np.arange(shard * self.per_shard, (shard + 1) * self.per_shard)
        seated = seated[table.occupied[seated] & ~table.parked[seated]]
        lengths, totals = (np.append(of[seated], new) for of, new in ((table.length, length), (table.total, total)))
        reserved = np.minimum(np.maximum(self.lengths.reserved(lengths, totals), lengths + self.device.ahead), totals)
        need = -(-reserved // blocks.size)
        need[:-1] -= self.device.room()[seated] // blocks.size
        wanted = int(np.maximum(need, 0).sum())
        if wanted <= blocks.free + self.prompts.reserved(shard, prompt):
            return True
        if not len(seated):
            self.prompts.drop(shard)
            return True
        while wanted > blocks.free + self.prompts.reserved(shard, prompt) and self.device.enlarge():
            pass
        if wanted > blocks.free + self.prompts.reserved(shard, prompt):
            self.prompts.drop(shard)
        return wanted <= blocks.free + self.prompts.reserved(shard, prompt)

    def _occupy(self, slot: int, ticket: int) -> None:
        """Gives a slot to a row of the queue, and starts it."""
        row = self.rows[ticket]
        self.table.admit(slot, ticket, row.request, self.seed, self.clock())
        row.slot = slot
        seated = self._seat(slot, again=False)
        if row.request.resume is not None and awaits_observation(row.request.resume):
            self.end_turns({slot: True})
        elif seated:
            self.table.go(slot, self.config.max_turn_tokens)

    def _seat_again(self, slot: int) -> bool:
        """Lets a parked row go on; False if there is no room."""
        table = self.table
        prompt = self.rows[int(table.row[slot])].prompt
        fits = self._fits(slot // self.per_shard, prompt, int(table.length[slot]), int(table.total[slot]))
        if not (fits and self._seat(slot, again=True)):
            return False
        table.go(slot, self.config.max_turn_tokens)
        return True

    def _seat(self, slot: int, *, again: bool) -> bool:
        """Gives blocks to a parked row and queues its tokens; False if there is no room."""
        table, row = self.table, self.rows[int(self.table.row[slot])]
        tokens, prompt = table.tokens[slot, : table.length[slot]], len(row.request.prompt) - 1
        try:
            known = self.prompts.provide(slot, row.prompt, tokens, prompt, again=again)
            self.device.grow(slot, len(tokens) - 1)
        except Full:
            self._park(slot, 0)
            more = self.device.enlarge() or self.prompts.drop(slot // self.per_shard)
            return more and self._seat(slot, again=again)
        start = max(known, prompt)
        if len(tokens) - 1 > start:
            self.device.write(Write(slot, tokens[start:-1].copy(), start))
        self.stats.recomputed_tokens += len(tokens) - 1 - known if again else 0
        if not again:
            self.stats.cached_tokens += known
            if row.submission.seated is not None:
                row.submission.seated(row.index, known)
        table.parked[slot] = False
        return True

    # Room.

    def make_room(self) -> None:
        """Room for the next chunk of every live row, in the order of tickets."""
        table, device = self.table, self.device
        need = np.minimum(table.length - 1 + device.ahead, table.limit - 1)
        short = np.flatnonzero(table.live & (need > device.room()))
        for slot in short[np.argsort(table.row[short])].tolist():
            if table.live[slot]:
                self.ensure_room(slot, int(need[slot]))

    def ensure_room(self, slot: int, columns: int) -> bool:
        """Room for that many columns of a row, if need be from younger rows; False if it is parked itself."""
        table, shard = self.table, slot // self.per_shard
        slots = np.arange(shard * self.per_shard, (shard + 1) * self.per_shard)
        while True:
            try:
                self.device.grow(slot, columns)
                return True
            except Full:
                if self.device.enlarge() or self.prompts.drop(shard):
                    continue
                seated = slots[table.occupied[slots] & ~table.parked[slots]]
                youngest = int(seated[np.argmax(table.row[seated])])
                self.stats.evictions += 1
                self._park(youngest, int(table.length[youngest]) - 1)
                if youngest == slot:
                    return False

    def _park(self, slot: int, written: int) -> None:
        """Takes the blocks of a row, whose first `written` tokens they hold. They stay as long as nobody needs them."""
        table = self.table
        self.prompts.park(slot, self.rows[int(table.row[slot])].prompt, table.tokens[slot, :written])
        table.park(slot)

    # Steering.

    def _steered(self) -> tuple[np.ndarray, ...]:
        """What live rows ask of the next chunk, as arrays; none if they ask for nothing."""
        rows = self._steered_rows()
        if any(row.most_steps for row in rows.values()) and self.device.flight is not None:
            self._take_flight()  # what may follow depends on its tokens
            rows = self._steered_rows()
        if not rows:
            return ()
        programs = self.device.programs
        settings, vocabulary = programs.settings, programs.model.vocab_size
        return steering_arrays(rows, self.config.slots, vocabulary, settings.sampling, settings.chunk)

    def _steered_rows(self) -> dict[int, RowSteering]:
        """The steering of the rows in live slots, by slot."""
        if all(submission.steering is None for submission in self.submissions):
            return {}
        slots = np.flatnonzero(self.table.live).tolist()
        steering_of = {slot: self.rows[int(self.table.row[slot])].steering for slot in slots}
        return {slot: steering for slot, steering in steering_of.items() if steering is not None}

    # Reports.

    def _take_flight(self) -> None:
        """Takes the chunk in flight, if there is one."""
        if self.device.flight is not None:
            self.end_turns(self._take_report(*self.device.read()))

    def _take_report(self, report: ChunkReport, count: np.ndarray, version: int) -> dict[int, bool]:
        """Takes a chunk's tokens, `count` of each slot. Returns slot -> whether it stopped at a stop text, for the rows
        whose turns ended in the chunk."""
        table, before = self.table, self.table.length.copy()
        table.extend(report, count, version)
        drew = count > 0
        self.shard_tokens += count.reshape(self.shards, -1).sum(axis=1)
        self.stats.sampled_tokens += int(count.sum())
        at_stop_text = self._stop_texts(np.flatnonzero(drew), count)
        last = table.tokens[np.arange(len(count)), np.maximum(table.length - 1, 0)]
        stopped = drew & ((table.length >= table.limit) | self.is_stop[last & ID_MASK])
        stopped[list(at_stop_text)] = True
        for slot in np.flatnonzero(drew).tolist():
            row, span = self.rows[int(table.row[slot])], slice(before[slot], table.length[slot])
            if row.steering is not None:
                ids = (table.tokens[slot, span] & ID_MASK).tolist()
                top = (
                    () if report.top is None else zip(*(leaf[: len(ids), :, slot] for leaf in report.top), strict=True)
                )
                row.steering.take(ids, [*top])
            if row.submission.drawn is not None:
                row.submission.drawn(row.index, table.tokens[slot, span].copy(), table.logprobs[slot, span].copy())
        for slot in np.flatnonzero(stopped & (table.length < table.limit)).tolist():
            if slot not in at_stop_text and self._goes_on(slot):
                stopped[slot] = False
                table.go(slot, self.config.max_turn_tokens)
        return {slot: slot in at_stop_text for slot in np.flatnonzero(stopped & table.live).tolist()}

    def _goes_on(self, slot: int) -> bool:
        """Whether the stop id that a row drew is part of its turn."""
        table, row = self.table, self.rows[int(self.table.row[slot])]
        tokens = table.tokens[slot, table.turn_start[slot] : table.length[slot]]
        return row.submission.goes_on is not None and row.submission.goes_on(row.index, tokens.copy())

    def _stop_texts(self, slots: np.ndarray, count: np.ndarray) -> set[int]:
        """Rows whose stop text ended in this chunk; they are rolled back to its end."""
        table, ended = self.table, set()
        for slot in slots.tolist():
            row = self.rows[int(table.row[slot])]
            if row.submission.find_stop is None:
                continue
            n, drawn = int(table.length[slot]), int(count[slot])
            new, before = table.tokens[slot, n - drawn : n], table.tokens[slot, table.turn_start[slot] : n - drawn]
            keep = row.submission.find_stop(row.index, new.copy(), before)
            if keep is None:
                continue
            if not 1 <= keep <= drawn:
                raise ValueError(
                    f"find_stop kept {keep} of {drawn} new tokens; a stop text ends among the new tokens, so it must "
                    f"return 1 to {drawn}, or None"
                )
            ended.add(slot)
            table.roll_back(slot, drawn - keep)
            self.stats.sampled_tokens -= drawn - keep
            self.shard_tokens[slot // self.per_shard] -= drawn - keep
            self.stats.dropped_tokens += drawn - keep
        return ended
