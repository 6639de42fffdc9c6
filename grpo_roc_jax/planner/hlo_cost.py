"""Cost of a compiled program on one device: FLOPs, bytes to and from memory, and communication.

XLA's own cost analysis counts the body of a loop once. Here a body is multiplied by the trip count of its loop, which
the text gives for loops with fixed bounds and the caller for the others.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from grpo_roc_jax.planner.hlo import (
    HloModule,
    Instruction,
    arrays,
    body_of,
    bytes_of,
    device_groups,
    group_size,
    known_trip_count,
    lies_in_zeros,
)

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")

_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call")
_FREE += ("after-all", "partition-id", "replica-id", "iota", "async-update", "opt-barrier")
"""Opcodes that move no data by themselves."""
SCATTERED = "all-reduce-scatter"
"""Name prefix of the computations that the TPU compiler emits for a reduce-scatter: an all-reduce and a slice."""
CHAIN = re.compile(r'channel_id=\d+|chain_id="\d+"')
"""The number of a collective and that of the chain of fusions during which the TPU compiler runs it. Each fusion of a
chain has the instruction."""
_KERNEL = re.compile(r"tpu_custom_call|triton|cudnn|cublas|mosaic")
"""Custom calls that compute; the compiler uses others as annotations."""


@dataclass(frozen=True)
class Collective:
    """One collective instruction."""

    kind: str
    bytes: float
    """Size of the result on one device (of the operand for a reduce-scatter)."""
    group: int
    """Devices in a replica group."""
    times: float
    """How often it runs."""
    loops: int
    """Number of enclosing loops."""
    source: str
    """JAX's name of the operation that it comes from."""
    gathers: bool = False
    """Every device ends up with the parts of all: an all-gather, or a sum of parts padded with zeros, which XLA emits
    instead over many devices."""
    slices: int = 1
    """Slices that a replica group extends over."""
    links: float = 1.0
    """Part of a chip's links that it uses, see `links.Torus.share`."""

    @property
    def moved(self) -> float:
        """Bytes that a device sends in a run of the ring algorithm: (n - 1)/n of the whole, twice for an all-reduce."""
        share = (self.group - 1) / self.group if self.group else 0.0
        return self.bytes * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)

    @property
    def between(self) -> float:
        """Bytes of these that leave the slice of a device: what its slice has added up or collected first is divided
        among its devices of the group."""
        return between_slices(self.kind, self.bytes, self.group, self.slices)


def between_slices(kind: str, size: float, group: int, slices: int) -> float:
    """Bytes that a device sends to other slices in a collective of `group` devices, evenly in so many slices."""
    if slices == 1:
        return 0.0
    share = (slices - 1) / slices * (2 if kind == "all-reduce" else 1)
    return size * share * slices / group


@dataclass
class Cost:
    """Cost of one run of a program on one device."""

    flops: float = 0.0
    """FLOPs of matrix products and convolutions, 2 for each multiply-add."""
    traffic: float = 0.0
    """Bytes to and from main memory; each instruction reads its operands and writes its result."""
    collectives: list[Collective] = field(default_factory=list)
    kernels: dict[str, float] = field(default_factory=dict)
    """Runs of custom kernels by target; `flops` does not include their work."""
    chains: set[str] = field(default_factory=set)
    """Collectives counted so far of those that are spread over several fusions, see `CHAIN`."""

    @property
    def moved(self) -> float:
        """Bytes that one device sends."""
        return sum(collective.moved * collective.times for collective in self.collectives)

    def by_kind(self) -> dict[str, dict[str, float]]:
        """Kind -> runs, bytes of results, and bytes that one device sends."""
        sums: dict[str, dict[str, float]] = {}
        busy: dict[str, float] = {}
        for collective in self.collectives:
            entry = sums.setdefault(collective.kind, {"runs": 0.0, "bytes": 0.0, "moved": 0.0})
            entry["runs"] += collective.times
            entry["bytes"] += collective.bytes * collective.times
            entry["moved"] += collective.moved * collective.times
            busy[collective.kind] = (
                busy.get(collective.kind, 0.0) + collective.moved * collective.times / collective.links
            )
            if collective.slices > 1:
                entry["between"] = entry.get("between", 0.0) + collective.between * collective.times
        for kind, entry in sums.items():
            entry |= {"links": entry["moved"] / busy[kind]} if busy[kind] > entry["moved"] else {}
        return sums


