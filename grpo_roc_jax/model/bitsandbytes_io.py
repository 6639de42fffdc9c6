"""Matrices that bitsandbytes stored in NF4, as transformers saves them: read as numbers, or as they are stored.

A matrix `w` is a uint8 tensor of two codes a byte (the first in the upper half), flattened row by row, with the
largest absolute number of each block in `w.absmax`. That may be in 8 bits itself: an index into `w.nested_quant_map`,
times `w.nested_absmax` of its block, plus an offset. `w.quant_state.bitsandbytes__nf4` holds the rest as JSON.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from grpo_roc_jax.model.low_precision import NF4_LEVELS
from grpo_roc_jax.model.safetensors_io import CheckpointError, Tensor

_STATE, _NF4 = ".quant_state.bitsandbytes__", "nf4"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


@dataclass(frozen=True)
class Nf4Tensor:
    """A matrix in NF4; read like `safetensors_io.Tensor`."""

    packed: Tensor
    parts: Mapping[str, Tensor]
    state: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.packed.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.state["shape"])

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the numbers after unpacking."""
        return np.dtype(np.float32)

    @property
    def blocks(self) -> tuple[str, int] | None:
        """(kind of a `QuantizedWeight`, numbers of a row that share a scale), if blocks do not cross rows."""
        size = self.state["blocksize"]
        return ("nf4", size) if self.shape[1] % size == 0 else None

    def block_parts(self) -> dict[str, "Nf4Part"]:
        """Codes and scales as tensors [rows, numbers or blocks of a row]."""
        rows, width = self.shape
        shapes = {"codes": (rows, width), "scales": (rows, width // self.state["blocksize"])}
        return {part: Nf4Part(self, part, shape) for part, shape in shapes.items()}

    def read(self, index: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out` with the slice, cast to its dtype; see `Tensor.read`."""
        first, last = index[0].indices(self.shape[0])[:2]
        size, width = self.state["blocksize"], self.shape[1]
        numbers = np.asarray(NF4_LEVELS, np.float32)[self.codes(first, last)]
        blocks = np.arange(first * width, last * width) // size
        numbers *= self.scales[blocks].reshape(numbers.shape)
        out[...] = numbers[:, index[1]].reshape(out.shape)

    def codes(self, first: int, last: int) -> np.ndarray:
        """Codes of these rows, uint8[rows, width]."""
        width = self.shape[1]
        start, stop = first * width // 2, -(-last * width // 2)
        stored = np.empty((stop - start, 1), np.uint8)
        self.packed.read((slice(start, stop), slice(None)), stored)
        codes = np.concatenate([stored >> 4, stored & 15], axis=1).ravel()[first * width - 2 * start :]
        return codes[: (last - first) * width].reshape(last - first, width)

    @cached_property
    def scales(self) -> np.ndarray:
        """The scale of each block, float32."""
        absmax = _all(self.parts["absmax"])
        if "nested_absmax" not in self.parts:
            return absmax.astype(np.float32)
        blocks = np.arange(len(absmax)) // self.state["nested_blocksize"]
        nested = _all(self.parts["nested_quant_map"])[absmax] * _all(self.parts["nested_absmax"])[blocks]
        return (nested + np.float32(self.state["nested_offset"])).astype(np.float32)


@dataclass(frozen=True)
class Nf4Part:
    """The codes or the scales of a matrix."""

    of: Nf4Tensor
    part: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.uint8 if self.part == "codes" else np.float32)

    def read(self, index: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out` with the slice; see `Tensor.read`."""
        first, last = index[0].indices(self.shape[0])[:2]
        rows = self.of.codes(first, last) if self.part == "codes" else self.of.scales.reshape(self.shape)[first:last]
        out[...] = rows[:, index[1]].reshape(out.shape)


def _all(tensor: Tensor) -> np.ndarray:
    values = np.empty(tensor.shape, tensor.dtype)
    tensor.read((slice(None),), values)
    return values


def join_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor | Nf4Tensor]:
    """The tensors of a directory, where the parts of a matrix in NF4 are one tensor.

    Raises:
        CheckpointError: a matrix is incomplete or in another format, or another tensor is in uint8.
    """
    joined: dict[str, Tensor | Nf4Tensor] = dict(tensors)
    for name, tensor in tensors.items():
        matrix, separator, kind = name.partition(_STATE)
        if not separator:
            continue
        if kind != _NF4:
            raise CheckpointError(f"{tensor.file}: {matrix} is in {kind} of bitsandbytes; must be nf4")
        parts = {part: tensors[f"{matrix}.{part}"] for part in _PARTS if f"{matrix}.{part}" in tensors}
        try:
            state = json.loads(_all(tensor).tobytes())
            joined[matrix] = Nf4Tensor(tensors[matrix], parts, state)
            _check(joined[matrix])
        except (KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
            raise CheckpointError(
                f"{tensor.file}: {matrix} is no complete matrix of bitsandbytes ({error!r:.200}); download it again"
            ) from error
        for part in (name, *(f"{matrix}.{part}" for part in parts)):
            del joined[part]
    for name, tensor in joined.items():
        if tensor.dtype == np.uint8:
            raise CheckpointError(f"{tensor.file}: {name} has dtype U8 without the parts of a matrix in NF4")
    return joined


def _check(tensor: Nf4Tensor) -> None:
    rows, width = tensor.shape
    state, numbers = tensor.state, rows * width
    blocks = -(-numbers // state["blocksize"])
    if state["quant_type"] != _NF4 or not np.allclose(_all(tensor.parts["quant_map"]), NF4_LEVELS, atol=1e-6):
        raise ValueError(f"quant_type {state['quant_type']!r} or quant_map is not NF4")
    if math.prod(tensor.packed.shape) != -(-numbers // 2) or tensor.parts["absmax"].shape != (blocks,):
        raise ValueError(f"shape {rows} x {width} does not fit {tensor.packed.shape} bytes and {blocks} blocks")
    nested = tensor.parts.keys() & {"nested_absmax", "nested_quant_map"}
    if (tensor.parts["absmax"].dtype == np.uint8) != (len(nested) == 2):
        raise ValueError("absmax in 8 bits needs nested_absmax and nested_quant_map")
