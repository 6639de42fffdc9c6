"""Parser for compiled programs in HLO text: computations, instructions, shapes, replica groups, trip counts of loops.

The text of a compiled program describes one device, after scheduling.
"""

import math
import re
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from grpo_roc_jax.planner.links import Torus

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^}]*\})?")
_NUMBERED = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_MULTILINE = re.compile(r"=\{\n([^\n]*)\n\}")
"""An attribute of a kernel on lines of its own, the last of which looks like the end of a computation."""


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    """The text after the operands: attributes and metadata."""
    root: bool

    def attribute(self, key: str) -> str:
        """The value of `key=` up to the next comma, or the text in its braces; empty if there is none."""
        match = re.search(rf"\b{key}=(\{{[^}}]*\}}|[^,\s]+)", self.rest)
        return match[1].strip("{}") if match else ""

    def called(self) -> list[str]:
        """Names of the computations that it calls, without those of reductions."""
        single = [self.attribute(key) for key in ("calls", "body", "true_computation", "false_computation")]
        names = [*single, *self.attribute("branch_computations").split(",")]
        if self.opcode == "call":
            names.append(self.attribute("to_apply"))
        return [name.strip().lstrip("%") for name in names if name.strip()]


@dataclass
class HloModule:
    """A compiled program: its computations by name, each with its instructions by name."""

    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)
    entry: str = ""
    devices: int = 1
    """Number of devices that run the program together."""
    slices: tuple[int, ...] = ()
    """The slice of each of these devices, where there are several."""
    torus: Torus | None = None
    """Their chips, on a TPU slice."""


def parse_hlo(text: str) -> HloModule:
    """The computations of a compiled program, from `Compiled.as_text()`.

    Raises:
        ValueError: the text has no entry computation.
    """
    count = re.search(r"^HloModule .*\bnum_partitions=(\d+)", text)
    module, current = HloModule(devices=int(count[1]) if count else 1), None
    for line in _MULTILINE.sub(r"={\1}", text).splitlines():
        if current is None:
            header = re.match(r"^(ENTRY )?%?([\w.\-]+) (\(.*)?.*\{$", line)
            if header and "=" not in line.split("(")[0]:
                current = header[2]
                module.computations[current] = {}
                module.entry = current if header[1] else module.entry
        elif line.startswith("}"):
            current = None
        elif (match := _NUMBERED.match(line)) is not None:
            instruction = _read_instruction(bool(match[1]), match[2], match[3])
            module.computations[current][instruction.name] = instruction
    if not module.entry:
        raise ValueError("the text holds no ENTRY computation; pass Compiled.as_text() of one program")
    return module


def _read_instruction(root: bool, name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shape, tail = text[:end], text[end:].lstrip()
    start = tail.index("(")
    close = _closing(tail, start)
    inside = re.sub(r"/\*.*?\*/", "", tail[start + 1 : close])
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, shape, tail[:start], operands or (inside,), tail[close + 1 :], root)


def _closing(text: str, start: int) -> int:
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if not depth:
            return at
    raise ValueError(f"unbalanced brackets in {text[:80]!r}")


def arrays(shape: str) -> list[tuple[str, tuple[int, ...], str]]:
    """(dtype, dimensions, layout) of an array shape, or of every array in a tuple."""
    return [
        (dtype, tuple(int(n.strip("<= ")) for n in dims.split(",") if n.strip()), layout or "")
        for dtype, dims, layout in _ARRAY.findall(shape)
    ]


def bytes_of(shape: str, *, main_memory: bool = False) -> float:
    """Bytes of an array or of all arrays in a tuple; with `main_memory` without those in on-chip memory."""
    total = 0.0
    for dtype, dims, layout in arrays(shape):
        if not (main_memory and re.search(r"S\([1-9]", layout)):
            total += _bits(dtype) * math.prod(dims) / 8
    return total


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 0


def group_size(instruction: Instruction) -> int:
    """Devices in a replica group of a collective; 0 if the text does not say."""
    groups = device_groups(instruction.rest)
    return len(groups[0]) if groups else 2 if "source_target_pairs" in instruction.rest else 0


def device_groups(text: str) -> list[list[int]]:
    """The replica groups of a collective, as a list, an iota or axes of a mesh; none if the text does not say."""
    if (match := re.search(r"replica_groups=\{(\{[\d,{}]+\})\}", text)) is not None:
        return [[int(n) for n in group.split(",")] for group in re.findall(r"[\d,]+\d|\d", match[1])]
    if (match := re.search(r"replica_groups=(\[\S+)", text)) is not None:
        return iota(match[1]).tolist()
    if (match := re.search(r"replica_groups=mesh(\[[^{]*)\{([^}]*)\}", text)) is not None:
        return along(*mesh_of(match[1]), match[2]).tolist()
    return []