def read_cost(module: HloModule, trip_counts: Sequence[float] = ()) -> Cost:
    """Cost of one run of a program.

    Args:
        module: From `parse_hlo`.
        trip_counts: Trip counts of loops whose bound is not fixed, by the number of such loops around them. The last
            one, or 1, is used for all deeper loops.
    """
    cost = Cost()
    _add(cost, module, module.entry, _Place(), list(trip_counts) or [1.0])
    return cost


@dataclass(frozen=True)
class _Place:
    """The loops around a computation."""

    times: float = 1.0
    loops: int = 0
    open_loops: int = 0
    fused: bool = False

    def inside(self, line: Instruction, module: HloModule, trip_counts: list[float]) -> "_Place":
        """The place of the computations that a line calls."""
        if line.opcode != "while":
            return replace(self, fused=self.fused or line.opcode in ("fusion", "async-start", "custom-call"))
        fixed = known_trip_count(line, module)
        count = trip_counts[min(self.open_loops, len(trip_counts) - 1)] if fixed is None else fixed
        return replace(
            self, times=self.times * count, loops=self.loops + 1, open_loops=self.open_loops + (fixed is None)
        )


def _add(cost: Cost, module: HloModule, name: str, place: _Place, trip_counts: list[float]) -> None:
    lines, times = module.computations.get(name, {}), place.times
    for line in lines.values():
        for called in line.called():
            _add(cost, module, called, place.inside(line, module, trip_counts), trip_counts)
        if line.opcode in ("dot", "convolution"):
            cost.flops += times * _product_flops(line, lines)
        elif line.opcode == "custom-call" and _KERNEL.search(target := line.attribute("custom_call_target")):
            target = target.strip('"')
            cost.kernels[target] = cost.kernels.get(target, 0.0) + times
        if (collective := _collective(module, line, lines, times, place.loops)) is not None:
            chain = " ".join(CHAIN.findall(line.rest)) if "chain_id=" in line.rest else ""
            if chain in cost.chains:
                continue
            cost.chains |= {chain} if chain else set()
            scatters = collective.kind == "all-reduce" and name.startswith(SCATTERED)
            cost.collectives.append(replace(collective, kind="reduce-scatter") if scatters else collective)
        if not place.fused:
            cost.traffic += times * _traffic(module, line, lines)


def _collective(
    module: HloModule, line: Instruction, lines: dict[str, Instruction], times: float, loops: int
) -> Collective | None:
    kind = line.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    result = sum(bytes_of(shape) for shape in _result_parts(line))
    if kind == "reduce-scatter":
        result = sum(bytes_of(lines[operand].shape) for operand in line.operands if operand in lines)
    source = re.search(r'op_name="([^"]*)"', line.rest)
    gathers = kind == "all-gather" or (
        kind == "all-reduce" and any(lies_in_zeros(module, lines, name) for name in line.operands)
    )
    name = source[1] if source else line.name
    groups = device_groups(line.rest) if module.slices or module.torus else []
    first = groups[0] if groups else []
    slices = len({module.slices[device] for device in first}) if module.slices and first else 1
    links = module.torus.share(first) if module.torus and first else 1.0
    return Collective(kind, result, group_size(line), times, loops, name, gathers, slices, links)


def _result_parts(line: Instruction) -> list[str]:
    """Shapes of a collective's results; most `-start` forms list the operands first."""
    parts = [f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims, _ in arrays(line.shape)]
    if line.opcode in ("all-gather-start", "collective-permute-start"):
        count = len(line.operands)
        return parts[count : 2 * count]
    return parts


def _product_flops(line: Instruction, lines: dict[str, Instruction]) -> float:
    left, right = (arrays(lines[operand].shape)[0][1] for operand in line.operands[:2])
    result = arrays(line.shape)[0][1]
    if line.opcode == "dot":
        axes = [int(axis) for axis in line.attribute("lhs_contracting_dims").split(",") if axis]
        return 2.0 * math.prod(result) * math.prod(left[axis] for axis in axes)
    inputs, rest = line.attribute("dim_labels").split("_")
    kernel, output = rest.split("->")
    window = _Window.read(line)
    total = 2.0 * left[inputs.index("b")] * right[kernel.index("i")] * result[output.index("f")]
    groups = line.attribute("batch_group_count")
    total /= int(groups) if groups else 1
    for axis in range(len(inputs) - 2):
        label = str(axis)
        total *= window.pairs(axis, left[inputs.index(label)], result[output.index(label)])
    return total


