"""The host's view of slots and blocks: `SlotTable` has the row of each slot, its length and its tokens, and
`BlockLedger` the row of each block of the cache.

A block has room for `size` tokens of a row. A row holds a `Chain` of blocks and takes more as it grows. Blocks that are
full can be shared: they are sealed, and nobody writes to them again. A sealed block whose tokens are known has a key,
the hash of the key of the block before it and of its own tokens; the first one hashes the version of the weights. A
block with a key stays when the last chain closes, and leaves when its room is needed, least recently used first.

Ids below `shared` are for blocks that several chains hold at once; the others have one holder. This matters where
blocks are multiplied in their place (`model.block_attention`), which gathers the queries of all holders of a block.

A row begins at its prompt, after a prefix, or where an earlier step cut it (`starting_point`).
"""

import hashlib
import heapq
from collections import OrderedDict
from dataclasses import dataclass, field, replace

import numpy as np

from grpo_roc_jax.engine.decode import PATCH_FIELDS, ChunkReport, empty_patch
from grpo_roc_jax.types import RolloutRequest, StopReason, Trajectory, Turn

Copies = list[tuple[int, int]]
"""(source, target) of blocks that the device must copy before it writes or reads the target."""


class Full(Exception):
    """There are not enough blocks; nothing was changed."""


@dataclass(eq=False)
class Chain:
    """The blocks of a row in order; column c lies in block c // size."""

    blocks: list[int] = field(default_factory=list)
    sealed: int = 0
    """Number of leading blocks that must not be written."""
    known: int = 0
    """Columns whose keys and values were found, when it was opened."""


