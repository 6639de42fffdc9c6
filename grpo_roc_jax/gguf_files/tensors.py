"""Tensors of a GGUF file under the names of published checkpoints, read in slices and unpacked by the package `gguf`.

llama.cpp's converter renames the tensors, interleaves the two halves of each query and key head of the Llama family,
stores Gemma's norm scales with 1 added, and joins the experts of a layer. All of it is undone while reading.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from grpo_roc_jax.gguf_files.header import GgufError, Header, TensorInfo

_CHUNK_NUMBERS = 1 << 18
"""Numbers unpacked at a time. The library takes about three times their float32 size while it does, which then stays in
the cache of a core, and in memory that the process has already."""

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}

_BLOCKS = {
    8: ("int8", ("scales", "codes")),
    2: ("int4", ("scales", "codes")),
    3: ("uint4", ("scales", "offsets", "codes")),
}
"""Type -> (kind of a `QuantizedWeight`, parts of a block in order) of the formats whose blocks of 32 numbers are used
as they are: Q8_0, Q4_0 and Q4_1. Scales and offsets are float16."""
_BLOCK = 32

ROTARY_FACTORS = "rope_freqs.weight"
"""A tensor that rescales the rotary frequencies; `config.py` reads it."""


def library() -> Any:
    """The package `gguf`.

    Raises:
        GgufError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise GgufError(f"GGUF files need the package gguf ({error}); pip install gguf") from error
    return gguf


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file in the layout of published checkpoints; read like `safetensors_io.Tensor`."""

    file: Path
    name: str
    """In the file."""
    type_id: int
    shape: tuple[int, ...]
    offset: int
    heads: int = 0
    """Heads whose rows are interleaved: the halves of a head alternate in the file. 0: none."""
    shift: float = 0.0
    """Added to the numbers of the file."""

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the numbers after unpacking."""
        return np.dtype(np.float32)

    @property
    def blocks(self) -> tuple[str, int] | None:
        """(kind of a `QuantizedWeight`, numbers of a row that share a scale) of a format that is used as it is."""
        return (_BLOCKS[self.type_id][0], _BLOCK) if self.type_id in _BLOCKS else None

    def block_parts(self) -> dict[str, "GgufPart"]:
        """Codes, scales and, if there are any, offsets of such a format, as tensors [rows, numbers or blocks of a
        row]."""
        rows, width = self.shape
        shapes = {part: (rows, width if part == "codes" else width // _BLOCK) for part in _BLOCKS[self.type_id][1]}
        return {
            part: GgufPart(self.file, self.name, self.type_id, shape, self.offset, self.heads, part=part, width=width)
            for part, shape in shapes.items()
        }

    def read(self, index: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out` with the slice, cast to its dtype; unpacks about 1 MiB of numbers at a time.

        Args:
            index: One slice for each dimension of the tensor.
            out: The slice with dimensions that may be split into parts: [n, h, d] for n*h rows of d.
        """
        if len(self.shape) == 1:
            out[...] = self._rows(np.arange(1))[0][index[0]].reshape(out.shape)
            return
        start, stop, _ = index[0].indices(self.shape[0])
        if start == stop:
            return
        order = self._file_order()[start:stop]
        group = (stop - start) // out.shape[0]  # rows of the file that make one row of `out`
        groups = max(1, _CHUNK_NUMBERS // (group * self.shape[1]))
        for first in range(0, out.shape[0], groups):
            last = min(first + groups, out.shape[0])
            piece = self._rows(order[first * group : last * group])[:, index[1]]
            out[first:last] = piece.reshape(last - first, *out.shape[1:])

    def _file_order(self) -> np.ndarray:
        """Index of each row in the file."""
        rows = np.arange(self.shape[0])
        if not self.heads:
            return rows
        return rows.reshape(self.heads, -1, 2).swapaxes(1, 2).ravel()

    def _rows(self, rows: np.ndarray) -> np.ndarray:
        """Rows of the file as float32; a vector is one row."""
        gguf = library()
        numbers = gguf.dequantize(self._stored(rows, self.shape[-1]), gguf.GGMLQuantizationType(self.type_id))
        return numbers + np.float32(self.shift) if self.shift else numbers

    def _stored(self, rows: np.ndarray, numbers: int) -> np.ndarray:
        """The bytes of rows of so many numbers."""
        gguf = library()
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(self.type_id)]
        shape = (math.prod(self.shape[:-1]), numbers // block * size)
        return np.ascontiguousarray(np.memmap(self.file, np.uint8, "r", self.offset, shape)[rows])


@dataclass(frozen=True)
class GgufPart(GgufTensor):
    """The codes, the scales or the offsets of a tensor in blocks."""

    part: str = ""
    width: int = 0
    """Numbers in a row of the tensor."""

    @property
    def dtype(self) -> np.dtype:
        if self.part != "codes":
            return np.dtype(np.float16)
        return np.dtype(np.int8 if _BLOCKS[self.type_id][0] == "int8" else np.uint8)

    def _rows(self, rows: np.ndarray) -> np.ndarray:
        kind, parts = _BLOCKS[self.type_id]
        stored = self._stored(rows, self.width).reshape(len(rows), self.width // _BLOCK, -1)
        if self.part != "codes":
            first = 2 * parts.index(self.part)
            return np.ascontiguousarray(stored[:, :, first : first + 2]).view(np.float16)[:, :, 0]
        codes = stored[:, :, 2 * (len(parts) - 1) :]
        if kind == "int8":
            return codes.view(np.int8).reshape(len(rows), -1)
        # A byte has a code of each half of the block.
        return np.concatenate([codes & 15, codes >> 4], axis=2).reshape(len(rows), -1)


def architecture_of(header: Header) -> str:
    """The architecture that a file names; empty where it names none, as a file of something else than a model."""
    return str(header.metadata.get("general.architecture", ""))


def published_tensors(header: Header) -> dict[str, GgufTensor]:
    """Every tensor of a file by its published name; one that has none keeps its own, so that it is refused.

    The rotary factors are left out.
    """
    architecture = architecture_of(header)
    gemma = architecture.startswith("gemma")
    heads = {"attn_q": header.metadata.get(f"{architecture}.attention.head_count", 0)}
    heads["attn_k"] = header.metadata.get(f"{architecture}.attention.head_count_kv", heads["attn_q"])
    tensors: dict[str, GgufTensor] = {}
    for name, info in header.tensors.items():
        if name == ROTARY_FACTORS:
            continue
        tensor = GgufTensor(header.file, name, info.type_id, info.shape, info.offset)
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        layer, part, kind = match.groups() if match else ("", "", "")
        if part in _EXPERTS:
            tensors |= dict(_split_experts(tensor, f"model.layers.{layer}.mlp.experts", _EXPERTS[part]))
            continue
        if architecture == "llama" and part in heads:
            tensor = replace(tensor, heads=heads[part])
        if gemma and name.endswith("norm.weight"):
            tensor = replace(tensor, shift=-1.0)
        leaf = (_GEMMA_LAYER if gemma else _LAYER).get(part)
        tensors[_TOP.get(name, f"model.layers.{layer}.{leaf}.{kind}" if leaf else name)] = tensor
    return tensors


def _split_experts(tensor: GgufTensor, prefix: str, part: str) -> Iterator[tuple[str, GgufTensor]]:
    gguf = library()
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type_id)]
    count, *shape = tensor.shape
    step = math.prod(shape) // block * size
    for i in range(count):
        yield f"{prefix}.{i}.{part}.weight", replace(tensor, shape=tuple(shape), offset=tensor.offset + i * step)


def check_types(header: Header) -> None:
    """Refuses number formats that the library cannot unpack, and files that end before their tensors.

    Raises:
        GgufError: the message names the formats with their tensors.
    """
    gguf, refused = library(), {}
    size = header.file.stat().st_size
    for info in header.tensors.values():
        name = _unreadable(gguf, info)
        if name:
            refused.setdefault(name, []).append(info.name)
        elif info.offset + stored_bytes(gguf, info) > size:
            raise GgufError(
                f"{header.file} is cut short: {info.name} ends at byte {info.offset + stored_bytes(gguf, info)} of "
                f"{size}; download it again"
            )
    if refused:
        listing = "; ".join(f"{name} ({len(names)} tensors, such as {names[0]})" for name, names in refused.items())
        raise GgufError(
            f"{header.file} has quantizations that gguf {metadata.version('gguf')} does not unpack: {listing}; take a "
            "file in another one, such as Q8_0 or Q4_K"
        )


def stored_bytes(gguf: Any, info: TensorInfo) -> int:
    """Bytes of a tensor in the file."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.type_id)]
    return math.prod(info.shape) // block * size


def _unreadable(gguf: Any, info: TensorInfo) -> str:
    """The name of a format that cannot be unpacked; empty if it can."""
    try:
        kind = gguf.GGMLQuantizationType(info.type_id)
    except ValueError:
        return f"type {info.type_id}"
    block, size = gguf.GGML_QUANT_SIZES.get(kind, (1, 1))
    try:
        gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        return kind.name
    return kind.name if info.shape[-1] % block else ""
