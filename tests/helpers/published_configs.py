"""The shapes of published models, as their `config.json` state them, for configurations that name them."""

import json
from pathlib import Path
from typing import Any

_COMMON = {"bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16", "use_cache": True}
_COMMON |= {"initializer_range": 0.02}
_LLAMA_SCALING = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}


def _shape(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return _COMMON | {"architectures": [architecture], "model_type": model_type} | fields


def _sizes(*sizes: int) -> dict[str, Any]:
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
    return dict(zip(names.split(), sizes, strict=True))


_QWEN = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "sliding_window": None}
_QWEN |= {"use_sliding_window": False, "attention_dropout": 0.0}
_QWEN3 = _QWEN | {"head_dim": 128, "rope_scaling": None, "attention_bias": False, "max_position_embeddings": 40_960}
_QWEN3_MOE = _QWEN3 | {"tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8}
_QWEN3_MOE |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_QWEN3_MOE |= {"output_router_logits": False, "router_aux_loss_coef": 0.001}
_DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16}
_DELTA |= {"linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "attn_output_gate": True}
_DELTA |= {"full_attention_interval": 4, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
_MROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"}
_MROPE |= {"partial_rotary_factor": 0.25, "rope_theta": 10_000_000}


def _qwen35(sizes: dict[str, Any], **text: Any) -> dict[str, Any]:
    """A config.json of vision and language, whose text model is read."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    inner = {"model_type": "qwen3_5_text", "head_dim": 256, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    inner |= {"attention_bias": False, "dtype": "bfloat16"}
    inner |= {"layer_types": kinds * (sizes["num_hidden_layers"] // 4), "max_position_embeddings": 262_144}
    inner |= {"rope_parameters": _MROPE, "eos_token_id": 248_044} | sizes | _DELTA | text
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 248_056}
    vision = {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"}
    return outer | {"text_config": inner, "vision_config": vision}


_OSS_SCALING = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
_OSS_SCALING |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


def _qwen35_moe() -> dict[str, Any]:
    outer = _qwen35(_sizes(2048, 0, 40, 16, 2, 248_320), linear_num_value_heads=32, tie_word_embeddings=False)
    text = outer["text_config"] | {"model_type": "qwen3_5_moe_text", "num_experts": 256, "num_experts_per_tok": 8}
    text |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001}
    return outer | {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}


def _gemma4(hidden: int, inner: int, layers: int, kv_heads: int, shared: int, every: int) -> dict[str, Any]:
    """E2B or E4B: text within images and sound."""
    kinds = [*["sliding_attention"] * (every - 1), "full_attention"]
    full = {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"}
    text = _sizes(hidden, inner, layers, 8, kv_heads, 262_144) | {"layer_types": kinds * (layers // every)}
    text |= {"attention_bias": False, "attention_k_eq_v": False, "enable_moe_block": False, "num_experts": None}
    text |= {"final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "rms_norm_eps": 1e-6}
    text |= {"hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256, "model_type": "gemma4_text"}
    text |= {"max_position_embeddings": 131_072, "moe_intermediate_size": None, "num_global_key_value_heads": None}
    text |= {"num_kv_shared_layers": shared, "sliding_window": 512, "tie_word_embeddings": True, "top_k_experts": None}
    sliding = {"rope_theta": 1e4, "rope_type": "default"}
    text |= {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}
    text |= {"use_bidirectional_attention": None, "use_double_wide_mlp": kv_heads == 1}
    text |= {"vocab_size_per_layer_input": 262_144, "use_cache": True, "initializer_range": 0.02}
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "image_token_id": 258_880}
    vision, audio = {"hidden_size": 768, "model_type": "gemma4_vision"}, {"hidden_size": 1024}
    return outer | {"text_config": text, "vision_config": vision, "audio_config": audio, "tie_word_embeddings": True}


CONFIGS: dict[str, tuple[dict[str, Any], float]] = {
    "qwen3_0_6b": (
        _shape("Qwen3ForCausalLM", "qwen3", **_sizes(1024, 3072, 28, 16, 8, 151_936), **_QWEN3)
        | {"tie_word_embeddings": True, "max_window_layers": 28},
        0.596,
    ),
    "qwen2_5_7b": (
        _shape("Qwen2ForCausalLM", "qwen2", **_sizes(3584, 18_944, 28, 28, 4, 152_064), **_QWEN)
        | {"tie_word_embeddings": False, "max_position_embeddings": 32_768, "max_window_layers": 28},
        7.616,
    ),
    "qwen2_5_0_5b": (
        _shape("Qwen2ForCausalLM", "qwen2", **_sizes(896, 4864, 24, 14, 2, 151_936), **_QWEN)
        | {"tie_word_embeddings": True, "max_position_embeddings": 32_768, "max_window_layers": 21},
        0.494,
    ),
    "qwen3_14b": (
        _shape("Qwen3ForCausalLM", "qwen3", **_sizes(5120, 17_408, 40, 40, 8, 151_936), **_QWEN3)
        | {"tie_word_embeddings": False, "max_position_embeddings": 32_768, "max_window_layers": 40},
        14.768,
    ),
    "qwen3_30b_a3b": (
        _shape("Qwen3MoeForCausalLM", "qwen3_moe", **_sizes(2048, 6144, 48, 32, 4, 151_936), **_QWEN3_MOE)
        | {"moe_intermediate_size": 768, "max_window_layers": 48},
        30.532,
    ),
    "qwen3_235b_a22b": (
        _shape("Qwen3MoeForCausalLM", "qwen3_moe", **_sizes(4096, 12_288, 94, 64, 4, 151_936), **_QWEN3_MOE)
        | {"moe_intermediate_size": 1536, "max_window_layers": 94},
        235.094,
    ),
    "qwen3_5_4b": (
        _qwen35(_sizes(2560, 9216, 32, 16, 4, 248_320), linear_num_value_heads=32, tie_word_embeddings=True)
        | {"tie_word_embeddings": True},
        4.206,
    ),
    "qwen3_5_27b": (
        _qwen35(_sizes(5120, 17_408, 64, 24, 4, 248_320), linear_num_value_heads=48, output_gate_type="swish")
        | {"tie_word_embeddings": False},
        26.896,
    ),
    "qwen3_5_35b_a3b": (_qwen35_moe(), 34.661),
    "gpt_oss_20b": (
        _shape("GptOssForCausalLM", "gpt_oss", **_sizes(2880, 2880, 24, 64, 8, 201_088))
        | {"head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 150_000, "attention_bias": True}
        | {"rope_scaling": _OSS_SCALING, "sliding_window": 128, "swiglu_limit": 7.0, "num_local_experts": 32}
        | {"layer_types": ["sliding_attention", "full_attention"] * 12, "num_experts_per_tok": 4}
        | {"experts_per_token": 4, "initial_context_length": 4096, "max_position_embeddings": 131_072}
        | {"output_router_logits": False, "router_aux_loss_coef": 0.9, "tie_word_embeddings": False}
        | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
        20.915,
    ),
    "glm_4_5_air": (
        _shape("Glm4MoeForCausalLM", "glm4_moe", **_sizes(4096, 10_944, 46, 96, 8, 151_552))
        | {"head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1_000_000, "rope_scaling": None}
        | {"attention_bias": True, "partial_rotary_factor": 0.5, "use_qk_norm": False, "moe_intermediate_size": 1408}
        | {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True}
        | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1}
        | {"num_nextn_predict_layers": 1, "max_position_embeddings": 131_072, "tie_word_embeddings": False},
        106.852,
    ),
    "gemma3_1b": (
        _shape("Gemma3ForCausalLM", "gemma3_text", **_sizes(1152, 6912, 26, 4, 1, 262_144))
        | {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
        | {
            "rms_norm_eps": 1e-6,
            "rope_local_base_freq": 10_000,
            "rope_theta": 1_000_000,
            "rope_scaling": None,
            "sliding_window": 512,
        }
        | {"sliding_window_pattern": 6, "max_position_embeddings": 32_768, "attn_logit_softcapping": None}
        | {"final_logit_softcapping": None, "cache_implementation": "hybrid", "attention_bias": False},
        1.000,
    ),
    "gemma4_e2b": (_gemma4(1536, 6144, 35, 1, 20, 5), 4.628),
    "gemma4_e4b": (_gemma4(2560, 10_240, 42, 2, 18, 6), 7.463),
    "llama3_2_1b": (
        _shape("LlamaForCausalLM", "llama", **_sizes(2048, 8192, 16, 32, 8, 128_256))
        | {"head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "mlp_bias": False}
        | {"rope_scaling": _LLAMA_SCALING | {"original_max_position_embeddings": 8192}, "pretraining_tp": 1}
        | {"tie_word_embeddings": True, "max_position_embeddings": 131_072, "attention_bias": False},
        1.236,
    ),
}
"""Name -> (config.json, billions of parameters as published)."""


def write_config(name: str, folder: Path) -> Path:
    """A directory with that `config.json` and no weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name][0]))
    return folder
