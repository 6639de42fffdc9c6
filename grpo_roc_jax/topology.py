"""Machines by name: what one chip holds and does in a second, and the devices of a pod that is not here.

`v5p:4x4x4` are 64 chips; `h200:8` are eight GPUs, for which no compiler runs without the device.
"""

import math
import os
import re
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Chip:
    """Peak figures of one chip, as its maker states them."""

    name: str
    memory_bytes: float
    flops: float
    """bfloat16, dense, per second."""
    memory_rate: float
    """Bytes per second between memory and chip."""
    link_rate: float
    """Bytes per second that leave the chip over all its links to other chips; half of a figure for both directions."""
    chips_per_process: int
    """In one machine of a slice; a smaller slice has fewer."""
    source: str
    tpu: bool = True


GIB = 2.0**30
_GOOGLE = "docs.cloud.google.com/tpu/docs"
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v5e", 16e9, 197e12, 819e9, 200e9, 4, f"{_GOOGLE}/v5e"),
        Chip("v5p", 95 * GIB, 459e12, 2765e9, 600e9, 4, f"{_GOOGLE}/v5p"),
        Chip("v6e", 32e9, 918e12, 1638e9, 400e9, 4, f"{_GOOGLE}/v6e"),
        Chip("a100", 80e9, 312e12, 2039e9, 300e9, 8, "NVIDIA A100 80GB SXM data sheet", tpu=False),
        Chip("h100", 80e9, 989e12, 3350e9, 450e9, 8, "NVIDIA H100 SXM data sheet", tpu=False),
        Chip("h200", 141e9, 989e12, 4800e9, 450e9, 8, "NVIDIA H200 SXM data sheet", tpu=False),
    )
}
"""By name. The compiler's own limit is lower than `memory_bytes`, as a part is reserved: a program that it refuses does
not fit, whatever the sum says."""


class TopologyError(ValueError):
    """A topology that is not known, or whose compiler is not at hand."""


@dataclass(frozen=True)
class Topology:
    """Chips of one kind in a grid."""

    chip: Chip
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.grid))}"

    @property
    def chips(self) -> int:
        return math.prod(self.grid)

    @property
    def processes(self) -> int:
        """Machines, each of which runs one process."""
        return max(1, self.chips // self.chip.chips_per_process)


def parse_topology(name: str) -> Topology:
    """A topology from `KIND:AxBxC` or `KIND:N`.

    Raises:
        TopologyError: naming the kinds and the form.
    """
    kind, _, grid = name.lower().partition(":")
    if kind not in CHIPS or not re.fullmatch(r"\d+(x\d+){0,2}", grid):
        raise TopologyError(
            f"topology {name!r}; one of {', '.join(CHIPS)} with a grid is wanted, as in v5p:4x4x4, v5e:2x2 or h200:8"
        )
    topology = Topology(CHIPS[kind], tuple(int(side) for side in grid.split("x")))
    if not topology.chips:
        raise TopologyError(f"topology {name!r} has no chips; sides of at least 1 are wanted")
    return topology


def topology_devices(topology: Topology) -> list[jax.Device]:
    """The devices of a TPU slice, for compiling only; nothing can be placed on them.

    Raises:
        TopologyError: the kind has no such compiler, libtpu is not installed, or there is no slice of that shape.
    """
    if not topology.chip.tpu:
        raise TopologyError(f"{topology.name}: programs for GPUs are compiled where the GPU is")
    from jax.experimental import topologies

    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    # Without these libtpu asks a metadata server which machine it is on, and waits for an answer; and lets one process
    # of a machine at a time have it, which is meant for those that run on its chips.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology.name)
    except Exception as error:  # several kinds, depending on what is missing
        message = str(error).strip().splitlines()
        raise TopologyError(
            f"{topology.name}: no compiler for it here ({message[0] if message else type(error).__name__}); install "
            "libtpu (pip install 'grpo-roc-jax[tpu]'), or take the estimate by arithmetic (--arithmetic)"
        ) from error
    return list(found.devices)
