"""Reading of tensors in MXFP4, the format of gpt-oss.

32 consecutive numbers share a scale of one byte, a power of two; each has four bits, a sign and one of eight sizes
(OCP Microscaling Formats 1.0, sec. 5.3.3 and 6.3). The low half of a byte is the first of its two numbers. A matrix of
an expert is stored by columns: what the model multiplies by [D,F] lies as [F,D].
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
VALUES = np.concatenate([VALUES, -VALUES])
"""The number of each four bits (E2M1)."""
BLOCK = 32
"""Numbers that share a scale."""


@dataclass(frozen=True)
class PackedTensor:
    """A tensor [E,D,F] whose experts are stored as blocks [E,F,D/32,16] and scales [E,F,D/32] of bytes."""

    codes: Any
    """A `safetensors_io.Tensor`, as are the scales."""
    scales: Any
    blocks: ClassVar[None] = None
    """See `safetensors_io.Tensor.blocks`."""

    @property
    def dtype(self) -> np.dtype:
        """Holds every number of the format."""
        return np.dtype(ml_dtypes.bfloat16)

    @property
    def shape(self) -> tuple[int, ...]:
        experts, columns, groups, _ = self.codes.shape
        return experts, groups * BLOCK, columns

    def read(self, index: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out` [e,d,f] with the slice, one expert at a time."""
        experts, rows, columns = (range(*cut.indices(size)) for cut, size in zip(index, self.shape, strict=True))
        for i, expert in enumerate(experts):
            at = (slice(expert, expert + 1), slice(columns.start, columns.stop))
            blocks = np.empty((1, len(columns), *self.codes.shape[2:]), np.uint8)
            scales = np.empty((1, len(columns), self.scales.shape[2]), np.uint8)
            self.codes.read((*at, slice(None), slice(None)), blocks)
            self.scales.read((*at, slice(None)), scales)
            out[i] = unpack(blocks[0], scales[0])[:, rows.start : rows.stop].T


def unpack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32[n,32 g] from blocks uint8[n,g,16] and scales uint8[n,g]."""
    numbers = VALUES[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(*scales.shape, BLOCK)
    return np.ldexp(numbers, scales.astype(np.int32)[..., None] - 127).reshape(len(blocks), -1)


def joined(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors with each pair `NAME_blocks` and `NAME_scales` as one tensor NAME, in place of the former."""
    result = {}
    for name, tensor in tensors.items():
        base, _, part = name.rpartition("_")
        other = tensors.get(f"{base}_{'scales' if part == 'blocks' else 'blocks'}")
        if part not in ("blocks", "scales") or other is None:
            result[name] = tensor
        elif part == "blocks" and tensor.shape[:-1] == other.shape and tensor.shape[-1:] == (BLOCK // 2,):
            result[base] = PackedTensor(tensor, other)
        elif part == "blocks":
            result |= {name: tensor, f"{base}_scales": other}
    return result
