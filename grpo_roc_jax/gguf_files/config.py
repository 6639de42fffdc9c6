"""The metadata of a GGUF file as a `config.json`.

A key of the model that this table does not know is passed on under its own name, so that `model.published` refuses it
by name unless it is empty or listed in `model.ignore_keys`.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from grpo_roc_jax.gguf_files.header import GgufError, Header
from grpo_roc_jax.gguf_files.tensors import ROTARY_FACTORS, GgufTensor, architecture_of

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
"""`general.architecture` -> `architectures` and `model_type` of the published model."""

_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
_MORE_KEYS = {
    "qwen3moe": {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    "gemma2": {
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {
        "attention.sliding_window": "sliding_window",
        "rope.freq_base_swa": "rope_local_base_freq",
        "final_logit_softcapping": "final_logit_softcapping",
    },
}
_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3moe": {"norm_topk_prob": True},  # llama.cpp always scales the weights of the chosen experts to sum 1
    "gemma2": {"query_pre_attn_scalar": 256, "sliding_window": 4096}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {"query_pre_attn_scalar": 256, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
}
"""What the files of an architecture leave out, as transformers and llama.cpp fill it in."""
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose attention scores are divided by sqrt(d_model / heads); llama.cpp knows them so."""

_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_UNSCALED = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "finetuned": None}
"""Further settings of the rescaling -> the value that changes nothing; None: every value."""

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of every published Llama 3; a GGUF file contains the factors that follow from them, not these numbers."""


def published_config(header: Header, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """The `config.json` of a file.

    Args:
        header: Header of the file.
        tensors: From `published_tensors`.

    Raises:
        GgufError: the architecture is not supported, or the file lacks a key.
    """
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise GgufError(f"{header.file} holds a {kind!r}, not a model; name the file of the model")
    architecture = architecture_of(header)
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise GgufError(f"{header.file}: the architecture {architecture!r} is not supported; known are {known}")
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise GgufError(
            f"{header.file} is one of {header.metadata['split.count']} parts; join them (llama-gguf-split --merge)"
        )
    stated = _stated(header, architecture)
    for key in (*_KEYS, *_MORE_KEYS.get(architecture, {}), *(f"rope.scaling.{key}" for key in _SCALING)):
        if type(stated.get(key, 0)) not in (int, float):
            raise GgufError(f"{header.file}: {architecture}.{key} = {stated[key]!r}; must be one number for all layers")
    if stated.pop("attention.causal", True) is False:
        raise GgufError(
            f"{header.file}: {architecture}.attention.causal = False; this model reads a text in both directions, and "
            "only causal ones can be trained here"
        )
    name, model_type = ARCHITECTURES[architecture]
    config: dict[str, Any] = {"architectures": [name], "model_type": model_type}
    config |= _DEFAULTS.get(architecture, {})
    for key, name in (_KEYS | _MORE_KEYS.get(architecture, {})).items():
        if key in stated:
            config[name] = stated.pop(key)
    lost = [key for key, name in _KEYS.items() if name not in config and key not in _OPTIONAL]
    if lost:
        raise GgufError(f"{header.file} lacks {', '.join(f'{architecture}.{key}' for key in lost)}")
    config.setdefault("rope_theta", 10_000.0)
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None:
        raise GgufError(f"{header.file} lacks token_embd.weight")
    config |= {"vocab_size": embedding.shape[0], "tie_word_embeddings": "lm_head.weight" not in tensors}
    config |= _head_width(stated, config)
    config |= _gemma(stated, config, architecture) if architecture.startswith("gemma") else {}
    config["rope_scaling"] = _rope_scaling(header, stated, config)
    config |= {name: header.metadata.get(f"tokenizer.ggml.{key}") for key, name in _IDS.items()}
    config["torch_dtype"] = _dtype(tensors)
    if stated.get("vocab_size") == config["vocab_size"]:
        del stated["vocab_size"]
    return config | {f"{architecture}.{key}": value for key, value in stated.items() if value}


_OPTIONAL = {"rope.freq_base", "attention.head_count_kv"}


def _stated(header: Header, architecture: str) -> dict[str, Any]:
    """The values of the model by their keys without the architecture; numbers in the shortest form that is the same
    float32."""
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    return {key: float(str(np.float32(value))) if isinstance(value, float) else value for key, value in values.items()}


def _head_width(stated: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The width of a head; takes the keys that agree with it from `stated`."""
    width = stated.get("attention.key_length") or stated.get("rope.dimension_count")
    width = width or config["hidden_size"] // (config["num_attention_heads"] or 1)  # 0 is refused later
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        for name in (key, f"{key}_swa"):
            if stated.get(name) == width:
                del stated[name]
    return {"head_dim": width}


