"""Device programs over packed rows when memory runs out: tried again in micro-batches of half the rows, which give the
same sums. And a heap of the host that stays flat."""

import ctypes
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax

from grpo_roc_jax.learner.pack import TrainBatch, halved
from grpo_roc_jax.model.sharding import Mesh, row_shards, shard_batch
from grpo_roc_jax.settings.points import reach

T = TypeVar("T")

log = logging.getLogger(__name__)

M_ARENA_MAX = -8
"""Of glibc's `malloc.h`."""


def few_arenas() -> None:
    """Lets the threads of this process share two arenas of glibc's heap, unless MALLOC_ARENA_MAX says otherwise.

    Each save of a checkpoint starts threads. With an arena for each of them freed memory is scattered, and the process
    grows by 0.5 MB with each of the first forty saves.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(M_ARENA_MAX, 2)


def resident_bytes(key: str = "VmRSS") -> int:
    """The memory that this process takes now, or at most so far with `VmHWM`; 0 where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


@dataclass
class Halvings:
    """How often the rows of micro-batches were halved; later calls begin with the halves."""

    mesh: Mesh
    counts: dict[str, int] = field(default_factory=dict)
    """By the name of the program."""

    def run(self, name: str, program: Callable[[TrainBatch], T], packed: TrainBatch, donated: Any = ()) -> T:
        """`program(packed)`, or of more and smaller micro-batches.

        Args:
            name: Of the program: `update`, `score`, `sft`.
            program: Fails with RESOURCE_EXHAUSTED where its arguments are too large.
            packed: On the mesh.
            donated: Arrays that the program takes over; once they are gone it cannot be tried again.
        """
        for _ in range(self.counts.get(name, 0)):
            packed = self._halve(packed)
        while True:
            try:
                reach(f"{name}.memory")
                with jax.transfer_guard("disallow"):
                    return program(packed)
            except jax.errors.JaxRuntimeError as error:
                gone = any(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
                rows = packed.tokens.shape[1] // row_shards(self.mesh)
                if "RESOURCE_EXHAUSTED" not in str(error) or gone or rows % 2 or self.mesh.is_multi_process:
                    raise
                log.warning("memory ran out in %s; micro-batches have %d rows a device from now on", name, rows // 2)
            self.counts[name] = self.counts.get(name, 0) + 1
            packed = self._halve(packed)

    def _halve(self, packed: TrainBatch) -> TrainBatch:
        return shard_batch(halved(jax.device_get(packed)), self.mesh)
