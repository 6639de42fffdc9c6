"""Tensors of safetensors files, read in slices and written one by one.

Files are read through the library's slices, reopened for each piece, so that a process holds no more of a checkpoint
than the slices that it asked for. Writing is done here: the library serializes a whole shard at once, whereas
`write_file` takes one tensor at a time.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from grpo_roc_jax.settings.files import read_json_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes of published parameters that are read."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}

_CHUNK_BYTES = 1 << 26
"""Bytes read at a time. The library maps the file: pages that were read count as memory of the process until it is
closed."""


class CheckpointError(ValueError):
    """The files are not a complete checkpoint of the model; the message lists what is wrong."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file."""

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    blocks: ClassVar[None] = None
    """As in `GgufTensor`: none."""

    def read(self, index: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out` with the slice, cast to its dtype; reads about 64 MiB of the file at a time.

        Args:
            index: One slice for each dimension of the tensor.
            out: The slice with dimensions that may be split into parts: [n, h, d] for n*h rows of d.
        """
        start, stop, _ = index[0].indices(self.shape[0])
        if start == stop:
            return
        group = (stop - start) // out.shape[0]  # rows of the file that make one row of `out`
        groups = max(1, _CHUNK_BYTES // (group * self.dtype.itemsize * math.prod(self.shape[1:])))
        for first in range(0, out.shape[0], groups):
            last = min(first + groups, out.shape[0])
            rows = slice(start + first * group, start + last * group)
            with safe_open(self.file, framework="numpy") as opened:
                piece = opened.get_slice(self.name)[rows, *index[1:]]
            out[first:last] = piece.reshape(last - first, *out.shape[1:])


@dataclass(frozen=True)
class TensorSlice:
    """A tensor that is stored as a part of another one, such as the matrix of one expert of many."""

    tensor: Any
    """A `Tensor`, or another with its `shape`, `dtype` and `read`."""
    first: int
    """Index along the outermost dimension, which the part does not have."""
    rows: tuple[int, int]
    """First and last (exclusive) index along the next dimension."""
    blocks: ClassVar[None] = None
    """See `Tensor.blocks`."""

    @property
    def dtype(self) -> np.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows[1] - self.rows[0], *self.tensor.shape[2:]

    def read(self, index: Sequence[slice], out: np.ndarray) -> None:
        """As `Tensor.read`."""
        start, stop, _ = index[0].indices(self.shape[0])
        rows = slice(self.rows[0] + start, self.rows[0] + stop)
        piece = np.empty((1, stop - start, *_sizes(index[1:], self.shape[1:])), out.dtype)
        self.tensor.read((slice(self.first, self.first + 1), rows, *index[1:]), piece)
        out[...] = piece.reshape(out.shape)


def _sizes(index: Sequence[slice], shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(len(range(*cut.indices(size))) for cut, size in zip(index, shape, strict=True))


def read_directory(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint directory by name, from a single file or else from the shards of an index; those in
    uint8 too. An index beside a single file is one of earlier shards, as transformers leaves it and does not read it.

    Raises:
        CheckpointError: there are no such files, a shard is missing or damaged, or lacks a tensor of the index.
    """
    index_file, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if single.is_file():
        return read_header(single, packed=True)
    if not index_file.is_file():
        raise CheckpointError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; no other format is read")
    try:
        places: Mapping[str, str] = read_json_object(index_file)["weight_map"]
        shards = sorted({str(Path(name)) for name in places.values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index_file} is not an index of shards ({error!r:.200}); download it again") from error
    tensors: dict[str, Tensor] = {}
    for name in shards:
        if not os.path.isfile(folder / name):  # pathlib raises for names that no file can have
            raise CheckpointError(f"{index_file} names the shard {name:.200}, which is missing; download it again")
        tensors |= read_header(folder / name, packed=True)
    lost = sorted(set(places) - set(tensors))
    if lost:
        raise CheckpointError(f"{index_file} names tensors that no shard holds: {listed(lost)}")
    return tensors


def read_header(file: Path, *, packed: bool = False) -> dict[str, Tensor]:
    """The tensors of one file; with `packed` also those in uint8 (`bitsandbytes_io`).

    Raises:
        CheckpointError: the file is damaged or cut short, or holds a dtype that is not read.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            entries = {name: (entry.get_dtype(), tuple(entry.get_shape())) for name, entry in slices.items()}
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a complete safetensors file ({error}); download it again") from error
    dtypes = DTYPES | ({"U8": np.dtype(np.uint8)} if packed else {})
    for name, (dtype, _) in entries.items():
        if dtype not in dtypes:
            raise CheckpointError(f"{file}: {name} has dtype {dtype}; must be one of {', '.join(DTYPES)}")
    return {name: Tensor(file, name, dtypes[dtype], shape) for name, (dtype, shape) in entries.items()}


@dataclass(frozen=True)
class Planned:
    """A tensor to be written, without its values."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def plan_shards(tensors: Sequence[Planned], max_shard_bytes: int) -> list[list[Planned]]:
    """Splits the tensors, in order, into shards of at most that size; a larger tensor is a shard of its own."""
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
    """Writes the files, and an index if there are several; returns their names.

    Args:
        folder: Existing and empty.
        shards: From `plan_shards`.
        values: The arrays in the order of the plan; each is taken when it is written.
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
    """Writes one file from arrays in the order of the plan, and syncs it to disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        span = [at, at + tensor.nbytes]
        header[tensor.name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        at = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            value = np.ascontiguousarray(next(values))
            if value.shape != tensor.shape or value.dtype != tensor.dtype:
                raise AssertionError(f"{tensor.name}: got {value.dtype}{value.shape}, planned was {tensor}")
            stream.write(value.reshape(-1).view(np.uint8))
        stream.flush()
        os.fsync(stream.fileno())


def listed(names: Sequence[str]) -> str:
    """The first eight names, and the number of the others."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