def _gemma(stated: dict[str, Any], config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh"}
    if config["num_hidden_layers"] == _LARGEST_GEMMA[architecture]:
        settings["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"]
    layers = range(min(int(config["num_hidden_layers"]), 10_000))  # more, or a part of one, are refused later
    pattern = stated.get("attention.sliding_window_pattern")
    if isinstance(pattern, list | int):  # any other value is refused by name
        del stated["attention.sliding_window_pattern"]
    if isinstance(pattern, list):
        settings["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    elif isinstance(pattern, int):  # every n-th layer has no window; 0: each has one
        unwindowed = [bool(pattern) and (i + 1) % pattern == 0 for i in layers]
        settings["layer_types"] = ["full_attention" if each else "sliding_attention" for each in unwindowed]
    elif "sliding_window" not in config:  # a Gemma 3 without windows, of which llama.cpp's converter says no width
        settings["layer_types"] = ["full_attention" for _ in layers]
    return settings


def _rope_scaling(header: Header, stated: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """How the rotary frequencies are rescaled: by settings, or by a tensor of factors as in Llama 3."""
    kind = stated.pop("rope.scaling.type", "linear")  # llama.cpp's default, without effect where no factor is given
    for key, neutral in _UNSCALED.items():
        name = f"rope.scaling.{key}"
        if neutral is None or stated.get(name) == neutral:
            stated.pop(name, None)
    if "rope.scale_linear" in stated:  # of old files
        stated.setdefault("rope.scaling.factor", stated.pop("rope.scale_linear"))
    parameters = {name: stated.pop(f"rope.scaling.{key}", None) for key, name in _SCALING.items()}
    scaling: dict[str, Any] | None = None
    if kind == "yarn":
        scaling = {name: value for name, value in parameters.items() if value is not None}
    elif kind == "linear" and parameters["factor"] not in (None, 0, 1):
        scaling = {"factor": parameters["factor"]}
    elif kind not in ("none", "linear"):
        scaling = {}
    factors = _rotary_factors(header, config)
    if factors is None:
        return None if scaling is None else {"rope_type": kind} | scaling
    if scaling is not None:
        raise GgufError(f"{header.file} rescales the rotary frequencies twice: {kind!r}, and {ROTARY_FACTORS}")
    length = {
        name: value for name, value in parameters.items() if name == _SCALING["original_context_length"] and value
    }
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), **LLAMA3, **length}
    expected = llama3_factors(config["rope_theta"], config["head_dim"], scaling)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise GgufError(
            f"{header.file}: {ROTARY_FACTORS} holds other factors than those of Llama 3 with {LLAMA3}; such a "
            "rescaling of the rotary frequencies is not supported"
        )
    return scaling


def _rotary_factors(header: Header, config: Mapping[str, Any]) -> np.ndarray | None:
    """What each rotary frequency is divided by, as a tensor of the file; None where that changes nothing."""
    info = header.tensors.get(ROTARY_FACTORS)
    if info is None:
        return None
    factors = np.empty(info.shape, np.float32)
    GgufTensor(header.file, info.name, info.type_id, info.shape, info.offset).read((slice(None),), factors)
    return None if factors.shape == (config["head_dim"] // 2,) and (factors == 1).all() else factors


def llama3_factors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> np.ndarray:
    """What each rotary frequency is divided by under Llama 3's rescaling.

    With wavelength w and original length L: 1 where L/w is above `high_freq_factor`, `factor` where it is below
    `low_freq_factor`, and between them 1 / ((1 - s) / factor + s) with s growing from 0 to 1.
    """
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = (scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    share = np.clip(share, 0, 1)
    return 1 / ((1 - share) / scaling["factor"] + share)


def _dtype(tensors: Mapping[str, GgufTensor]) -> str:
    """The dtype in which the model is exported: the narrowest that holds every number of the file."""
    kinds = {tensor.type_id for tensor in tensors.values() if len(tensor.shape) > 1}
    name, dtype = _NARROW.get(min(kinds) if len(kinds) == 1 else -1, ("float32", None))
    for tensor in tensors.values() if dtype else ():
        if len(tensor.shape) == 1 and tensor.type_id not in kinds:
            numbers = np.empty(tensor.shape, np.float32)
            tensor.read((slice(None),), numbers)
            if (numbers.astype(dtype) != numbers).any():
                return "float32"
    return name


_NARROW = {1: ("float16", np.dtype(np.float16)), 30: ("bfloat16", np.dtype(ml_dtypes.bfloat16))}
"""Number format of a file -> the dtype that is the same."""
