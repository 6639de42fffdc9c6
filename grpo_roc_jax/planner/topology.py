"""Accelerators by name: peak figures of one chip, and the devices of a pod to compile for.

`v5p:4x4x4` is 64 chips, `h200:8` eight GPUs. XLA compiles for devices that are not attached: for TPUs by the name of a
slice, for GPUs by a description of one of them.
"""

import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from grpo_roc_jax.process.installing import install_command


@dataclass(frozen=True)
class Gpu:
    """What XLA needs to know of a GPU to compile for it, from NVIDIA's data sheets and the CUDA C++ Programming Guide
    (technical specifications by compute capability). Without the GPU it cannot autotune and chooses kernels by guess.
    """

    capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    float_units: int
    """Float32 units of a core."""
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int
    """Shared memory of a core; a block can use 1 KiB less."""
    threads: int = 2048
    """Threads of a core."""

    def target_config(self, name: str, memory_bytes: float, memory_rate: float) -> str:
        """XLA's `GpuTargetConfigProto` as text."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {self.cores} fpus_per_core: {self.float_units} clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {int(memory_bytes)} memory_bandwidth: {int(memory_rate)} l2_cache_size: {self.l2_bytes}
  shared_memory_per_core: {self.shared_bytes} shared_memory_per_block_optin: {self.shared_bytes - 1024}
  shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: {self.threads}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


SPARE = 0.1
"""Part of the usable memory that a plan leaves free."""


@dataclass(frozen=True)
class Chip:
    """Peak figures of one device, as published by its maker."""

    name: str
    memory_bytes: float
    flops: float
    """Dense bfloat16 FLOPs per second; float32 where a chip has no bfloat16 units, as XLA computes in float32 there."""
    memory_rate: float
    """Bytes per second between memory and chip."""
    link_rate: float
    """Bytes per second that the chip sends over all its links; half of a figure for both directions. In a `Topology`
    over those that its slice has."""
    chips_per_process: int
    """Chips in one machine of a slice; a smaller slice has fewer."""
    source: str
    gpu: Gpu | None = None
    share: float = 1.0
    """Part of the memory that JAX uses."""
    network_rate: float = 6.25e9
    """Bytes per second that it sends to other slices, over the network of its machine."""
    cores: int = 1
    """Devices that JAX shows for a chip; all figures are those of one device."""
    compiled_as: str = ""
    """The compiler's name of the kind where it is another one."""
    ring_side: int = 0
    """A side of a TPU slice is a ring if it is a multiple of this, and a line otherwise; 0 for GPUs."""
    sides: int = 2
    """Sides of the torus; a chip of a whole pod has two links along each."""

    @property
    def tpu(self) -> bool:
        return self.gpu is None

    @property
    def usable_bytes(self) -> float:
        return self.share * self.memory_bytes

    @property
    def room_bytes(self) -> float:
        """What a program may take, see `SPARE`."""
        return (1 - SPARE) * self.usable_bytes


FRACTION = "XLA_CLIENT_MEM_FRACTION"
"""JAX's setting of the part of a GPU's memory that it takes at the start and never exceeds."""
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
USUAL_FRACTION = 0.75
"""JAX's default (docs.jax.dev, GPU memory allocation)."""
MOST_OF_A_GPU = 0.9
"""What docs/launch sets; the rest is for the CUDA context, libraries and NCCL's buffers, as in NVIDIA's images."""