class BlockLedger:
    """The blocks of one pool. `free`, `idle` and the blocks in use are always all of them."""

    def __init__(self, blocks: int, size: int, shared: int | None = None):
        """`shared`: ids below it may have several holders; None for all."""
        self.count, self.size = blocks, size
        self.shared = blocks if shared is None else shared
        self._free: tuple[list[int], list[int]] = ([*range(self.shared)], [*range(self.shared, blocks)])
        self.holders = [0] * blocks
        """Number of chains that hold each block."""
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def extend(self, blocks: int, shared: int) -> None:
        """The pool has so many blocks now; ids below `shared` may have several holders."""
        for block in range(self.count, blocks):  # in rising order, so that both parts stay heaps
            self._free[block >= shared].append(block)
        self.holders += [0] * (blocks - self.count)
        self.count, self.shared = blocks, shared

    @property
    def free(self) -> int:
        """Blocks that a chain can take now, idle ones included."""
        return sum(map(len, self._free)) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that chains hold."""
        return self.count - self.free

    def blocks_for(self, columns: int) -> int:
        return -(-columns // self.size)

    def open(self, tokens: np.ndarray, version: int) -> Chain:
        """A chain with the longest known prefix of these tokens by reference. The last token is left out: it is the
        pending one, which is not in the cache."""
        chain = Chain()
        for key in self._keys(tokens[:-1], version):
            block = self._block_of.get(key)
            if block is None or (block >= self.shared and self.holders[block]):
                break
            self._hold(block)
            chain.blocks.append(block)
        chain.sealed = len(chain.blocks)
        chain.known = chain.sealed * self.size
        return chain

    def grow(self, chain: Chain, columns: int, *, sharable: bool = False) -> bool:
        """Gives the chain room for that many columns; whether it had to take blocks.

        Raises:
            Full: there are too few.
        """
        need = self.blocks_for(columns) - len(chain.blocks)
        if need <= 0:
            return False
        self._check(need)
        chain.blocks += [self._take(sharable) for _ in range(need)]
        return True

    def seal(self, chain: Chain, tokens: np.ndarray, version: int) -> None:
        """Declares whole blocks of the chain written with these tokens under this version, so that others find them."""
        for i, key in enumerate(self._keys(tokens[: len(chain.blocks) * self.size], version)):
            block = chain.blocks[i]
            if block not in self._key_of and key not in self._block_of:
                self._key_of[block], self._block_of[key] = key, block
            chain.sealed = max(chain.sealed, i + 1)

    def fork(self, chain: Chain, columns: int) -> tuple[Chain, Copies]:
        """A second chain with the first `columns` of this one: whole blocks by reference where they can be shared, the
        others as copies.

        Raises:
            Full: there is no room for the copies.
        """
        full = min(columns // self.size, len(chain.blocks))
        common = 0
        while common < full and chain.blocks[common] < self.shared:
            common += 1
        rest = chain.blocks[common : self.blocks_for(columns)]
        self._check(len(rest))
        for block in chain.blocks[:common]:
            self._hold(block)
        copies = [(block, self._take(False)) for block in rest]
        chain.sealed = max(chain.sealed, common)
        return Chain(chain.blocks[:common] + [target for _, target in copies], sealed=common), copies

    def roll_back(self, chain: Chain, columns: int) -> Copies:
        """Cuts the chain to that many columns. A sealed block that is cut in the middle is copied.

        Raises:
            Full: there is no room for the copy.
        """
        keep, full = self.blocks_for(columns), columns // self.size
        cut = chain.blocks[full] if full < keep <= chain.sealed else None
        only = cut is not None and self.holders[cut] == 1  # then it only loses its key
        if cut is not None and not only and not any(self.holders[block] == 1 for block in chain.blocks[keep:]):
            self._check(1)
        for block in reversed(chain.blocks[keep:]):
            self._release(block)
        del chain.blocks[keep:]
        chain.sealed = min(chain.sealed, full)
        if cut is None:
            return []
        if only:
            self._forget(cut)
            return []
        target = self._take(False)
        chain.blocks[-1] = target
        self._release(cut)
        return [(cut, target)]

    def close(self, chain: Chain) -> None:
        """Gives the blocks back; those with keys stay while there is room."""
        for block in reversed(chain.blocks):  # so that the end of a prefix leaves before its beginning
            self._release(block)
        chain.blocks, chain.sealed, chain.known = [], 0, 0

    def forget(self) -> None:
        """No prefix is found any more: the weights have changed."""
        for block in self._idle:
            self._put_free(block)
        self._idle.clear()
        self._key_of.clear()
        self._block_of.clear()

    def _keys(self, tokens: np.ndarray, version: int) -> list[bytes]:
        """Keys of the whole blocks of these tokens."""
        keys, key = [], str(version).encode()
        tokens = np.ascontiguousarray(tokens, np.int32)
        for end in range(self.size, len(tokens) + 1, self.size):
            key = hashlib.blake2b(tokens[end - self.size : end].tobytes(), key=key, digest_size=16).digest()
            keys.append(key)
        return keys

    def _check(self, need: int) -> None:
        if need > self.free:
            raise Full(f"{need} blocks needed, {self.free} of {self.count} free")

    def _take(self, sharable: bool) -> int:
        """The lowest free block of the preferred part, then of the other one, then the least recently used idle one."""
        for part in self._free if sharable else self._free[::-1]:
            if part:
                block = heapq.heappop(part)
                break
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self.holders[block] = 1
        return block

    def _hold(self, block: int) -> None:
        self._idle.pop(block, None)
        self.holders[block] += 1

    def _release(self, block: int) -> None:
        self.holders[block] -= 1
        if self.holders[block] == 0:
            if block in self._key_of:
                self._idle[block] = None
            else:
                self._put_free(block)

    def _put_free(self, block: int) -> None:
        heapq.heappush(self._free[block >= self.shared], block)

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]


def starting_point(row: RolloutRequest) -> Trajectory:
    """The trajectory before anything is sampled; `row` requests one rollout."""
    if row.resume is not None:
        return row.resume
    tokens = np.concatenate([row.prompt, np.asarray(row.prefix, np.int32)])
    return Trajectory(
        tokens=tokens.astype(np.int32),
        policy_mask=np.zeros(len(tokens), bool),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), -1, np.int32),
        prompt_length=len(row.prompt),
        turns=(),
        stop="cancelled",
        sample=row.first_sample,
        condition=row.condition,
        temperature=row.temperature,
    )


def from_prompt(cut: Trajectory) -> Trajectory:
    """A cut rollout as it was before anything was sampled."""
    per_token = {name: getattr(cut, name) for name in ("tokens", "policy_mask", "logprobs", "versions", "routes")}
    of_prompt = {name: values[: cut.prompt_length] for name, values in per_token.items() if values is not None}
    return replace(cut, **of_prompt, turns=(), seconds=0.0)


def awaits_observation(cut: Trajectory) -> bool:
    """Whether a rollout was cut between a turn's calls and their observation."""
    return bool(cut.turns) and cut.turns[-1].end == cut.length


