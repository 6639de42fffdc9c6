"""Reading compiled programs: computations and their instructions, collectives, FLOPs, and bytes to and from memory.

The text of a compiled program is per device and scheduled. XLA's own cost analysis counts the body of a loop once; here
a body counts as often as its loop runs, which XLA states for loops with a fixed number of turns and the caller says for
the others.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^}]*\})?")
_NUMBERED = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call")
_FREE += ("after-all", "partition-id", "replica-id", "iota", "async-update", "opt-barrier")
"""Opcodes that move no bytes themselves."""
_SPREAD = re.compile(r"=\{\n([^\n]*)\n\}")
"""What a kernel says of itself stands on lines of its own, the last of which looks like the end of a computation."""
SCATTERED = "all-reduce-scatter"
"""How the computations begin that a TPU's compiler writes for a reduce-scatter: an all-reduce and a cut."""
_KERNEL = re.compile(r"tpu_custom_call|triton|cudnn|cublas|mosaic")
"""Custom calls that compute; the compiler uses others for notes to itself."""


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    """What follows the operands: attributes, metadata."""
    root: bool

    def attribute(self, key: str) -> str:
        """The value of `key=` up to the next comma, or what its braces hold; empty without it."""
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|[^,\s]+)", self.rest)
        return found[1].strip("{}") if found else ""

    def called(self) -> list[str]:
        """Names of the computations that it runs, those of reductions left out."""
        single = [self.attribute(key) for key in ("calls", "body", "true_computation", "false_computation")]
        names = [*single, *self.attribute("branch_computations").split(",")]
        if self.opcode == "call":
            names.append(self.attribute("to_apply"))
        return [name.strip().lstrip("%") for name in names if name.strip()]


@dataclass
class Program:
    """A compiled program by its computations."""

    computations: dict[str, dict[str, Instruction]] = field(default_factory=dict)
    entry: str = ""


@dataclass(frozen=True)
class Collective:
    """One kind of collective of one size in one place."""

    kind: str
    bytes: float
    """Of the result on one device (of the operand for reduce-scatter)."""
    group: int
    """Devices that take part together."""
    times: float
    """Runs of it."""
    loops: int
    """Loops around it."""
    source: str
    """The operation that it comes from, as JAX names it."""
    gathers: bool = False
    """Devices end with the parts of all: an all-gather, or the sum of parts that lie in zeros, as XLA writes one over
    many devices."""

    @property
    def moved(self) -> float:
        """Bytes that leave a device in one run, by a ring: (n - 1)/n of the whole, twice that for an all-reduce."""
        share = (self.group - 1) / self.group if self.group else 0.0
        return self.bytes * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)


@dataclass
class Cost:
    """What one run of a program does on one device."""

    flops: float = 0.0
    """Of matrix products and convolutions; 2 for each multiply-add."""
    traffic: float = 0.0
    """Bytes to and from main memory, each instruction reading its operands and writing its result."""
    collectives: list[Collective] = field(default_factory=list)
    kernels: dict[str, float] = field(default_factory=dict)
    """Runs of custom kernels by target, whose work is not in `flops`."""

    @property
    def moved(self) -> float:
        """Bytes that leave a device for others."""
        return sum(collective.moved * collective.times for collective in self.collectives)

    def by_kind(self) -> dict[str, dict[str, float]]:
        """Kind -> runs, bytes of results, and bytes that leave a device."""
        found: dict[str, dict[str, float]] = {}
        for one in self.collectives:
            entry = found.setdefault(one.kind, {"runs": 0.0, "bytes": 0.0, "moved": 0.0})
            entry["runs"] += one.times
            entry["bytes"] += one.bytes * one.times
            entry["moved"] += one.moved * one.times
        return found


