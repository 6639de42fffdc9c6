"""Bodies of `forward_backward` and results of it and of sampling, as protocol buffers (proto3) <-> NumPy.

The messages are built from the table below instead of generated code; names of fields stay on this side, so only
numbers and types must agree with the client's.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from math import prod
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from grpo_roc_jax.serving.refusal import RequestRefused

PACKAGE = "grpo_roc_jax_tinker"
MESSAGES: dict[str, dict[int, str]] = {
    "Request": {
        1: "string model_id",
        2: "int32 seq_id",
        3: "Datum* data",
        4: "string loss_fn",
        5: "map:double loss_fn_config",
        6: "bool forward_only",
        7: "map:Setting loss_fn_config_v2",
    },
    "Setting": {1: "double? number", 2: "string? text"},
    "Datum": {1: "Chunk* model_input", 2: "map:Tensor loss_fn_inputs"},
    "Chunk": {1: "Tokens? text", 2: "bytes? image", 3: "bytes? dmel"},
    "Tokens": {1: "bytes tokens"},
    "Tensor": {1: "bytes? dense", 2: "Sparse? sparse", 3: "int32 dtype", 4: "int64* shape"},
    "Sparse": {1: "bytes values", 2: "bytes crow", 3: "bytes col"},
    "Output": {1: "string loss_fn_output_type", 2: "ArrayRecord* outputs", 3: "map:double metrics"},
    "ArrayRecord": {1: "string type_tag", 2: "map:BatchedTensor fields", 3: "int64 num_datums"},
    "BatchedTensor": {1: "bytes data", 2: "bytes offsets", 3: "int32 dtype", 4: "int64* trailing_shape"},
    "SampleResponse": {
        1: "SampledSequence* sequences",
        2: "bytes? prompt_logprobs",
        3: "TopK? topk_prompt_logprobs",
        4: "int32 prompt_cache_hit_tokens",
        5: "Tensor? target_prompt_logprobs",
        6: "Draws? prompt_alt_tokens",
    },
    "Draws": {1: "Tensor tokens", 2: "Tensor logprobs"},
    "SampledSequence": {1: "int32? stop_reason", 2: "bytes tokens", 3: "bytes? logprobs", 4: "TopK? topk"},
    "TopK": {1: "bytes ids", 2: "bytes logprobs", 3: "int32 k", 4: "int32 length"},
}
"""Message -> number: type and name of a field. `*` repeated, `?` present or absent, `map:` from strings."""
DTYPES: dict[int, np.dtype] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
BFLOAT16 = 4
MOST_CELLS = 1 << 25
"""Cells of the sparse arrays of a request together."""
STOP, LENGTH = 0, 1
"""Reasons why an answer ended."""


@cache
def classes() -> dict[str, Any]:
    """The class of each message."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        made = file.message_type.add(name=name)
        for number, text in fields.items():
            kind, label = text.split()
            plain = kind.rstrip("*?").removeprefix("map:")
            entry = made.field.add(name=label, number=number, label=kinds.LABEL_OPTIONAL)
            if kind.startswith("map:"):
                pair = made.nested_type.add(name=label.title().replace("_", "") + "Entry")
                pair.options.map_entry = True
                pair.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
                _typed(pair.field.add(name="value", number=2, label=kinds.LABEL_OPTIONAL), plain)
                entry.type, entry.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{name}.{pair.name}"
            else:
                _typed(entry, plain)
            if kind.endswith("?") and plain not in MESSAGES:
                entry.proto3_optional, entry.oneof_index = True, len(made.oneof_decl)
                made.oneof_decl.add(name=f"_{label}")
            if kind.endswith("*") or kind.startswith("map:"):
                entry.label = kinds.LABEL_REPEATED
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in MESSAGES}


def _typed(entry: Any, kind: str) -> None:
    if kind in MESSAGES:
        entry.type, entry.type_name = entry.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        entry.type = getattr(entry, f"TYPE_{kind.upper()}")


@dataclass(frozen=True, eq=False)
class Datum:
    """One row of a batch: N input ids, and arrays [N] or [N,K] by the names that the loss has for them."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    """A batch with its loss."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


