"""GGUF files as llama.cpp's converter writes them, with small vocabularies that are trained on the documentation."""

import io
import json
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers

gguf = pytest.importorskip("gguf", reason="gguf is not installed; pip install -e '.[dev]'")
QUANT = gguf.GGMLQuantizationType


def write_gguf(file, folder, tensors, *, kinds=QUANT.F32, vocabulary=MappingProxyType({}), more=None, extra=None):
    """Writes the model of a folder to a file; returns its numbers under the published names, float32. `kinds` is the
    number format of matrices; `vocabulary` are keys below `tokenizer`, `more` other keys of the metadata; `extra` are
    further tensors by their names in the file."""
    config = json.loads((folder / "config.json").read_text())
    architecture = config["architectures"][0].removesuffix("ForCausalLM").lower()
    writer = gguf.GGUFWriter(file, architecture)
    values = metadata(architecture, config) | {f"tokenizer.{key}": value for key, value in vocabulary.items()}
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (values | (more or {})).items():
        adders.get(type(value), writer.add_array)(key, value)
    published = {}
    for name, (value, undo) in converted(architecture, config, tensors).items():
        kind = kinds if value.ndim > 1 else QUANT.F32
        stored = gguf.quantize(np.ascontiguousarray(value, np.float32), kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        published |= undo(np.asarray(gguf.dequantize(stored, kind), np.float32))
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()
    return published


HEADS = {"": "attention", "_kv": "key_value"}


def metadata(architecture, config):
    """The keys that llama.cpp writes for this architecture."""
    fields = {"context_length": config["max_position_embeddings"], "embedding_length": config["hidden_size"]}
    fields |= {"block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"]}
    fields |= {f"attention.head_count{end}": config[f"num_{of}_heads"] for end, of in HEADS.items()}
    fields |= {"attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "vocab_size": config["vocab_size"]}
    fields |= {"rope.freq_base": float(config["rope_theta"])}
    widths = ["rope.dimension_count"] if architecture == "llama" else ["attention.key_length", "attention.value_length"]
    fields |= dict.fromkeys(widths, config["head_dim"])
    if architecture.startswith("gemma"):
        fields["attention.sliding_window"] = config["sliding_window"]
    if architecture == "qwen3moe":
        fields |= {"expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"]}
        fields["expert_feed_forward_length"] = config["moe_intermediate_size"]
    general = {"general.name": "tiny", "general.file_type": 0}
    return general | {f"{architecture}.{key}": value for key, value in fields.items()}


def swapped(rows, *parts):
    """The rows of each head in the other order of these parts."""
    return rows.reshape(*parts, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def converted(architecture, config, tensors):
    """Name in the file -> (numbers in the file, what gives them back under their published names)."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    entries, experts = {}, {}
    for name, value in tensors.items():
        if ".mlp.experts." in name:
            first, _, part = name.rpartition(".experts.")
            experts.setdefault(f"{first}.experts.{part.split('.')[1]}", []).append(name)
            continue
        base, _, kind = name.rpartition(".")
        key, part = f"{names.get_name(base)}.{kind}", base.rpartition(".")[2]
        value = value.astype(np.float32)
        if architecture == "llama" and part in heads:
            # Each head's rows 0 1 2 3 as 0 2 1 3: a row of the first half, then one of the second.
            undo = lambda x, name=name, n=heads[part]: {name: swapped(x, n, -1, 2)}  # noqa: E731
            entries[key] = (swapped(value, heads[part], 2, -1), undo)
        elif architecture.startswith("gemma") and key.endswith("norm.weight"):
            entries[key] = (value + 1, lambda x, name=name: {name: x - 1})
        else:
            entries[key] = (value, lambda x, name=name: {name: x})
    for base, parts in experts.items():
        stacked = np.stack([tensors[name] for name in parts]).astype(np.float32)
        key = f"{names.get_name(base)}.weight"
        entries[key] = (stacked, lambda x, parts=parts: dict(zip(parts, x, strict=True)))
    return entries


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
DOCS = Path(__file__).resolve().parents[2] / "docs"
MORE = "日本語 テキスト 한국어 é à ñ ½ 123 4567 don't I'll WE'VE aaaa bb   \n\n\t\t  if x:\n        return 12345.678\n"
CHAT = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def corpus() -> str:
    """Pages, without the tags in them: transformers reads these as special tokens, which this library never does."""
    pages = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in ("models.md", "data.md", "method.md"))
    return pages.replace("<|", "<") + 20 * MORE


def texts() -> list[str]:
    """Prose, code, digits, runs of spaces, other scripts, and random mixtures of all of them."""
    fixed = ["", " ", "   ", "\n\n", " a", "a ", "  42   7", "12345.678 + 9,999", "\r\n\r\n x \r", "ß \u0130 ﬁ ½ ²"]
    fixed += ["don't I'll WE'VE you'RE", "日本語 テキスト한국어", "emoji 👩‍👩‍👧 é e\u0301 ñ", "a\u00a0b\u2003c\u200b"]
    rng = np.random.default_rng(0)
    parts = [*" \n\t09abAZ.,'()_é語👍\u0301", "  ", "\n\n", "the ", " 12", "'ll", "def f(x):\n    ", "    "]
    mixed = ["".join(rng.choice(parts, rng.integers(1, 40))) for _ in range(200)]
    return [*fixed, *mixed, *corpus().split("\n\n")[:60]]


@cache
def byte_level(pre: str = "gpt-2") -> dict[str, Any]:
    """BPE over bytes, with three control tokens, a token that a user defined, and one of another alphabet."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(corpus().splitlines(keepends=True), trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    added = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    merges = [" ".join(pair) for pair in model["merges"]]
    tokens = [*added, *pieces, "<|thought|>", "<｜pause｜>", "[PAD9]"]
    types = [CONTROL] * len(added) + [NORMAL] * len(pieces) + [USER_DEFINED, CONTROL, UNUSED]
    lists = {"ggml.tokens": tokens, "ggml.token_type": types, "ggml.merges": merges, "ggml.model": "gpt2"}
    ids = {"ggml.bos_token_id": 0, "ggml.eos_token_id": 1, "ggml.padding_token_id": 2}
    return lists | ids | {"ggml.pre": pre, "chat_template": CHAT}


@cache
def sentencepiece_model() -> bytes:
    """A BPE model of SentencePiece that changes no text."""
    out = io.BytesIO()
    options = {"model_type": "bpe", "vocab_size": 700, "byte_fallback": True, "character_coverage": 0.99}
    options |= {"normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False}
    options |= {"allow_whitespace_only_pieces": True, "minloglevel": 2}
    lines = iter(corpus().splitlines())
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=out, **options)
    return out.getvalue()


@cache
def bpe_of_scores() -> dict[str, Any]:
    """The SentencePiece model as llama.cpp stores it."""
    model = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    ids = range(model.vocab_size())
    tokens, scores = [model.id_to_piece(i) for i in ids], [model.get_score(i) for i in ids]
    types = [
        UNKNOWN if model.is_unknown(i) else CONTROL if model.is_control(i) else BYTE if model.is_byte(i) else NORMAL
        for i in ids
    ]
    lists = {"ggml.tokens": tokens, "ggml.token_type": types, "ggml.scores": scores}
    more = {"ggml.unknown_token_id": 0, "ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "chat_template": CHAT}
    return {"ggml.model": "llama"} | lists | more