GIB = 2.0**30
_GOOGLE = "docs.cloud.google.com/tpu/docs"
_AMPERE = Gpu((8, 0), 108, 64, 1.41, 40 << 20, 164 << 10)
_HOPPER = Gpu((9, 0), 132, 128, 1.98, 50 << 20, 228 << 10)
_BLACKWELL = Gpu((10, 0), 148, 128, 1.965, 126 << 20, 228 << 10)
_TURING = Gpu((7, 5), 40, 64, 1.59, 4 << 20, 64 << 10, 1024)
_GA102 = Gpu((8, 6), 72, 128, 1.695, 6 << 20, 100 << 10, 1536)
_AD104 = Gpu((8, 9), 58, 128, 2.04, 48 << 20, 100 << 10, 1536)
_AD102 = Gpu((8, 9), 128, 128, 2.52, 72 << 20, 100 << 10, 1536)
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v5e", 16e9, 197e12, 819e9, 200e9, 4, f"{_GOOGLE}/v5e", network_rate=3.125e9, ring_side=16),
        Chip("v5p", 95 * GIB, 459e12, 2765e9, 600e9, 4, f"{_GOOGLE}/v5p", network_rate=6.25e9, ring_side=4, sides=3),
        Chip("v6e", 32e9, 918e12, 1638e9, 400e9, 4, f"{_GOOGLE}/v6e", network_rate=12.5e9, ring_side=16),
        # A chip of 192 GiB, 2307 TFLOP/s, 7380 GB/s, 600 GB/s of links and 100 Gb/s of network is two devices.
        Chip(
            "v7x",
            96 * GIB,
            1153.5e12,
            3690e9,
            300e9,
            4,
            f"{_GOOGLE}/tpu7x",
            cores=2,
            compiled_as="tpu7x",
            ring_side=4,
            sides=3,
        ),
        # Cards on PCIe, whose bus is their link.
        Chip("t4", 16e9, 8.1e12, 320e9, 16e9, 8, "NVIDIA T4 data sheet", _TURING),
        Chip("l4", 24e9, 121e12, 300e9, 32e9, 8, "NVIDIA L4 data sheet", _AD104),
        Chip("a10", 24e9, 125e12, 600e9, 32e9, 8, "NVIDIA A10 data sheet", _GA102),
        Chip("4090", 24e9, 165.2e12, 1008e9, 32e9, 8, "NVIDIA Ada GPU architecture, RTX 4090", _AD102),
        Chip("a100", 80e9, 312e12, 2039e9, 300e9, 8, "NVIDIA A100 80GB SXM data sheet", _AMPERE),
        Chip("h100", 80e9, 989e12, 3350e9, 450e9, 8, "NVIDIA H100 SXM data sheet", _HOPPER),
        Chip("h200", 141e9, 989e12, 4800e9, 450e9, 8, "NVIDIA H200 SXM data sheet", _HOPPER),
        Chip("b200", 180e9, 2250e12, 8000e9, 900e9, 8, "NVIDIA DGX B200 data sheet", _BLACKWELL),
    )
}
"""Chips by name. The compiler's limit is below `memory_bytes`, since a part of the memory is reserved: a program that
it rejects does not fit, even if the sum of its needs does."""


class TopologyError(ValueError):
    """A topology that is unknown, or whose compiler is not installed."""


