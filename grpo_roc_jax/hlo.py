"""Reading compiled programs: computations, their instructions, shapes, groups of devices, and turns of loops.

The text of a compiled program is per device and scheduled.
"""

import math
import re
from dataclasses import dataclass, field

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^}]*\})?")
_NUMBERED = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_SPREAD = re.compile(r"=\{\n([^\n]*)\n\}")
"""What a kernel says of itself stands on lines of its own, the last of which looks like the end of a computation."""


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
    ids = r"(?:, device_ids=\(\[[\d,]*\](?:T\([\d,]*\))?\))?"
    if (found := re.search(rf"replica_groups=mesh\[([^\]]*)\]{ids}\s*\{{([^}}]*)\}}", text)) is not None:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part) if part else sizes[name] for name, part in parts)
    return 2 if "source_target_pairs" in text else 0


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


def lies_in_zeros(program: Program, lines: dict[str, Instruction], name: str) -> bool:
    """Whether a value is a part written into an array of one constant, alone or at the end of a fusion."""
    line = _origin(lines, name)
    if line is None or line.opcode not in ("dynamic-update-slice", "fusion"):
        return False
    inner = body_of(program, line) if line.opcode == "fusion" else lines
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


def body_of(program: Program, line: Instruction) -> dict[str, Instruction]:
    """The computation of a fusion."""
    return program.computations.get(line.attribute("calls").lstrip("%"), {})
