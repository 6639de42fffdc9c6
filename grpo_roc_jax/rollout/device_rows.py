"""The device side of a run: the cache, the slots, the writes queued for them, the chunk in flight.

Within a round, writes are queued on the host and then enqueued together: prompts, copies of prompts, then what follows
the prompts. The device runs calls in that order, so a copy may read a prompt that is written in the same round.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from grpo_roc_jax.model.transformer import Params
from grpo_roc_jax.rollout.config import RolloutConfig
from grpo_roc_jax.rollout.decode import ChunkReport, empty_patch
from grpo_roc_jax.rollout.programs import SamplerPrograms
from grpo_roc_jax.rollout.records import RolloutStats
from grpo_roc_jax.rollout.table import FREE, SlotTable

SHRINK_AFTER = 8
"""Consecutive chunks that must fit the next smaller cache before the engine shrinks to it, which copies the cache."""


class Write(NamedTuple):
    """Tokens to append to a slot's cache from column `start`; void once the slot has gone to another row."""

    slot: int
    row: int
    ids: np.ndarray
    start: int


@dataclass(frozen=True, eq=False)
class Flight:
    """A chunk that is enqueued and not read yet."""

    report: ChunkReport
    generation: np.ndarray
    """int64[B]: `SlotTable.generation` when the chunk was enqueued."""
    width: int
    """Rows that each shard computes."""


