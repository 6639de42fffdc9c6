"""Published model families: their tensor names, and what their `config.json` may contain.

`model.published` reads and writes `config.json`; `model.convert` reads and writes the tensors.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo_roc_jax.model.config import FULL, ModelConfig
from grpo_roc_jax.model.delta import channels

Json = Mapping[str, Any]


@dataclass(frozen=True)
class TensorRule:
    """How one leaf is stored in a checkpoint."""

    leaf: str
    """Name in the parameters; a leaf of a layer if `name` contains `{layer}`."""
    name: str
    """Published name, with `{layer}` and `{expert}` if a leaf is stored in parts."""
    dims: str
    """Published dimensions, outermost first; a merged dimension lists its parts in brackets, as in "(N H) D". Of
    "(J X)" the parts of X (`delta.channels`) are stored one after the other, each for all J; of "(J R)" the last comes
    first."""
    order: str
    """Dimensions of the leaf, without layers and experts."""
    before: tuple[str, ...] = ()
    """Outermost dimensions of the leaves that come before it in the same tensor; the tables list them in this order."""
    turn: tuple[int, int] = (0, 1)
    """(i, n): the leaf has every n-th entry, from i on, of the innermost dimension of the tensor, which n leaves share
    in turn."""
    runs: int = 0
    """The dimension, counted from the end as -1, -2, that n leaves share one after the other instead, the leaf being
    the i-th; 0 for none."""


_LAYER = "model.layers.{layer}."

_TOP = (
    TensorRule("embed", "model.embed_tokens.weight", "V D", "V D"),
    TensorRule("final_norm", "model.norm.weight", "D", "D"),
    TensorRule("unembed", "lm_head.weight", "V D", "D V"),
)

_ATTENTION = (
    TensorRule("attn_norm", _LAYER + "input_layernorm.weight", "D", "D"),
    TensorRule("wq", _LAYER + "self_attn.q_proj.weight", "(N Q) D", "D N Q"),
    TensorRule("wk", _LAYER + "self_attn.k_proj.weight", "(K H) D", "D K H"),
    TensorRule("wv", _LAYER + "self_attn.v_proj.weight", "(K H) D", "D K H"),
    TensorRule("wo", _LAYER + "self_attn.o_proj.weight", "D (N H)", "N H D"),
    TensorRule("bq", _LAYER + "self_attn.q_proj.bias", "(N H)", "N H"),
    TensorRule("bk", _LAYER + "self_attn.k_proj.bias", "(K H)", "K H"),
    TensorRule("bv", _LAYER + "self_attn.v_proj.bias", "(K H)", "K H"),
    TensorRule("q_norm", _LAYER + "self_attn.q_norm.weight", "H", "H"),
    TensorRule("k_norm", _LAYER + "self_attn.k_norm.weight", "H", "H"),
)

_MLP = (
    TensorRule("w_gate", _LAYER + "mlp.gate_proj.weight", "F D", "D F"),
    TensorRule("w_up", _LAYER + "mlp.up_proj.weight", "F D", "D F"),
    TensorRule("w_down", _LAYER + "mlp.down_proj.weight", "D F", "F D"),
)

_EXPERTS = (
    TensorRule("router", _LAYER + "mlp.gate.weight", "E D", "D E"),
    TensorRule("w_gate", _LAYER + "mlp.experts.{expert}.gate_proj.weight", "F D", "D F"),
    TensorRule("w_up", _LAYER + "mlp.experts.{expert}.up_proj.weight", "F D", "D F"),
    TensorRule("w_down", _LAYER + "mlp.experts.{expert}.down_proj.weight", "D F", "F D"),
)

_SHARED = (
    TensorRule("s_gate", _LAYER + "mlp.shared_expert.gate_proj.weight", "G D", "D G"),
    TensorRule("s_up", _LAYER + "mlp.shared_expert.up_proj.weight", "G D", "D G"),
    TensorRule("s_down", _LAYER + "mlp.shared_expert.down_proj.weight", "D G", "G D"),
    TensorRule("s_share", _LAYER + "mlp.shared_expert_gate.weight", "Y D", "D Y"),
)

_SHARED_EXPERTS = tuple(
    replace(rule, name=rule.name.replace("shared_expert.", "shared_experts.")) for rule in _SHARED[:3]
)
_FIRST_DENSE = tuple(
    replace(rule, leaf=f"d{rule.leaf[1:]}", dims=rule.dims.replace("F", "I"), order=rule.order.replace("F", "I"))
    for rule in _MLP
)
_CORRECTION = (TensorRule("b_router", _LAYER + "mlp.gate.e_score_correction_bias", "E", "E"),)

_OSS = _LAYER + "mlp.experts."
_OSS_LAYER = (
    TensorRule("sinks", _LAYER + "self_attn.sinks", "N", "N"),
    TensorRule("bo", _LAYER + "self_attn.o_proj.bias", "D", "D"),
    TensorRule("router", _LAYER + "mlp.router.weight", "E D", "D E"),
    TensorRule("b_router", _LAYER + "mlp.router.bias", "E", "E"),
    TensorRule("w_gate", _OSS + "gate_up_proj", "E D F", "E D F", turn=(0, 2)),
    TensorRule("w_up", _OSS + "gate_up_proj", "E D F", "E D F", turn=(1, 2)),
    TensorRule("b_gate", _OSS + "gate_up_proj_bias", "E F", "E F", turn=(0, 2)),
    TensorRule("b_up", _OSS + "gate_up_proj_bias", "E F", "E F", turn=(1, 2)),
    TensorRule("w_down", _OSS + "down_proj", "E F D", "E F D"),
    TensorRule("b_down", _OSS + "down_proj_bias", "E D", "E D"),
)

_FOUR = _LAYER + "feed_forward."
_LLAMA4_LAYER = (
    TensorRule("router", _FOUR + "router.weight", "E D", "D E"),
    TensorRule("w_gate", _FOUR + "experts.gate_up_proj", "E D F", "E D F", turn=(0, 2), runs=-1),
    TensorRule("w_up", _FOUR + "experts.gate_up_proj", "E D F", "E D F", turn=(1, 2), runs=-1),
    TensorRule("w_down", _FOUR + "experts.down_proj", "E F D", "E F D"),
    *(replace(rule, name=rule.name.replace("mlp.", "feed_forward.")) for rule in (*_SHARED[:3], *_FIRST_DENSE)),
)

_LATENT = (
    TensorRule("attn_norm", _LAYER + "input_layernorm.weight", "D", "D"),
    TensorRule("q_down", _LAYER + "self_attn.q_a_proj.weight", "Z D", "D Z"),
    TensorRule("q_latent_norm", _LAYER + "self_attn.q_a_layernorm.weight", "Z", "Z"),
    TensorRule("wq", _LAYER + "self_attn.q_b_proj.weight", "(N Q) Z", "Z N Q"),
    TensorRule("wq", _LAYER + "self_attn.q_proj.weight", "(N Q) D", "D N Q"),
    TensorRule("kv_down", _LAYER + "self_attn.kv_a_proj_with_mqa.weight", "H D", "D H"),
    TensorRule("kv_latent_norm", _LAYER + "self_attn.kv_a_layernorm.weight", "L", "L"),
    TensorRule("kv_up", _LAYER + "self_attn.kv_b_proj.weight", "(N P) L", "L N P"),
    TensorRule("wo", _LAYER + "self_attn.o_proj.weight", "D (N O)", "N O D"),
)
"""Latent attention; which of the two rules of `wq` holds depends on the model (`rules`)."""

_NORMS = (TensorRule("mlp_norm", _LAYER + "post_attention_layernorm.weight", "D", "D"),)
_GEMMA_NORMS = (
    TensorRule("attn_post_norm", _LAYER + "post_attention_layernorm.weight", "D", "D"),
    TensorRule("mlp_norm", _LAYER + "pre_feedforward_layernorm.weight", "D", "D"),
    TensorRule("mlp_post_norm", _LAYER + "post_feedforward_layernorm.weight", "D", "D"),
)

_FULL_ATTENTION = tuple(
    replace(
        rule,
        leaf=f"{FULL}{rule.leaf}",
        **{side: getattr(rule, side).translate(str.maketrans("KHQ", "CAA")) for side in ("dims", "order")},
    )
    for rule in _ATTENTION
    if rule.leaf in ("wq", "wk", "wv", "wo", "q_norm", "k_norm")
)
"""Attention in layers without a window, where its heads are others (Gemma 4)."""
_GEMMA4_INPUTS = (
    TensorRule("layer_embed", "model.embed_tokens_per_layer.weight", "V (S T)", "V S T"),
    TensorRule("layer_proj", "model.per_layer_model_projection.weight", "(S T) D", "D S T"),
    TensorRule("layer_proj_norm", "model.per_layer_projection_norm.weight", "T", "T"),
    TensorRule("p_gate", _LAYER + "per_layer_input_gate.weight", "T D", "D T"),
    TensorRule("p_out", _LAYER + "per_layer_projection.weight", "D T", "T D"),
    TensorRule("p_post_norm", _LAYER + "post_per_layer_input_norm.weight", "D", "D"),
)
"""The second embedding of Gemma 4 E2B and E4B, see `transformer.layer_inputs`."""
_GEMMA4_LAYER = (
    TensorRule("factor", _LAYER + "layer_scalar", "Y", "Y"),
    *_GEMMA4_INPUTS,
    *_FIRST_DENSE,
    *(replace(rule, name=rule.name.replace("shared_expert.", "")) for rule in _SHARED[:3]),
    TensorRule("s_post_norm", _LAYER + "post_feedforward_layernorm_1.weight", "D", "D"),
    TensorRule("e_norm", _LAYER + "pre_feedforward_layernorm_2.weight", "D", "D"),
    TensorRule("e_post_norm", _LAYER + "post_feedforward_layernorm_2.weight", "D", "D"),
    TensorRule("router", _LAYER + "router.proj.weight", "E D", "D E"),
    TensorRule("router_scale", _LAYER + "router.scale", "D", "D"),
    TensorRule("expert_scale", _LAYER + "router.per_expert_scale", "E", "E"),
    TensorRule("w_gate", _LAYER + "experts.gate_up_proj", "E F D", "E D F", turn=(0, 2), runs=-2),
    TensorRule("w_up", _LAYER + "experts.gate_up_proj", "E F D", "E D F", turn=(1, 2), runs=-2),
    TensorRule("w_down", _LAYER + "experts.down_proj", "E D F", "E F D"),
)

_OLMO_NORMS = (
    TensorRule("q_norm", _LAYER + "self_attn.q_norm.weight", "(N H)", "N H"),
    TensorRule("k_norm", _LAYER + "self_attn.k_norm.weight", "(K H)", "K H"),
    TensorRule("attn_post_norm", _LAYER + "post_attention_layernorm.weight", "D", "D"),
    TensorRule("mlp_post_norm", _LAYER + "post_feedforward_layernorm.weight", "D", "D"),
)

_GLM_NORMS = (
    TensorRule("attn_post_norm", _LAYER + "post_self_attn_layernorm.weight", "D", "D"),
    TensorRule("mlp_norm", _LAYER + "post_attention_layernorm.weight", "D", "D"),
    TensorRule("mlp_post_norm", _LAYER + "post_mlp_layernorm.weight", "D", "D"),
)

_QKV = _LAYER + "self_attn.qkv_proj.weight"


def _gate_and_up(joined: str, down: str) -> tuple[TensorRule, ...]:
    """A feed-forward whose first two matrices are one tensor."""
    return (
        TensorRule("w_gate", _LAYER + joined, "F D", "D F"),
        TensorRule("w_up", _LAYER + joined, "F D", "D F", before=("F",)),
        TensorRule("w_down", _LAYER + down, "D F", "F D"),
    )


_FUSED = (
    TensorRule("attn_norm", _LAYER + "input_layernorm.weight", "D", "D"),
    TensorRule("wq", _QKV, "(N H) D", "D N H"),
    TensorRule("wk", _QKV, "(K H) D", "D K H", before=("N H",)),
    TensorRule("wv", _QKV, "(K H) D", "D K H", before=("N H", "K H")),
    TensorRule("wo", _LAYER + "self_attn.o_proj.weight", "D (N H)", "N H D"),
    *_gate_and_up("mlp.gate_up_proj.weight", "mlp.down_proj.weight"),
)

_MIX = _LAYER + "linear_attn."
_DELTA = (
    TensorRule("w_qkv", _MIX + "in_proj_qkv.weight", "(J X) D", "D J X"),
    TensorRule("w_z", _MIX + "in_proj_z.weight", "(M U) D", "D M U"),
    TensorRule("w_beta", _MIX + "in_proj_b.weight", "M D", "D M"),
    TensorRule("w_decay", _MIX + "in_proj_a.weight", "M D", "D M"),
    TensorRule("conv", _MIX + "conv1d.weight", "(J X) 1 W", "J X W"),
    TensorRule("a_log", _MIX + "A_log", "M", "M"),
    TensorRule("dt_bias", _MIX + "dt_bias", "M", "M"),
    TensorRule("delta_norm", _MIX + "norm.weight", "U", "U"),
    TensorRule("w_out", _MIX + "out_proj.weight", "D (M U)", "M U D"),
)

_MAMBA_IN = _LAYER + "mamba.in_proj.weight"
_MAMBA_LAYER = (
    TensorRule("w_z", _MAMBA_IN, "(M U) D", "D M U"),
    TensorRule("w_qkv", _MAMBA_IN, "(J R) D", "D J R", before=("M U",)),
    TensorRule("w_decay", _MAMBA_IN, "M D", "D M", before=("M U", "J R")),
    TensorRule("conv", _LAYER + "mamba.conv1d.weight", "(J R) 1 W", "J R W"),
    TensorRule("conv_bias", _LAYER + "mamba.conv1d.bias", "(J R)", "J R"),
    TensorRule("a_log", _LAYER + "mamba.A_log", "M", "M"),
    TensorRule("dt_bias", _LAYER + "mamba.dt_bias", "M", "M"),
    TensorRule("skip", _LAYER + "mamba.D", "M", "M"),
    TensorRule("delta_norm", _LAYER + "mamba.norm.weight", "(M U)", "M U"),
    TensorRule("w_out", _LAYER + "mamba.out_proj.weight", "D (M U)", "M U D"),
)

# `rules` drops the leaves that a model does not have (biases, a tied unembedding).
_DENSE_RULES = (*_TOP, *_ATTENTION, *_NORMS, *_MLP)
_GEMMA_RULES = (*_TOP, *_ATTENTION, *_GEMMA_NORMS, *_MLP)
_GEMMA_FIXED = {"norm_offset": True, "post_norms": True}
_GEMMA_DEFAULTS = {"query_pre_attn_scalar": 256, "head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096}
_GEMMA_DEFAULTS |= {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}


_GEMMA4_UNUSED = ("hidden_act", "vocab_size_per_layer_input", "use_double_wide_mlp", "num_experts", "top_k_experts")
_GEMMA4_UNUSED += ("moe_intermediate_size", "num_global_key_value_heads", "norm_topk_prob", "intermediate_size")
_LATENT_KEYS = ("head_dim", "qk_head_dim", "num_key_value_heads", "num_local_experts", "ep_size", "topk_method")
_LATENT_KEYS += ("scoring_func", "moe_layer_freq", "aux_loss_alpha", "seq_aux", "partial_rotary_factor")
_INDEX_KEYS = ("index_n_heads", "index_head_dim", "indexer_types", "index_topk_freq", "index_skip_topk_offset")
_INDEX_KEYS += ("index_topk_pattern", "indexer_rope_interleave", "layer_types")


@dataclass(frozen=True)
class Family:
    """One architecture: its names, and what its `config.json` may contain."""

    architecture: str
    model_type: str
    table: tuple[TensorRule, ...] = _DENSE_RULES
    fixed: Mapping[str, Any] | None = None
    """Fields of `ModelConfig` that the architecture implies."""
    required: Mapping[str, Any] | None = None
    """Keys without a field here, and the only value that is supported."""
    has_windows: bool = True
    defaults: Mapping[str, Any] | None = None
    """Defaults of missing keys, from the configuration class in transformers; a key set to null is not missing."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Keys that describe parts which the model has not, or that another key replaces."""
        if self.model_type == "granitemoehybrid":
            return ("mamba_chunk_size", "intermediate_size", "num_experts_per_tok", "init_method")
        if self.model_type == "gemma4_text":
            return _GEMMA4_UNUSED
        if self.model_type == "llama4_text":
            return ("output_router_logits", "num_local_experts", "attn_scale", "floor_scale", "intermediate_size_mlp")
        if self.sigmoid_experts:
            left = ("num_nextn_predict_layers", "num_mtp_layers", "intermediate_size")
            left = (*left, *_LATENT_KEYS) if self.latent else left
            return (*left, *_INDEX_KEYS) if self.indexed else left
        if self.has_experts and self.model_type != "gpt_oss":
            return ("intermediate_size",)  # the width of dense layers
        if self.model_type == "gpt_oss":
            return ("experts_per_token", "initial_context_length")
        return ("hidden_act",) if self.gemma else ()

    @property
    def gemma(self) -> bool:
        return self.model_type.startswith("gemma")

    @property
    def partly_rotary(self) -> bool:
        """Whether the key `partial_rotary_factor` determines which share of a head is rotated."""
        return self.model_type in ("phi3", "glm4", "glm4_moe") or self.recurrent

    @property
    def granite(self) -> bool:
        return self.model_type.startswith("granite")

    @property
    def latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.model_type in ("deepseek_v3", "glm4_moe_lite") or self.indexed

    @property
    def indexed(self) -> bool:
        """Whether an indexer chooses the keys of a query; its tensors stay as they are (`convert.index_tensors`)."""
        return self.model_type in ("deepseek_v32", "glm_moe_dsa")

    @property
    def sigmoid_experts(self) -> bool:
        """Whether the experts are chosen as in DeepSeek-V3."""
        return self.latent or self.model_type == "glm4_moe"

    @property
    def states_bias(self) -> bool:
        """Whether the key `attention_bias` says if queries, keys and values have biases."""
        return self.model_type in ("glm4", "glm4_moe")

    @property
    def recurrent(self) -> bool:
        """Whether most layers are recurrent."""
        return self.model_type.startswith("qwen3_5")

    @property
    def has_experts(self) -> bool:
        return any(rule.leaf == "router" for rule in self.table)

    @property
    def optional_windows(self) -> bool:
        """Whether windows apply only if the key `use_sliding_window` is set."""
        return self.model_type.startswith(("qwen", "smollm"))

    @property
    def one_window(self) -> bool:
        """Whether all layers have the window; transformers reads no `layer_types` and no `max_window_layers` then."""
        return self.model_type in ("mistral", "ministral3", "phi3", "qwen3_moe")