def read_program(text: str) -> Program:
    """The computations of a compiled program, from `Compiled.as_text()`.

    Raises:
        ValueError: the text has no entry computation.
    """
    program, current = Program(), None
    for line in _SPREAD.sub(r"={\1}", text).splitlines():
        if current is None:
            header = re.match(r"^(ENTRY )?%?([\w.\-]+) (\(.*)?.*\{$", line)
            if header and "=" not in line.split("(")[0]:
                current = header[2]
                program.computations[current] = {}
                program.entry = current if header[1] else program.entry
        elif line.startswith("}"):
            current = None
        elif (found := _NUMBERED.match(line)) is not None:
            instruction = _read_instruction(bool(found[1]), found[2], found[3])
            program.computations[current][instruction.name] = instruction
    if not program.entry:
        raise ValueError("the text holds no ENTRY computation; Compiled.as_text() of one program is wanted")
    return program


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
    """Bytes of an array or of all arrays in a tuple; with `main_memory` without those kept on the chip."""
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
    """Devices in a group of a collective; 0 where the text does not say."""
    text = instruction.rest
    if (found := re.search(r"replica_groups=\{\{([\d,]+)\}", text)) is not None:
        return found[1].count(",") + 1
    if (found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", text)) is not None:
        return int(found[1])
    if (found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text)) is not None:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part) if part else sizes[name] for name, part in parts)
    return 2 if "source_target_pairs" in text else 0


def read_cost(program: Program, turns: Sequence[float] = ()) -> Cost:
    """What one run does.

    Args:
        program: From `read_program`.
        turns: How often loops run whose number of turns is not fixed, by how many such loops are around them; the last
            number, or 1, serves all deeper ones.
    """
    cost = Cost()
    _add(cost, program, program.entry, _Place(), list(turns) or [1.0])
    return cost


def fixed_turns(line: Instruction, program: Program) -> float | None:
    """How often a loop runs where the text says so: outright, or by a condition `counter < constant`.

    Counters of loops with fixed bounds start at 0. They rise by what the body adds to them: JAX's by 1, those of the
    products that XLA runs while it exchanges their parts by as many parts as one turn takes. None for computed bounds.
    """
    if (said := re.search(r'"known_trip_count":\{"n":"(\d+)"', line.rest)) is not None:
        return float(said[1])
    lines = program.computations.get(line.attribute("condition").lstrip("%"), {})
    root = next((one for one in lines.values() if one.root), None)
    if root is None or root.opcode != "compare" or root.attribute("direction") != "LT":
        return None
    bound, counter = lines.get(root.operands[1]), lines.get(root.operands[0])
    if bound is None or bound.opcode != "constant":
        return None
    body = program.computations.get(line.attribute("body").lstrip("%"), {})
    index = counter.attribute("index") if counter is not None and counter.opcode == "get-tuple-element" else ""
    return math.ceil(float(bound.operands[0]) / (_rise(body, int(index)) if index else 1.0))


def _rise(body: dict[str, Instruction], index: int) -> float:
    """What a loop's body adds to an entry of its state, through as many additions as it takes; 1 where unclear."""
    root = next((one for one in body.values() if one.root), None)
    name = root.operands[index] if root is not None and root.opcode == "tuple" else ""
    rise = 0.0
    while (line := body.get(name)) is not None and line.opcode in ("add", "copy"):
        added = [body[one] for one in line.operands if one in body and body[one].opcode == "constant"]
        if line.opcode == "add" and len(added) != 1:
            return 1.0
        rise += sum(float(one.operands[0]) for one in added)
        name = next(one for one in line.operands if one not in {constant.name for constant in added})
    is_counter = line is not None and line.opcode == "get-tuple-element" and line.attribute("index") == str(index)
    return rise if is_counter and rise > 0 else 1.0