def iota(text: str) -> np.ndarray:
    """The devices that `[2,4]<=[4,2]T(1,0)` describes: ascending numbers of the second shape, transposed, in the first;
    one shape alone stands for both."""
    dims, _, source, order = re.match(r"\[([\d,]*)\](<=\[([\d,]*)\])?(?:T\(([\d,]*)\))?", text).groups()
    shape = [int(n) for n in dims.split(",") if n]
    first = [int(n) for n in source.split(",")] if source else shape
    devices = np.arange(math.prod(first)).reshape(first)
    devices = devices.transpose([int(n) for n in order.split(",")]) if order else devices
    return devices.reshape(shape) if source else devices


def mesh_of(text: str) -> tuple[dict[str, int], np.ndarray]:
    """(sizes of the axes by name, devices in their order) of `['a'=2,'b'=4], device_ids=([4,2]T(1,0))`."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", text)}
    ids = re.search(r"device_ids=\((\[[^)]*\](?:T\([\d,]*\))?|[\d,]*)\)", text)
    devices = np.arange(math.prod(sizes.values()))
    if ids is not None:
        devices = iota(ids[1]) if ids[1].startswith("[") else np.array(ids[1].split(","), int)
    return sizes, devices.reshape(-1)


def along(sizes: dict[str, int], devices: np.ndarray, parts: str) -> np.ndarray:
    """int[rest, parts]: the devices of a mesh, in a row those that differ in `'a', 'b':(1)2` only: whole axes, and
    parts of one as (product of the parts before it) and size."""
    chosen = {
        (name, int(before or 1)): size for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", parts)
    }
    shape, inside = [], []
    for name, size in sizes.items():
        spans = [
            (before, before * int(width or size)) for (dimension, before), width in chosen.items() if dimension == name
        ]
        for low, high in pairwise(sorted({1, size, *(edge for span in spans for edge in span)})):
            shape.append(high // low)
            inside.append(any(first <= low and high <= last for first, last in spans))
    order = sorted(range(len(shape)), key=lambda axis: inside[axis])
    width = math.prod(n for n, is_inside in zip(shape, inside, strict=True) if is_inside)
    return devices.reshape(shape).transpose(order).reshape(-1, width)


def root_of(lines: dict[str, Instruction]) -> Instruction | None:
    """The instruction whose value a computation returns."""
    return next((line for line in lines.values() if line.root), None)


def known_trip_count(line: Instruction, module: HloModule) -> float | None:
    """Trip count of a loop if the text gives it: as an attribute, or by a condition `counter < constant`. None for a
    computed bound.

    Counters of loops with fixed bounds start at 0. The body increments them: JAX's loops by 1, the matrix products that
    XLA overlaps with communication by the number of parts that one iteration handles.
    """
    if (match := re.search(r'"known_trip_count":\{"n":"(\d+)"', line.rest)) is not None:
        return float(match[1])
    lines = module.computations.get(line.attribute("condition").lstrip("%"), {})
    root = root_of(lines)
    if root is None or root.opcode != "compare" or root.attribute("direction") != "LT":
        return None
    bound, counter = lines.get(root.operands[1]), lines.get(root.operands[0])
    if bound is None or bound.opcode != "constant":
        return None
    body = module.computations.get(line.attribute("body").lstrip("%"), {})
    index = counter.attribute("index") if counter is not None and counter.opcode == "get-tuple-element" else ""
    return math.ceil(float(bound.operands[0]) / (_increment(body, int(index)) if index else 1.0))


def _increment(body: dict[str, Instruction], index: int) -> float:
    """What a loop's body adds to an entry of its state, over any number of additions; 1 if unclear."""
    root = root_of(body)
    name = root.operands[index] if root is not None and root.opcode == "tuple" else ""
    rise = 0.0
    while (line := body.get(name)) is not None and line.opcode in ("add", "copy"):
        constants = [name for name in line.operands if name in body and body[name].opcode == "constant"]
        if line.opcode == "add" and len(constants) != 1:
            return 1.0
        rise += sum(float(body[name].operands[0]) for name in constants)
        name = next(name for name in line.operands if name not in constants)
    is_counter = line is not None and line.opcode == "get-tuple-element" and line.attribute("index") == str(index)
    return rise if is_counter and rise > 0 else 1.0


def lies_in_zeros(module: HloModule, lines: dict[str, Instruction], name: str) -> bool:
    """Whether a value is a part written into a constant array, as an instruction or at the root of a fusion."""
    line = _origin(lines, name)
    if line is None or line.opcode not in ("dynamic-update-slice", "fusion"):
        return False
    inner = body_of(module, line) if line.opcode == "fusion" else lines
    root = root_of(inner) if line.opcode == "fusion" else line
    if root is None or root.opcode != "dynamic-update-slice":
        return False
    base = _origin(inner, root.operands[0])
    if base is not None and base.opcode == "parameter" and inner is not lines:
        base = _origin(lines, line.operands[int(base.operands[0])])
    return base is not None and base.opcode in ("broadcast", "constant")


def _origin(lines: dict[str, Instruction], name: str) -> Instruction | None:
    """The instruction that computed a value, looking through copies."""
    line = lines.get(name)
    while line is not None and line.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
        line = lines.get(line.operands[0])
    return line


def body_of(module: HloModule, line: Instruction) -> dict[str, Instruction]:
    """The computation of a fusion."""
    return module.computations.get(line.attribute("calls").lstrip("%"), {})
