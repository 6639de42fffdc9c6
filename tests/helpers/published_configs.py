"""The shapes of published models, as their `config.json` state them, for configurations that name them; of the keys
that change nothing a few."""

import json
from pathlib import Path
from typing import Any

Values = dict[str, Any]
_COMMON = {"bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16", "initializer_range": 0.02}
_COMMON |= {"hidden_act": "silu", "attention_bias": False}
_SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


def _shape(architecture: str, model_type: str, sizes: tuple[int, ...], positions: int, *more: Values) -> Values:
    values = _COMMON | {"architectures": [architecture], "model_type": model_type, "max_position_embeddings": positions}
    for part in (dict(zip(_SIZES.split(), sizes, strict=True)), *more):
        values |= part
    return values


_QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1_000_000, "sliding_window": None, "use_sliding_window": False}
_QWEN2, _QWEN3 = _QWEN | {"max_window_layers": 21}, _QWEN | {"head_dim": 128, "rope_scaling": None}
_MOE = _QWEN3 | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
_MOE |= {"mlp_only_layers": [], "output_router_logits": False, "moe_intermediate_size": 768}
_GEMMA3 = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
_GEMMA3 |= {"rms_norm_eps": 1e-6, "rope_local_base_freq": 10_000, "rope_theta": 1_000_000, "rope_scaling": None}
_GEMMA3 |= {"sliding_window": 512, "sliding_window_pattern": 6, "attn_logit_softcapping": None}
_GEMMA3 |= {"final_logit_softcapping": None, "cache_implementation": "hybrid"}
_SCALING = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
_LLAMA = {"head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "mlp_bias": False, "pretraining_tp": 1}
_LLAMA |= {"rope_scaling": _SCALING | {"original_max_position_embeddings": 8192}}

# Text within images and sound.
_FULL = {"partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0, "rope_type": "proportional"}
_SLIDING = {"rope_theta": 1e4, "rope_type": "default"}
_GEMMA4 = {"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7, "hidden_size_per_layer_input": 256}
_GEMMA4 |= {"attention_k_eq_v": False, "enable_moe_block": False, "num_experts": None, "top_k_experts": None}
_GEMMA4 |= {"final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "rms_norm_eps": 1e-6}
_GEMMA4 |= {"hidden_activation": "gelu_pytorch_tanh", "num_global_key_value_heads": None, "num_kv_shared_layers": 20}
_GEMMA4 |= {"sliding_window": 512, "use_double_wide_mlp": True, "use_bidirectional_attention": None}
_GEMMA4 |= {"rope_parameters": {"full_attention": _FULL, "sliding_attention": _SLIDING}}
_E2B = _shape("", "gemma4_text", (1536, 6144, 35, 8, 1, 262_144), 131_072, _GEMMA4, _TIED)
_E2B |= {"vocab_size_per_layer_input": 262_144}
_E2B = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": _E2B} | _TIED
_E2B |= {"vision_config": {"hidden_size": 768, "model_type": "gemma4_vision"}, "audio_config": {"hidden_size": 1024}}

_NAME, _GEMMA, _LLAMA3 = "Qwen3ForCausalLM", "Gemma3ForCausalLM", "LlamaForCausalLM"
_30B, _1B = (2048, 6144, 48, 32, 4, 151_936), (1152, 6912, 26, 4, 1, 262_144)
_7B, _0_5B = (3584, 18_944, 28, 28, 4, 152_064), (896, 4864, 24, 14, 2, 151_936)
CONFIGS: dict[str, tuple[Values, float]] = {
    "qwen3_0_6b": (_shape(_NAME, "qwen3", (1024, 3072, 28, 16, 8, 151_936), 40_960, _QWEN3, _TIED), 0.596),
    "qwen2_5_7b": (_shape("Qwen2ForCausalLM", "qwen2", _7B, 32_768, _QWEN2, _UNTIED), 7.616),
    "qwen2_5_0_5b": (_shape("Qwen2ForCausalLM", "qwen2", _0_5B, 32_768, _QWEN2, _TIED), 0.494),
    "qwen3_14b": (_shape(_NAME, "qwen3", (5120, 17_408, 40, 40, 8, 151_936), 32_768, _QWEN3, _UNTIED), 14.768),
    "qwen3_30b_a3b": (_shape("Qwen3MoeForCausalLM", "qwen3_moe", _30B, 40_960, _MOE, _UNTIED), 30.532),
    "gemma3_1b": (_shape(_GEMMA, "gemma3_text", _1B, 32_768, _GEMMA3), 1.000),
    "gemma4_e2b": (_E2B, 4.628),
    "llama3_2_1b": (_shape(_LLAMA3, "llama", (2048, 8192, 16, 32, 8, 128_256), 131_072, _LLAMA, _TIED), 1.236),
}
"""Name -> (config.json, billions of parameters as published)."""


def write_config(name: str, folder: Path) -> Path:
    """A directory with that `config.json` and no weights."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name][0]))
    return folder
