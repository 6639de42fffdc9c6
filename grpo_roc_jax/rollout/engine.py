"""The rollout engine: slots that keep the devices decoding while tools run.

`make_engine` fixes the shapes; `publish` takes the parameters once a step; `run` rolls requests out. The engine knows
token ids and slots, neither text nor tools: those are the environment's (`rollout.collect`). One round of `run`:

1. answers of the environment are appended to the live caches of their rows;
2. free slots take the next requests, a prompt being written once per group and copied to the siblings;
3. a chunk of decode steps is enqueued, and the previous one (on a CPU: this one) is read;
4. rows that stopped go to the environment, which finishes them or submits their calls; ended rows free their slot.

The host blocks on the environment only when nothing can be decoded.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.model.transformer import Params
from grpo_roc_jax.rollout.admission import Admission
from grpo_roc_jax.rollout.config import RolloutConfig, SamplingConfig
from grpo_roc_jax.rollout.decode import Report, empty_patch
from grpo_roc_jax.rollout.programs import ProgramCost, Programs
from grpo_roc_jax.rollout.records import (
    Environment,
    Finish,
    Observe,
    Request,
    Rollout,
    RolloutStats,
    SingleTurn,
    TurnEnd,
    TurnReason,
    Wait,
)
from grpo_roc_jax.rollout.table import FREE, SlotTable
from grpo_roc_jax.rollout.weights import Publisher, SamplerParams, StaleWeightsError
from grpo_roc_jax.types import StopReason

__all__ = [
    "Engine",
    "Environment",
    "Finish",
    "Observe",
    "Request",
    "Rollout",
    "RolloutStats",
    "SamplerParams",
    "SingleTurn",
    "StaleWeightsError",
    "TurnEnd",
    "Wait",
    "make_engine",
]

SHRINK_AFTER = 8
"""Chunks that must fit the next smaller cache before the engine returns to it: resizing copies the whole cache."""
POLL_S = 1.0
"""Longest single wait for tools; deadlines are looked at in between."""

Surplus = Callable[[int, Rollout], Iterable[int]]
"""(index, its rollout), called as each row ends -> indices no longer needed, e.g. as a group's quota is settled."""


def make_engine(
    model_config: ModelConfig,
    rollout_config: RolloutConfig,
    sampling_config: SamplingConfig,
    stop_ids: Sequence[int],
    mesh: Mesh | None = None,
    *,
    seed: int = 0,
    vocab_size: int | None = None,
) -> "Engine":
    """An engine for one set of shapes; programs are compiled by `warmup` or at first use, and counted.

    Args:
        model_config: With `vocab_size` resolved.
        rollout_config: Slots, limits, deadlines.
        sampling_config: Temperature and cuts.
        stop_ids: Token ids that end a turn.
        mesh: Slots are split over its data and fsdp axes, heads over tensor; only devices of this process are used,
            since tools finish at different times in different processes. None: one device.
        seed: Of the run.
        vocab_size: Ids the tokenizer knows; padding rows of the embedding behind it are never drawn. None: all.

    Raises:
        ValueError: a stop id outside the vocabulary, or slots that do not divide over the mesh.
    """
    vocabulary = vocab_size or model_config.vocab_size
    outside = [stop for stop in stop_ids if not 0 <= stop < vocabulary]
    if outside:
        raise ValueError(
            f"stop ids {outside} lie outside the vocabulary of {vocabulary} tokens and could never be drawn; take "
            "them from the tokenizer the model was made for"
        )
    mesh = mesh.local_mesh if mesh is not None and mesh.is_multi_process else mesh
    programs = Programs(model_config, rollout_config, sampling_config, tuple(stop_ids), vocab_size, mesh)
    if rollout_config.slots % programs.shards:
        raise ValueError(
            f"rollout.slots = {rollout_config.slots} does not divide over the {programs.shards} data shards of the "
            f"mesh; take {-(-rollout_config.slots // programs.shards) * programs.shards}"
        )
    shard_tokens = rollout_config.reservable_tokens // programs.shards
    if shard_tokens < rollout_config.max_row_tokens:
        raise ValueError(
            f"rollout.kv_tokens = {rollout_config.kv_tokens} over {programs.shards} data shards leaves "
            f"{shard_tokens} tokens each, too few for one row of {rollout_config.max_row_tokens}; raise it to at "
            f"least {rollout_config.max_row_tokens * programs.shards}"
        )
    publisher = Publisher(model_config, mesh, rollout_config.canary_tolerance)
    return Engine(rollout_config, sampling_config, tuple(stop_ids), seed, programs, publisher)


