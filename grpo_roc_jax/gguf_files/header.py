"""The header of a GGUF file: its metadata, and where each tensor lies. Tensor data are not touched.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. The reader of the
package `gguf` makes array objects of every string and number of a vocabulary (2.2 s and 163 MB for 49,152 tokens);
this one takes 0.1 s.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a metadata value -> its code in `struct`."""
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """A GGUF file that cannot be used; the message names the file and the reason."""


@dataclass(frozen=True)
class TensorInfo:
    """Location, shape and format of a tensor."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as in other checkpoints; the file lists them the other way round."""
    type_id: int
    """Number of its format in ggml's table."""
    offset: int
    """Offset of its first byte in the file."""


@dataclass(frozen=True)
class Header:
    """What a GGUF file says before its tensors."""

    file: Path
    metadata: dict[str, Any]
    """Key -> number, text, or list of these."""
    tensors: dict[str, TensorInfo]


def read_header(file: Path) -> Header:
    """The header of a file.

    Raises:
        GgufError: it is not a GGUF file, of another version or byte order, or cut short.
    """
    with file.open("rb") as stream:
        begins = stream.read(8)
        if begins[:4] != MAGIC or len(begins) < 8:
            raise GgufError(f"{file} is not a GGUF file: it begins with {begins[:4]!r}; must be {MAGIC!r}")
        version = struct.unpack("<I", begins[4:])[0]
        if version not in VERSIONS:
            what = "has the byte order of another machine" if version & 0xFFFF == 0 else f"has version {version}"
            raise GgufError(f"{file} {what}; read are versions {' and '.join(map(str, VERSIONS))}, little-endian")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(file, _Cursor(data, 8))
            except (struct.error, IndexError, UnicodeDecodeError, RecursionError) as error:
                raise GgufError(f"{file} is not a complete GGUF file ({error}); download it again") from error


class _Cursor:
    """Reads the values of a header one after the other."""

    def __init__(self, data: mmap.mmap, position: int):
        self.data, self.position = data, position

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        if self.position + size > len(self.data):
            raise IndexError(f"it ends at byte {len(self.data)}, within its header")
        values = struct.unpack_from(f"<{count}{code}", self.data, self.position)
        self.position += size
        return values

    def number(self, code: str) -> Any:
        return self.numbers(code)[0]

    def text(self) -> str:
        size = self.number("Q")
        start, self.position = self.position, self.position + size
        if self.position > len(self.data):
            raise IndexError(f"it ends at byte {len(self.data)}, within its header")
        return self.data[start : self.position].decode()

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise IndexError(f"a value of type {kind} at byte {self.position}")
        element, count = self.numbers("I")[0], self.number("Q")
        if element in _NUMBERS:
            return list(self.numbers(_NUMBERS[element], count))
        if count > len(self.data):
            raise IndexError(f"a list of {count} values at byte {self.position}")
        return [self.value(element) for _ in range(count)]


def _parse(file: Path, cursor: _Cursor) -> Header:
    tensor_count, value_count = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("I"))
    listed = []
    for _ in range(tensor_count):
        name, dimensions = cursor.text(), cursor.number("I")
        shape = tuple(reversed(cursor.numbers("Q", dimensions)))
        listed.append((name, shape, *cursor.numbers("I"), cursor.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise IndexError(f"general.alignment = {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: TensorInfo(name, shape, kind, start + offset) for name, shape, kind, offset in listed}
    if len(tensors) < tensor_count:
        raise IndexError("two tensors have one name")
    return Header(file, metadata, tensors)
