"""The shapes of published models, as their `config.json` state them, for configurations that name them; of the keys
that change nothing a few."""

import json
from pathlib import Path
from typing import Any

Values = dict[str, Any]
_COMMON = {"bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16", "initializer_range": 0.02}
_COMMON |= {"hidden_act": "silu", "attention_bias": False}


def _shape(architecture: str, model_type: str, sizes: Values, positions: int, *more: Values, **fields: Any) -> Values:
    values = _COMMON | {"architectures": [architecture], "model_type": model_type, "max_position_embeddings": positions}
    for part in (sizes, *more, fields):
        values |= part
    return values


def _sizes(*sizes: int) -> Values:
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
    return dict(zip(names.split(), sizes, strict=True))


_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "sliding_window": None, "use_sliding_window": False}
_QWEN3 = _QWEN | {"head_dim": 128, "rope_scaling": None}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
_EXPERTS |= {"mlp_only_layers": [], "output_router_logits": False}
_DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16}
_DELTA |= {"linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "attn_output_gate": True}
_DELTA |= {"full_attention_interval": 4, "mtp_num_hidden_layers": 1}
_MROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"}
_MROPE |= {"partial_rotary_factor": 0.25, "rope_theta": 10_000_000}
_LLAMA_SCALING = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
_UNTIED, _TIED = {"tie_word_embeddings": False}, {"tie_word_embeddings": True}


def _qwen35(sizes: Values, value_heads: int, tied: Values = _UNTIED, kind: str = "qwen3_5_text", **text: Any) -> Values:
    """A config.json of vision and language, whose text model is read."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    inner = {"model_type": kind, "head_dim": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False}
    inner |= {"layer_types": kinds * (sizes["num_hidden_layers"] // 4), "max_position_embeddings": 262_144}
    inner |= {"rope_parameters": _MROPE, "linear_num_value_heads": value_heads} | sizes | _DELTA | tied | text
    name = "Qwen3_5Moe" if "num_experts" in text else "Qwen3_5"
    outer = {"architectures": [f"{name}ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 248_056}
    return outer | {"text_config": inner, "vision_config": {"depth": 27, "model_type": "qwen3_5"}} | tied


def _gemma4(hidden: int, inner: int, layers: int, kv_heads: int, shared: int, every: int) -> Values:
    """E2B or E4B: text within images and sound."""
    kinds = [*["sliding_attention"] * (every - 1), "full_attention"]
    full = {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"}
    text = _sizes(hidden, inner, layers, 8, kv_heads, 262_144) | {"layer_types": kinds * (layers // every)} | _TIED
    text |= {"attention_bias": False, "attention_k_eq_v": False, "enable_moe_block": False, "num_experts": None}
    text |= {"final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "rms_norm_eps": 1e-6}
    text |= {"hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256, "model_type": "gemma4_text"}
    text |= {"max_position_embeddings": 131_072, "num_global_key_value_heads": None, "top_k_experts": None}
    text |= {"num_kv_shared_layers": shared, "sliding_window": 512, "use_double_wide_mlp": kv_heads == 1}
    sliding = {"rope_theta": 1e4, "rope_type": "default"}
    text |= {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    text |= {"use_bidirectional_attention": None, "vocab_size_per_layer_input": 262_144}
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "image_token_id": 258_880}
    vision, audio = {"hidden_size": 768, "model_type": "gemma4_vision"}, {"hidden_size": 1024}
    return outer | {"text_config": text, "vision_config": vision, "audio_config": audio} | _TIED


def _qwen3(*sizes: int, tied: Values = _UNTIED, positions: int = 40_960) -> Values:
    return _shape("Qwen3ForCausalLM", "qwen3", _sizes(*sizes, 151_936), positions, _QWEN3, tied)


def _qwen3_moe(*sizes: int, moe: int) -> Values:
    more = _QWEN3 | _EXPERTS | _UNTIED
    return _shape("Qwen3MoeForCausalLM", "qwen3_moe", _sizes(*sizes, 151_936), 40_960, more, moe_intermediate_size=moe)


def _qwen2(*sizes: int, tied: Values) -> Values:
    return _shape("Qwen2ForCausalLM", "qwen2", _sizes(*sizes), 32_768, _QWEN, tied, max_window_layers=21)


_GEMMA3 = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
_GEMMA3 |= {"rms_norm_eps": 1e-6, "rope_local_base_freq": 10_000, "rope_theta": 1_000_000, "rope_scaling": None}
_GEMMA3 |= {"sliding_window": 512, "sliding_window_pattern": 6, "attn_logit_softcapping": None}
_GEMMA3 |= {"final_logit_softcapping": None, "cache_implementation": "hybrid"}
_LLAMA = {"head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "mlp_bias": False, "pretraining_tp": 1}
_LLAMA |= {"rope_scaling": _LLAMA_SCALING | {"original_max_position_embeddings": 8192}}
_MOE35 = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
_MOE35 |= {"shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001, "kind": "qwen3_5_moe_text"}

_GEMMA3_SIZES, _LLAMA_SIZES = _sizes(1152, 6912, 26, 4, 1, 262_144), _sizes(2048, 8192, 16, 32, 8, 128_256)
CONFIGS: dict[str, tuple[Values, float]] = {
    "qwen3_0_6b": (_qwen3(1024, 3072, 28, 16, 8, tied=_TIED), 0.596),
    "qwen2_5_7b": (_qwen2(3584, 18_944, 28, 28, 4, 152_064, tied=_UNTIED), 7.616),
    "qwen2_5_0_5b": (_qwen2(896, 4864, 24, 14, 2, 151_936, tied=_TIED), 0.494),
    "qwen3_14b": (_qwen3(5120, 17_408, 40, 40, 8, positions=32_768), 14.768),
    "qwen3_30b_a3b": (_qwen3_moe(2048, 6144, 48, 32, 4, moe=768), 30.532),
    "qwen3_235b_a22b": (_qwen3_moe(4096, 12_288, 94, 64, 4, moe=1536), 235.094),
    "qwen3_5_4b": (_qwen35(_sizes(2560, 9216, 32, 16, 4, 248_320), 32, _TIED), 4.206),
    "qwen3_5_27b": (_qwen35(_sizes(5120, 17_408, 64, 24, 4, 248_320), 48, output_gate_type="swish"), 26.896),
    "qwen3_5_35b_a3b": (_qwen35(_sizes(2048, 0, 40, 16, 2, 248_320), 32, **_MOE35), 34.661),
    "gemma3_1b": (_shape("Gemma3ForCausalLM", "gemma3_text", _GEMMA3_SIZES, 32_768, _GEMMA3), 1.000),
    "gemma4_e2b": (_gemma4(1536, 6144, 35, 1, 20, 5), 4.628),
    "gemma4_e4b": (_gemma4(2560, 10_240, 42, 2, 18, 6), 7.463),
    "llama3_2_1b": (_shape("LlamaForCausalLM", "llama", _LLAMA_SIZES, 131_072, _LLAMA, _TIED), 1.236),
}
"""Name -> (config.json, billions of parameters as published)."""


def write_config(name: str, folder: Path) -> Path:
    """A directory with that `config.json` and no weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name][0]))
    return folder