@dataclass(frozen=True)
class _Window:
    """The window of a convolution, with one entry per spatial axis."""

    size: list[int]
    stride: list[int]
    low: list[int]
    left_dilation: list[int]
    right_dilation: list[int]

    @classmethod
    def read(cls, line: Instruction) -> "_Window":
        fields = dict(re.findall(r"(\w+)=(\S+)", line.attribute("window")))
        size = [int(n) for n in fields.get("size", "").split("x") if n]

        def whole(key: str) -> list[int]:
            return [int(n) for n in fields[key].split("x")] if key in fields else [1] * len(size)

        low = [int(pair.split("_")[0]) for pair in fields["pad"].split("x")] if "pad" in fields else [0] * len(size)
        return cls(size, whole("stride"), low, whole("lhs_dilate"), whole("rhs_dilate"))

    def pairs(self, axis: int, length: int, outputs: int) -> float:
        """(output, kernel) positions along an axis that meet an input; products with padding are not counted."""
        if axis >= len(self.size):
            return float(outputs)
        starts = np.arange(outputs, dtype=np.int64) * self.stride[axis] - self.low[axis]
        dilation = self.left_dilation[axis]
        total = 0
        for offset in range(self.size[axis]):
            at = starts + offset * self.right_dilation[axis]
            total += int(((at >= 0) & (at <= (length - 1) * dilation) & (at % dilation == 0)).sum())
        return float(total)


def _traffic(module: HloModule, line: Instruction, lines: dict[str, Instruction]) -> float:
    """Bytes that an instruction outside a fusion reads and writes in main memory."""
    if line.opcode in _FREE or line.opcode.endswith("-done"):
        return 0.0

    def size(name: str) -> float:
        return bytes_of(lines[name].shape, main_memory=True) if name in lines else 0.0

    if line.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * bytes_of(line.shape, main_memory=True)
    if line.opcode == "dynamic-update-slice":
        return 2 * size(line.operands[1])
    if line.opcode in ("copy-start", "slice-start", "dynamic-slice-start"):
        # (to, from, token) or (from, to, token): the smaller one moves; it is read once and written once.
        sizes = [(bytes_of(f"{d}[{','.join(map(str, n))}]"), "S(" in layout) for d, n, layout in arrays(line.shape)[:2]]
        return min(size for size, _ in sizes) * (1 if any(stays for _, stays in sizes) else 2)
    if line.opcode != "fusion":
        return bytes_of(line.shape, main_memory=True) + sum(map(size, line.operands))
    body = body_of(module, line)
    read = sum(min(size(name), _used(module, body, i)) for i, name in enumerate(line.operands))
    return read + min(bytes_of(line.shape, main_memory=True), _written(module, body))


def _used(module: HloModule, body: dict[str, Instruction], index: int) -> float:
    """Bytes of an operand that a fusion reads: all, unless every use takes a slice or replaces one in place."""
    names = [line.name for line in body.values() if line.opcode == "parameter" and line.operands[0] == str(index)]
    total = 0.0
    while names:
        name = names.pop()
        if body[name].root:  # passed through whole
            return math.inf
        for line in body.values():
            if name not in line.operands:
                continue
            first = line.operands[0] == name
            if line.opcode in ("dynamic-slice", "gather", "slice") and first:
                total += bytes_of(line.shape)
            elif line.opcode == "bitcast":
                names.append(line.name)
            elif line.opcode == "fusion":
                total += _used(module, body_of(module, line), line.operands.index(name))
            elif not (line.opcode in ("dynamic-update-slice", "scatter") and first):
                return math.inf
    return total


def _written(module: HloModule, body: dict[str, Instruction]) -> float:
    """Bytes of a fusion's result that are written: only a slice if it replaces one in place."""
    root = next((line for line in body.values() if line.root), None)
    while root is not None and root.opcode == "bitcast":
        root = body.get(root.operands[0])
    if root is not None and root.opcode == "fusion":
        return _written(module, body_of(module, root))
    if root is None or root.opcode not in ("dynamic-update-slice", "scatter"):
        return math.inf
    update = body.get(root.operands[1 if root.opcode == "dynamic-update-slice" else 2])
    return bytes_of(update.shape) if update is not None else math.inf


def largest_gather(module: HloModule) -> Collective | None:
    """The gather with the largest result, however often it runs, or None; see `Collective.gathers`."""
    gathers = [collective for collective in read_cost(module).collectives if collective.gathers]
    return max(gathers, key=lambda collective: collective.bytes, default=None)