def read_forward_backward(body: bytes) -> ForwardBackward:
    """The request of a body.

    Raises:
        RequestRefused: It is no such message.
    """
    request = classes()["Request"]()
    try:
        request.ParseFromString(body)
    except message.DecodeError as error:
        raise RequestRefused(f"the body is no forward_backward message ({error}); send it as protobuf") from None
    if request.seq_id < 1:
        raise RequestRefused(f"seq_id is {request.seq_id}; must be at least 1", "seq_id")
    cells = 0
    for i, datum in enumerate(request.data):
        for name, tensor in datum.loss_fn_inputs.items():
            cells += abs(prod(tensor.shape)) if tensor.HasField("sparse") else 0
            if cells > MOST_CELLS:
                raise RequestRefused(
                    f"datum {i}, {name}: the sparse arrays have {cells} cells up to here; must be at most {MOST_CELLS} "
                    "in a request: send fewer data at a time"
                )
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        config[name] = value.number if value.HasField("number") else value.text
    data = tuple(_datum(i, datum) for i, datum in enumerate(request.data))
    return ForwardBackward(
        request.model_id, request.seq_id, data, request.loss_fn, config, forward_only=request.forward_only
    )


def numbered_forward_backward(body: bytes) -> tuple[str, int, bool]:
    """(model, number of the call, whether it is forward only) of a body whose data may be wrong."""
    request = classes()["Request"]()
    with suppress(message.DecodeError):
        request.ParseFromString(body)
    return request.model_id, request.seq_id, request.forward_only


def _datum(index: int, datum: Any) -> Datum:
    parts = []
    for chunk in datum.model_input:
        if not chunk.HasField("text"):
            raise RequestRefused(f"datum {index} holds an image or audio; only chunks of text tokens are trained on")
        if len(chunk.text.tokens) % 4:
            raise RequestRefused(f"datum {index}: a chunk of {len(chunk.text.tokens)} bytes; must be int32 ids")
        parts.append(np.frombuffer(chunk.text.tokens, "<i4"))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    inputs = {name: _tensor(f"datum {index}, {name}", tensor) for name, tensor in datum.loss_fn_inputs.items()}
    return Datum(tokens, inputs)


def _tensor(name: str, tensor: Any) -> np.ndarray:
    """The array of a message; what a sparse one lacks is 0."""
    if tensor.dtype not in (*DTYPES, BFLOAT16):
        raise RequestRefused(f"{name} has dtype {tensor.dtype}; must be 1 (float32), 2 (int64), 3 (int32) or 4")

    def values(data: bytes) -> np.ndarray:
        if tensor.dtype == BFLOAT16:
            return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
        return np.frombuffer(data, DTYPES[tensor.dtype])

    try:
        shape = tuple(tensor.shape)
        if not tensor.HasField("sparse"):
            dense = values(tensor.dense)
            return dense.reshape(shape or dense.shape)
        starts, columns = (np.frombuffer(part, "<i8") for part in (tensor.sparse.crow, tensor.sparse.col))
        given, (rows, width) = values(tensor.sparse.values), shape
        counts = np.diff(starts)
        if not (rows + 1 == len(starts) and starts[0] == 0 and (counts >= 0).all()):
            raise ValueError("its row starts do not fit")
        if not starts[-1] == len(columns) == len(given) or width < 0:
            raise ValueError("its columns do not fit")
        if len(columns) and not 0 <= columns.min() <= columns.max() < width:
            raise ValueError("a column is out of range")
        filled = np.zeros(shape, given.dtype)
        filled[np.repeat(np.arange(rows), counts), columns] = given
        return filled
    except (ValueError, IndexError) as error:
        raise RequestRefused(f"{name}: its bytes do not fit its shape {list(tensor.shape)} ({error})") from None