def open_turn_start(cut: Trajectory) -> int:
    """Where the unfinished turn of a cut rollout begins; its length where no token of that turn was sampled.

    `turns` holds finished turns alone. An observation separates the last one from the unfinished turn. Without any,
    only a prefix can precede the sampled tokens, and it belongs to the turn.
    """
    if not cut.turns:
        return cut.prompt_length
    last = cut.turns[-1].end
    sampled = np.flatnonzero(cut.policy_mask[last:])
    return last + int(sampled[0]) if len(sampled) else cut.length


FREE = -1


class SlotTable:
    """Mutable arrays indexed by slot. A slot is free, live (decoding), waiting (for an observation), or idle: its row
    has no blocks and could go on. A waiting row may have no blocks either (`parked`)."""

    def __init__(self, slots: int, width: int, *, routes: tuple[int, int] | None = None, recurrent: bool = False):
        """Arrays for B `slots` and rows of at most `width` tokens.

        Args:
            slots: B.
            width: Most tokens of a row.
            routes: Layers, and experts of a token, to record; None records none.
            recurrent: Whether the model has recurrent layers.
        """
        self.recurrent = recurrent
        self.row = np.full(slots, FREE, np.int64)
        """Ticket of the row."""
        self.length = np.zeros(slots, np.int64)
        """Tokens of the row, including the pending one."""
        self.total = np.zeros(slots, np.int64)
        """Prompt + budget."""
        self.limit = np.zeros(slots, np.int64)
        """Length at which the device stops the row: `total`, or less where a turn has its own limit."""
        self.turn_start = np.zeros(slots, np.int64)
        self.live = np.zeros(slots, bool)
        self.waiting = np.zeros(slots, bool)
        self.parked = np.zeros(slots, bool)
        """Whether the row has lost its blocks; its tokens are all here."""
        self.generation = np.zeros(slots, np.int64)
        """Increases when a row is rolled back, parked or ended, so that tokens in flight for it are ignored."""
        self.admitted_s = np.zeros(slots)
        self.waiting_since_s = np.zeros(slots)
        self.overrun = np.zeros(slots, bool)
        """Whether recurrent layers have read tokens that the row no longer has."""
        self.tokens = np.zeros((slots, width), np.int32)
        self.mask = np.zeros((slots, width), bool)
        self.logprobs = np.zeros((slots, width), np.float32)
        self.versions = np.full((slots, width), -1, np.int32)
        self.routes = None if routes is None else np.full((slots, width, *routes), -1, np.int16)
        self.turns: list[list[Turn]] = [[] for _ in range(slots)]
        """Finished turns; their text, calls and results are the environment's."""
        self._patch = empty_patch(slots)
        self._keys = np.zeros((4, slots), np.int32)
        self._temperature = np.zeros(slots, np.float32)

    @property
    def occupied(self) -> np.ndarray:
        """bool[B]."""
        return self.row != FREE

    def admit(self, slot: int, ticket: int, row: RolloutRequest, seed: int, now_s: float) -> None:
        """Puts a row into a free slot, with the tokens that exist already; it is parked at first."""
        start = starting_point(row)
        n = start.length
        self.row[slot], self.parked[slot] = ticket, True
        self.overrun[slot] = False
        self.length[slot] = n
        self.total[slot] = len(row.prompt) + row.budget
        self.admitted_s[slot] = now_s
        self.tokens[slot, :n] = start.tokens
        self.mask[slot, :n] = start.policy_mask
        self.logprobs[slot, :n] = start.logprobs
        self.versions[slot, :n] = start.versions
        self._forget_routes(slot, 0)
        if self.routes is not None and start.routes is not None:
            self.routes[slot, :n] = start.routes
        self.turns[slot] = list(start.turns)
        # A turn that has no observation yet ends once more: the environment is asked again.
        resumed = self.turns[slot].pop().start if awaits_observation(start) else open_turn_start(start)
        self.turn_start[slot] = resumed
        key = (seed, row.step, row.place, row.first_sample)
        self._keys[:, slot] = np.array(key, np.int64).astype(np.int32)
        self._temperature[slot] = row.temperature

    def go(self, slot: int, max_turn_tokens: int) -> None:
        """Makes the row live in the next chunk."""
        limit = self.total[slot]
        if max_turn_tokens:
            limit = min(limit, self.turn_start[slot] + max_turn_tokens)
        self.limit[slot] = limit
        self.live[slot], self.waiting[slot] = True, False
        self._write(slot, active=1)

    def roll_back(self, slot: int, tokens: int) -> None:
        """Drops the last `tokens` of a live row, which the device stops with the next chunk."""
        self.length[slot] -= tokens
        self._forget_routes(slot, int(self.length[slot]) - 1)
        self.generation[slot] += 1
        self.overrun[slot] = self.recurrent
        self._write(slot, active=0)

    def _forget_routes(self, slot: int, start: int) -> None:
        """Tokens from `start` on have no recorded experts."""
        if self.routes is not None:
            self.routes[slot, start:] = -1

    def rewritten_from(self, slot: int, column: int) -> int:
        """Where to begin when tokens are appended at `column`: there, or at 0 after a roll-back that the memory of
        recurrent layers could not follow. The caller writes the row from there on."""
        begin = 0 if self.overrun[slot] else column
        self.overrun[slot] = False
        return begin

    def park(self, slot: int) -> None:
        """The row loses its blocks: what is in flight for it is dropped."""
        if self.live[slot]:
            self._write(slot, active=0)
        self.generation[slot] += 1
        self.live[slot], self.parked[slot], self.overrun[slot] = False, True, False

    def _write(self, slot: int, *, active: int) -> None:
        position = self.length[slot] - 1
        row = (
            1,
            position,
            self.tokens[slot, position],
            active,
            self.limit[slot],
            *self._keys[:, slot],
            self._temperature[slot : slot + 1].view(np.int32)[0],
        )
        self._patch[: len(PATCH_FIELDS), slot] = row

    def take_patch(self) -> np.ndarray | None:
        """The changes since the last call; None when there are none."""
        if not self._patch[0].any():
            return None
        patch, self._patch = self._patch, empty_patch(self._patch.shape[1])
        return patch

    def extend(self, report: ChunkReport, count: np.ndarray, version: int) -> None:
        """Appends a report's tokens, `count` of each column, to the rows."""
        slots = np.repeat(np.arange(len(count)), count)
        steps = np.arange(len(slots)) - np.repeat(np.cumsum(count) - count, count)
        at = self.length[slots] + steps
        self.tokens[slots, at] = report.tokens[steps, slots]
        self.logprobs[slots, at] = report.logprobs[steps, slots]
        self.mask[slots, at] = True
        self.versions[slots, at] = version
        if self.routes is not None:  # of the token that a step read
            self.routes[slots, at - 1] = report.routes[steps, :, :, slots]
        self.length += count

    def observe(self, slot: int, ids: np.ndarray) -> None:
        """Appends an observation: off the mask, version -1."""
        span = slice(self.length[slot], self.length[slot] + len(ids))
        self.tokens[slot, span] = ids
        self.mask[slot, span] = False
        self.logprobs[slot, span] = 0.0
        self.versions[slot, span] = -1
        self.length[slot] = span.stop
        self.turn_start[slot] = span.stop

    def end_turn(self, slot: int) -> Turn:
        """Closes the turn of a row, which is no longer live; returns its span."""
        turn = Turn(int(self.turn_start[slot]), int(self.length[slot]), "")
        self.live[slot] = False
        self.turns[slot].append(turn)
        return turn

    def trajectory(self, slot: int, row: RolloutRequest, stop: StopReason, now_s: float) -> Trajectory:
        """A copy of the row as a trajectory."""
        n = int(self.length[slot])
        earlier_s = 0.0 if row.resume is None else row.resume.seconds
        return Trajectory(
            tokens=self.tokens[slot, :n].copy(),
            policy_mask=self.mask[slot, :n].copy(),
            logprobs=self.logprobs[slot, :n].copy(),
            versions=self.versions[slot, :n].copy(),
            prompt_length=len(row.prompt),
            turns=tuple(self.turns[slot]),
            stop=stop,
            sample=row.first_sample,
            seconds=now_s - float(self.admitted_s[slot]) + earlier_s,
            condition=row.condition,
            temperature=row.temperature,
            routes=None if self.routes is None else self.routes[slot, :n].copy(),
        )

    def free(self, slot: int) -> None:
        """Empties the slot."""
        if self.live[slot]:
            self._write(slot, active=0)
        self.generation[slot] += 1
        self.live[slot] = False
        self.row[slot] = FREE
        self.length[slot] = 0
        self.waiting[slot] = self.parked[slot] = False