class Engine:
    """Compiled programs and settings; no weights, no rows. Make it once per run with `make_engine`."""

    def __init__(
        self,
        config: RolloutConfig,
        sampling: SamplingConfig,
        stop_ids: tuple[int, ...],
        seed: int,
        programs: Programs,
        publisher: Publisher,
    ):
        self.config, self.sampling, self.stop_ids, self.seed = config, sampling, stop_ids, seed
        self.programs = programs
        self._publisher = publisher

    def publish(self, params: Params, version: int) -> SamplerParams:
        """The parameters as the engine samples with them; once a step. See `weights.Publisher.publish`."""
        return self._publisher.publish(params, version)

    def warmup(self, sampler: SamplerParams) -> list[ProgramCost]:
        """Compiles every program a run can need; a table of names, seconds and scratch bytes."""
        return self.programs.warmup(sampler.params)

    def run(
        self,
        sampler: SamplerParams,
        requests: Sequence[Request],
        environment: Environment,
        *,
        progress: Any = None,
        surplus: Surplus | None = None,
    ) -> tuple[list[Rollout], RolloutStats]:
        """Rolls every request out; rollouts in the order asked, their stops counted in the statistics.

        Args:
            sampler: From `publish`.
            requests: What to roll out.
            environment: Parses turns, runs tools; `SingleTurn()` for plain generation.
            progress: `progress.RolloutProgress` or None.
            surplus: Consulted as rows end when `rollout.early_exit` is on; see `Surplus`.

        Raises:
            ValueError: no request, an empty or too long prompt, a budget beyond the limits, unequal prompts in a group.
        """
        check_requests(requests, self.config, self.programs.model.vocab_size)
        return _Run(self, sampler, requests, environment, progress, surplus).run()


def check_requests(requests: Sequence[Request], config: RolloutConfig, vocab_size: int) -> None:
    """Refuses what could not be rolled out, before anything is computed.

    Raises:
        ValueError: naming the request, the numbers and the setting to change.
    """
    if not requests:
        raise ValueError("no rollout requested: the group is empty; ask for at least one sample of one problem")
    first: dict[int, Request] = {}
    for index, request in enumerate(requests):
        n = len(request.prompt)
        if not 1 <= n <= config.max_prompt_tokens:
            raise ValueError(
                f"request {index} (key {request.key}): prompt of {n} tokens, 1 to {config.max_prompt_tokens} are "
                "wanted; drop the problem or raise rollout.max_prompt_tokens"
            )
        if not 1 <= request.budget <= config.max_response_tokens:
            raise ValueError(
                f"request {index} (key {request.key}): budget of {request.budget} tokens, 1 to "
                f"{config.max_response_tokens} are wanted; change it or rollout.max_response_tokens"
            )
        if request.resume is not None and len(request.resume.tokens) >= n + request.budget:
            raise ValueError(
                f"request {index} (key {request.key}) resumes {len(request.resume.tokens)} tokens, but prompt + "
                f"budget is {n + request.budget}; finish it as `length` or raise its budget"
            )
        sibling = first.setdefault(request.group, request)
        if sibling is request:
            low, high = int(np.min(request.prompt)), int(np.max(request.prompt))
            if low < 0 or high >= vocab_size:
                raise ValueError(
                    f"request {index} (key {request.key}): prompt ids from {low} to {high}, but the model has "
                    f"{vocab_size} tokens; use the tokenizer the model was made for"
                )
        elif sibling.prompt is not request.prompt and not np.array_equal(sibling.prompt, request.prompt):
            raise ValueError(
                f"request {index} (key {request.key}): its prompt differs from that of group {request.group}; give "
                "requests with different prompts different groups"
            )


