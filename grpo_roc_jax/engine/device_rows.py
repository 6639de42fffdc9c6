"""The device side of the rows: their blocks in the pool, the writes queued for them, the chunk in flight.

Within a round, writes are queued on the host and then enqueued together: prompts, copies of blocks, then what follows
the prompts. The device runs calls in that order, so a copy may read a prompt that is written in the same round, and a
block that a row gives up may go to another row at once.

`Prompts` knows which row has written a prompt, so that its siblings share it: whole blocks by reference, the rest as a
copy. The prompt of a row that ends while siblings are still in the queue is kept for the next of them. With recurrent
layers only rows of the same round can share a prompt: their memory moves on with the first token, and nothing keeps it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from grpo_roc_jax.engine.config import RolloutConfig
from grpo_roc_jax.engine.decode import ChunkReport, empty_patch
from grpo_roc_jax.engine.programs import COPIES, SamplerPrograms
from grpo_roc_jax.engine.protocol import RolloutStats
from grpo_roc_jax.engine.publish import SamplerParams
from grpo_roc_jax.engine.table import BlockLedger, Chain, Copies, SlotTable
from grpo_roc_jax.model.pool import tile_count, tile_width


class Write(NamedTuple):
    """Tokens to append to a slot's blocks from column `start`."""

    slot: int
    ids: np.ndarray
    start: int


def _tokens(queue: Sequence[Write]) -> int:
    return sum(len(write.ids) for write in queue)


@dataclass
class RowTaker:
    """Takes writes for a call that holds one piece for each of so many rows, all padded to the length of the longest.
    Each of them must end within the columns of the table, padding included."""

    rows: int
    piece: Callable[[Write], tuple[int, int]]
    columns: int
    start: int = 0
    """Largest first column of the writes that the call has."""
    length: int = 0
    """Largest padded length of them."""

    def __call__(self, write: Write) -> tuple[int, int] | None:
        """(tokens of the write that the call takes, padded length); None if there is no place for it in the call."""
        count, padded = self.piece(write)
        start, length = max(self.start, write.start), max(self.length, padded)
        if not self.rows or start + length > self.columns:
            return None
        self.rows, self.start, self.length = self.rows - 1, start, length
        return count, padded