FAMILIES = (
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        fixed={"qkv_bias": True},
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        fixed={"qk_norm": True},
        required={"attention_bias": False},
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    ),
    Family(
        "LlamaForCausalLM",
        "llama",
        has_windows=False,
        required={"attention_bias": False, "mlp_bias": False},
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 10_000.0},
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        required={"attention_bias": False},
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        table=_GEMMA_RULES,
        fixed=_GEMMA_FIXED,
        required={"attention_bias": False, "use_bidirectional_attention": False},
        defaults=_GEMMA_DEFAULTS
        | {"rope_theta": 10_000.0, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        table=_GEMMA_RULES,
        fixed=_GEMMA_FIXED | {"qk_norm": True},
        required={
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        defaults=_GEMMA_DEFAULTS | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
    ),
    Family(
        "Olmo3ForCausalLM",
        "olmo3",
        table=(*_TOP, *(rule for rule in _ATTENTION if not rule.leaf.endswith("norm")), *_OLMO_NORMS, *_MLP),
        fixed={"qk_norm": "whole", "post_norms": "only"},
        required={"attention_bias": False},
        defaults={"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "sliding_window": 4096},
    ),
    Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        required={"attention_bias": False, "mlp_bias": False},
        defaults={"rope_theta": 2_000_000.0, "num_key_value_heads": 4, "tie_word_embeddings": True}
        | {"rms_norm_eps": 1e-6, "no_rope_layer_interval": 4},
    ),
    Family(
        "Phi3ForCausalLM",
        "phi3",
        table=(*_TOP, *_FUSED, *_NORMS),
        required={"attention_bias": False, "full_attn_mod": 1, "interpolate_factor": 1},
        defaults={"rope_theta": 10_000.0, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        table=(*_TOP, *_ATTENTION, *_NORMS, *_EXPERTS),
        fixed={"qk_norm": True},
        required={
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        defaults={"norm_topk_prob": False, "num_key_value_heads": 4, "sliding_window": 4096, "max_window_layers": 28},
    ),
    Family(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        table=(*_TOP, *_ATTENTION, *_DELTA, *_NORMS, *_MLP),
        fixed={"qk_norm": True, "norm_offset": True},
        required={"attention_bias": False, "attn_output_gate": True, "output_gate_type": "swish"},
        has_windows=False,
        defaults={"num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
        | {"full_attention_interval": 4, "rms_norm_eps": 1e-6, "partial_rotary_factor": 0.25},
    ),
)
_GRANITE = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "embedding_multiplier": 1.0, "logits_scaling": 1.0}
_GRANITE |= {"residual_multiplier": 1.0, "attention_multiplier": 1.0}
_DEEPSEEK = {"rope_theta": 10_000.0, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "rope_interleave": True}
_DEEPSEEK |= {"n_shared_experts": 1, "norm_topk_prob": True}
_GLM = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
_QWEN35 = FAMILIES[-1]
FAMILIES += (
    replace(
        _QWEN35,
        architecture="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        table=(*_TOP, *_ATTENTION, *_DELTA, *_NORMS, *_EXPERTS, *_SHARED),
        defaults=_QWEN35.defaults
        | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "norm_topk_prob": True}
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    ),
    Family(
        "GraniteForCausalLM",
        "granite",
        has_windows=False,
        required={"attention_bias": False, "mlp_bias": False},
        defaults=_GRANITE,
    ),
    Family(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        table=(
            *(*_TOP, *_ATTENTION, *_MAMBA_LAYER, *_NORMS),
            *_gate_and_up("shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight"),
        ),
        has_windows=False,
        required={"attention_bias": False, "num_local_experts": 0, "mamba_conv_bias": True, "mamba_proj_bias": False}
        | {"normalization_function": "rmsnorm"},
        defaults=_GRANITE
        | {"num_local_experts": 8, "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1}
        | {"mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2},
    ),
    Family(
        "Glm4ForCausalLM",
        "glm4",
        table=(
            *(*_TOP, *_ATTENTION, *_GLM_NORMS),
            *_gate_and_up("mlp.gate_up_proj.weight", "mlp.down_proj.weight"),
        ),
        fixed={"post_norms": True},
        has_windows=False,
        defaults=_GLM | {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
    ),
    Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        table=(*_TOP, *_ATTENTION, *_NORMS, *_FIRST_DENSE, *_EXPERTS, *_SHARED_EXPERTS, *_CORRECTION),
        has_windows=False,
        defaults=_GLM
        | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "n_routed_experts": 128, "n_shared_experts": 1}
        | {"num_experts_per_tok": 8, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1}
        | {"topk_group": 1, "first_k_dense_replace": 1, "intermediate_size": 10_944, "moe_intermediate_size": 1408},
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        table=(*_TOP, *_LATENT, *_NORMS, *_FIRST_DENSE, *_EXPERTS, *_SHARED_EXPERTS, *_CORRECTION),
        has_windows=False,
        required={"attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        defaults=_DEEPSEEK
        | {"n_routed_experts": 256, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}
        | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "q_lora_rank": 1536, "qk_nope_head_dim": 128}
        | {"v_head_dim": 128, "intermediate_size": 18_432, "moe_intermediate_size": 2048, "rms_norm_eps": 1e-6},
    ),
    Family(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        table=(*_TOP, *_LATENT, *_NORMS, *_FIRST_DENSE, *_EXPERTS, *_SHARED_EXPERTS, *_CORRECTION),
        has_windows=False,
        required={"attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        defaults=_DEEPSEEK
        | {"n_routed_experts": 64, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4}
        | {"routed_scaling_factor": 1.8, "q_lora_rank": 768, "qk_nope_head_dim": 192}
        | {"v_head_dim": 256, "intermediate_size": 10_240, "moe_intermediate_size": 1536, "rms_norm_eps": 1e-5},
    ),
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        table=(*_TOP, *_ATTENTION, *_NORMS, *_OSS_LAYER),
        fixed={"qkv_bias": True, "activation": "clamped_swiglu"},
        required={"attention_bias": True, "hidden_act": "silu", "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        defaults={"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5}
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "norm_topk_prob": True},
    ),
    Family(
        "Ministral3ForCausalLM",
        "ministral3",
        required={"attention_bias": False},
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    ),
)


_DEEPSEEK_V3, _GLM_LITE = (
    next(family for family in FAMILIES if family.model_type == name) for name in ("deepseek_v3", "glm4_moe_lite")
)
_INDEXED = _DEEPSEEK_V3.required | {"mlp_bias": False, "rope_interleave": True}
FAMILIES += (
    replace(
        _DEEPSEEK_V3,
        architecture="DeepseekV32ForCausalLM",
        model_type="deepseek_v32",
        required=_INDEXED,
        defaults=_DEEPSEEK_V3.defaults | {"index_topk": 2048},
    ),
    replace(
        _GLM_LITE,
        architecture="GlmMoeDsaForCausalLM",
        model_type="glm_moe_dsa",
        required=_INDEXED,
        defaults=_GLM_LITE.defaults
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "q_lora_rank": 2048}
        | {"first_k_dense_replace": 3, "intermediate_size": 12_288, "moe_intermediate_size": 2048, "index_topk": 2048},
    ),
)
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
FAMILIES += (
    Family(
        "Gemma4ForCausalLM",
        "gemma4_text",
        table=(*_TOP, *_ATTENTION, *_FULL_ATTENTION, *_GEMMA_NORMS, *_MLP, *_GEMMA4_LAYER),
        fixed={"post_norms": True, "qk_norm": True},
        required={"attention_bias": False},
        defaults={key: value for key, value in _GEMMA_DEFAULTS.items() if key != "query_pre_attn_scalar"}
        | {"sliding_window": 512, "global_head_dim": 512, "hidden_size_per_layer_input": 256, "rms_norm_eps": 1e-6}
        | {"vocab_size_per_layer_input": 262_144}
        | {"rope_parameters": _GEMMA4_ROPE, "norm_topk_prob": True},
    ),
    Family(
        "Llama4ForCausalLM",
        "llama4_text",
        table=(*_TOP, *_ATTENTION, *_NORMS, *_LLAMA4_LAYER),
        required={"attention_bias": False},
        defaults={"rope_theta": 500_000.0, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
        | {"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": True}
        | {"floor_scale": 8192, "attn_scale": 0.1, "use_qk_norm": True, "interleave_moe_layer_step": 1}
        | {
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384,
        }
        | {"norm_topk_prob": False},
    ),
)


class UnsupportedModelError(ValueError):
    """A published model that this package cannot compute exactly; the message names the reason."""


TEXT_PARTS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Model type of the text part of a vision-language model -> model type of the family that computes the same. For text
the positions of the three rotary sections are equal."""
_LEFT_OUT = {"num_attention_heads": 8, "vocab_size": 262_208, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6}
TEXT_DEFAULTS: dict[Any, Json] = {"gemma3_text": _LEFT_OUT}
"""Keys that the text part of a published vision-language model leaves out, with the defaults of transformers."""
_TOP_KEYS = ("torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
"""Keys of the complete configuration that also apply to its text part."""
_VISION_KEYS = re.compile("vision_.*|(image|video|audio)_token_(id|index)|text_config")


def text_part(config: Json) -> Json:
    """The `config.json` of the text model within a vision-language model; any other is returned unchanged.

    Raises:
        UnsupportedModelError: its family is not known here.
    """
    if not isinstance(config.get("vision_config"), Mapping):
        return config
    if isinstance(config.get("text_config"), Mapping):
        text = {key: config[key] for key in _TOP_KEYS if config.get(key) is not None} | dict(config["text_config"])
        kind = text.get("model_type")
        text = {**TEXT_DEFAULTS.get(kind, {}), **text}
    else:  # the first Qwen2-VL and Qwen2.5-VL have the keys of both at one level
        text = {key: value for key, value in config.items() if not _VISION_KEYS.fullmatch(key)}
        kind = f"{config.get('model_type')}_text"
    kind = TEXT_PARTS.get(kind, kind)
    matches = [family for family in FAMILIES if family.model_type == kind]
    if not matches:
        known = ", ".join([*TEXT_PARTS, *(family.model_type for family in FAMILIES)])
        raise UnsupportedModelError(f"config.json: the text part {kind!r} is not supported; known are {known}")
    text = {key: value for key, value in text.items() if not key.startswith("mtp_")}  # its tensors are left out too
    tied = [part["tie_word_embeddings"] for part in (config, text) if part.get("tie_word_embeddings") is not None]
    text |= {"tie_word_embeddings": any(tied)} if tied else {}
    return text | {"architectures": [matches[0].architecture], "model_type": kind}


def find_family(config: Json) -> Family:
    """The family that `architectures` (or `model_type`) of a `config.json` names.

    Raises:
        UnsupportedModelError: the family is not known here.
    """
    names = config.get("architectures") or ()
    for family in FAMILIES:
        if names[:1] == [family.architecture] or (not names and config.get("model_type") == family.model_type):
            return family
    got = names[0] if names else config.get("model_type")
    known = ", ".join(family.architecture for family in FAMILIES)
    raise UnsupportedModelError(f"config.json: the architecture {got!r} is not supported; known are {known}")


def rules(family: Family, config: ModelConfig) -> list[TensorRule]:
    """The rows of the family's table for the leaves that this model has."""
    absent = set() if config.qkv_bias else {"bq", "bk", "bv"}
    absent |= set() if config.qk_norm else {"q_norm", "k_norm"}
    absent |= {"unembed"} if config.tie_embeddings else set()
    absent |= set() if config.delta else {rule.leaf for rule in (*_MAMBA_LAYER, *_DELTA)}
    absent |= set() if config.extras.latent_query else {"q_down", "q_latent_norm"}
    absent |= set() if config.experts.dense_ff or config.windows.shared_ff else {"d_gate", "d_up", "d_down"}
    absent |= set() if config.extras.layer_embed else {rule.leaf for rule in _GEMMA4_INPUTS}
    absent |= {f"{FULL}wv"} if config.windows.full_keys_as_values else set()
    absent |= set() if config.experts.shared else {"s_gate", "s_up", "s_down"}
    if family.model_type == "gemma4_text":
        absent |= set() if config.experts.count else {"router", "router_scale", "expert_scale"}
        absent |= set() if config.experts.count else {"e_norm", "e_post_norm", "s_post_norm"}
    table = [rule for rule in family.table if rule.leaf not in absent]
    if family.model_type == "gemma4_text":
        other = ".mlp." if config.experts.count else ".experts."
        table = [rule for rule in table if not (rule.leaf.startswith("w_") and other in rule.name)]
    if not family.latent:
        return table
    inputs = "Z" if config.extras.latent_query else "D"
    return [rule for rule in table if rule.leaf != "wq" or rule.order.startswith(inputs)]


class Layout:
    """The dimensions of a rule with their sizes, which map the layout of the leaf to the published one."""

    def __init__(self, rule: TensorRule, config: ModelConfig):
        sizes = {"D": config.d_model, "N": config.heads, "K": config.kv_heads, "H": config.head_dim}
        sizes |= {"F": config.d_ff, "V": config.vocab_size, "E": config.experts.count}
        sizes |= {"G": config.experts.shared, "I": config.experts.dense_ff or config.windows.shared_ff}
        sizes |= {"S": config.layers, "T": config.extras.layer_embed}
        sizes |= {"C": config.windows.full_kv_heads, "A": config.windows.full_head_dim}
        extras = config.extras
        sizes |= {"L": extras.latent, "Z": extras.latent_query, "P": extras.latent_key + extras.latent_value}
        sizes |= {"O": extras.latent_value}
        query = extras.latent_key + config.rotary_dim if extras.latent else config.head_dim
        sizes |= {"Q": (2 if config.gated_attention else 1) * query, "1": 1, "Y": 1}
        self.parts: tuple[int, ...] = ()
        """Widths that make up the second dimension of "(J X)" and "(J R)"; empty in other rules."""
        self.backwards = "J R" in rule.dims
        """Whether the last part is stored first."""
        if config.delta:
            delta, self.parts = config.delta, channels(config.delta) if re.search("J [XR]", rule.dims) else ()
            sizes |= {"J": delta.key_heads, "X": sum(channels(delta)), "M": delta.value_heads}
            sizes["R"] = sizes["X"]
            sizes |= {"U": delta.value_dim, "W": delta.conv}
        before = (math.prod(sizes[letter] for letter in dims.split()) for dims in rule.before)
        self.groups = [(merged or single).split() for merged, single in re.findall(r"\((.+?)\)|(\w)", rule.dims)]
        order = rule.order.split()
        split = [letter for group in self.groups for letter in group if letter != "1"]
        self.shape = tuple(sizes[letter] for letter in order)
        self.published_shape = tuple(math.prod(sizes[letter] for letter in group) for group in self.groups)
        self.permutation = tuple(order.index(letter) for letter in split)
        """Axes of the leaf in the published order."""
        self._order, self._sizes, self._first = order, sizes, sum(before)

    def blocked(self, block: int) -> "Layout | None":
        """The layout of one number for each block of inputs of a row; None if blocks do not follow the dimensions."""
        layout, left = copy(self), block
        layout._sizes = dict(self._sizes)
        for letter in reversed(self.groups[-1]):
            size = self._sizes[letter]
            factor = math.gcd(size, left)
            if factor != min(size, left):
                return None
            layout._sizes[letter], left = size // factor, left // factor
        if left > 1:
            return None
        layout.shape = tuple(layout._sizes[letter] for letter in self._order)
        layout.published_shape = tuple(math.prod(layout._sizes[letter] for letter in group) for group in self.groups)
        return layout

    def published_index(self, index: Sequence[slice]) -> list[slice]:
        """The slice of the published tensor that holds a slice of the leaf. Only the outer part of a merged dimension
        may be cut."""
        bounds = {letter: cut.indices(self._sizes[letter])[:2] for letter, cut in zip(self._order, index, strict=True)}
        bounds["1"] = (0, 1)
        result = []
        for outer, *inner in self.groups:
            if any(bounds[letter] != (0, self._sizes[letter]) for letter in inner):
                raise AssertionError(
                    f"dimension {inner} is cut; shardings may cut only the outer part of a merged dimension"
                )
            width = math.prod(self._sizes[letter] for letter in inner)
            first = 0 if result else self._first
            result.append(slice(*(first + bound * width for bound in bounds[outer])))
        return result

    def pieces(self, index: Sequence[slice]) -> Iterator[tuple[list[slice], tuple[slice, ...]]]:
        """(slice of the published tensor, its place in that slice of the leaf in published order), piece by piece."""
        published = self.published_index(index)
        if not self.parts:
            yield published, ()
            return
        bounds = (published[0].start - self._first, published[0].stop - self._first)
        first, last = (bound // sum(self.parts) for bound in bounds)
        stored = self._first
        ends = np.cumsum(self.parts)
        starts = [*zip(ends - self.parts, self.parts, strict=True)]
        for start, width in reversed(starts) if self.backwards else starts:
            rows = slice(*(int(stored + head * width) for head in (first, last)))
            yield [rows, *published[1:]], (slice(None), slice(int(start), int(start + width)))
            stored += self._sizes["J"] * width

    def to_published(self, leaf: np.ndarray) -> np.ndarray:
        """The published tensor, from a complete leaf."""
        value = leaf.transpose(self.permutation).reshape(self.published_shape)
        return value[self.row_order()] if self.parts else value

    def row_order(self) -> np.ndarray | slice:
        """For each published row, its index among the rows of the leaf."""
        if not self.parts:
            return slice(None)
        rows = np.arange(self.published_shape[0]).reshape(self._sizes["J"], -1)
        parts = np.split(rows, np.cumsum(self.parts)[:-1], axis=1)
        return np.concatenate([part.ravel() for part in (reversed(parts) if self.backwards else parts)])