@dataclass(frozen=True)
class _Place:
    """Where in the nest of loops a computation runs."""

    times: float = 1.0
    loops: int = 0
    open_loops: int = 0
    fused: bool = False

    def inside(self, line: Instruction, program: Program, turns: list[float]) -> "_Place":
        """The place of what a line calls."""
        if line.opcode != "while":
            return replace(self, fused=self.fused or line.opcode in ("fusion", "async-start", "custom-call"))
        fixed = fixed_turns(line, program)
        count = turns[min(self.open_loops, len(turns) - 1)] if fixed is None else fixed
        return replace(
            self, times=self.times * count, loops=self.loops + 1, open_loops=self.open_loops + (fixed is None)
        )


def _add(cost: Cost, program: Program, name: str, place: _Place, turns: list[float]) -> None:
    lines, times = program.computations.get(name, {}), place.times
    for line in lines.values():
        for called in line.called():
            _add(cost, program, called, place.inside(line, program, turns), turns)
        if line.opcode in ("dot", "convolution"):
            cost.flops += times * _product_flops(line, lines)
        elif line.opcode == "custom-call" and _KERNEL.search(target := line.attribute("custom_call_target")):
            target = target.strip('"')
            cost.kernels[target] = cost.kernels.get(target, 0.0) + times
        if (found := _collective(program, line, lines, times, place.loops)) is not None:
            scatters = found.kind == "all-reduce" and name.startswith(SCATTERED)
            cost.collectives.append(replace(found, kind="reduce-scatter") if scatters else found)
        if not place.fused:
            cost.traffic += times * _traffic(program, line, lines)


def _collective(
    program: Program, line: Instruction, lines: dict[str, Instruction], times: float, loops: int
) -> Collective | None:
    kind = line.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    result = sum(bytes_of(shape) for shape in _result_parts(line))
    if kind == "reduce-scatter":
        result = sum(bytes_of(lines[operand].shape) for operand in line.operands if operand in lines)
    source = re.search(r'op_name="([^"]*)"', line.rest)
    gathers = kind == "all-gather" or (
        kind == "all-reduce" and any(_lies_in_zeros(program, lines, name) for name in line.operands)
    )
    return Collective(kind, result, group_size(line), times, loops, source[1] if source else line.name, gathers)


def _lies_in_zeros(program: Program, lines: dict[str, Instruction], name: str) -> bool:
    """Whether a value is a part written into an array of one constant, alone or at the end of a fusion."""
    line = _origin(lines, name)
    if line is None or line.opcode not in ("dynamic-update-slice", "fusion"):
        return False
    inner = _body(program, line) if line.opcode == "fusion" else lines
    root = next((one for one in inner.values() if one.root), None) if line.opcode == "fusion" else line
    if root is None or root.opcode != "dynamic-update-slice":
        return False
    base = _origin(inner, root.operands[0])
    if base is not None and base.opcode == "parameter" and inner is not lines:
        base = _origin(lines, line.operands[int(base.operands[0])])
    return base is not None and base.opcode in ("broadcast", "constant")


def _origin(lines: dict[str, Instruction], name: str) -> Instruction | None:
    """The instruction that made a value, behind copies of it."""
    line = lines.get(name)
    while line is not None and line.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
        line = lines.get(line.operands[0])
    return line