class PackTaker:
    """Takes writes for a call that holds so many tokens of any rows."""

    def __init__(self, tokens: int):
        self._tokens, self._tiles, self._width = tokens, tile_count(tokens), tile_width(tokens)

    def __call__(self, write: Write) -> tuple[int, int] | None:
        """The same as for `RowTaker`, but without padding."""
        count = min(len(write.ids), self._tokens, self._tiles * self._width)
        self._tokens -= count
        self._tiles -= -(-count // self._width)
        return (count, count) if count else None


@dataclass(frozen=True, eq=False)
class Flight:
    """A chunk that is enqueued and not read yet."""

    report: ChunkReport
    generation: np.ndarray
    """int64[B]: `SlotTable.generation` when the chunk was enqueued."""
    width: int
    """Rows that each shard computes."""
    version: int
    """The version of the weights that draw it."""


class DeviceRows:
    """Gives blocks to slots, queues writes, enqueues and reads chunks. `sampler` may be replaced between chunks."""

    def __init__(
        self,
        programs: SamplerPrograms,
        config: RolloutConfig,
        sampler: SamplerParams,
        table: SlotTable,
        stats: RolloutStats,
    ):
        self.programs, self.config, self.sampler = programs, config, sampler
        self.table, self.stats = table, stats
        self.shards = programs.shards
        self.per_shard = config.slots // self.shards
        self.pipelined = {"on": True, "off": False, "auto": jax.default_backend() != "cpu"}[config.pipeline]
        self.flight: Flight | None = None
        size = programs.size
        self.blocks = [BlockLedger(size.blocks, size.columns, programs.shared_blocks) for _ in range(self.shards)]
        self.chains: list[Chain | None] = [None] * config.slots
        self.version = np.zeros(config.slots, np.int64)
        """int64[B]: the version of the weights that wrote the first column of each slot."""
        self._none = programs.largest_size.blocks
        self._block_table = np.full((config.slots, config.table_width), self._none, np.int32)
        self._block_table_on_device: jax.Array | None = None
        self._axes = programs.row_axes or None
        self._idle_patch = programs.place(empty_patch(config.slots), None, self._axes)
        self._pool = programs.new_pool()
        self._slots = programs.new_slots()
        self.queued_prompts: list[Write] = []
        """Prompts that are written with the next `flush`."""
        self._copies: list[tuple[int, int, int]] = []
        self._rows: list[tuple[int, int]] = []
        self._others: list[Write] = []

    # Blocks.

    def of(self, slot: int) -> BlockLedger:
        """The blocks of the slot's shard."""
        return self.blocks[slot // self.per_shard]

    @property
    def ahead(self) -> int:
        """Columns that chunks may write before the host has read them, the next one included."""
        return self.config.chunk * (2 if self.flight is not None else 1)

    def give(self, slot: int, chain: Chain) -> None:
        """The slot's row goes on with this chain."""
        self.chains[slot], self.version[slot] = chain, self.sampler.version
        self._show(slot)

    def grow(self, slot: int, columns: int) -> None:
        """Room for that many columns; raises `Full`."""
        if self.of(slot).grow(self.chains[slot], columns):
            self._show(slot)

    def enlarge(self) -> bool:
        """Lets the pool grow, if `rollout.kv_start` left room for that; whether it did."""
        if not self.programs.can_grow:
            return False
        self._pool = self.programs.grow(self._pool)
        for blocks in self.blocks:
            blocks.extend(self.programs.size.blocks, self.programs.shared_blocks)
        return True

    def room(self) -> np.ndarray:
        """int64[B]: columns that each slot has room for."""
        return (self._block_table != self._none).sum(axis=1) * self.programs.size.columns

    def take_back(self, slot: int) -> Chain | None:
        """The chain of a slot, which loses it. What is queued for others from its blocks is enqueued first, since they
        may go to another row."""
        written = (write.slot for write in self.queued_prompts)
        if slot in {*written, *(part for source, target in self._rows for part in (source, target))}:
            self.flush()
        self._others = [write for write in self._others if write.slot != slot]
        chain, self.chains[slot] = self.chains[slot], None
        self._block_table[slot], self._block_table_on_device = self._none, None
        return chain

    def _show(self, slot: int) -> None:
        blocks = self.chains[slot].blocks
        self._block_table[slot, : len(blocks)], self._block_table_on_device = blocks, None

    # Queueing.

    def write_prompt(self, write: Write) -> None:
        """Queues a prompt."""
        self.queued_prompts.append(write)

    def copy(self, source: int, target: int, copies: Copies) -> None:
        """Queues copies of blocks from a row to another of its shard, and of the memory of its recurrent layers."""
        shard = source // self.per_shard
        self._copies += [(shard, *pair) for pair in copies]
        if copies or self.table.recurrent:
            self._rows.append((source, target))

    def write(self, write: Write) -> None:
        """Queues tokens that follow a prompt: an observation, a prefix, or the tokens of an earlier step."""
        self._others.append(write)

    def prompt_is_queued(self, slot: int) -> bool:
        """Whether the prompt of the slot is still to be written."""
        return any(write.slot == slot for write in self.queued_prompts)

    def is_written(self, slot: int) -> bool:
        """Whether nothing that follows the prompt is queued for the slot."""
        return all(write.slot != slot for write in self._others)

    # Enqueueing.

    def flush(self) -> None:
        """Enqueues the writes of the round."""
        if not (self.queued_prompts or self._rows or self._others):
            return
        start = time.perf_counter()
        self.append_all(self.queued_prompts, shared=True)
        self._copy_all()
        self.append_all(self._others, shared=False)
        self.queued_prompts, self._copies, self._rows, self._others = [], [], [], []
        self.stats.append_s += time.perf_counter() - start

    def append_all(self, writes: Sequence[Write], *, shared: bool) -> None:
        """Appends in calls of one piece per row, with as many rows per shard as the programs take. `shared`: a write
        may begin after blocks that another one of them writes."""
        queues: list[list[Write]] = [[] for _ in range(self.shards)]
        for write in writes:
            queues[write.slot // self.per_shard].append(write)
        columns = self._block_table.shape[1] * self.programs.size.columns
        while any(queues):
            pack = self.programs.pack_length(max(map(_tokens, queues))) if self.programs.packs else 0
            pieces = []
            rows = RowTaker(0, self._piece, columns)
            for shard, queue in enumerate(queues):
                rows = replace(rows, rows=self.programs.append_rows[-1])  # the call has one length in all shards
                take = PackTaker(pack) if pack else rows
                batch, queues[shard] = self.next_pieces(queue, shared, take)
                queues[shard] += [
                    write._replace(ids=write.ids[count:], start=write.start + count)
                    for write, count, _ in batch
                    if count < len(write.ids)
                ]
                pieces.append(batch)
            if pack:
                self._append_packed(pieces, pack)
            else:
                self.append(pieces)

    def next_pieces(
        self, queue: list[Write], shared: bool, take: RowTaker | PackTaker
    ) -> tuple[list[tuple[Write, int, int]], list[Write]]:
        """(the writes of a shard's next call, each with what `take` says of it; those that are left in the queue).

        A prompt that begins with blocks of another one waits until these are written, or are written by the same call,
        which writes before it reads in each layer.
        """
        unwritten: set[int] = set()
        if shared:
            unwritten = {block for write in queue for block in self._blocks_of(write, 0)}
        batch: list[tuple[Write, int, int]] = []
        left: list[Write] = []
        for write in queue:
            before = self._block_table[write.slot, : write.start // self.programs.size.columns] if unwritten else ()
            if unwritten.isdisjoint(before) and (piece := take(write)):
                batch.append((write, *piece))
                unwritten -= self._blocks_of(write, 0) - self._blocks_of(write, piece[0])
            else:
                left.append(write)
        return batch, left

    def _blocks_of(self, write: Write, first: int) -> set[int]:
        """The blocks that the tokens of a write from `first` on go to."""
        size, end = self.programs.size.columns, write.start + len(write.ids)
        begin = (write.start + first) // size
        return set(self._block_table[write.slot, begin : -(-end // size)].tolist()) if first < len(write.ids) else set()

    def _piece(self, write: Write) -> tuple[int, int]:
        """How many tokens of a write the next call takes, and its padded length."""
        lengths, count = self.config.append_lengths, len(write.ids)
        T = next((length for length in lengths if length >= count), lengths[-1])
        if write.start + T > self._block_table.shape[1] * self.programs.size.columns:
            # Padding would not fit after the longest row: pieces without padding first.
            T = max((length for length in lengths if length <= count), default=lengths[0])
        return min(T, count), T

    def append(self, pieces: Sequence[Sequence[tuple[Write, int, int]]]) -> None:
        """Appends a piece of each of these rows of each shard: what is written, tokens taken of it, padded length."""
        T = max(padded for batch in pieces for _, _, padded in batch)
        n = self.programs.append_width(max(map(len, pieces)), T)
        rows = n * self.shards
        tokens = np.zeros((rows, T), np.int32)
        table = np.full((rows, self._block_table.shape[1]), self._none, np.int32)
        where = np.zeros((3, rows), np.int32)
        where[0] = self.per_shard
        placed = [(shard * n + i, *piece[:2]) for shard, batch in enumerate(pieces) for i, piece in enumerate(batch)]
        for row, write, count in placed:
            tokens[row, :count] = write.ids[:count]
            table[row] = self._block_table[write.slot]
            where[:, row] = (write.slot % self.per_shard, write.start, count)
            self.stats.prefilled_tokens += count
            self.stats.padded_tokens += T
        place, axes = self.programs.place, self._axes
        arrays = (place(tokens, axes), place(table, axes), place(where, None, axes))
        self._pool = self.programs.append(self.sampler.params, self._pool, *arrays)
        self.stats.appends += 1

    def _append_packed(self, pieces: Sequence[Sequence[tuple[Write, int, int]]], N: int) -> None:
        """Appends a piece of each of these rows of each shard, side by side in packs of N tokens."""
        J, X, shards = tile_count(N), tile_width(N), self.shards
        tokens = np.zeros((3, shards, N), np.int32)
        tokens[2] = J * X  # the place of padding
        table = np.full((shards, J, self._block_table.shape[1]), self._none, np.int32)
        tiles = np.zeros((2, shards, J), np.int32)
        for shard, batch in enumerate(pieces):
            first = tile = 0
            for write, count, _ in batch:
                steps = np.arange(count)
                tokens[:, shard, first : first + count] = write.ids[:count], write.start + steps, tile * X + steps
                for start in range(0, count, X):
                    table[shard, tile] = self._block_table[write.slot]
                    tiles[:, shard, tile] = first + start, min(X, count - start)
                    tile += 1
                first += count
            self.stats.prefilled_tokens += first
            self.stats.padded_tokens += N if batch else 0
        place, axes = self.programs.place, self._axes
        arrays = place(tokens.reshape(3, -1), None, axes), place(table.reshape(shards * J, -1), axes)
        tiles = place(tiles.reshape(2, -1), None, axes)
        self._pool = self.programs.append_packed(self.sampler.params, self._pool, *arrays, tiles)
        self.stats.appends += 1

    def _copy_all(self) -> None:
        """Enqueues the queued copies of blocks and, with recurrent layers, of rows."""
        blocks = [[pair for shard, *pair in self._copies if shard == number] for number in range(self.shards)]
        rows: list[list[tuple[int, int]]] = [[] for _ in range(self.shards)]
        for source, target in self._rows if self.table.recurrent else ():
            rows[source // self.per_shard].append((source % self.per_shard, target % self.per_shard))
        place = self.programs.place
        while any(blocks) or any(rows):
            calls = []
            for queues, none in ((blocks, self._none), (rows, self.per_shard)):
                pairs = np.full((2, self.shards * COPIES), none, np.int32)
                for shard, queue in enumerate(queues):
                    batch, queue[:] = queue[:COPIES], queue[COPIES:]
                    pairs[:, shard * COPIES : shard * COPIES + len(batch)] = np.array(batch, np.int32).reshape(-1, 2).T
                calls.append(place(pairs, None, self._axes))
            self._pool = self.programs.copy(self._pool, *calls)

    # Chunks.

    def chunk(self, steering: Sequence[np.ndarray] = ()) -> tuple[ChunkReport, np.ndarray, int] | None:
        """Enqueues a chunk, then reads one: this one, or the previous if pipelined; None if there is none yet.

        Args:
            steering: The fields of `steering.Steering`, if a row asks for something.
        """
        start = time.perf_counter()
        changes = self.table.take_patch()
        patch = self._idle_patch if changes is None else self.programs.place(changes, None, self._axes)
        if self._block_table_on_device is None:
            self._block_table_on_device = self.programs.place(self._block_table.copy(), self._axes)
        # The rows that are live on the host include every row that is active on the device.
        width = self.programs.width(int(self.table.live.reshape(self.shards, -1).sum(axis=1).max()))
        arguments = (self.sampler.params, self._pool, self._slots, patch, self._block_table_on_device)
        if steering:
            place = self.programs.place
            placed = (*(place(array, self._axes) for array in steering[:-1]), place(steering[-1]))
            self._pool, self._slots, report = self.programs.decode_steered(*arguments, *placed, width=width)
        else:
            self._pool, self._slots, report = self.programs.decode(*arguments, width)
        latest = Flight(report, self.table.generation.copy(), width, self.sampler.version)
        self._count()
        self.stats.decode_s += time.perf_counter() - start
        if not self.pipelined:
            self.flight = latest
            return self.read()
        previous = self.read() if self.flight is not None else None
        self.flight = latest
        return previous

    def _count(self) -> None:
        stats, room = self.stats, sum(blocks.used for blocks in self.blocks) * self.programs.size.columns
        stats.chunks += 1
        stats.cache_tokens = max(stats.cache_tokens, room)
        stats.room_sum += room
        stats.held_sum += int(self.table.length[~self.table.parked].sum())

    def read(self) -> tuple[ChunkReport, np.ndarray, int]:
        """(report of the chunk in flight, int[B] of the tokens that count: none of rows that have ended since, version
        of the weights that drew them)."""
        start = time.perf_counter()
        flight, self.flight = self.flight, None
        report = jax.device_get(flight.report)
        self.stats.decode_s += time.perf_counter() - start
        current = (flight.generation == self.table.generation) & self.table.live
        count = np.where(current, report.count, 0)
        self.stats.steps += round(float(report.steps.mean()))
        self.stats.slot_steps += int(report.steps.sum()) * flight.width
        self.stats.dropped_tokens += int(report.count.sum() - count.sum())
        return report, count, flight.version


class Prompts:
    """The written prompts of each data shard."""

    def __init__(self, device: DeviceRows, table: SlotTable, siblings: Callable[[int], int], stats: RolloutStats):
        self._device, self._table, self._siblings, self.stats = device, table, siblings, stats
        self._writer: dict[tuple[int, int], int] = {}
        """(shard, prompt) -> slot of the row that has written it."""
        self._orphans: dict[tuple[int, int], Chain] = {}
        """(shard, prompt) -> its blocks, after that row has ended."""

    def _key(self, slot: int, prompt: int) -> tuple[int, int]:
        return slot // self._device.per_shard, prompt

    def provide(self, slot: int, prompt: int, tokens: np.ndarray, columns: int, *, again: bool) -> int:
        """Gives the slot a chain that begins with the prompt, and queues what has to be written of it. Returns the
        columns of the row that were known.

        Args:
            slot: A slot without blocks.
            prompt: Number of its prompt.
            tokens: The tokens of the row, the pending one included.
            columns: The columns of its prompt; the last token of a prompt is not among them.
            again: The row has had blocks before; it is not counted, and its own blocks may still be there.

        Raises:
            Full: no room.
        """
        device, stats, key = self._device, self.stats, self._key(slot, prompt)
        blocks = device.of(slot)
        writer = None if again else self._writer.get(key)
        if writer is not None and columns and self._table.recurrent and not device.prompt_is_queued(writer):
            writer = None
        if not again and (orphan := self._orphans.pop(key, None)):
            device.give(slot, orphan)
            self._writer[key] = slot
            stats.reused += 1
            return columns
        if writer is not None:
            chain, copies = blocks.fork(device.chains[writer], columns)
            device.give(slot, chain)
            device.copy(writer, slot, copies)
            stats.forks += 1
            return columns
        chain = Chain() if self._table.recurrent else blocks.open(tokens, device.sampler.version)
        device.give(slot, chain)
        known = chain.known
        if self._siblings(prompt):
            blocks.grow(chain, columns // blocks.size * blocks.size, sharable=True)
        device.grow(slot, columns)
        device.give(slot, chain)
        self._writer[key] = slot
        stats.prompts += not again
        if columns > known:
            device.write_prompt(Write(slot, tokens[known:columns].copy(), known))
        if not self._table.recurrent:
            blocks.seal(chain, tokens[:columns], device.sampler.version)
        return known

    def reserved(self, shard: int, prompt: int) -> int:
        """Number of blocks that stay allocated for the next row of a prompt."""
        chain = self._orphans.get((shard, prompt))
        return len(chain.blocks) if chain else 0

    def leave(self, slot: int, prompt: int, columns: int, written: np.ndarray | None = None) -> None:
        """The row of the slot has ended: its blocks are free, but for a prompt that siblings still need. They can be
        found by the tokens `written`, if given."""
        findable = written is not None and self._is_current(slot)
        chain, key, blocks = self._device.take_back(slot), self._key(slot, prompt), self._device.of(slot)
        if chain is None:
            return
        if findable:
            blocks.seal(chain, written, self._device.sampler.version)
        if self._writer.get(key) == slot:
            del self._writer[key]
            needed = columns and self._siblings(prompt) and not self._table.recurrent
            # A copy for the last block would have no row to go to.
            if needed and not blocks.roll_back(chain, columns):
                self._orphans[key] = chain
                return
        blocks.close(chain)

    def park(self, slot: int, prompt: int, tokens: np.ndarray) -> None:
        """The row of the slot loses its blocks; `tokens` are those that it has written."""
        device, key = self._device, self._key(slot, prompt)
        current = self._is_current(slot)
        chain = device.take_back(slot)
        if self._writer.get(key) == slot:
            del self._writer[key]
        if chain is None:
            return
        if current:
            device.of(slot).seal(chain, tokens, device.sampler.version)
        device.of(slot).close(chain)

    def _is_current(self, slot: int) -> bool:
        """Whether what the blocks of a row hold is complete and of the present weights alone."""
        device = self._device
        same = device.version[slot] == device.sampler.version
        return same and not self._table.recurrent and device.is_written(slot)

    def drop(self, shard: int) -> bool:
        """Gives up prompts that are kept for rows of the queue; whether there were any."""
        keys = [key for key in self._orphans if key[0] == shard]
        for key in keys:
            self._device.blocks[shard].close(self._orphans.pop(key))
        return bool(keys)

    def forget(self) -> None:
        """The weights have changed: rows of the queue start with their own prompt."""
        for shard in range(self._device.shards):
            self.drop(shard)
        self._writer.clear()
