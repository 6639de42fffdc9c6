"""Small random models of every family, saved to disk by transformers: what real loading code is held to."""

import functools
import operator
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB = 97
TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
TEXT |= {"max_position_embeddings": 512, "pad_token_id": None}  # some defaults lie beyond this vocabulary
TEXT |= {"initializer_range": 0.2}  # large enough that attention is far from uniform and a wrong mask or angle shows
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def _case(family: str, heads: tuple[int, int] = (4, 2), *parts: dict[str, Any], **more: Any) -> tuple[str, dict]:
    """(family, options): those of all parts, later ones first."""
    own = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    return family, functools.reduce(operator.or_, (*parts, more), TEXT | own)


_THETA = {"rope_theta": 10_000.0}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, **_THETA}
_LLAMA3 = _YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 24}
_LONG = {"rope_type": "longrope", "partial_rotary_factor": 0.75, **_THETA}
_LONG |= {"short_factor": [1.0, 1.1, 1.2, 1.4, 1.9, 2.5], "long_factor": [1.0, 1.5, 3.0, 6.0, 12.0, 20.0]}
_PHI4 = {"rope_parameters": _LONG, "sliding_window": 1024, "tie_word_embeddings": True, "hidden_size": 64}
_EXPERTS = {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Where a query finds almost nothing in a state, the norm of the context enlarges the rounding; eps limits that. Eight
# layers in float32 differ from float64 by 8e-5 in transformers and 1.5e-4 here at 1e-3, by 3e-5 and 4e-5 at 1e-2.
_DELTA = {"rms_norm_eps": 1e-3, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
_DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "full_attention_interval": 2}
_MIX = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 14}
_MIX |= {"rms_norm_eps": 1e-2}
_SCALES = "embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"
_GRANITE = dict(zip(_SCALES, (3.5, 1.25, 0.7, 0.21), strict=True))
_MAMBA = _GRANITE | {"num_local_experts": 0, "shared_intermediate_size": 44, "mamba_n_heads": 8, "mamba_d_state": 6}
_MAMBA |= {"mamba_n_groups": 2, "mamba_d_conv": 4, "position_embedding_type": None, "rms_norm_eps": 1e-3}
_MAMBA |= {"num_hidden_layers": 4, "layer_types": [LINEAR, FULL, LINEAR, LINEAR], "normalization_function": "rmsnorm"}
_GLM = {"partial_rotary_factor": 0.5, "rope_theta": 10_000.0, "rope_type": "default"}
_GLM_MIX = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2}
_GLM_MIX |= {"first_k_dense_replace": 1, "routed_scaling_factor": 1.6}
_GLM_4 = {"attention_bias": True, "num_hidden_layers": 4, "rope_parameters": _GLM, "use_qk_norm": True}
_OSS = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7}
_OSS |= {"num_hidden_layers": 4, "rope_parameters": _YARN | {"truncate": False}}
_MINISTRAL = _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
_MINISTRAL |= {"original_max_position_embeddings": 8}
_DEEP = _GLM_MIX | {"kv_lora_rank": 20, "q_lora_rank": 18, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10}
_DEEP |= {"v_head_dim": 14, "n_group": 4, "topk_group": 2, "num_hidden_layers": 3}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_INDEX = {"index_topk": 64, "index_n_heads": 3, "index_head_dim": 8}
_GLM5 = {"first_k_dense_replace": 2, "indexer_types": ["full", "shared", "full"], "rms_norm_eps": 1e-4}
# Scores are not divided by the root of the width, so attention is close to one key and enlarges the rounding.
_GEMMA4 = {"hidden_size_per_layer_input": 0, "global_head_dim": 16, "sliding_window": 8, "rms_norm_eps": 1e-3}
_GEMMA4 |= {"head_dim": 12}
_ONE_KEY = _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_GEMMA4_4 = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2}
# As E2B: periods of windows, keys shared over two of three, embeddings by layer.
_SMALL = {"num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 4}
_SMALL |= {"use_double_wide_mlp": True, "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": VOCAB}
_FOUR = {"intermediate_size": 20, "intermediate_size_mlp": 44, "num_local_experts": 6, "num_experts_per_tok": 2}
_FOUR |= {"attention_chunk_size": 8, "floor_scale": 5, "attn_scale": 0.4, "num_hidden_layers": 4}
_FOUR |= {"no_rope_layer_interval": 2, "rope_parameters": _LLAMA3 | {"high_freq_factor": 1.0}}
_TIED, _SIZE_36, _CAP = {"tie_word_embeddings": True}, {"hidden_size": 36}, {"final_logit_softcapping": 2.0}

CASES = {
    "qwen2": _case("Qwen2"),
    "qwen2-sliding": _case("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3-tied": _case("Qwen3", (4, 2), _TIED, head_dim=16),
    "llama": _case("Llama"),
    "llama3-scaling": _case("Llama", (4, 1), _TIED, rope_parameters=_LLAMA3),
    "mistral-sliding": _case("Mistral", (4, 4), sliding_window=8),
    "gemma3": _case("Gemma3Text", (4, 1), head_dim=16, num_hidden_layers=7, sliding_window=8),
    "gemma2": _case("Gemma2", (4, 2), _CAPS, head_dim=16, num_hidden_layers=4, sliding_window=8),
    "olmo3": _case("Olmo3", num_hidden_layers=5, sliding_window=8),
    "smollm3": _case("SmolLM3", num_hidden_layers=5),
    "phi3-longrope": _case("Phi3", (4, 2), _PHI4, original_max_position_embeddings=256),
    "moe-top2": _case("Qwen3Moe", (4, 2), _EXPERTS),
    "qwen35": _case("Qwen3_5Text", (4, 2), _DELTA, head_dim=16),
    "qwen35-moe": _case("Qwen3_5MoeText", (4, 2), _DELTA, _MIX, head_dim=16),
    "granite": _case("Granite", (4, 2), _GRANITE),
    "granite4-h": _case("GraniteMoeHybrid", (4, 2), _MAMBA),
    "glm4": _case("Glm4", (4, 2), head_dim=12, rope_parameters=_GLM | {"partial_rotary_factor": 2 / 3}),
    "glm4-moe": _case("Glm4Moe", (4, 2), _GLM_MIX, _GLM_4),
    "gpt-oss": _case("GptOss", (4, 2), _OSS),
    "gpt-oss-packed": _case("GptOss", (4, 2), _OSS, num_hidden_layers=2, intermediate_size=64, num_local_experts=3),
    "ministral3": _case("Ministral3", (4, 2), head_dim=12, rope_parameters=_MINISTRAL),
    "deepseek": _case("DeepseekV3", (4, 4), _DEEP, rope_parameters=_YARN | {"mscale": 1.3, "mscale_all_dim": 0.8}),
    "deepseek-v32": _case("DeepseekV32", (4, 4), _DEEP, _INDEX),
    "glm5": _case("GlmMoeDsa", (3, 3), _SIZE_36, _DEEP, _ONE_GROUP, _INDEX, _GLM5),
    "glm4-lite": _case("Glm4MoeLite", (4, 4), _DEEP, _ONE_GROUP),
    "gemma4": _case("Gemma4Text", (4, 2), _ONE_KEY, _GEMMA4_4, _CAP),
    "gemma4-small": _case("Gemma4Text", (4, 1), _TIED, _GEMMA4, _SMALL, _CAP),
    "llama4": _case("Llama4Text", (4, 2), _FOUR, head_dim=12),
}
"""Each family as it is published, and what else its configuration may say where that takes another path."""
SLOW_CASES = ("qwen2-sliding", "llama", "gpt-oss-packed", "deepseek-v32", "glm5", "glm4-lite")
ONE_PER_FAMILY = tuple(name for name in CASES if name not in SLOW_CASES)


def need_reference(module: str) -> Any:
    """A library of the extra `reference`; without it the test is skipped."""
    return pytest.importorskip(module, reason=f"no {module}; with Python 3.11, pip install -e '.[dev,reference]'")


def need_transformers() -> Any:
    """transformers with torch; without them the test is skipped."""
    need_reference("torch")
    return need_reference("transformers")


def make_config(name: str) -> Any:
    """The configuration of that case, by transformers."""
    family, options = CASES[name]
    config = getattr(need_transformers(), f"{family}Config")(**options)
    config.architectures = [f"{family.removesuffix('Text')}ForCausalLM"]
    return config


def save_model(name: str, folder: Path, **save: Any) -> Any:
    """Saves the model of that case and returns it. Its weights, norms, biases and buffers are random."""
    transformers, config = need_transformers(), make_config(name)
    import torch

    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])(config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim == 1 or key.endswith("_bias"):
                value.add_(0.3 * torch.randn_like(value))
        for key, value in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "layer_scalar")):
                value.add_(0.2 * torch.randn_like(value))
    assert all(value.std() > 0 for value in model.parameters())
    model.save_pretrained(folder, **save)
    return model


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """float32 logits [B,T,V] by transformers, eager attention."""
    import torch

    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def random_tokens(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (rows, length))
