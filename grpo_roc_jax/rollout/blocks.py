"""Which row holds which block of the cache: counts of references, prefixes that are found again, what leaves first.

A block has room for `size` tokens of a row. A row holds a `Chain` of blocks and takes more as it grows. Blocks that
are full can be shared: they are sealed, and nobody writes to them again. A sealed block whose tokens are known has a
key, the hash of the key of the block before it and of its own tokens; the first one hashes the version of the weights.
A block with a key stays when the last chain closes, and leaves when its room is needed, least recently used first.

Ids below `shared` are for blocks that several chains hold at once; the others have one holder. This matters where
blocks are multiplied in their place (`model.block_attention`), which gathers the queries of all holders of a block.
"""

import hashlib
import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

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
        self._holders = [0] * blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def extend(self, blocks: int, shared: int) -> None:
        """The pool has so many blocks now; ids below `shared` may have several holders."""
        for block in range(self.count, blocks):  # in rising order, so that both parts stay heaps
            self._free[block >= shared].append(block)
        self._holders += [0] * (blocks - self.count)
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
            if block is None or (block >= self.shared and self._holders[block]):
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
        whole = min(columns // self.size, len(chain.blocks))
        common = 0
        while common < whole and chain.blocks[common] < self.shared:
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
        keep, whole = self.blocks_for(columns), columns // self.size
        cut = chain.blocks[whole] if whole < keep <= chain.sealed else None
        only = cut is not None and self._holders[cut] == 1  # then it only loses its key
        if cut is not None and not only and not any(self._holders[block] == 1 for block in chain.blocks[keep:]):
            self._check(1)
        for block in reversed(chain.blocks[keep:]):
            self._release(block)
        del chain.blocks[keep:]
        chain.sealed = min(chain.sealed, whole)
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
        self._holders[block] = 1
        return block

    def _hold(self, block: int) -> None:
        self._idle.pop(block, None)
        self._holders[block] += 1

    def _release(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
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