@dataclass(frozen=True)
class Topology:
    """A grid of chips of one kind, or several such slices with a network between them."""

    chip: Chip
    grid: tuple[int, ...]
    slices: int = 1
    machine: int = 0
    """Chips of a machine; 0: as many as usual."""

    @property
    def name(self) -> str:
        machine = f"/{self.machine}" if self.machine else ""
        slices = f":{self.slices}" if self.slices > 1 else ""
        return f"{self.chip.name}:{'x'.join(map(str, self.grid))}{machine}{slices}"

    @property
    def chips(self) -> int:
        """Devices of all slices."""
        return self.chip.cores * math.prod(self.grid) * self.slices

    @property
    def chips_per_machine(self) -> int:
        """Chips of a machine of this topology; a slice that is smaller than a machine counts as one."""
        return min(self.machine or self.chip.chips_per_process, math.prod(self.grid))

    @property
    def per_process(self) -> int:
        """Devices of one process; each machine runs one."""
        return self.chip.cores * self.chips_per_machine

    @property
    def processes(self) -> int:
        """Number of machines; each runs one process."""
        return max(1, self.chips // self.per_process)

    def host_bounds(self) -> tuple[int, int, int]:
        """Chips of a machine along each side, as the compiler for TPUs wants them.

        Raises:
            TopologyError: no block of the grid has so many chips.
        """
        sides = (*self.grid, 1, 1)[:3]
        blocks = (sides, (1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 4, 1))
        for block in blocks:
            even = all(side % part == 0 for side, part in zip(sides, block, strict=True))
            if math.prod(block) == self.chips_per_machine and even:
                return block
        raise TopologyError(
            f"{self.name}: no block of {self.chips_per_machine} chips divides the grid; machines have 1, 4 or 8 chips, "
            f"as in v5e:2x4/8"
        )


def links_there(chip: Chip, grid: Sequence[int]) -> float:
    """Links that a chip of a slice has on average, of those of a chip of a whole pod: two along each side that is a
    ring, and one less at both ends of a line."""
    links = sum(2.0 if chip.ring_side and side % chip.ring_side == 0 else 2.0 * (side - 1) / side for side in grid)
    return links / (2 * chip.sides)


def parse_topology(name: str, environ: Mapping[str, str] = os.environ) -> Topology:
    """A topology from `KIND:AxBxC` or `KIND:N`, with the part of a GPU's memory that a run with this environment has.
    `/N` names the chips of a machine, as in `v5e:2x4/8`, and `:N` the number of slices, as in `v5p:4x4x4:2`.

    Raises:
        TopologyError: the name is not valid; the message gives the kinds and the form.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+){0,2})(?:/(\d+))?(?::(\d+))?", name.lower())
    if match is None or match[1] not in CHIPS:
        raise TopologyError(
            f"topology {name!r}; must be one of {', '.join(CHIPS)} with a grid, as in v5p:4x4x4, v5e:2x2 or h200:8; "
            "v5e:2x4/8 has 8 chips in a machine, v5p:4x4x4:2 is two slices"
        )
    chip = CHIPS[match[1]]
    if not chip.tpu:
        chip = replace(chip, share=_share_of_gpu(environ))
    grid = tuple(int(side) for side in match[2].split("x"))
    if len(grid) > (chip.sides if chip.tpu else 1):
        form = f"at most {chip.sides} sides" if chip.tpu else "a number of GPUs"
        raise TopologyError(f"topology {name!r}: {match[1]} has {form}")
    if chip.tpu and max(grid, default=0) > 1:
        chip = replace(chip, link_rate=chip.link_rate * links_there(chip, grid))
    topology = Topology(chip, grid, int(match[4] or 1), int(match[3] or 0))
    if not topology.chips or match[3] == "0":
        raise TopologyError(f"topology {name!r} has no chips; every number must be at least 1")
    if not chip.tpu and topology.slices > 1:
        raise TopologyError(f"topology {name!r}: slices are those of TPUs; give the number of all GPUs")
    if math.prod(grid) % topology.chips_per_machine:
        raise TopologyError(
            f"topology {name!r}: {math.prod(grid)} chips; must be a multiple of the {topology.chips_per_machine} of a "
            "machine"
        )
    return topology


def _share_of_gpu(environ: Mapping[str, str]) -> float:
    """The part of a GPU's memory that JAX takes in this environment."""
    name = FRACTION if environ.get(FRACTION) else OLD_FRACTION
    given = environ.get(name) or str(USUAL_FRACTION)
    try:
        share = float(given)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise TopologyError(f"{name}={given}; must be a number above 0 and at most 1, as in {name}={MOST_OF_A_GPU}")
    return share


def has_compiler(topology: Topology) -> bool:
    """Whether programs for it are compiled here: always for TPUs, for GPUs if JAX's CUDA plugin is installed.
    Otherwise the plan uses formulas, and the report says so."""
    return topology.chip.tpu or any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))


def topology_devices(topology: Topology) -> list[jax.Device]:
    """The devices of a TPU slice or of GPU machines, for compiling only; they cannot hold arrays.

    Raises:
        TopologyError: the compiler is not installed, or there is no such slice.
    """
    from jax.experimental import topologies

    chip = topology.chip
    if chip.gpu is None:
        os.environ.setdefault("TPU_LOG_DIR", "disabled")
        # By default libtpu asks a metadata server for the kind of machine and waits for the answer. It also allows only
        # one process per machine, which is meant for processes that use its chips.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        kind = f"{chip.compiled_as or chip.name}:{'x'.join(map(str, topology.grid))}"
        description = {"platform": "tpu", "topology_name": kind, "chips_per_host_bounds": topology.host_bounds()}
        description |= {"num_slices": topology.slices} if topology.slices > 1 else {}
    else:
        described = chip.gpu.target_config(chip.name, chip.memory_bytes, chip.memory_rate)
        machines = f"1x{topology.processes}x{topology.chips // topology.processes}"
        description = {"platform": "cuda", "topology_name": "", "target_config": described, "topology": machines}
    try:
        description_of_slice = topologies.get_topology_desc(**description)
    except Exception as error:  # the class depends on what is missing
        message = str(error).strip().splitlines()
        part = f"libtpu ({install_command('tpu')})" if chip.tpu else install_command("gpu")
        raise TopologyError(
            f"{topology.name}: no compiler for it here ({message[0] if message else type(error).__name__}); install "
            f"{part}, or take the estimate by arithmetic (--arithmetic)"
        ) from error
    return list(description_of_slice.devices)