def _result_parts(line: Instruction) -> list[str]:
    """Shapes of what a collective gives back; the started form of most gives its operands first."""
    found = [f"{dtype}[{','.join(map(str, dims))}]" for dtype, dims, _ in arrays(line.shape)]
    if line.opcode in ("all-gather-start", "collective-permute-start"):
        count = len(line.operands)
        return found[count : 2 * count]
    return found


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
    """The window of a convolution, one entry per spatial axis."""

    size: list[int]
    stride: list[int]
    low: list[int]
    left_dilation: list[int]
    right_dilation: list[int]

    @classmethod
    def read(cls, line: Instruction) -> "_Window":
        found = dict(re.findall(r"(\w+)=(\S+)", line.attribute("window")))
        size = [int(n) for n in found.get("size", "").split("x") if n]
        whole = lambda key: [int(n) for n in found[key].split("x")] if key in found else [1] * len(size)  # noqa: E731
        low = [int(pair.split("_")[0]) for pair in found["pad"].split("x")] if "pad" in found else [0] * len(size)
        return cls(size, whole("stride"), low, whole("lhs_dilate"), whole("rhs_dilate"))

    def pairs(self, axis: int, length: int, outputs: int) -> float:
        """(output, kernel) positions along an axis that meet an input: products with padding are not computed."""
        if axis >= len(self.size):
            return float(outputs)
        starts = np.arange(outputs, dtype=np.int64) * self.stride[axis] - self.low[axis]
        dilation = self.left_dilation[axis]
        total = 0
        for offset in range(self.size[axis]):
            at = starts + offset * self.right_dilation[axis]
            total += int(((at >= 0) & (at <= (length - 1) * dilation) & (at % dilation == 0)).sum())
        return float(total)


def _traffic(program: Program, line: Instruction, lines: dict[str, Instruction]) -> float:
    """Bytes that an instruction outside of fusions reads and writes in main memory."""
    if line.opcode in _FREE or line.opcode.endswith("-done"):
        return 0.0
    size = lambda name: bytes_of(lines[name].shape, main_memory=True) if name in lines else 0.0  # noqa: E731
    if line.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * bytes_of(line.shape, main_memory=True)
    if line.opcode == "dynamic-update-slice":
        return 2 * size(line.operands[1])
    if line.opcode in ("copy-start", "slice-start", "dynamic-slice-start"):
        # (to, from, token) or (from, to, token): the smaller one is what moves, read once and written once.
        sizes = [(bytes_of(f"{d}[{','.join(map(str, n))}]"), "S(" in layout) for d, n, layout in arrays(line.shape)[:2]]
        return min(size for size, _ in sizes) * (1 if any(kept for _, kept in sizes) else 2)
    if line.opcode != "fusion":
        return bytes_of(line.shape, main_memory=True) + sum(map(size, line.operands))
    body = _body(program, line)
    read = sum(min(size(name), _used(program, body, i)) for i, name in enumerate(line.operands))
    return read + min(bytes_of(line.shape, main_memory=True), _written(program, body))


def _body(program: Program, line: Instruction) -> dict[str, Instruction]:
    return program.computations.get(line.attribute("calls").lstrip("%"), {})


def _used(program: Program, body: dict[str, Instruction], index: int) -> float:
    """Bytes that a fusion reads of an operand: all, unless every use takes a slice or replaces one in place."""
    names = [line.name for line in body.values() if line.opcode == "parameter" and line.operands[0] == str(index)]
    total = 0.0
    while names:
        name = names.pop()
        if body[name].root:  # handed on whole
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
                total += _used(program, _body(program, line), line.operands.index(name))
            elif not (line.opcode in ("dynamic-update-slice", "scatter") and first):
                return math.inf
    return total


def _written(program: Program, body: dict[str, Instruction]) -> float:
    """Bytes of a fusion's result that are new: a slice where it replaces one in place."""
    root = next((line for line in body.values() if line.root), None)
    while root is not None and root.opcode == "bitcast":
        root = body.get(root.operands[0])
    if root is not None and root.opcode == "fusion":
        return _written(program, _body(program, root))
    if root is None or root.opcode not in ("dynamic-update-slice", "scatter"):
        return math.inf
    update = body.get(root.operands[1 if root.opcode == "dynamic-update-slice" else 2])
    return bytes_of(update.shape) if update is not None else math.inf


def gathers(program: Program) -> Iterator[Collective]:
    """Every gather of the program, once each, however often it runs; see `Collective.gathers`."""
    cost = read_cost(program)
    yield from (one for one in cost.collectives if one.gathers)


def largest_gather(program: Program) -> Collective | None:
    """The gather with the largest result, or None."""
    return max(gathers(program), key=lambda one: one.bytes, default=None)
