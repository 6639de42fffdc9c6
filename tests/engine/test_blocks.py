"""Blocks of the cache on the host: a memory that follows every act, and rules that hold after each."""

import numpy as np
import pytest

from grpo_roc_jax.engine.table import BlockLedger, Chain, Full

SIZE = 4


def ids(*values):
    return np.array(values, np.int32)


def test_a_prefix_is_found_by_whole_blocks_and_never_with_the_last_token():
    blocks = BlockLedger(6, SIZE)
    first = Chain()
    blocks.grow(first, 9)
    assert first.blocks == [0, 1, 2]
    blocks.seal(first, np.arange(9), version=1)
    assert first.sealed == 2
    second = blocks.open(np.arange(9), version=1)
    assert (second.blocks, second.sealed, second.known) == ([0, 1], 2, 8)
    assert blocks.open(np.arange(8), version=1).blocks == [0], "the token at 7 is the pending one"
    assert blocks.open(np.arange(9), version=2).blocks == []
    assert blocks.open(ids(0, 1, 2, 3, 9, 9, 9, 9, 9), version=1).blocks == [0]


def test_idle_blocks_are_found_until_room_is_needed_and_the_end_of_a_prefix_leaves_first():
    blocks = BlockLedger(3, SIZE)
    chain = Chain()
    blocks.grow(chain, 8)
    blocks.seal(chain, np.arange(8), 0)
    blocks.close(chain)
    assert blocks.free == 3 and blocks.used == 0
    blocks.grow(chain, 8)
    assert chain.blocks == [2, 1]
    assert blocks.open(np.arange(9), 0).blocks == [0]


def test_a_fork_copies_the_block_in_which_it_ends_and_a_roll_back_what_another_row_has():
    blocks = BlockLedger(3, SIZE)
    chain = Chain()
    blocks.grow(chain, 7)
    with pytest.raises(Full, match="2 blocks needed, 1 of 3 free"):
        blocks.grow(chain, 16)
    other, copies = blocks.fork(chain, 6)
    assert other.blocks == [0, 2] and copies == [(1, 2)]
    assert blocks.roll_back(other, 2) == [(0, 2)], "the block that leaves takes the copy"
    assert blocks.roll_back(chain, 6) == [] and chain.blocks == [0, 1]


def test_blocks_that_may_have_one_holder_are_copied_by_a_fork():
    blocks = BlockLedger(8, SIZE, shared=2)
    chain = Chain()
    blocks.grow(chain, 8, sharable=True)
    blocks.grow(chain, 14)
    assert chain.blocks == [0, 1, 2, 3]
    other, copies = blocks.fork(chain, 14)
    assert other.blocks == [0, 1, 4, 5] and copies == [(2, 4), (3, 5)]
    blocks.seal(chain, np.arange(14), 0)
    assert blocks.open(np.arange(14), 0).blocks == [0, 1], "the third block has a holder"


class Memory:
    """What the device would hold, and the tokens that each chain must read."""

    def __init__(self, count, shared):
        self.blocks, self.cells = BlockLedger(count, SIZE, shared), np.full((count, SIZE), -1)
        self.rows: list[tuple[Chain, list[int], int]] = []

    def copy(self, copies):
        self.cells[[t for _, t in copies]] = self.cells[[s for s, _ in copies]]

    def write(self, chain, tokens, start):
        for column in range(start, len(tokens)):
            assert column >= chain.sealed * SIZE, "a sealed block is written"
            self.cells[chain.blocks[column // SIZE], column % SIZE] = tokens[column]

    def check(self):
        blocks, holders = self.blocks, np.zeros(self.blocks.count, int)
        for chain, tokens, _ in self.rows:
            assert len(set(chain.blocks)) == len(chain.blocks) and len(tokens) <= len(chain.blocks) * SIZE
            assert self.cells[chain.blocks].reshape(-1)[: len(tokens)].tolist() == tokens
            holders[chain.blocks] += 1
        assert holders.tolist() == blocks.holders and (holders[blocks.shared :] <= 1).all()
        assert blocks.used == np.count_nonzero(holders), "every other block can be taken, once"


@pytest.mark.parametrize("shared", [None, 8])
def test_acts_in_any_order_leave_every_row_its_tokens(shared):
    """10,000 acts, with all rows read after every tenth; tokens of two values, so that prefixes meet."""
    rng, memory, version, full = np.random.default_rng(0), Memory(24, shared), 0, 0
    blocks, rows = memory.blocks, memory.rows
    acts = rng.choice(9, 10_000, p=[0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.06, 0.039, 0.001])
    for step, act in enumerate(acts):
        at = int(rng.integers(len(rows))) if rows else None
        before = [(chain, list(chain.blocks), chain.sealed) for chain, _, _ in rows]
        try:
            if act == 0:
                tokens = rng.integers(0, 2, rng.integers(1, 20)).tolist()
                chain = blocks.open(np.array(tokens), version)
                assert chain.known <= len(tokens) - 1
                rows.append((chain, tokens[: chain.known], version))
                blocks.grow(chain, len(tokens), sharable=bool(rng.integers(2)))
                memory.write(chain, tokens, chain.known)
                rows[-1] = (chain, tokens, version)
            elif at is None:
                continue
            elif act in (1, 2):
                chain, tokens, _ = rows[at]
                more = rng.integers(0, 2, rng.integers(0, 6)).tolist()
                blocks.grow(chain, len(tokens) + len(more))
                start = len(tokens)
                tokens += more
                memory.write(chain, tokens, start)
            elif act == 3:
                chain, tokens, born = rows[at]
                if born == version:
                    blocks.seal(chain, np.array(tokens), version)
            elif act == 4:
                chain, tokens, born = rows[at]
                columns = int(rng.integers(0, len(tokens) + 1))
                fork, copies = blocks.fork(chain, columns)
                memory.copy(copies)
                rows.append((fork, tokens[:columns], born))
            elif act == 5:
                chain, tokens, _ = rows[at]
                columns = int(rng.integers(0, len(tokens) + 1))
                memory.copy(blocks.roll_back(chain, columns))
                del tokens[columns:]
            elif act in (6, 7):
                blocks.close(rows.pop(at)[0])
            else:
                version += 1
                blocks.forget()
        except Full:
            full += 1
            assert all((chain.blocks, chain.sealed) == (row_blocks, sealed) for chain, row_blocks, sealed in before)
            blocks.close(rows.pop(0)[0])
        if step % 10 == 0:
            memory.check()
    assert full > 100 and version > 2