class DeviceRows:
    """Queues writes, keeps the cache as large as the rows need, enqueues and reads chunks."""

    def __init__(
        self, programs: SamplerPrograms, config: RolloutConfig, params: Params, table: SlotTable, stats: RolloutStats
    ):
        self.programs, self.config, self.params = programs, config, params
        self.table, self.stats = table, stats
        self.shards = programs.shards
        self.per_shard = config.slots // self.shards
        self.pipelined = {"on": True, "off": False, "auto": jax.default_backend() != "cpu"}[config.pipeline]
        self.flight: Flight | None = None
        self._axes = programs.row_axes or None
        self._idle_patch = programs.place(empty_patch(config.slots), None, self._axes)
        self._cache = programs.new_cache(config.capacities[0])
        self._slots = programs.new_slots()
        self._fits_smaller = 0
        self._prompts: list[Write] = []
        self._copies: dict[int, int] = {}
        self._others: list[Write] = []

    # Queueing.

    def write_prompt(self, write: Write) -> None:
        """Queues a prompt; call `flush_if_queued` first where the slot may be part of queued work."""
        self._prompts.append(write)

    def copy_prompt(self, source: int, target: int) -> None:
        """Queues a copy of the prompt in `source`; if that is itself a queued copy, of the prompt it copies."""
        self._copies[target] = self._copies.get(source, source)

    def write(self, write: Write) -> None:
        """Queues tokens that follow a prompt: an observation, a prefix, or the tokens of an earlier step."""
        self._others.append(write)

    def is_source(self, slot: int) -> bool:
        """Whether a queued copy reads the slot."""
        return slot in self._copies.values()

    def flush_if_queued(self, slot: int) -> None:
        """Enqueues the queued work if the slot is part of it, so that the slot can be reused."""
        writes = (write.slot for write in self._prompts)
        if slot in {*self._copies, *self._copies.values(), *writes}:
            self.flush()

    # Enqueueing.

    def flush(self) -> None:
        """Enqueues the writes of the round."""
        if not (self._prompts or self._copies or self._others):
            return
        start = time.perf_counter()
        # A prompt is written even if its row has ended, since other rows copy it. Other writes are dropped then.
        others = [write for write in self._others if self.table.row[write.slot] == write.row]
        padding = self.config.append_lengths[0]
        self._grow(max((w.start + len(w.ids) + padding for w in (*self._prompts, *others)), default=0))
        self._append_all(self._prompts)
        self._copy_all(self._copies)
        self._append_all(others)
        self._prompts, self._copies, self._others = [], {}, []
        self.table.forget_prompts()
        self.stats.append_s += time.perf_counter() - start

    def _append_all(self, writes: Iterable[Write]) -> None:
        """Appends in calls of one piece per row, with as many rows per shard as the programs take."""
        queues: list[deque[Write]] = [deque() for _ in range(self.shards)]
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
                    rest = write._replace(ids=write.ids[taken:], start=write.start + taken)
                    queues[row // n].append(rest)
            self._append(n, batch)

    def _piece(self, write: Write) -> tuple[int, int]:
        """How many tokens of a write the next call takes, and its padded length."""
        lengths, count = self.config.append_lengths, len(write.ids)
        T = next((length for length in lengths if length >= count), lengths[-1])
        if write.start + T > self._cache.capacity:
            # Padding would not fit after the row: pieces without padding first.
            T = max((length for length in lengths if length <= count), default=lengths[0])
        return min(T, count), T

    def _append(self, n: int, batch: Sequence[tuple[int, Write, int, int]]) -> None:
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
        # A row that is written again from its start may take a longer piece than any prompt.
        fresh = self.config.longest_fresh >= T and all(write.start == 0 for _, write, _, _ in batch)
        place = self.programs.place
        self._cache = self.programs.append(
            self.params, self._cache, place(tokens, self._axes), place(where, None, self._axes), fresh=fresh
        )
        self.stats.appends += 1

    def _copy_all(self, copies: Mapping[int, int]) -> None:
        """Copies prompts (target slot -> source slot), one source per shard and call."""
        by_source: list[dict[int, list[int]]] = [{} for _ in range(self.shards)]
        for target, source in copies.items():
            by_source[source // self.per_shard].setdefault(source % self.per_shard, []).append(target % self.per_shard)
        place = self.programs.place
        while any(by_source):
            source = np.zeros(self.shards, np.int32)
            count = np.zeros(self.shards, np.int32)
            targets = np.zeros((self.shards, self.per_shard), np.int32)
            for shard, pending in enumerate(by_source):
                if pending:
                    source[shard], rows = pending.popitem()
                    count[shard] = len(rows)
                    targets[shard, : len(rows)] = rows
            self._cache = self.programs.fork(
                self._cache, place(source, self._axes), place(targets.reshape(-1), self._axes), place(count, self._axes)
            )

    # Capacity.

    def _grow(self, columns: int) -> None:
        """Grows the cache to at least `columns`."""
        ladder = self.config.capacities
        while self._cache.capacity < columns:
            self._resize(ladder[ladder.index(self._cache.capacity) + 1])
        self.stats.capacity = max(self.stats.capacity, self._cache.capacity)

    def _resize(self, capacity: int) -> None:
        self._cache = self.programs.resize(self._cache, capacity)
        self.stats.resizes += 1
        self._fits_smaller = 0

    def _fit(self) -> None:
        """Grows the cache for the next chunk, or shrinks it after `SHRINK_AFTER` chunks that fit a smaller one."""
        ahead = self.config.chunk * (2 if self.flight is not None else 1)
        need = int(self.table.length.max()) + ahead
        ladder = self.config.capacities
        self._grow(min(need, ladder[-1]))
        capacity = self._cache.capacity
        smaller = ladder[max(0, ladder.index(capacity) - 1)]
        self._fits_smaller = self._fits_smaller + 1 if need + ahead <= smaller < capacity else 0
        if self._fits_smaller >= SHRINK_AFTER:
            self._resize(smaller)
            self.table.held_prompt[self.table.held_columns > smaller] = FREE

    # Chunks.

    def chunk(self) -> tuple[ChunkReport, np.ndarray] | None:
        """Enqueues a chunk, then reads one: this one, or the previous if pipelined; None if there is none yet."""
        self._fit()
        start = time.perf_counter()
        changes = self.table.take_patch()
        patch = self._idle_patch if changes is None else self.programs.place(changes, None, self._axes)
        # The rows that are live on the host include every row that is active on the device.
        width = self.programs.width(int(self.table.live.reshape(self.shards, -1).sum(axis=1).max()))
        self._cache, self._slots, report = self.programs.decode(self.params, self._cache, self._slots, patch, width)
        latest = Flight(report, self.table.generation.copy(), width)
        self.stats.chunks += 1
        self.stats.decode_s += time.perf_counter() - start
        if not self.pipelined:
            self.flight = latest
            return self.read()
        previous = self.read() if self.flight is not None else None
        self.flight = latest
        return previous

    def read(self) -> tuple[ChunkReport, np.ndarray]:
        """(report of the chunk in flight, int[B] of the tokens that count: none of rows that have ended since)."""
        start = time.perf_counter()
        flight, self.flight = self.flight, None
        report = jax.device_get(flight.report)
        self.stats.decode_s += time.perf_counter() - start
        current = (flight.generation == self.table.generation) & self.table.live
        count = np.where(current, report.count, 0)
        self.stats.steps += round(float(report.steps.mean()))
        self.stats.slot_steps += int(report.steps.sum()) * flight.width
        self.stats.dropped_tokens += int(report.count.sum() - count.sum())
        return report, count