def write_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """The result of `forward_backward`: log-probabilities [N] or [N,K] of each datum. A record has one K, so data with
    other numbers of targets are in records of their own."""
    output = classes()["Output"](loss_fn_output_type="ArrayRecord")
    for shape, alike in groupby(logprobs, lambda array: array.shape[1:]):
        arrays = [np.ascontiguousarray(array, "<f4") for array in alike]
        record = output.outputs.add(num_datums=len(arrays))
        tensor = record.fields["logprobs"]
        tensor.data = b"".join(array.tobytes() for array in arrays)
        tensor.offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8").tobytes()
        tensor.dtype = 1
        tensor.trailing_shape.extend(shape)
    for name, value in metrics.items():
        output.metrics[name] = value
    return output.SerializeToString(deterministic=True)


@dataclass(frozen=True, eq=False)
class SampledSequence:
    """One sampled sequence."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    """Whether it ended with a stop, else by its length."""
    topk: tuple[np.ndarray, np.ndarray] | None = None
    """(ids, log-probabilities) [N,K] of the most likely ids at each of its positions."""


@dataclass(frozen=True, eq=False)
class Sparse:
    """The places of a sparse array: `values[crow[i]:crow[i + 1]]` lie in row i, at the columns `col`."""

    shape: tuple[int, ...]
    crow: np.ndarray
    col: np.ndarray


@dataclass(frozen=True, eq=False)
class OfPrompt:
    """What a result says about a prompt of P tokens."""

    logprobs: np.ndarray | None = None
    """float32[P]; entry 0 is NaN."""
    topk: tuple[np.ndarray, np.ndarray] | None = None
    """(ids, log-probabilities) [P,K]; empty cells are 0 and -99999."""
    targets: np.ndarray | None = None
    """float32[P-1,K], or the values of a sparse one; 0 where no id was named."""
    sparse: Sparse | None = None
    """The form of `targets`, if it is sparse."""
    drawn: tuple[np.ndarray, np.ndarray] | None = None
    """(ids, log-probabilities) [P-1,K]."""


def write_samples(answers: Sequence[SampledSequence], prompt: OfPrompt | None = None, cached: int = 0) -> bytes:
    """The result of sampling.

    Args:
        answers: In the order of the samples.
        prompt: What the result says about the prompt.
        cached: Tokens of the prompt that were cached.
    """
    response, prompt = classes()["SampleResponse"](), prompt or OfPrompt()
    for answer in answers:
        sequence = response.sequences.add()
        sequence.tokens = answer.tokens.astype("<i4").tobytes()
        sequence.logprobs = answer.logprobs.astype("<f4").tobytes()
        if not answer.stopped:
            sequence.stop_reason = LENGTH
        if answer.topk is not None:
            _write_topk(sequence.topk, *answer.topk)
    if prompt.logprobs is not None:
        response.prompt_logprobs = prompt.logprobs.astype("<f4").tobytes()
    if prompt.topk is not None:
        _write_topk(response.topk_prompt_logprobs, *prompt.topk)
    if prompt.targets is not None:
        _write_tensor(response.target_prompt_logprobs, prompt.targets, prompt.sparse)
    if prompt.drawn is not None:
        _write_tensor(response.prompt_alt_tokens.tokens, prompt.drawn[0].astype("<i8"))
        _write_tensor(response.prompt_alt_tokens.logprobs, prompt.drawn[1])
    if cached:
        response.prompt_cache_hit_tokens = cached
    return response.SerializeToString(deterministic=True)


def _write_topk(message: Any, ids: np.ndarray, values: np.ndarray) -> None:
    message.ids, message.logprobs = ids.astype("<i4").tobytes(), values.astype("<f4").tobytes()
    message.length, message.k = ids.shape


def _write_tensor(message: Any, values: np.ndarray, sparse: Sparse | None = None) -> None:
    integers = values.dtype.kind == "i"
    data, message.dtype = values.astype("<i8" if integers else "<f4").tobytes(), 2 if integers else 1
    if sparse is None:
        message.dense = data
        message.shape.extend(values.shape)
        return
    message.sparse.values = data
    message.sparse.crow, message.sparse.col = (part.astype("<i8").tobytes() for part in (sparse.crow, sparse.col))
    message.shape.extend(sparse.shape)
