"""How long steps of training would take: rows, blocks, tools and updates as events, with the times of programs given.

An engine repeats the rounds of `engine.scheduler`: it appends what tools answered, gives slots to rows while what is
expected of them fits, decodes a chunk, and passes the rows whose turn has ended to their tools. Engines meet at
updates, unless these have devices of their own. Nothing here computes with weights.

Left out: the host's work between chunks beyond `Costs.round`, selection and scoring, and unequal shards of an engine.
Tools answer after their own time, however many run.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from grpo_roc_jax.engine.programs import first_calls
from grpo_roc_jax.engine.scheduler import Lengths
from grpo_roc_jax.model.pool import tile_count, tile_width
from grpo_roc_jax.stream.rollout_stream import may_take, oldest_whole

NEVER = float("inf")


@dataclass(frozen=True)
class RowTurn:
    """One turn of a row."""

    sampled: int
    """Tokens."""
    observed: int = 0
    """Tokens of what the tools answered; 0 after the last turn."""
    tool_s: float = 0.0
    """Seconds until the tools answered."""


@dataclass(frozen=True)
class RowLife:
    """A row from its prompt to its end."""

    prompt: int
    """Tokens."""
    turns: tuple[RowTurn, ...]

    @property
    def sampled(self) -> int:
        return sum(turn.sampled for turn in self.turns)

    @property
    def length(self) -> int:
        return self.prompt + sum(turn.sampled + turn.observed for turn in self.turns)


RowGroups = Sequence[Sequence[RowLife]]
"""The rows of each problem of a step."""


class DecodeTimes(NamedTuple):
    """Measured seconds of a decode step of so many rows, by the columns that it reads."""

    rows: int
    columns: tuple[float, ...]
    """Rising; times in between are interpolated."""
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Seconds of an engine's programs, linear in their work or, of decode steps, measured."""

    step: float
    """A decode step of any number of rows: what is read once."""
    row: float
    """Each row that a decode step computes."""
    column: float
    """Each column of the cache that a decode step reads."""
    append: float
    """A call that writes prompts or observations."""
    token: float
    """Each token of it, padding included."""
    round: float = 0.0
    """The host between two chunks."""
    compute_row: float = 0.0
    """A decode step takes at least this for each row, whatever it reads; 0 where the terms above add up."""
    publish: float = 0.0
    update: float = 0.0
    """An update of any size."""
    trained_token: float = 0.0
    """Each token of it."""
    copy: float = 0.0
    """A call that copies blocks of a prompt for a row of the same group."""
    measured: tuple[DecodeTimes, ...] = ()
    """In place of `step`, `row`, `column` and `compute_row`, by rising rows: on a CPU a program of twice the rows takes
    less or more than twice the time."""

    def decode(self, rows: float, columns: float) -> float:
        """Seconds of a decode step that computes so many rows and reads so many columns."""
        if self.measured:
            times = next((times for times in self.measured if times.rows >= rows), self.measured[-1])
            return float(np.interp(columns, times.columns, times.seconds))
        return max(self.step + self.row * rows + self.column * columns, self.compute_row * rows)


@dataclass(frozen=True)
class Machine:
    """The engines of a run."""

    engines: int
    slots: int
    """Slots of one engine."""
    chunk: int
    blocks: int
    """Blocks in the cache of one engine."""
    block: int
    """Columns of a block."""
    longest: int
    """Columns of the longest row."""
    widths: tuple[int, ...] = ()
    """Numbers of rows that a decode program computes; the smallest one that holds the live rows runs."""
    append_lengths: tuple[int, ...] = (16, 32, 64, 128)
    """Padded tokens of a row in an append, or where rows are packed those of the whole call."""
    append_rows: int = 8
    """Rows of an append; 0 where the tokens of any number of rows are packed (`rollout.append_rows`)."""
    copies: int = 8
    """Blocks that a call copies."""
    shares: bool = True
    """Whether the rows of a group share the whole blocks of their prompt; if not, these are copied too."""
    arenas: tuple[int, ...] = ()
    """Blocks of each part of the cache that a decode step reads whole if a live row has a block there, as on a CPU
    (`model.pool`); empty where it reads the columns of the live rows only."""


