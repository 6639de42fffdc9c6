"""Which row has written a prompt, so that its siblings share it: whole blocks by reference, the rest as a copy.

The prompt of a row that ends while siblings are still in the queue is kept for the next of them. With recurrent layers
only rows of the same round can share a prompt: their memory moves on with the first token, and nothing keeps it.
"""

import numpy as np

from grpo_roc_jax.rollout.admission import Admission
from grpo_roc_jax.rollout.blocks import Chain
from grpo_roc_jax.rollout.device_rows import DeviceRows, Write
from grpo_roc_jax.rollout.records import RolloutStats
from grpo_roc_jax.rollout.table import SlotTable


class Prompts:
    """The written prompts of each data shard."""

    def __init__(self, device: DeviceRows, table: SlotTable, admission: Admission, stats: RolloutStats):
        self._device, self._table, self._admission, self.stats = device, table, admission, stats
        self._writer: dict[tuple[int, int], int] = {}
        """(shard, prompt) -> slot of the row that has written it."""
        self._kept: dict[tuple[int, int], Chain] = {}
        """(shard, prompt) -> its blocks, after that row has ended."""

    def _key(self, slot: int, prompt: int) -> tuple[int, int]:
        return slot // self._device.per_shard, prompt

    def provide(self, slot: int, prompt: int, tokens: np.ndarray, columns: int, *, again: bool) -> int:
        """Gives the slot a chain that begins with the prompt, and queues what has to be written of it. Returns the
        columns of the row that were known.

        Args:
            slot: Without blocks.
            prompt: Number of its prompt.
            tokens: Of the row, the pending one included.
            columns: Of its prompt; the last token of a prompt is not among them.
            again: The row has had blocks before; it is not counted, and its own blocks may still be there.

        Raises:
            Full: no room.
        """
        device, stats, key = self._device, self.stats, self._key(slot, prompt)
        blocks = device.of(slot)
        writer = None if again else self._writer.get(key)
        if writer is not None and columns and self._table.recurrent and not device.prompt_is_queued(writer):
            writer = None
        if not again and (kept := self._kept.pop(key, None)):
            device.give(slot, kept)
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
        if self._admission.siblings(prompt):
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

    def kept(self, shard: int, prompt: int) -> int:
        """Blocks of a prompt that are kept for its next row."""
        chain = self._kept.get((shard, prompt))
        return len(chain.blocks) if chain else 0

    def leave(self, slot: int, prompt: int, columns: int, kept: np.ndarray | None = None) -> None:
        """The row of the slot has ended: its blocks are free, but for a prompt that siblings still need. They can be
        found by the tokens `kept`, if given."""
        found = kept is not None and self._is_current(slot)
        chain, key, blocks = self._device.take_back(slot), self._key(slot, prompt), self._device.of(slot)
        if chain is None:
            return
        if found:
            blocks.seal(chain, kept, self._device.sampler.version)
        if self._writer.get(key) == slot:
            del self._writer[key]
            needed = columns and self._admission.siblings(prompt) and not self._table.recurrent
            # A copy for the last block would have no row to go to.
            if needed and not blocks.roll_back(chain, columns):
                self._kept[key] = chain
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
        found = [key for key in self._kept if key[0] == shard]
        for key in found:
            self._device.blocks[shard].close(self._kept.pop(key))
        return bool(found)

    def forget(self) -> None:
        """The weights have changed: rows of the queue start with their own prompt."""
        for shard in range(self._device.shards):
            self.drop(shard)
        self._writer.clear()
