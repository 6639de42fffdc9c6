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
TEXT = _SHAPE
"""The sizes of the text part of a vision-language model."""
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def _case(family: str, heads: tuple[int, int] = (4, 2), *parts: dict[str, Any], **more: Any) -> tuple[str, dict]:
    """(family, options): those of all parts, later ones first."""
    options = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True))
    for part in (*parts, more):
        options |= part
    return family, options


def _only_full(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions of a model whose layers with a window have plain ones."""
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", **_THETA}}


_THETA = {"rope_theta": 10_000.0}
_LINEAR = {"rope_type": "linear", "factor": 8.0, **_THETA}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, **_THETA}
_LLAMA3 = _YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 24}
_WINDOW = {"use_sliding_window": True, "sliding_window": 7}
# Rows of the tests are longer than 8 and shorter than 256 tokens, the first lengths of two cases.
_LONG = {"rope_type": "longrope", "partial_rotary_factor": 0.75, **_THETA}
_LONG |= {"short_factor": [1.0, 1.1, 1.2, 1.4, 1.9, 2.5], "long_factor": [1.0, 1.5, 3.0, 6.0, 12.0, 20.0]}
_PHI4 = {"rope_parameters": _LONG, "sliding_window": 1024, "tie_word_embeddings": True, "hidden_size": 64}
_EXPERTS = {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Where a query finds almost nothing in a state, the norm of the context enlarges the rounding; eps limits that. Eight
# layers in float32 differ from float64 by 8e-5 in transformers and 1.5e-4 here at 1e-3, by 3e-5 and 4e-5 at 1e-2.
_DELTA = {"rms_norm_eps": 1e-3, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
_DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "full_attention_interval": 2}
_ODD_DELTA = {"rms_norm_eps": 1e-3, "num_hidden_layers": 5, "linear_num_key_heads": 3, "linear_num_value_heads": 3}
_ODD_DELTA |= {"linear_key_head_dim": 5, "linear_value_head_dim": 7, "full_attention_interval": 3}
_ODD_DELTA |= {"head_dim": 24, "hidden_size": 40}
_MROPE = {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "rope_type": "default", "rope_theta": 1e4}
_MIX = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 14}
_MIX |= {"rms_norm_eps": 1e-2}
_GRANITE = {"embedding_multiplier": 3.5, "logits_scaling": 1.25, "residual_multiplier": 0.7}
_GRANITE |= {"attention_multiplier": 0.21}
_HYBRID = _GRANITE | {"num_local_experts": 0, "shared_intermediate_size": 44, "mamba_n_heads": 8, "mamba_d_state": 8}
_HYBRID |= {"layer_types": ["attention"] * 3, "normalization_function": "rmsnorm"}
_MAMBA = _HYBRID | {"mamba_n_groups": 1, "mamba_d_state": 6, "mamba_d_conv": 4, "position_embedding_type": None}
_MAMBA |= {"rms_norm_eps": 1e-3}
_GLM = {"partial_rotary_factor": 0.5, "rope_theta": 10_000.0, "rope_type": "default"}
_GLM_MIX = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2}
_GLM_MIX |= {"first_k_dense_replace": 1, "routed_scaling_factor": 1.6}
_OSS = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7}
_OSS |= {"num_hidden_layers": 4, "rope_parameters": _YARN | {"truncate": False}}
_MINISTRAL = _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
_MINISTRAL |= {"original_max_position_embeddings": 8}
_DEEP = _GLM_MIX | {"kv_lora_rank": 20, "q_lora_rank": 18, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10}
_DEEP |= {"v_head_dim": 14, "n_group": 4, "topk_group": 2, "num_hidden_layers": 3}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_INDEX = {"index_topk": 64, "index_n_heads": 3, "index_head_dim": 8}
# Scores are not divided by the root of the width, so attention is close to one key and enlarges the rounding.
_GEMMA4 = {"hidden_size_per_layer_input": 0, "global_head_dim": 16, "sliding_window": 8}
_ONE_KEY = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_BY_LAYER = {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": VOCAB}
_PART = {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5}
_FOUR = {"intermediate_size": 20, "intermediate_size_mlp": 44, "num_local_experts": 6, "num_experts_per_tok": 2}
_FOUR |= {"attention_chunk_size": 8, "floor_scale": 5, "attn_scale": 0.4}

_TIED, _UNTIED, _SIZE_36 = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"hidden_size": 36}
_HEADS_8, _HEADS_12, _HEADS_16 = {"head_dim": 8}, {"head_dim": 12}, {"head_dim": 16}
_GEMMA3_ODD = {"hidden_size": 48, "num_hidden_layers": 6, "query_pre_attn_scalar": 24, "sliding_window": 5}
_GEMMA2_ODD = _CAPS | {"attn_logit_softcapping": None, "query_pre_attn_scalar": 7, "sliding_window": 5}
_OLMO_ODD = {"num_hidden_layers": 4, "sliding_window": 6, "layer_types": [FULL, SLIDING] * 2}
_FEW_EXPERTS = _WINDOW | _EXPERTS | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 8}
_GQA4_DELTA = _DELTA | {"linear_num_value_heads": 2, "full_attention_interval": 4}
_MAMBA_4 = {"mamba_n_groups": 2, "num_hidden_layers": 4, "layer_types": [LINEAR, FULL, LINEAR, LINEAR]}
_MAMBA_5 = {"mamba_d_conv": 3, "mamba_n_heads": 6, "position_embedding_type": "rope", "num_hidden_layers": 5}
_MAMBA_5 |= {"layer_types": [LINEAR, LINEAR, LINEAR, FULL, FULL]}
_GLM_ODD = {"first_k_dense_replace": 2, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "norm_topk_prob": False}
_DEEP_ODD = {"q_lora_rank": None, "first_k_dense_replace": 0, "rope_interleave": False}
_GLM5 = {"first_k_dense_replace": 2, "indexer_types": ["full", "shared", "full"], "rms_norm_eps": 1e-4}
_GEMMA4_4 = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL] * 2, "rms_norm_eps": 1e-3}
_GEMMA4_5 = {"head_dim": 10, "num_hidden_layers": 5, "sliding_window": 5}
_GEMMA4_5 |= {"layer_types": [FULL, SLIDING, SLIDING, SLIDING, FULL], "rope_parameters": _only_full(_PART)}
_GEMMA4_MIX = {"layer_types": [SLIDING, SLIDING, FULL], "rms_norm_eps": 1e-3, "enable_moe_block": True}
_GEMMA4_MIX |= {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20}
# As E2B: periods of windows, keys shared over two of three, embeddings by layer.
_SMALL = {"num_hidden_layers": 6, "layer_types": [SLIDING, FULL] * 3, "num_kv_shared_layers": 4, "rms_norm_eps": 1e-3}
_SMALL |= {"use_double_wide_mlp": True}
_SMALL_ODD = {"head_dim": 10, "num_hidden_layers": 7, "sliding_window": 5, "num_kv_shared_layers": 3}
_SMALL_ODD |= {"hidden_size_per_layer_input": 7, "rms_norm_eps": 1e-2, "rope_parameters": _only_full(_PART)}
_SMALL_ODD |= {"layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, SLIDING, FULL]}
_FOUR_ODD = {"num_local_experts": 3, "num_experts_per_tok": 1, "attention_chunk_size": 7, "num_hidden_layers": 6}
_FOUR_ODD |= {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 1, 0, 1, 1, 0], "use_qk_norm": False}

# Each family has a case as it is published, and one of odd sizes with what else its configuration may say.
CASES = {
    "qwen2": _case("Qwen2"),
    "qwen2-sliding": _case("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen2-odd": _case("Qwen2", (7, 7), _TIED, hidden_size=56),
    "qwen3-tied": _case("Qwen3", (4, 2), _TIED, _HEADS_16),
    "qwen3-gqa4": _case("Qwen3", (8, 2), _HEADS_8),
    "qwen3-yarn": _case("Qwen3", (8, 1), _HEADS_16, rope_parameters=_YARN | {"truncate": False}),
    "llama": _case("Llama"),
    "llama3-scaling": _case("Llama", (4, 1), _TIED, rope_parameters=_LLAMA3),
    "llama-odd": _case("Llama", (3, 3), head_dim=6, hidden_size=48, rope_parameters=_LINEAR),
    "mistral": _case("Mistral", sliding_window=None),
    "mistral-sliding": _case("Mistral", (4, 4), sliding_window=8),
    "mistral-gqa8": _case("Mistral", (8, 1), _TIED, _HEADS_8, sliding_window=6),
    "gemma3": _case("Gemma3Text", (4, 1), _HEADS_16, num_hidden_layers=7, sliding_window=8),
    "gemma3-scaled": _case(
        "Gemma3Text", (3, 3), _UNTIED, _HEADS_8, _GEMMA3_ODD, rope_parameters=_only_full(_LINEAR | {"rope_theta": 1e5})
    ),
    "gemma2": _case("Gemma2", (4, 2), _CAPS, _HEADS_16, num_hidden_layers=4, sliding_window=8),
    "gemma2-odd": _case("Gemma2", (3, 3), _UNTIED, _SIZE_36, _GEMMA2_ODD, head_dim=10),
    "olmo3": _case("Olmo3", num_hidden_layers=5, sliding_window=8),
    "olmo3-yarn": _case("Olmo3", (6, 3), _TIED, _SIZE_36, _OLMO_ODD, rope_parameters=_only_full(_YARN)),
    "smollm3": _case("SmolLM3", num_hidden_layers=5),
    "smollm3-odd": _case("SmolLM3", (3, 3), _UNTIED, _WINDOW, hidden_size=48, no_rope_layers=[0, 1, 0]),
    "phi3-longrope": _case("Phi3", (4, 2), _PHI4, original_max_position_embeddings=256),
    "phi3-long-rows": _case("Phi3", (4, 1), _PHI4, original_max_position_embeddings=8),
    "phi3-odd": _case("Phi3", (5, 5), _TIED, hidden_size=40, sliding_window=6),
    "moe-top2": _case("Qwen3Moe", (4, 2), _EXPERTS),
    "moe-odd": _case("Qwen3Moe", (3, 3), _TIED, _FEW_EXPERTS, hidden_size=24, norm_topk_prob=True),
    "qwen35": _case("Qwen3_5Text", (4, 2), _DELTA, _HEADS_16),
    "qwen35-tied-gqa4": _case(
        "Qwen3_5Text", (4, 1), _TIED, _GQA4_DELTA, _HEADS_12, rope_parameters=_MROPE | {"partial_rotary_factor": 0.5}
    ),
    "qwen35-odd": _case("Qwen3_5Text", (3, 3), _ODD_DELTA, linear_conv_kernel_dim=3),
    "qwen35-moe": _case("Qwen3_5MoeText", (4, 2), _DELTA, _MIX, _HEADS_16),
    "qwen35-moe-odd": _case("Qwen3_5MoeText", (3, 3), _TIED, _ODD_DELTA, _MIX, num_experts=5, num_experts_per_tok=3),
    "granite": _case("Granite", (4, 2), _GRANITE),
    "granite-odd": _case("Granite", (3, 3), _TIED, _SIZE_36, _GRANITE),
    "granite4": _case("GraniteMoeHybrid", (4, 2), _HYBRID, position_embedding_type="rope"),
    "granite4-nope": _case("GraniteMoeHybrid", (4, 1), _TIED, _HYBRID, position_embedding_type=None),
    "granite4-h": _case("GraniteMoeHybrid", (4, 2), _MAMBA, _MAMBA_4),
    "granite4-h-odd": _case("GraniteMoeHybrid", (3, 3), _TIED, _SIZE_36, _MAMBA, _MAMBA_5),
    "glm4": _case("Glm4", (4, 2), _HEADS_12, rope_parameters=_GLM | {"partial_rotary_factor": 2 / 3}),
    "glm4-odd": _case("Glm4", (3, 3), _SIZE_36, _HEADS_8, attention_bias=False, rope_parameters=_GLM),
    "glm4-moe": _case(
        "Glm4Moe", (4, 2), _GLM_MIX, attention_bias=True, num_hidden_layers=4, rope_parameters=_GLM, use_qk_norm=True
    ),
    "glm4-moe-odd": _case("Glm4Moe", (3, 3), _SIZE_36, _GLM_MIX, _GLM_ODD, num_hidden_layers=5, rope_parameters=_GLM),
    "gpt-oss": _case("GptOss", (4, 2), _OSS),
    "gpt-oss-odd": _case("GptOss", (6, 3), _SIZE_36, _OSS, num_local_experts=5, num_experts_per_tok=4, head_dim=10),
    "gpt-oss-packed": _case("GptOss", (4, 2), _OSS, num_hidden_layers=2, intermediate_size=64, num_local_experts=3),
    "ministral3": _case("Ministral3", (4, 2), _HEADS_12, rope_parameters=_MINISTRAL),
    "ministral3-odd": _case("Ministral3", (5, 5), _TIED, _HEADS_8, hidden_size=40, rope_parameters=_MINISTRAL),
    "deepseek": _case("DeepseekV3", (4, 4), _DEEP, rope_parameters=_YARN | {"mscale": 1.3, "mscale_all_dim": 0.8}),
    "deepseek-odd": _case("DeepseekV3", (3, 3), _TIED, _SIZE_36, _DEEP, _ONE_GROUP, _DEEP_ODD),
    "deepseek-v32": _case("DeepseekV32", (4, 4), _DEEP, _INDEX),
    "glm5": _case("GlmMoeDsa", (3, 3), _SIZE_36, _DEEP, _ONE_GROUP, _INDEX, _GLM5),
    "glm4-lite": _case("Glm4MoeLite", (4, 4), _DEEP, _ONE_GROUP),
    "gemma4": _case("Gemma4Text", (4, 2), _HEADS_12, _GEMMA4, _ONE_KEY, _GEMMA4_4, final_logit_softcapping=2.0),
    "gemma4-odd": _case("Gemma4Text", (3, 3), _UNTIED, _SIZE_36, _GEMMA4, _GEMMA4_5),
    "gemma4-moe": _case("Gemma4Text", (4, 2), _HEADS_12, _GEMMA4, _ONE_KEY, _GEMMA4_MIX),
    "gemma4-small": _case(
        "Gemma4Text", (4, 1), _TIED, _HEADS_12, _GEMMA4, _BY_LAYER, _SMALL, final_logit_softcapping=2.0
    ),
    "gemma4-small-odd": _case("Gemma4Text", (6, 3), _SIZE_36, _GEMMA4, _BY_LAYER, _SMALL_ODD),
    "llama4": _case(
        "Llama4Text",
        (4, 2),
        *(_HEADS_12, _FOUR, {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
        rope_parameters=_LLAMA3 | {"high_freq_factor": 1.0},
    ),
    "llama4-odd": _case("Llama4Text", (3, 3), _TIED, _SIZE_36, _HEADS_8, _FOUR, _FOUR_ODD),
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


def drawn(name: str, config: Any) -> Any:
    """A model of that class of transformers with random weights; norms, biases and buffers are random too."""
    transformers = need_transformers()
    import torch

    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim == 1 or key.endswith("_bias"):
                value.add_(0.3 * torch.randn_like(value))
        for key, value in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "layer_scalar")):
                value.add_(0.2 * torch.randn_like(value))
    return model


def save_model(name: str, folder: Path, dtype: str = "float32", **save: Any) -> Any:
    """Saves the model of that case and returns it."""
    config = make_config(name)
    model = drawn(config.architectures[0], config)
    assert all(value.std() > 0 for value in model.parameters())
    model = model.to(dtype=getattr(need_reference("torch"), dtype))
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
