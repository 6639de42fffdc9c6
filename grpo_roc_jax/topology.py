"""Machines by name: what one chip holds and does in a second, and the devices of a pod that is not here.

`v5p:4x4x4` are 64 chips, `h200:8` eight GPUs. Both compilers work for devices that are not here: a slice of TPUs by its
name, GPUs by a description of one of them.
"""

import importlib.util
import math
import os
import re
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Gpu:
    """What XLA asks of a GPU to compile for it, from NVIDIA's data sheets and the CUDA C++ Programming Guide (technical
    specifications by compute capability). Where a GPU would choose among kernels by timing them, this has to guess."""

    capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    float_units: int
    """Of float32, of a core."""
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int
    """Of a core; a block has 1 KiB less."""

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
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


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
    gpu: Gpu | None = None

    @property
    def tpu(self) -> bool:
        return self.gpu is None


GIB = 2.0**30
_GOOGLE = "docs.cloud.google.com/tpu/docs"
_AMPERE = Gpu((8, 0), 108, 64, 1.41, 40 << 20, 164 << 10)
_HOPPER = Gpu((9, 0), 132, 128, 1.98, 50 << 20, 228 << 10)
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v5e", 16e9, 197e12, 819e9, 200e9, 4, f"{_GOOGLE}/v5e"),
        Chip("v5p", 95 * GIB, 459e12, 2765e9, 600e9, 4, f"{_GOOGLE}/v5p"),
        Chip("v6e", 32e9, 918e12, 1638e9, 400e9, 4, f"{_GOOGLE}/v6e"),
        Chip("a100", 80e9, 312e12, 2039e9, 300e9, 8, "NVIDIA A100 80GB SXM data sheet", _AMPERE),
        Chip("h100", 80e9, 989e12, 3350e9, 450e9, 8, "NVIDIA H100 SXM data sheet", _HOPPER),
        Chip("h200", 141e9, 989e12, 4800e9, 450e9, 8, "NVIDIA H200 SXM data sheet", _HOPPER),
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


def has_compiler(topology: Topology) -> bool:
    """Whether its programs are to be compiled here: those of TPUs always; those of GPUs where JAX's part for them is
    installed, and by arithmetic otherwise, as the report then says."""
    return topology.chip.tpu or any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))


def topology_devices(topology: Topology) -> list[jax.Device]:
    """The devices of a slice or of machines with GPUs, for compiling only; nothing can be placed on them.

    Raises:
        TopologyError: the compiler is not installed, or there is no such slice.
    """
    from jax.experimental import topologies

    chip = topology.chip
    if chip.gpu is None:
        os.environ.setdefault("TPU_LOG_DIR", "disabled")
        # Without these libtpu asks a metadata server which machine it is on, and waits for an answer; and lets one
        # process of a machine at a time have it, which is meant for those that run on its chips.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        wanted = {"platform": "tpu", "topology_name": topology.name}
    else:
        described = chip.gpu.target_config(chip.name, chip.memory_bytes, chip.memory_rate)
        machines = f"1x{topology.processes}x{topology.chips // topology.processes}"
        wanted = {"platform": "cuda", "topology_name": "", "target_config": described, "topology": machines}
    try:
        found = topologies.get_topology_desc(**wanted)
    except Exception as error:  # several kinds, depending on what is missing
        message = str(error).strip().splitlines()
        part = "libtpu (pip install 'grpo-roc-jax[tpu]')" if chip.tpu else "pip install 'grpo-roc-jax[gpu]'"
        raise TopologyError(
            f"{topology.name}: no compiler for it here ({message[0] if message else type(error).__name__}); install "
            f"{part}, or take the estimate by arithmetic (--arithmetic)"
        ) from error
    return list(found.devices)