@dataclass(frozen=True, eq=False)
class _Write:
    """Tokens to append to a slot's cache from column `start`; void once the slot has gone to another request."""

    slot: int
    request: int
    ids: np.ndarray
    start: int


@dataclass(frozen=True, eq=False)
class _Flight:
    """A chunk enqueued and not yet read."""

    report: Report
    generation: np.ndarray


class _Run:
    """The state of one `Engine.run`."""

    def __init__(
        self,
        engine: Engine,
        sampler: SamplerParams,
        requests: Sequence[Request],
        environment: Environment,
        progress: Any,
        surplus: Surplus | None,
    ):
        self.config, self.programs, self.seed = engine.config, engine.programs, engine.seed
        self.temperature = engine.sampling.temperature
        self.sampler, self.requests, self.environment = sampler, requests, environment
        self.progress = progress
        self.surplus = surplus if engine.config.early_exit else None
        self.find_stop = getattr(environment, "find_stop", None)
        on_cpu = jax.default_backend() == "cpu"
        self.pipelined = {"on": True, "off": False, "auto": not on_cpu}[self.config.pipeline]
        self.shards, B = self.programs.shards, self.config.slots
        self.per_shard = B // self.shards
        self.is_stop = np.zeros(self.programs.model.vocab_size, bool)
        self.is_stop[list(engine.stop_ids)] = True
        width = max(len(request.prompt) + request.budget for request in requests)
        self.table = SlotTable(B, width, keeps_mass=engine.sampling.truncated)
        self.slot_of = np.full(len(requests), FREE, np.int64)
        self.rollouts: list[Rollout | None] = [None] * len(requests)
        self.unfinished = len(requests)
        self.admission = Admission(
            requests,
            shards=self.shards,
            reservable=self.config.reservable_tokens // self.shards,
            longest_first=self.config.admission == "longest",
        )
        self.stats = RolloutStats(requests=len(requests))
        self.shard_tokens = np.zeros(self.shards, np.int64)
        self.compiled_before = self.programs.compilations
        self.idle_patch = self.programs.place(empty_patch(B), None, self.programs.row_axes or None)
        self.flight: _Flight | None = None
        self.fits_smaller = 0
        self.seats_left = True
        # Work of the current round, flushed before the next chunk.
        self.prompt_writes: list[_Write] = []
        self.copies: dict[int, int] = {}
        self.other_writes: list[_Write] = []

    def run(self) -> tuple[list[Rollout], RolloutStats]:
        """See `Engine.run`."""
        self.started = time.perf_counter()
        self.cache = self.programs.new_cache(self.config.capacities[0])
        self.slots = self.programs.new_slots()
        while self.unfinished:
            self._answers()
            self._deadlines()
            self._admit()
            self._flush()
            if self.table.live.any():
                self._chunk()
            elif self.flight is not None:
                self._read()
            self._show()
        self.stats.seconds = time.perf_counter() - self.started
        self.stats.compilations = self.programs.compilations - self.compiled_before
        self.stats.shard_tokens = tuple(int(n) for n in self.shard_tokens)
        return [rollout for rollout in self.rollouts if rollout is not None], self.stats

    # The environment's side of a row.

    def _answers(self) -> None:
        """Takes what tools have answered; blocks only when no row can decode and no chunk is to be read."""
        table = self.table
        if not table.waiting.any():
            return
        seats = self.seats_left and self.admission.waiting > 0
        idle = not table.live.any() and self.flight is None and not seats
        start = time.perf_counter()
        answers = self.environment.poll(min(POLL_S, self._until_deadline()) if idle else 0.0)
        seconds = time.perf_counter() - start
        if idle:
            self.stats.tool_wait_s += seconds
        else:
            self.stats.environment_s += seconds
        for index, answer in answers:
            slot = self.slot_of[index]
            if slot == FREE or not table.waiting[slot]:
                continue
            if isinstance(answer, Finish):
                self._finish(slot, answer.stop)
            else:
                self._observe(slot, np.asarray(answer.ids, np.int32))

    def _observe(self, slot: int, ids: np.ndarray) -> None:
        table = self.table
        length, index = int(table.length[slot]), int(table.request[slot])
        if length + len(ids) >= table.total[slot]:
            # Not even one token could follow; the row ends on its unanswered call, as in the published environment.
            self._give_up(slot, "length")
            return
        table.observe(slot, ids)
        self.stats.observation_tokens += len(ids)
        if len(ids):
            # The pending token comes first; the last of the observation is the next pending one.
            unwritten = table.tokens[slot, length - 1 : length + len(ids) - 1].copy()
            self.other_writes.append(_Write(slot, index, unwritten, length - 1))
        table.go(slot, self.config.max_turn_tokens)

    def _turn_end(self, slot: int, found: bool) -> None:
        """Hands a stopped row to the environment."""
        table = self.table
        start, length = int(table.turn_start[slot]), int(table.length[slot])
        reason: TurnReason = "turn_length"
        if length >= table.total[slot]:
            reason = "length"
        elif found or self.is_stop[table.tokens[slot, length - 1]]:
            reason = "stop"
        table.live[slot] = False
        table.turns[slot].append((start, length))
        turn = TurnEnd(
            request=int(table.request[slot]),
            start=start,
            tokens=table.tokens[slot, start:length].copy(),
            logprobs=table.logprobs[slot, start:length].copy(),
            reason=reason,
        )
        before = time.perf_counter()
        answer = self.environment.turn_ended(turn.request, turn)
        self.stats.environment_s += time.perf_counter() - before
        if reason == "length":
            self._finish(slot, "length")
        elif isinstance(answer, Finish):
            self._finish(slot, answer.stop)
        else:
            table.waiting[slot] = True
            table.waiting_since_s[slot] = time.perf_counter()

    def _finish(self, slot: int, stop: StopReason) -> None:
        table = self.table
        index = int(table.request[slot])
        rollout = table.rollout(slot, stop, time.perf_counter())
        table.free(slot)
        self.slot_of[index] = FREE
        self.admission.release(index, slot // self.per_shard)
        self.seats_left = True
        self._record(index, rollout)

    def _record(self, index: int, rollout: Rollout) -> None:
        self.rollouts[index] = rollout
        self.unfinished -= 1
        self.stats.stops[rollout.stop] += 1
        if self.surplus is not None:
            for other in self.surplus(index, rollout):
                self._cancel(other, "cancelled")

    def _give_up(self, slot: int, stop: StopReason) -> None:
        """Ends a row for a reason of the engine's own; the environment is told to drop its calls."""
        self.environment.cancelled(int(self.table.request[slot]))
        self._finish(slot, stop)

    def _cancel(self, index: int, stop: StopReason) -> None:
        if self.rollouts[index] is not None:
            return
        if self.slot_of[index] != FREE:
            self._give_up(int(self.slot_of[index]), stop)
        elif self.admission.withdraw(index):
            self._record(index, self._untouched(index, stop))

    def _untouched(self, index: int, stop: StopReason) -> Rollout:
        """The rollout of a request that never got a slot."""
        request = self.requests[index]
        if request.resume is not None:
            past = request.resume
            return Rollout(**{**past.__dict__, "stop": stop, "seconds": 0.0})
        n = len(request.prompt)
        return Rollout(
            tokens=np.asarray(request.prompt, np.int32).copy(),
            policy_mask=np.zeros(n, bool),
            logprobs=np.zeros(n, np.float32),
            versions=np.full(n, -1, np.int32),
            mass=None if self.table.mass is None else np.ones(n, np.float32),
            prompt_length=n,
            turns=(),
            stop=stop,
            seconds=0.0,
        )

    # Deadlines.

    def _deadlines(self) -> None:
        config, table = self.config, self.table
        if not (config.turn_timeout_s or config.trajectory_timeout_s or config.step_timeout_s):
            return
        now = time.perf_counter()
        late = np.zeros(len(table.request), bool)
        if config.turn_timeout_s:
            late |= table.waiting & (now - table.waiting_since_s > config.turn_timeout_s)
        if config.trajectory_timeout_s:
            late |= table.occupied & (now - table.admitted_s > config.trajectory_timeout_s)
        for slot in np.flatnonzero(late):
            if table.request[slot] != FREE:
                self._give_up(int(slot), "deadline")
        if config.step_timeout_s and now - self.started > config.step_timeout_s:
            self._end_step()

    def _end_step(self) -> None:
        carry = self.config.carry_over
        for slot in np.flatnonzero(self.table.occupied):
            if self.table.request[slot] == FREE:
                continue
            late: StopReason = "deadline" if self.table.waiting[slot] else "infrastructure"
            self._give_up(int(slot), "cancelled" if carry else late)
        for index in self.admission.withdraw_all():
            self._record(index, self._untouched(index, "cancelled" if carry else "infrastructure"))

    def _until_deadline(self) -> float:
        """Seconds to the nearest deadline, at least a millisecond."""
        config, table, now = self.config, self.table, time.perf_counter()
        ends = [float("inf")]
        if config.turn_timeout_s:
            ends.append(float(table.waiting_since_s[table.waiting].min()) + config.turn_timeout_s)
        if config.trajectory_timeout_s:
            ends.append(float(table.admitted_s[table.occupied].min()) + config.trajectory_timeout_s)
        if config.step_timeout_s:
            ends.append(self.started + config.step_timeout_s)
        return max(1e-3, min(ends) - now)

    # Admission.

    def _admit(self) -> None:
        """Fills free slots while reservations fit."""
        self.seats_left = False
        if not self.admission.waiting:
            return
        table, now = self.table, time.perf_counter()
        for shard in self._emptiest_first():
            first = shard * self.per_shard
            own = np.arange(first, first + self.per_shard)
            free = [int(slot) for slot in own[table.request[own] == FREE]]
            while free:
                index = self.admission.take(shard)
                if index is None:
                    break
                slot = self._choose(self.requests[index].group, own, free)
                free.remove(slot)
                self._place(index, slot, own, now)
        self.stats.reserved_peak = max(self.stats.reserved_peak, sum(self.admission.reserved))

    def _emptiest_first(self) -> list[int]:
        return sorted(range(self.shards), key=lambda shard: self.admission.reserved[shard])

    def _choose(self, group: int, own: np.ndarray, free: list[int]) -> int:
        """A free slot that still holds the prompt; else one whose prompt nobody copies from in this round."""
        holding = self.table.holders(group, free)
        if len(holding):
            return int(holding[0])
        sources = set(self.copies.values())
        return next((slot for slot in free if slot not in sources), free[0])

    def _place(self, index: int, slot: int, own: np.ndarray, now: float) -> None:
        """Seats a request: its prompt from the slot itself, from a sibling's slot, or written."""
        table, request = self.table, self.requests[index]
        columns = len(request.prompt) - 1
        if table.held_group[slot] == request.group:
            self.stats.reused += 1
        else:
            holders = table.holders(request.group, own)
            pending = {*self.copies, *self.copies.values(), *(write.slot for write in self.prompt_writes)}
            if slot in pending:
                self._flush()
            if len(holders):
                if columns:
                    # From the original, not from a copy that is itself still to be made.
                    holder = int(holders[0])
                    self.copies[slot] = self.copies.get(holder, holder)
                self.stats.forks += 1
            else:
                if columns:
                    self.prompt_writes.append(_Write(slot, index, np.asarray(request.prompt[:-1], np.int32), 0))
                self.stats.prompts += 1
            table.held_group[slot], table.held_columns[slot] = request.group, columns
        temperature = self.temperature if request.temperature is None else request.temperature
        table.admit(slot, index, request, self.seed, temperature, now)
        self.slot_of[index] = slot
        past = request.resume
        if past is not None and len(past.tokens) - 1 > columns:
            rest = np.asarray(past.tokens[columns:-1], np.int32)
            self.other_writes.append(_Write(slot, index, rest, columns))
        if past is not None and past.waiting:
            self._turn_end(slot, found=True)
        else:
            table.go(slot, self.config.max_turn_tokens)

    # Device work.

    def _flush(self) -> None:
        """Enqueues the round's writes: prompts, then copies of them, then what comes behind prompts."""
        if not (self.prompt_writes or self.copies or self.other_writes):
            return
        start = time.perf_counter()
        padding = self.config.append_lengths[0]
        # A prompt is written even if its row is gone, since siblings copy it; anything else then belongs to nobody.
        self.other_writes = [w for w in self.other_writes if self.table.request[w.slot] == w.request]
        writes = [*self.prompt_writes, *self.other_writes]
        self._grow(max((w.start + len(w.ids) + padding for w in writes), default=0))
        self._write(self.prompt_writes)
        self._copy(self.copies)
        self._write(self.other_writes)
        self.prompt_writes, self.copies, self.other_writes = [], {}, []
        self.stats.append_s += time.perf_counter() - start

    def _write(self, writes: Sequence[_Write]) -> None:
        """Appends in calls of one piece per row, as many rows per shard as the programs have."""
        queues: list[deque[_Write]] = [deque() for _ in range(self.shards)]
        for write in writes:
            queues[write.slot // self.per_shard].append(write)
        while any(queues):
            n = self.programs.append_rows[-1] if max(map(len, queues)) > 1 else 1
            batch = []
            for shard, queue in enumerate(queues):
                batch += [(shard * n + i, queue.popleft()) for i in range(min(n, len(queue)))]
            batch = [(row, write, *self._piece(write)) for row, write in batch]
            for row, write, taken, _ in batch:
                if taken < len(write.ids):
                    rest = _Write(write.slot, write.request, write.ids[taken:], write.start + taken)
                    queues[row // n].append(rest)
            self._append(n, batch)

    def _piece(self, write: _Write) -> tuple[int, int]:
        """How many tokens of a write the next call takes, and its padded length."""
        lengths, count = self.config.append_lengths, len(write.ids)
        T = next((length for length in lengths if length >= count), lengths[-1])
        if write.start + T > self.cache.capacity:
            # Padding would not fit behind the row: whole pieces first.
            T = max((length for length in lengths if length <= count), default=lengths[0])
        return min(T, count), T

    def _append(self, n: int, batch: list[tuple[int, _Write, int, int]]) -> None:
        T = max(padded for _, _, _, padded in batch)
        rows = n * self.shards
        tokens = np.zeros((rows, T), np.int32)
        where = np.zeros((3, rows), np.int32)
        where[0] = self.per_shard
        for row, write, taken, _ in batch:
            tokens[row, :taken] = write.ids[:taken]
            where[:, row] = (write.slot % self.per_shard, write.start, taken)
            self.stats.prefilled_tokens += taken
            self.stats.padded_tokens += T
        fresh = all(write.start == 0 for _, write, _, _ in batch)
        axes = self.programs.row_axes or None
        place = self.programs.place
        self.cache = self.programs.append(
            self.sampler.params, self.cache, place(tokens, axes), place(where, None, axes), fresh=fresh
        )
        self.stats.appends += 1

    def _copy(self, copies: Mapping[int, int]) -> None:
        """Forks prompts (target slot -> source slot), one source per shard and call."""
        by_source: list[dict[int, list[int]]] = [{} for _ in range(self.shards)]
        for target, source in copies.items():
            by_source[source // self.per_shard].setdefault(source % self.per_shard, []).append(target % self.per_shard)
        axes, place = self.programs.row_axes or None, self.programs.place
        while any(by_source):
            source = np.zeros(self.shards, np.int32)
            count = np.zeros(self.shards, np.int32)
            targets = np.zeros((self.shards, self.per_shard), np.int32)
            for shard, pending in enumerate(by_source):
                if pending:
                    source[shard], rows = pending.popitem()
                    count[shard] = len(rows)
                    targets[shard, : len(rows)] = rows
            self.cache = self.programs.fork(
                self.cache, place(source, axes), place(targets.reshape(-1), axes), place(count, axes)
            )

    def _grow(self, columns: int) -> None:
        """A cache of at least `columns`."""
        while self.cache.capacity < columns:
            ladder = self.config.capacities
            self.cache = self.programs.resize(self.cache, ladder[ladder.index(self.cache.capacity) + 1])
            self.stats.resizes += 1
            self.fits_smaller = 0
        self.stats.capacity = max(self.stats.capacity, self.cache.capacity)

    def _fit(self) -> None:
        """Grows for the next chunk, or shrinks when the smaller cache would have done for a while."""
        ahead = self.config.chunk * (2 if self.flight is not None else 1)
        need = int(self.table.length.max()) + ahead
        self._grow(min(need, self.config.capacities[-1]))
        ladder, capacity = self.config.capacities, self.cache.capacity
        smaller = ladder[max(0, ladder.index(capacity) - 1)]
        self.fits_smaller = self.fits_smaller + 1 if need + ahead <= smaller < capacity else 0
        if self.fits_smaller >= SHRINK_AFTER:
            self.cache = self.programs.resize(self.cache, smaller)
            self.stats.resizes += 1
            self.fits_smaller = 0
            self.table.held_group[self.table.held_columns > smaller] = FREE

    def _chunk(self) -> None:
        """Enqueues a chunk and reads one: the previous when pipelined, this one otherwise."""
        self._fit()
        start = time.perf_counter()
        changes = self.table.take_patch()
        patch = self.idle_patch
        if changes is not None:
            patch = self.programs.place(changes, None, self.programs.row_axes or None)
        previous = self.flight
        self.cache, self.slots, report = self.programs.decode(self.sampler.params, self.cache, self.slots, patch)
        self.flight = _Flight(report, self.table.generation.copy())
        self.stats.chunks += 1
        self.stats.decode_s += time.perf_counter() - start
        if not self.pipelined:
            self._read()
        elif previous is not None:
            latest, self.flight = self.flight, previous
            self._read()
            self.flight = latest

    def _read(self) -> None:
        """Reads the chunk in flight and deals with the rows that stopped in it."""
        start = time.perf_counter()
        flight, self.flight = self.flight, None
        report = jax.device_get(flight.report)
        self.stats.decode_s += time.perf_counter() - start
        table, steps = self.table, report.steps
        self.stats.steps += int(steps.mean().round())
        self.stats.slot_steps += int(steps.sum()) * self.per_shard
        current = (flight.generation == table.generation) & table.live
        count = np.where(current, report.count, 0)
        self.stats.dropped_tokens += int(report.count.sum() - count.sum())
        table.extend(report.tokens, report.logprobs, report.mass, count, self.sampler.version)
        self.stats.sampled_tokens += int(count.sum())
        self.shard_tokens += count.reshape(self.shards, -1).sum(axis=1)
        drew = count > 0
        found = self._stop_texts(np.flatnonzero(drew), count) if self.find_stop is not None else {}
        last = table.tokens[np.arange(len(count)), np.maximum(table.length - 1, 0)]
        stopped = drew & ((table.length >= table.limit) | self.is_stop[last])
        stopped[list(found)] = True
        for slot in np.flatnonzero(stopped):
            if table.live[slot]:
                self._turn_end(int(slot), found=slot in found)

    def _stop_texts(self, slots: np.ndarray, count: np.ndarray) -> dict[int, int]:
        """Slot -> tokens kept, for rows whose stop text ended in this chunk; they are rolled back to its end."""
        table, found = self.table, {}
        for slot in slots:
            n, drawn = int(table.length[slot]), int(count[slot])
            keep = self.find_stop(int(table.request[slot]), table.tokens[slot, n - drawn : n].copy())
            if keep is None:
                continue
            if not 1 <= keep <= drawn:
                raise ValueError(
                    f"find_stop kept {keep} of {drawn} new tokens; a stop text ends among the new tokens, so 1 to "
                    f"{drawn} are wanted"
                )
            found[int(slot)] = keep
            if keep < drawn:
                table.length[slot] -= drawn - keep
                self.stats.sampled_tokens -= drawn - keep
                self.shard_tokens[slot // self.per_shard] -= drawn - keep
                self.stats.dropped_tokens += drawn - keep
            table.halt(slot)
            table.live[slot] = True
        return found

    def _show(self) -> None:
        if self.progress is not None:
            table = self.table
            self.progress.update(
                live=int(table.live.sum()),
                waiting=int(table.waiting.sum()),
                done=len(self.requests) - self.unfinished,
                total=len(self.requests),
                tokens=self.stats.sampled_tokens,
            )
