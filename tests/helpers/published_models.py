"""Small random models of every family, saved to disk by transformers: what real loading code is held to."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB = 97
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Large enough that attention is far from uniform and a wrong mask or angle shows.
    "initializer_range": 0.2,
    # The defaults of some families lie beyond this vocabulary.
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


_THETA = {"rope_theta": 10_000.0}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, **_THETA}
# Rows of the tests are longer than 8 and shorter than 256 tokens, the first lengths of two cases.
_LONG = {"rope_type": "longrope", "partial_rotary_factor": 0.75, **_THETA}
_LONG |= {"short_factor": [1.0, 1.1, 1.2, 1.4, 1.9, 2.5], "long_factor": [1.0, 1.5, 3.0, 6.0, 12.0, 20.0]}
_PHI4 = {"original_max_position_embeddings": 256, "sliding_window": 1024, "tie_word_embeddings": True}
_SHORT_START = {"original_max_position_embeddings": 8}
_CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 24}


TEXT = _SHAPE
"""The sizes of the text part of a vision-language model."""


def _heads(heads: int, kv_heads: int, **more: Any) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, **more}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-gqa4": ("Qwen2", _heads(4, 1, tie_word_embeddings=True)),
    "qwen2-odd": ("Qwen2", _heads(7, 7, hidden_size=56)),
    "qwen2-gqa8": ("Qwen2", _heads(8, 1)),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3-gqa4": ("Qwen3", _heads(8, 2, head_dim=8)),
    "qwen3-odd": ("Qwen3", _heads(5, 5, head_dim=8, hidden_size=40)),
    "qwen3-gqa8": ("Qwen3", _heads(8, 1, head_dim=16)),
    "llama": ("Llama", {}),
    "llama3-scaling": ("Llama", _heads(4, 1, rope_parameters=_LLAMA3, tie_word_embeddings=True)),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-odd": ("Llama", _heads(3, 3, head_dim=6, hidden_size=48)),
    "llama-gqa8": ("Llama", _heads(8, 1, head_dim=8, rope_parameters=_LLAMA3)),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", _heads(4, 4, sliding_window=8)),
    "mistral-gqa8": ("Mistral", _heads(8, 1, head_dim=8, sliding_window=6, tie_word_embeddings=True)),
    "mistral-odd": ("Mistral", _heads(5, 5, hidden_size=40, sliding_window=None)),
    "gemma3-gqa8": (
        "Gemma3Text",
        _heads(8, 1, head_dim=8, num_hidden_layers=6, sliding_window=6, tie_word_embeddings=False),
    ),
    "gemma3": ("Gemma3Text", _heads(4, 1, head_dim=16, num_hidden_layers=7, sliding_window=8)),
    "gemma3-scaled": (
        "Gemma3Text",
        _heads(3, 3, head_dim=8, query_pre_attn_scalar=24, sliding_window=5, num_hidden_layers=6, hidden_size=48)
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "gemma2": ("Gemma2", _heads(4, 2, head_dim=16, num_hidden_layers=4, sliding_window=8, **_CAPS)),
    "gemma2-odd": (
        "Gemma2",
        _heads(3, 3, head_dim=10, hidden_size=36, sliding_window=5, query_pre_attn_scalar=7, tie_word_embeddings=False)
        | {"attn_logit_softcapping": None, "final_logit_softcapping": 2.0},
    ),
    "gemma2-gqa8": ("Gemma2", _heads(8, 1, head_dim=8, sliding_window=6, **_CAPS | {"final_logit_softcapping": None})),
    "olmo3": ("Olmo3", _heads(4, 2, num_hidden_layers=5, sliding_window=8)),
    "olmo3-yarn": (
        "Olmo3",
        _heads(6, 3, hidden_size=36, num_hidden_layers=4, sliding_window=6, tie_word_embeddings=True)
        | {"rope_parameters": {"full_attention": _YARN, "sliding_attention": {"rope_type": "default", **_THETA}}},
    ),
    "olmo3-odd": (
        "Olmo3",
        _heads(
            5,
            5,
            hidden_size=40,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            sliding_window=6,
        ),
    ),
    "smollm3": ("SmolLM3", _heads(4, 2, num_hidden_layers=5)),
    "smollm3-odd": (
        "SmolLM3",
        _heads(3, 3, hidden_size=48, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=7)
        | {"tie_word_embeddings": False},
    ),
    "smollm3-gqa8": ("SmolLM3", _heads(8, 1, no_rope_layer_interval=2, rope_parameters=_LLAMA3)),
    "phi3": ("Phi3", _heads(4, 2)),
    "phi3-longrope": ("Phi3", _heads(4, 2, hidden_size=64, rope_parameters=_LONG, **_PHI4)),
    "phi3-long-rows": ("Phi3", _heads(4, 1, hidden_size=64, rope_parameters=_LONG, **_PHI4 | _SHORT_START)),
    "phi3-odd": ("Phi3", _heads(5, 5, hidden_size=40, sliding_window=6, tie_word_embeddings=True)),
    "qwen3-yarn": ("Qwen3", _heads(8, 1, head_dim=16, rope_parameters=_YARN | {"truncate": False})),
    "moe-top2": ("Qwen3Moe", {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "moe-top1-gqa8": (
        "Qwen3Moe",
        _heads(8, 1, head_dim=8, num_experts=5, num_experts_per_tok=1, moe_intermediate_size=16),
    ),
    "moe-odd": (
        "Qwen3Moe",
        _heads(3, 3, head_dim=8, hidden_size=24, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=8)
        | {"use_sliding_window": True, "sliding_window": 7},
    ),
    "moe-normed": (
        "Qwen3Moe",
        {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 16}
        | {"norm_topk_prob": True, "tie_word_embeddings": True},
    ),
}
# Where a query finds almost nothing in a state, the norm of the context enlarges the rounding; eps limits that. Eight
# layers in float32 differ from float64 by 8e-5 in transformers and 1.5e-4 here at 1e-3, by 3e-5 and 4e-5 at 1e-2.
_EPS = {"rms_norm_eps": 1e-3}
_DELTA = _EPS | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
_MROPE = {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "rope_type": "default", "rope_theta": 1e4}
CASES |= {
    "qwen35": ("Qwen3_5Text", _heads(4, 2, head_dim=16, num_hidden_layers=4, full_attention_interval=2, **_DELTA)),
    "qwen35-deep": ("Qwen3_5Text", _heads(4, 2, head_dim=16, num_hidden_layers=8, **_DELTA | {"rms_norm_eps": 1e-2})),
    "qwen35-tied-gqa4": (
        "Qwen3_5Text",
        _heads(4, 1, head_dim=12, num_hidden_layers=4, tie_word_embeddings=True, **_DELTA)
        | {"rope_parameters": _MROPE | {"partial_rotary_factor": 0.5}, "linear_num_value_heads": 2},
    ),
    "qwen35-odd": (
        "Qwen3_5Text",
        _heads(3, 3, head_dim=24, hidden_size=40, num_hidden_layers=5, full_attention_interval=3)
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 5, "linear_value_head_dim": 7}
        | {"linear_conv_kernel_dim": 3}
        | _EPS,
    ),
}
_MIX = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 14}
CASES |= {
    "qwen35-moe": (
        "Qwen3_5MoeText",
        _heads(4, 2, head_dim=16, num_hidden_layers=4, full_attention_interval=2, **_DELTA, **_MIX)
        | {"rms_norm_eps": 1e-2},
    ),
    "qwen35-moe-odd": (
        "Qwen3_5MoeText",
        _heads(3, 3, head_dim=24, hidden_size=40, num_hidden_layers=5, full_attention_interval=3)
        | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 5, "linear_value_head_dim": 7}
        | _MIX
        | {"num_experts": 5, "num_experts_per_tok": 3, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    ),
}
_GRANITE = {"embedding_multiplier": 3.5, "logits_scaling": 1.25, "residual_multiplier": 0.7}
_GRANITE |= {"attention_multiplier": 0.21}
_HYBRID = {"num_local_experts": 0, "shared_intermediate_size": 44, "mamba_n_heads": 8, "mamba_d_state": 8}
_HYBRID |= {"layer_types": ["attention"] * 3, "normalization_function": "rmsnorm"}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 6,
    "mamba_d_conv": 4,
    "position_embedding_type": None,
}
_MAMBA |= {"rms_norm_eps": 1e-3}
_GLM = {"partial_rotary_factor": 0.5, "rope_theta": 10_000.0, "rope_type": "default"}
_GLM_MIX = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2}
_GLM_MIX |= {"first_k_dense_replace": 1, "routed_scaling_factor": 1.6}
_OSS = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7}
_OSS |= {"num_hidden_layers": 4, "rope_parameters": _YARN | {"truncate": False}}
_MINISTRAL = _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
_MINISTRAL |= {"original_max_position_embeddings": 8}
CASES |= {
    "granite": ("Granite", _heads(4, 2, **_GRANITE)),
    "granite-odd": ("Granite", _heads(3, 3, hidden_size=36, tie_word_embeddings=True, **_GRANITE)),
    "granite4": ("GraniteMoeHybrid", _heads(4, 2, position_embedding_type="rope", **_GRANITE, **_HYBRID)),
    "granite4-nope": (
        "GraniteMoeHybrid",
        _heads(4, 1, position_embedding_type=None, tie_word_embeddings=True, **_GRANITE, **_HYBRID),
    ),
    "granite4-h": (
        "GraniteMoeHybrid",
        _heads(4, 2, num_hidden_layers=4, **_GRANITE, **_HYBRID | _MAMBA | {"mamba_n_groups": 2})
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]},
    ),
    "granite4-h-odd": (
        "GraniteMoeHybrid",
        _heads(3, 3, hidden_size=36, num_hidden_layers=5, tie_word_embeddings=True, **_GRANITE, **_HYBRID | _MAMBA)
        | {"mamba_d_conv": 3, "mamba_n_heads": 6, "position_embedding_type": "rope"}
        | {"layer_types": ["linear_attention"] * 3 + ["full_attention", "full_attention"]},
    ),
    "glm4": ("Glm4", _heads(4, 2, head_dim=12, rope_parameters=_GLM | {"partial_rotary_factor": 2 / 3})),
    "glm4-odd": ("Glm4", _heads(3, 3, head_dim=8, hidden_size=36, attention_bias=False, rope_parameters=_GLM)),
    "glm4-moe": (
        "Glm4Moe",
        _heads(4, 2, attention_bias=True, use_qk_norm=True, rope_parameters=_GLM, num_hidden_layers=4, **_GLM_MIX),
    ),
    "glm4-moe-odd": (
        "Glm4Moe",
        _heads(3, 3, hidden_size=36, num_hidden_layers=5, rope_parameters=_GLM, **_GLM_MIX)
        | {"first_k_dense_replace": 2, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 1},
    ),
    "gpt-oss": ("GptOss", _heads(4, 2, **_OSS)),
    "gpt-oss-packed": (
        "GptOss",
        _heads(
            4, 2, hidden_size=32, **_OSS | {"num_hidden_layers": 2, "intermediate_size": 64, "num_local_experts": 3}
        ),
    ),
    "gpt-oss-odd": (
        "GptOss",
        _heads(6, 3, hidden_size=36, **_OSS | {"num_local_experts": 5, "num_experts_per_tok": 4, "head_dim": 10}),
    ),
    "ministral3": ("Ministral3", _heads(4, 2, head_dim=12, rope_parameters=_MINISTRAL)),
    "ministral3-odd": (
        "Ministral3",
        _heads(5, 5, head_dim=8, hidden_size=40, rope_parameters=_MINISTRAL, tie_word_embeddings=True),
    ),
}
_DEEP = _GLM_MIX | {"kv_lora_rank": 20, "q_lora_rank": 18, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10}
_INDEX = {"index_topk": 64, "index_n_heads": 3, "index_head_dim": 8}
_DEEP |= {"v_head_dim": 14, "n_group": 4, "topk_group": 2, "num_hidden_layers": 3}
CASES |= {
    "deepseek": (
        "DeepseekV3",
        _heads(4, 4, rope_parameters=_YARN | {"mscale": 1.3, "mscale_all_dim": 0.8}, **_DEEP),
    ),
    "deepseek-odd": (
        "DeepseekV3",
        _heads(3, 3, hidden_size=36, **_DEEP | {"q_lora_rank": None, "first_k_dense_replace": 0, "n_group": 1})
        | {"topk_group": 1, "rope_interleave": False, "tie_word_embeddings": True},
    ),
    "deepseek-v32": ("DeepseekV32", _heads(4, 4, **_DEEP | _INDEX | {"first_k_dense_replace": 1})),
    "glm5": (
        "GlmMoeDsa",
        _heads(3, 3, hidden_size=36, **_DEEP | _INDEX | {"n_group": 1, "topk_group": 1})
        | {"first_k_dense_replace": 2, "indexer_types": ["full", "shared", "full"], "rms_norm_eps": 1e-4},
    ),
    "glm4-lite": ("Glm4MoeLite", _heads(4, 4, **_DEEP | {"n_group": 1, "topk_group": 1})),
}
# Scores are not divided by the root of the width, so attention is close to one key and enlarges the rounding.
_GEMMA4 = {"hidden_size_per_layer_input": 0, "global_head_dim": 16, "sliding_window": 8}
_BY_LAYER = {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": VOCAB}
_PART = {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5}
_FOUR = {"intermediate_size": 20, "intermediate_size_mlp": 44, "num_local_experts": 6, "num_experts_per_tok": 2}
_FOUR |= {"attention_chunk_size": 8, "floor_scale": 5, "attn_scale": 0.4}
CASES |= {
    "gemma4": (
        "Gemma4Text",
        _heads(4, 2, head_dim=12, num_hidden_layers=4, attention_k_eq_v=True, num_global_key_value_heads=1, **_GEMMA4)
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "rms_norm_eps": 1e-3}
        | {"final_logit_softcapping": 2.0},
    ),
    "gemma4-odd": (
        "Gemma4Text",
        _heads(3, 3, head_dim=10, num_hidden_layers=5, hidden_size=36, tie_word_embeddings=False, **_GEMMA4)
        | {"layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"], "sliding_window": 5}
        | {"rope_parameters": {"full_attention": _PART, "sliding_attention": {"rope_type": "default", **_THETA}}},
    ),
    "gemma4-moe": (
        "Gemma4Text",
        _heads(4, 2, head_dim=12, num_hidden_layers=3, attention_k_eq_v=True, num_global_key_value_heads=1, **_GEMMA4)
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "rms_norm_eps": 1e-3}
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20},
    ),
    "gemma4-small": (  # as E2B: periods of windows, keys shared over two of three, embeddings by layer
        "Gemma4Text",
        _heads(4, 1, head_dim=12, num_hidden_layers=6, tie_word_embeddings=True, **_GEMMA4 | _BY_LAYER)
        | {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 4}
        | {"use_double_wide_mlp": True, "final_logit_softcapping": 2.0, "rms_norm_eps": 1e-3},
    ),
    "gemma4-small-odd": (
        "Gemma4Text",
        _heads(6, 3, head_dim=10, num_hidden_layers=7, hidden_size=36, **_GEMMA4 | _BY_LAYER)
        | {"layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 4, "full_attention"]}
        | {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 7, "sliding_window": 5, "rms_norm_eps": 1e-2}
        | {"rope_parameters": {"full_attention": _PART, "sliding_attention": {"rope_type": "default", **_THETA}}},
    ),
    "llama4": (
        "Llama4Text",
        _heads(4, 2, head_dim=12, num_hidden_layers=4, no_rope_layer_interval=2, **_FOUR)
        | {"rope_parameters": _LLAMA3 | {"high_freq_factor": 1.0}},
    ),
    "llama4-odd": (
        "Llama4Text",
        _heads(3, 3, head_dim=8, hidden_size=36, num_hidden_layers=6, tie_word_embeddings=True, **_FOUR)
        | {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 0, 1, 1, 0], "use_qk_norm": False}
        | {"num_local_experts": 3, "num_experts_per_tok": 1, "attention_chunk_size": 7},
    ),
}
ONE_PER_FAMILY = ("qwen2", "qwen3-tied", "llama3-scaling", "mistral-sliding", "gemma3", "moe-top2")
ONE_PER_FAMILY += ("gemma2", "olmo3", "smollm3", "phi3-longrope", "qwen35", "qwen35-moe")
ONE_PER_FAMILY += ("granite", "granite4-h", "glm4", "glm4-moe", "gpt-oss", "deepseek", "ministral3")
ONE_PER_FAMILY += ("gemma4", "gemma4-small", "llama4")


def need_reference(module: str) -> Any:
    """A library of the extra `reference`; without it the test is skipped."""
    return pytest.importorskip(
        module, reason=f"{module} is not installed; with Python 3.11, pip install -e '.[dev,reference]'"
    )


def need_transformers() -> Any:
    """transformers with torch; without them the test is skipped."""
    need_reference("torch")
    return need_reference("transformers")


def make_config(name: str) -> Any:
    """The configuration of that case, by transformers."""
    family, options = CASES[name]
    causal = family.removesuffix("Text")
    config = getattr(need_transformers(), f"{family}Config")(**(_SHAPE | options))
    config.architectures = [f"{causal}ForCausalLM"]
    return config


def save_model(name: str, folder: Path, dtype: str = "float32", **save: Any) -> Any:
    """Saves the model of that case and returns it; norms and biases are random too."""
    transformers = need_transformers()
    import torch

    config = make_config(name)
    torch.manual_seed(0)
    model = getattr(transformers, config.architectures[0])(config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim == 1 or key.endswith("_bias"):
                value.add_(0.3 * torch.randn_like(value))
            assert value.std() > 0, key
        for key, value in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "layer_scalar")):
                value.add_(0.2 * torch.randn_like(value))
    model = model.to(getattr(torch, dtype))
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
