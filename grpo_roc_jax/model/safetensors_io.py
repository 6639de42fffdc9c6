"""Tensors of safetensors files, read in slices and written one by one.

The format is a length (8 bytes, little-endian), a JSON header with name -> dtype, shape and byte range, and the raw
bytes. It is read here through short-lived maps of one tensor, so that a process holds no more of a checkpoint than the
slices that it asked for, and written tensor by tensor; the library of that name wants a whole shard in memory.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes of published parameters that are read; quantised ones are refused."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}

_CHUNK_BYTES = 1 << 26
"""Bytes mapped at a time. Pages of a map count as memory of the process until it is closed."""


class CheckpointError(ValueError):
    """Files that are no complete checkpoint of the model asked for; the message lists what is wrong."""


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""

    def read(self, index: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out` with the slice, cast to its dtype; maps about 64 MiB of the file at a time.

        Args:
            index: One slice for each dimension of the tensor.
            out: The slice with dimensions that may be split into parts: [n, h, d] for n*h rows of d.
        """
        start, stop, _ = index[0].indices(self.shape[0])
        if start == stop:
            return
        group = (stop - start) // out.shape[0]  # rows that make one of `out`
        groups = max(1, _CHUNK_BYTES // (group * self.dtype.itemsize * math.prod(self.shape[1:])))
        for first in range(0, out.shape[0], groups):
            last = min(first + groups, out.shape[0])
            rows = self._map(start + first * group, start + last * group)[:, *index[1:]]
            out[first:last] = rows.reshape(last - first, *out.shape[1:])
            del rows  # closes the map

    def _map(self, first: int, last: int) -> np.ndarray:
        row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])
        shape = (last - first, *self.shape[1:])
        return np.memmap(self.file, self.dtype, mode="r", offset=self.offset + first * row_bytes, shape=shape)


def read_directory(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint directory by name, from one file or from the shards that an index lists.

    Raises:
        CheckpointError: no such files, a shard that is missing or lacks a tensor of the index, or a damaged header.
    """
    index_file = folder / INDEX_FILE
    if not index_file.is_file():
        single = folder / SINGLE_FILE
        if not single.is_file():
            raise CheckpointError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; other formats are not read")
        return read_header(single)
    places: Mapping[str, str] = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if not (folder / name).is_file():
            raise CheckpointError(f"{index_file} names the shard {name}, which is missing; download it again")
        tensors |= read_header(folder / name)
    lost = sorted(set(places) - set(tensors))
    if lost:
        raise CheckpointError(f"{index_file} names tensors that no shard holds: {listed(lost)}")
    return tensors


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one file.

    Raises:
        CheckpointError: the file is cut short, or is no safetensors file, or holds a dtype that is not read.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= size - 8:
            raise CheckpointError(
                f"{file} is no safetensors file (header of {length} bytes in {size}); download it again"
            )
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise CheckpointError(f"{file}: its header is no JSON ({error}); download it again") from error
    header.pop("__metadata__", None)
    return {name: _tensor(file, name, spec, 8 + length, size) for name, spec in header.items()}


def _tensor(file: Path, name: str, spec: Mapping[str, Any], base: int, size: int) -> Tensor:
    if spec["dtype"] not in DTYPES:
        raise CheckpointError(f"{file}: {name} has dtype {spec['dtype']}; one of {', '.join(DTYPES)} is wanted")
    dtype, shape = DTYPES[spec["dtype"]], tuple(spec["shape"])
    begin, end = spec["data_offsets"]
    if end - begin != dtype.itemsize * math.prod(shape) or base + end > size:
        raise CheckpointError(f"{file}: {name} {list(shape)} does not fit into its bytes; the file is cut short")
    return Tensor(file, dtype, shape, base + begin)


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: known before its values are."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def plan_shards(tensors: Sequence[Planned], max_shard_bytes: int) -> list[list[Planned]]:
    """The tensors in order, cut into shards of at most that size (a larger tensor is a shard of its own)."""
    shards: list[list[Planned]] = [[]]
    used = 0
    for tensor in tensors:
        if shards[-1] and used + tensor.nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += tensor.nbytes
    return shards


def write_shards(folder: Path, shards: Sequence[Sequence[Planned]], values: Iterable[np.ndarray]) -> list[str]:
    """Writes the files, and the index where there are several; returns their names.

    Args:
        folder: Existing and empty.
        shards: From `plan_shards`.
        values: The arrays in the order of the plan, made one at a time as they are written.
    """
    values = iter(values)
    if len(shards) == 1:
        write_file(folder / SINGLE_FILE, shards[0], values)
        return [SINGLE_FILE]
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, values)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for shard in shards for tensor in shard)},
        "weight_map": {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return [*names, INDEX_FILE]


def write_file(file: Path, tensors: Sequence[Planned], values: Iterator[np.ndarray]) -> None:
    """Writes one file from arrays that come in the order of the plan, and waits until it is on the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        span = [at, at + tensor.nbytes]
        header[tensor.name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        at = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins on a multiple of 8, as the format asks
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            value = np.ascontiguousarray(next(values))
            if value.shape != tensor.shape or value.dtype != tensor.dtype:
                raise AssertionError(f"{tensor.name}: {value.dtype}{value.shape} came, {tensor} was planned")
            stream.write(value.reshape(-1).view(np.uint8))
        stream.flush()
        os.fsync(stream.fileno())


def listed(names: Sequence[str], limit: int = 8) -> str:
    """The first names and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