def packs(written: Sequence[int], lengths: tuple[int, ...]) -> list[int]:
    """Tokens, padding included, of each call that packs texts of so many tokens; see `engine.device_rows`.

    Args:
        written: Tokens of each text.
        lengths: Rising lengths of the calls.
    """
    calls, queue = [], [count for count in written if count]
    while queue:
        calls.append(size := first_calls(lengths)[min(sum(queue), 2 * lengths[-1])])
        tokens, tiles, width, left = size, tile_count(size), tile_width(size), []
        for count in queue:
            packed = min(count, tokens, tiles * width)
            tokens, tiles = tokens - packed, tiles - -(-packed // width)
            left += [count - packed] if packed < count else []
        queue = left
    return calls


@dataclass(frozen=True)
class StepSchedule:
    """When rows start and when steps end."""

    whole_rows: bool = False
    """Whether a row reserves the blocks of the longest row when it starts."""
    lag: int = 0
    """Steps to come whose rollouts begin now, and by how many versions the oldest rows of a step may be older than it.
    `stream.rollout_stream` says which groups a step takes, and when."""
    stealing: bool = False
    """Whether engines take the next problem from one queue, in place of an equal share each."""
    apart: bool = False
    """Whether updates have devices of their own (`rollout.samplers`), so that the engines go on meanwhile."""


@dataclass(frozen=True)
class Simulated:
    """What a simulation came to."""

    seconds: tuple[float, ...]
    """Seconds of each step."""
    sampled: int
    """Tokens of all steps."""
    live: float
    """Rows that decode at a time, mean over the decode steps of all engines, those of skipped steps included."""
    busy: float
    """Share of the time in which an engine's devices run a program."""
    evictions: int
    recomputed: int
    """Tokens written again after evictions."""

    @property
    def tokens_per_s(self) -> float:
        return self.sampled / sum(self.seconds)


def simulate(
    groups: Callable[[int], RowGroups],
    machine: Machine,
    costs: Costs,
    schedule: StepSchedule,
    steps: int,
    *,
    skipped: int = 0,
    kept: float = 1.0,
) -> Simulated:
    """Steps of training.

    Args:
        groups: The rows that a step's problems will have.
        machine: The engines.
        costs: Of their programs.
        schedule: See there.
        steps: How many.
        skipped: Steps before them that are not reported, in which a stream fills.
        kept: Share of the tokens that is trained on.

    Raises:
        ValueError: the cache cannot hold the longest row and a chunk after it.
    """
    if machine.blocks * machine.block < machine.longest + machine.chunk:
        raise ValueError(
            f"{machine.blocks} blocks of {machine.block} columns cannot hold a row of {machine.longest} and a chunk of "
            f"{machine.chunk}"
        )
    return _Simulation(machine, costs, schedule).run(groups, steps, skipped, kept)


@dataclass(eq=False)
class _Group:
    born: int
    rows: Sequence[RowLife]
    left: int = field(init=False)
    ended: float = 0.0
    """When its last row ended."""

    def __post_init__(self) -> None:
        self.left = len(self.rows)

    @property
    def complete(self) -> bool:
        return not self.left


class _Simulation:
    """All engines, and the update where they meet."""

    def __init__(self, machine: Machine, costs: Costs, schedule: StepSchedule):
        self.machine, self.costs, self.schedule = machine, costs, schedule
        self.queue: deque[_Group] = deque()
        """Groups that no engine has taken; empty without `stealing`."""
        self.engines = [_Engine(machine, costs, schedule) for _ in range(machine.engines)]

    def run(self, groups: Callable[[int], RowGroups], steps: int, skipped: int, share_trained: float) -> Simulated:
        pending: list[_Group] = []
        seconds, sampled, submitted, now = [], 0, 0, 0.0
        count = len(groups(0))
        for trained in range(skipped + steps):
            if self.schedule.apart:
                self._go_on(now)
            while submitted <= trained + self.schedule.lag:
                new = [_Group(trained, rows) for rows in groups(submitted)]
                self._share(new)
                pending.extend(new)
                submitted += 1
            while not may_take(pending, count, trained, self.schedule.lag):
                self._advance()
            done = oldest_whole(pending, count)
            pending = [group for group in pending if group not in done]
            tokens = sum(row.length for group in done for row in group.rows)
            if trained >= skipped:
                sampled += sum(row.sampled for group in done for row in group.rows)
            costs = self.costs
            spent = costs.publish + costs.update + costs.trained_token * share_trained * tokens
            if self.schedule.apart:
                end = max(now, *(group.ended for group in done)) + spent
            else:
                end = max(engine.clock for engine in self.engines) + spent
                for engine in self.engines:
                    engine.clock = end
                    engine.busy += spent
            seconds.append(end - now)
            now = end
        latest = max(engine.clock for engine in self.engines)
        decoded = max(1, sum(engine.decode_steps for engine in self.engines))
        return Simulated(
            tuple(seconds[skipped:]),
            sampled,
            sum(engine.live_steps for engine in self.engines) / decoded,
            sum(engine.busy for engine in self.engines) / (max(now, latest) * len(self.engines)),
            sum(engine.evictions for engine in self.engines),
            sum(engine.recomputed for engine in self.engines),
        )

    def _share(self, groups: Sequence[_Group]) -> None:
        if self.schedule.stealing:
            self.queue.extend(groups)
            return
        for index, engine in enumerate(self.engines):
            first, last = (len(groups) * i // len(self.engines) for i in (index, index + 1))
            for group in groups[first:last]:
                engine.take(group)

    def _go_on(self, until: float) -> None:
        """Rounds of the engines during an update that ends then."""
        while True:
            if self.queue:
                self._steal()
            late = [e for e in self.engines if (e.occupied or e.waiting) and e.clock < until]
            if not late:
                break
            min(late, key=lambda e: e.clock).round(until)
        for engine in self.engines:
            engine.clock = max(engine.clock, until)

    def _advance(self) -> None:
        """A round of the engine whose time is the earliest, of those that have something to do."""
        if self.queue:
            self._steal()
        engine = min((e for e in self.engines if e.occupied or e.waiting), key=lambda e: e.clock)
        engine.round()

    def _steal(self) -> None:
        """Engines with idle slots and nothing queued take a problem each, those with fewest rows first."""
        for engine in sorted(self.engines, key=lambda e: e.occupied):
            if self.queue and not engine.waiting and engine.occupied < self.machine.slots:
                engine.take(self.queue.popleft())


class _Engine:
    """The slots of one engine, one array each."""

    def __init__(self, machine: Machine, costs: Costs, schedule: StepSchedule):
        self.machine, self.costs, self.whole = machine, costs, schedule.whole_rows
        self.clock = self.busy = 0.0
        self.queue: deque[tuple[int, _Group, RowLife]] = deque()
        self.tickets = self.evictions = self.recomputed = self.decode_steps = 0
        self.live_steps = 0.0
        n = machine.slots
        self.rows: list[tuple[_Group, RowLife]] = [None] * n
        self.used, self.parked = np.zeros(n, bool), np.zeros(n, bool)
        self.ticket = np.full(n, np.iinfo(np.int64).max)
        self.length, self.turn, self.left, self.held = (np.zeros(n, np.int64) for _ in range(4))
        self.until = np.full(n, NEVER)
        """When the tools of a row answer; `NEVER` for rows that do not wait."""
        self.prompts: set[_Group] = set()
        """Groups whose prompts are in the cache."""
        self.copied = 0
        """Blocks to copy in this round."""
        self.lengths = Lengths()
        self.free, self.ids = [*range(machine.blocks)], [[] for _ in range(n)]
        """Numbers of the free blocks, a heap, and of those of each slot; kept where there are arenas."""

    @property
    def waiting(self) -> int:
        """Rows without a slot."""
        return len(self.queue)

    @property
    def occupied(self) -> int:
        return int(self.used.sum())

    def take(self, group: _Group) -> None:
        """Queues the rows of a group."""
        for row in group.rows:
            self.queue.append((self.tickets, group, row))
            self.tickets += 1

    def round(self, until: float = NEVER) -> None:
        """Appends, admission, a chunk; or the wait for the next answer of a tool, at most until then."""
        observed, prompts = self._observe(), self._seat_again() + self._admit()
        if self.machine.append_rows:
            self._write(observed + prompts)
        else:
            self._write(prompts)
            self._write(observed)
        self._grow()
        live = self._live()
        if live.any():
            self._chunk(live)
            return
        answered = self.until[self.until < NEVER]
        if len(answered):
            self.clock = max(self.clock, min(float(answered.min()), until))

    def _live(self) -> np.ndarray:
        return (self.left > 0) & (self.until == NEVER) & ~self.parked

    def _observe(self) -> list[int]:
        """Tokens of the observations that have come."""
        written = []
        for slot in np.flatnonzero(self.until <= self.clock).tolist():
            _, row = self.rows[slot]
            before, turn = row.turns[self.turn[slot]], self.turn[slot] + 1
            self.turn[slot], self.left[slot], self.until[slot] = turn, row.turns[turn].sampled, NEVER
            self.length[slot] += before.observed
            if not self.parked[slot]:
                written.append(before.observed)
        return written

    def _seat_again(self) -> list[int]:
        """Tokens of the parked rows that go on, the oldest first."""
        written = []
        parked = np.flatnonzero(self.parked & (self.until == NEVER))
        for slot in parked[np.argsort(self.ticket[parked])].tolist():
            if not self._fits(int(self.length[slot])):
                break
            self.parked[slot] = False
            self.held[slot] = self._blocks(self.length[slot])
            written.append(int(self.length[slot]))
            self.recomputed += written[-1]
        return written

    def _admit(self) -> list[int]:
        """Tokens of the prompts of rows that get a slot; rows of one group share theirs."""
        written = []
        free = deque(np.flatnonzero(~self.used).tolist())
        while self.queue and free and not self.parked.any():
            ticket, group, row = self.queue[0]
            if not self._fits(row.prompt):
                break
            self.queue.popleft()
            slot = free.popleft()
            prompt, blocks = (row.prompt - 1) // self.machine.block, self._blocks(row.prompt - 1)
            if group not in self.prompts:
                self.prompts.add(group)
                written.append(row.prompt)
            else:
                self.copied += blocks - prompt * self.machine.shares
            self.rows[slot], self.used[slot], self.ticket[slot] = (group, row), True, ticket
            self.length[slot], self.turn[slot], self.left[slot] = row.prompt, 0, row.turns[0].sampled
            self.held[slot] = self._blocks(row.prompt)
        return written

    def _blocks(self, columns: np.ndarray | int) -> np.ndarray | int:
        return -(-columns // self.machine.block)

    def _seated(self) -> np.ndarray:
        return self.used & ~self.parked

    def _fits(self, length: int) -> bool:
        """Whether there is room for a row, beside what is expected of the others; see `Scheduler._fits`."""
        seated = self._seated()
        if self.whole:
            return (int(seated.sum()) + 1) * self._blocks(self.machine.longest) <= self.machine.blocks
        lengths = np.append(self.length[seated], length)
        ends, ahead = np.full(len(lengths), self.machine.longest), lengths + self.machine.chunk
        need = self._blocks(np.minimum(np.maximum(self.lengths.reserved(lengths, ends), ahead), ends))
        return int(need.sum()) <= self.machine.blocks or not seated.any()

    def _grow(self) -> None:
        """Blocks for the next chunk, if need be from the youngest rows."""
        while True:
            live = self._live()
            end = np.minimum(self.length + np.minimum(self.left, self.machine.chunk), self.machine.longest)
            blocks = np.where(live, np.maximum(self.held, self._blocks(end)), self.held)
            seated = self._seated()
            if self.whole or blocks[seated].sum() <= self.machine.blocks:
                self.held = blocks
                return
            youngest = int(np.argmax(np.where(seated, self.ticket, -1)))
            self.parked[youngest] = True
            self._give_back(youngest)
            self.evictions += 1

    def _give_back(self, slot: int) -> None:
        """The blocks of a slot are free."""
        self.held[slot] = 0
        while self.ids[slot]:
            heapq.heappush(self.free, self.ids[slot].pop())

    def _read(self, live: np.ndarray) -> float:
        """Columns of the arenas in which a live row has a block; rows take the lowest blocks that are free."""
        for ids, count in zip(self.ids, self.held.tolist(), strict=True):
            ids += [heapq.heappop(self.free) for _ in range(count - len(ids))]
        ends = np.cumsum(self.machine.arenas)
        blocks = [block for slot in np.flatnonzero(live).tolist() for block in self.ids[slot]]
        used = np.unique(np.searchsorted(ends, blocks, side="right"))
        return float(np.asarray(self.machine.arenas)[used].sum() * self.machine.block)

    def _write(self, written: Sequence[int]) -> None:
        """The appends of texts of these lengths, in pieces, and the copies."""
        self._spend(self.costs.copy * -(-self.copied // self.machine.copies))
        self.copied = 0
        machine, longest = self.machine, self.machine.append_lengths[-1]
        if not machine.append_rows:
            for tokens in packs(written, machine.append_lengths):
                self._spend(self.costs.append + self.costs.token * tokens)
            return
        pieces = [min(longest, count - start) for count in written for start in range(0, count, longest)]
        padded = sorted(next(size for size in machine.append_lengths if size >= piece) for piece in pieces)
        for start in range(0, len(padded), machine.append_rows):
            batch = padded[start : start + machine.append_rows]
            self._spend(self.costs.append + self.costs.token * batch[-1] * len(batch))

    def _chunk(self, live: np.ndarray) -> None:
        rows = int(live.sum())
        steps = int(min(self.machine.chunk, self.left[live].max()))
        drawn = np.where(live, np.minimum(self.left, steps), 0)
        width = next((width for width in self.machine.widths if width >= rows), self.machine.slots)
        tokens_read = float(self.length[live].sum() + drawn[live].sum() / 2)
        columns = self._read(live) if self.machine.arenas else tokens_read
        self._spend(self.costs.round + steps * self.costs.decode(width, columns))
        self.decode_steps += steps
        self.live_steps += float(drawn.sum())
        self.length += drawn
        self.left -= drawn
        for slot in np.flatnonzero(live & (self.left == 0)).tolist():
            group, row = self.rows[slot]
            if self.turn[slot] + 1 < len(row.turns):
                self.until[slot] = self.clock + row.turns[self.turn[slot]].tool_s
            else:
                self._leave(slot, group)

    def _leave(self, slot: int, group: _Group) -> None:
        group.left -= 1
        self.lengths.add(int(self.length[slot]))
        if not group.left:
            group.ended = self.clock
            self.prompts.discard(group)
        self.used[slot], self.ticket[slot] = False, np.iinfo(np.int64).max
        self.length[slot] = 0
        self._give_back(slot)

    def _spend(self, seconds: float) -> None:
        self.clock += seconds
        self.busy += seconds
