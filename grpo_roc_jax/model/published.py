"""`config.json` of published models, read into a `ModelConfig` and written from one.

Every key is read, known to have no effect, or refused by name with its value. Keys of transformers 4 (`rope_theta`,
`rope_scaling`) and 5 (`rope_parameters`) are read. The former are written, since both versions read them.
"""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from grpo_roc_jax.model.config import (
    DenseFeedForward,
    Extras,
    GatedDelta,
    Mixture,
    ModelConfig,
    NoExtras,
    NoWindows,
    SlidingWindows,
    SomeExtras,
    bounded,
)
from grpo_roc_jax.model.families import FAMILIES, Family, Json, UnsupportedModelError, find_family, text_part
from grpo_roc_jax.model.rope_scaling import LongRopeScaling, NoRopeScaling, RopeScaling, YarnRopeScaling
from grpo_roc_jax.settings.cli import describe_error
from grpo_roc_jax.settings.options import fields_of

log = logging.getLogger(__name__)

_READ_TOGETHER = {"_sliding_window_pattern", "architectures", "max_window_layers", "model_type"}
_READ_TOGETHER |= {"sliding_window_pattern", "use_sliding_window"}
"""Keys that are read together with another one, where it matters."""

_WITHOUT_EFFECT = {
    "how transformers runs it": """
        _attn_implementation _attn_implementation_autoset cache_implementation chunk_size_feed_forward dtype is_decoder
        is_encoder_decoder mamba_ssm_dtype output_attentions output_hidden_states pretraining_tp return_dict torch_dtype
        use_cache
    """,
    "training": "attention_dropout initializer_range router_aux_loss_coef",
    "origin": "_name_or_path transformers_version",
    "tokens": "bos_token_id eos_token_id pad_token_id tokenizer_class unk_token_id",
    "other heads": "id2label label2id problem_type",
}
"""Keys in common use without effect on the logits of this package, by what they are about."""

_SELDOM = {
    "origin": """
        _commit_hash _model_name_or_path auto_map base_model_name_or_path is_llama_config model_name name_or_path
        _from_model_config custom_pipelines library_name mtp_.* quantized_by unsloth_.*
    """,
    "how transformers runs it": """
        _attn_implementation_internal _experts_implementation _experts_implementation_internal _flash_attn_.*
        attn_implementation base_model_ep_plan base_model_pp_plan base_model_tp_plan compile_config disable_compile
        distributed_config experts_implementation gradient_checkpointing keys_to_ignore_at_inference
        output_router_logits return_dict_in_generate sliding_window_size tf_legacy_loss torchscript
        use_bfloat16 use_flash_attention(_2)? use_return_dict transformers\\.js_config
    """,
    "training": """
        attn_pdrop classifier_dropout embd_pdrop embedding_dropout ffn_dropout_rate hidden_dropout
        hidden_dropout_prob initializer_factor residual_dropout resid_pdrop router_jitter_noise
    """,
    "tokens and generation": """
        (boi|boa|eoa|eoi|image|audio|video)_token_(id|index) (decoder_start|mask|cls|sep|forced_bos|forced_eos)_token_id
        add_bos_token add_eos_token bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
        encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
        exponential_decay_length_penalty force_words_ids guidance_scale length_penalty max_length max_new_tokens
        max_time min_length min_new_tokens min_p mm_tokens_per_image model_max_length no_repeat_ngram_size
        num_beam_groups num_beams num_return_sequences output_logits output_scores penalty_alpha prefix
        remove_invalid_values renormalize_logits repetition_penalty sequence_bias stop_strings suppress_tokens
        temperature token_healing tokenizer_model_max_length tokenizer_padding_side top_k top_p typical_p
        watermarking_config
    """,
    "other heads": "finetuning_task num_labels task_specific_params",
}
"""Patterns of such keys that tools leave behind; they are ignored with a note."""

_COMMON = frozenset(" ".join(_WITHOUT_EFFECT.values()).split())
_NOTED = re.compile("|".join(" ".join(_SELDOM.values()).split()))

_MEANINGLESS = (None, False, 0, 0.0, [], {}, "")
"""Values under which an unknown key enables nothing; `_refuse_not_causal` has the keys that are true by default."""


def without_effect(key: str) -> str:
    """Whether a key of a `config.json` never changes what is computed, whatever its value: `silent` for keys in common
    use, `noted` for other keys, empty if it may. All other modules ask this function."""
    return "silent" if key in _COMMON else "noted" if _NOTED.fullmatch(key) else ""


_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

_ROPE_SCALINGS = {
    "default": {},
    "linear": {"factor": "factor"},
    "proportional": {"partial_rotary_factor": "share", "factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq",
        "high_freq_factor": "high_freq",
        "original_max_position_embeddings": "original_length",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_length",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
    },
    "longrope": {
        "short_factor": "short",
        "long_factor": "long",
        "original_max_position_embeddings": "original_length",
        "attention_factor": "attention_factor",
    },
}
"""Published kind of rescaling of the rotary frequencies -> its published parameters and our settings."""

_OPTIONAL = {"beta_fast", "beta_slow", "truncate", "attention_factor"}
"""Published parameters that may be missing."""


@bounded
def read_config(published: Json, ignore_keys: Sequence[str] = ()) -> ModelConfig:
    """The `ModelConfig` that a published `config.json` describes.

    Raises:
        UnsupportedModelError: it has an architecture, option or key that is not supported; the message names it.
    """
    published = text_part(published)
    family = find_family(published)
    published = _Keys(published, family, ignore_keys)
    _refuse_not_causal(published, family)
    d_model, heads = published["hidden_size"], published["num_attention_heads"]
    mixes = family.has_experts and (family.model_type != "gemma4_text" or bool(published.get("enable_moe_block")))
    experts = _experts(published, family) if mixes else DenseFeedForward()
    theta, local_theta, scaling = _rope(published, family)
    sizes = _windows(published, family)
    window_options = _own_windows(published, family)
    windows = SlidingWindows(sizes or (0,), local_theta, **window_options) if sizes or local_theta else NoWindows()
    fields = dict(
        d_model=d_model,
        layers=published["num_hidden_layers"],
        heads=heads,
        kv_heads=published.get("num_key_value_heads") or heads,
        head_dim=published.get("head_dim") or d_model // heads,
        d_ff=published[_width_key(family) if mixes or not family.has_experts else "intermediate_size"],
        vocab_size=published["vocab_size"],
        norm_eps=published["rms_norm_eps"],
        tie_embeddings=bool(published.get("tie_word_embeddings", False)),
        extras=_extras(published, family),
        max_positions=published.get("max_position_embeddings") or 0,
        rope_theta=theta,
        rope_scaling=scaling,
        windows=_recurrent(published, family) or windows,
        experts=experts,
    )
    fields |= _stated(published, family)
    try:
        config = ModelConfig(**fields)
    except ValueError as error:
        raise UnsupportedModelError(f"config.json of a {family.architecture}: {describe_error(error)}") from error
    for key in family.unused:
        published.get(key)
    stored = published.peek("quantization_config")
    stored = stored if isinstance(stored, dict) else {}
    if stored.get("load_in_4bit") and stored.get("bnb_4bit_quant_type") == "nf4":
        published.get("quantization_config")  # `bitsandbytes_io` reads these matrices
    if family.model_type == "gpt_oss" and stored.get("quant_method") == "mxfp4":
        published.get("quantization_config")  # `mxfp4` unpacks them
    published.refuse_rest()
    return config


class _Keys:
    """A `config.json` that remembers which of its keys were read."""

    def __init__(self, config: Json, family: Family, ignore_keys: Sequence[str]):
        self._config = {**(family.defaults or {}), **config}
        self._family = family
        self._ignored = frozenset(ignore_keys)
        self._read = set(ignore_keys) | _READ_TOGETHER | {key for key in config if without_effect(key) == "silent"}
        for key, value in (family.required or {}).items():
            self._read.add(key)
            if self._config.get(key, value) != value and (self._config[key] or value):
                raise UnsupportedModelError(
                    f"config.json of a {family.architecture}: {key} = {self._config[key]!r} is not supported, "
                    f"must be {value!r}"
                )

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        if self._config.get(key) is None:
            raise UnsupportedModelError(f"config.json of a {self._family.architecture} lacks {key}")
        return self._config[key]

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self._config.get(key, default)

    def ignores(self, key: str) -> bool:
        """Whether the settings say that a key has no effect."""
        return key in self._ignored

    def ignores_rotary(self, key: str) -> bool:
        """Whether the settings say that a parameter of the rotary rescaling has no effect."""
        return self.ignores(f"rope_scaling.{key}") or self.ignores(f"rope_parameters.{key}")

    def peek(self, key: str) -> Any:
        """The value of a key, which still counts as not read."""
        return self._config.get(key)

    def refuse_rest(self) -> None:
        rest = [key for key, value in self._config.items() if key not in self._read and value not in _MEANINGLESS]
        ignored = [key for key in rest if self._harmless(key)]
        if ignored:
            note(f"config.json of a {self._family.architecture}: ignored, without effect: {', '.join(sorted(ignored))}")
        rest = [key for key in rest if key not in ignored]
        if rest:
            listing = ", ".join(f"{key} = {self._config[key]!r}" for key in sorted(rest))
            raise UnsupportedModelError(
                f"config.json of a {self._family.architecture}: not supported: {listing}; if it has no effect, list "
                f"it in model.ignore_keys"
            )

    def _harmless(self, key: str) -> bool:
        value = self._config[key]
        if key == "layer_types":  # of a family without windows
            return isinstance(value, list) and all(kind == "full_attention" for kind in value)
        return without_effect(key) == "noted"


def _refuse_not_causal(published: _Keys, family: Family) -> None:
    """Refuses a model whose tokens attend to later ones. These keys are true by default, so false is not neutral."""
    for key in ("is_causal", "causal"):
        value = published.get(key, True)
        if value is not True and not published.ignores(key):
            raise UnsupportedModelError(
                f"config.json of a {family.architecture}: {key} = {value!r}; this model reads a text in both "
                "directions, and only causal ones can be trained here"
            )


def _width_key(family: Family) -> str:
    """The key of the width of a feed-forward, or of an expert."""
    if family.model_type == "granitemoehybrid":
        return "shared_intermediate_size"
    with_experts = family.has_experts and family.model_type not in ("gpt_oss", "llama4_text")
    return "moe_intermediate_size" if with_experts else "intermediate_size"


def _stated(published: _Keys, family: Family) -> dict[str, Any]:
    """Fields that some architectures imply and others state."""
    fields: dict[str, Any] = {}
    if "activation" not in (family.fixed or {}):
        fields["activation"] = _activation(published, family)
    if family.states_bias:
        fields["qkv_bias"] = bool(published.get("attention_bias", False))
    if family.model_type == "glm4_moe":
        fields["qk_norm"] = bool(published.get("use_qk_norm", False))
    if family.latent:
        fields |= {"kv_heads": 1, "head_dim": published["kv_lora_rank"] + published["qk_rope_head_dim"]}
    return fields | dict(family.fixed or {})


@cache
def note(text: str) -> None:
    """Logs a text once; a `config.json` is read several times in a run."""
    log.warning(text)


def _activation(published: _Keys, family: Family) -> str:
    key = "hidden_activation" if family.gemma else "hidden_act"
    name = published[key] if family.gemma else published.get(key) or "silu"
    if name not in _ACTIVATIONS:
        known = " or ".join(_ACTIVATIONS)
        raise UnsupportedModelError(f"config.json: {key} = {name!r} is not supported; must be {known}")
    return _ACTIVATIONS[name]


def _extras(published: _Keys, family: Family) -> Extras:
    """The optional steps of this family; none if all have their neutral value."""
    settings: dict[str, Any] = {}
    if family.model_type == "gemma4_text":
        settings = {"scale_embed": True, "query_scale": 1.0, "value_norm": True, "layer_factors": True}
        settings["logit_cap"] = float(published.get("final_logit_softcapping") or 0)
        settings["layer_embed"] = _layer_embed(published, family)
    elif family.gemma:
        settings = {"scale_embed": True, "query_scale": float(published["query_pre_attn_scalar"])}
    if family.model_type == "gemma2":
        caps = {"attention_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}
        settings |= {name: float(published.get(key) or 0) for name, key in caps.items()}
    if family.partly_rotary:
        parameters = published.get("rope_parameters") or published.get("rope_scaling") or {}
        top = published.get("partial_rotary_factor")
        settings = {"rotary_share": float(parameters.get("partial_rotary_factor") or top or 1.0)}
    if family.model_type == "smollm3":
        rotary = _rotary_layers(published)
        settings = {"rotary_layers": () if all(rotary) else _period(rotary)}
    if family.model_type == "glm4":
        settings["rotary_pairs"] = True
    if family.model_type == "llama4_text":
        settings = _llama4(published)
    if family.latent:
        settings = _latent(published) | ({"indexed_keys": published["index_topk"]} if family.indexed else {})
    if family.model_type == "gpt_oss":
        settings = {"sinks": True, "output_bias": True}
    if family.model_type == "ministral3":
        settings = _query_growth(published)
    if family.granite:
        factor = float(published["attention_multiplier"])
        settings = {
            "query_scale": _twelve_digits(factor**-2),
            "embed_factor": float(published["embedding_multiplier"]),
            "residual_factor": float(published["residual_multiplier"]),
            "logit_divisor": float(published["logits_scaling"]),
        }
    if family.model_type == "granitemoehybrid":
        kind = published.get("position_embedding_type")
        if kind not in ("rope", "nope", None):
            raise UnsupportedModelError(
                f"config.json of a {family.architecture}: position_embedding_type = {kind!r} is not supported; must be "
                "rope or nope"
            )
        settings["rotary_layers"] = () if kind == "rope" else (False,)
    extras = SomeExtras(**settings)
    return NoExtras() if extras == SomeExtras() else extras


def _llama4(published: _Keys) -> dict[str, Any]:
    rotary = _rotary_layers(published)
    settings = {"rotary_pairs": True, "rotary_layers": () if all(rotary) else _period(rotary)}
    settings["rotated_norm"] = bool(published.get("use_qk_norm"))
    if published.get("attn_temperature_tuning") and not all(rotary):
        settings |= {"query_growth": float(published["attn_scale"]), "query_length": published["floor_scale"]}
        settings["query_unrotated"] = True
    return settings


def _layer_embed(published: _Keys, family: Family) -> int:
    """The width of a Gemma 4's embedding of each layer, 0 for none."""
    width, rows = published.get("hidden_size_per_layer_input") or 0, published.get("vocab_size_per_layer_input")
    if width and rows != published["vocab_size"]:
        raise UnsupportedModelError(
            f"config.json of a {family.architecture}: vocab_size_per_layer_input = {rows} is not supported, must be "
            f"vocab_size = {published['vocab_size']}"
        )
    return width


def _own_windows(published: _Keys, family: Family) -> dict[str, Any]:
    """What windows mean in this family, and what its layers without one have of their own."""
    if family.model_type == "llama4_text":
        return {"chunked": True}
    if family.model_type != "gemma4_text":
        return {}
    if published.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise UnsupportedModelError(
            f"config.json of a {family.architecture}: use_bidirectional_attention = "
            f"{published['use_bidirectional_attention']!r} is not supported"
        )
    joined = bool(published.get("attention_k_eq_v"))
    global_kv_heads = published.get("num_global_key_value_heads") if joined else None
    heads = {
        "head_dim": published["global_head_dim"],
        "num_key_value_heads": global_kv_heads or published["num_key_value_heads"],
    }
    if stated := published.get("per_layer_config"):  # as transformers 5 writes it
        types = published.get("layer_types") or _layer_types(published, family, published["num_hidden_layers"])
        full = {i for i, kind in enumerate(types) if kind == "full_attention"}
        entries = [dict(entry) for entry in stated.values()]
        heads = {"num_key_value_heads": published["num_key_value_heads"]} | entries[0]
        if {int(key) for key in stated} != full or entries != entries[:1] * len(full) or len(heads) != 2:
            raise UnsupportedModelError(
                f"config.json of a {family.architecture}: per_layer_config = {stated!r} is not supported; must give "
                "all layers of full_attention, and only these, the same head_dim and num_key_value_heads"
            )
    return {
        "full_head_dim": heads["head_dim"],
        "full_kv_heads": heads["num_key_value_heads"],
        "full_keys_as_values": joined,
        **_shared_keys(published, family),
    }


def _shared_keys(published: _Keys, family: Family) -> dict[str, int]:
    """How many last layers of a Gemma 4 read the keys of earlier ones, and the width of their feed-forward."""
    layers, wide = published.get("num_kv_shared_layers") or 0, bool(published.get("use_double_wide_mlp"))
    if layers and wide and published.get("enable_moe_block"):
        raise UnsupportedModelError(
            f"config.json of a {family.architecture}: use_double_wide_mlp with enable_moe_block is not supported"
        )
    return {"shared_layers": layers, "shared_ff": 2 * published["intermediate_size"] if layers and wide else 0}


def _twelve_digits(number: float) -> float:
    """The number with twelve digits: a factor, its inverse square, and the inverse root of that are then one value."""
    return float(f"{number:.12g}")


def _latent(published: _Keys) -> dict[str, Any]:
    """The widths of latent attention, and the factor of its scores, which grows with the rotary rescaling."""
    key, value = published["qk_nope_head_dim"], published["v_head_dim"]
    parameters = published.get("rope_parameters") or published.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    growth = parameters.get("mscale_all_dim") if kind != "default" else 0.0
    scale = float(key + published["qk_rope_head_dim"])
    if growth:
        scale = _twelve_digits(scale / (0.1 * growth * math.log(max(parameters["factor"], 1.0)) + 1.0) ** 4)
    return {
        "latent": published["kv_lora_rank"],
        "latent_query": published.get("q_lora_rank") or 0,
        "latent_key": key,
        "latent_value": value,
        "rotary_pairs": bool(published["rope_interleave"]) if published.get("rope_interleave") else False,
        "query_scale": scale,
    }


def _query_growth(published: _Keys) -> dict[str, Any]:
    """The growth of queries with their position, which a Ministral 3 states with the rotary rescaling."""
    parameters = published.get("rope_parameters") or published.get("rope_scaling") or {}
    growth = float(parameters.get("llama_4_scaling_beta") or 0.0)
    length = int(parameters["original_max_position_embeddings"]) if growth else 0
    return {"query_growth": growth, "query_length": length}


def _rotary_layers(published: _Keys) -> tuple[bool, ...]:
    """Whether each layer of a SmolLM3 is rotated."""
    layers, every = published["num_hidden_layers"], published["no_rope_layer_interval"]
    stated = published.get("no_rope_layers") or [(i + 1) % every for i in range(layers)]
    if len(stated) < layers:
        raise UnsupportedModelError(f"config.json: no_rope_layers has {len(stated)} entries for {layers} layers")
    return tuple(map(bool, stated[:layers]))


def _windows(published: _Keys, family: Family) -> tuple[int, ...]:
    """The window of each layer, as the shortest sequence that repeats."""
    if not family.has_windows:
        return ()
    window, layers = published.get("sliding_window"), published["num_hidden_layers"]
    if family.model_type == "llama4_text":
        return _chunks(published, layers)
    types = published.get("layer_types")
    if not window or (family.optional_windows and not published.get("use_sliding_window", False)):
        window = 0
    if family.model_type == "phi3" and window >= (published.get("max_position_embeddings") or window + 1):
        window = 0  # Phi-4-mini has windows that are longer than its rows
    if family.one_window and window and set(types or ()) - {"sliding_attention"}:
        raise UnsupportedModelError(
            f"config.json of a {family.architecture}: layer_types = {types!r} with sliding_window = {window}: in "
            "transformers all layers of this family have the window; remove layer_types, or set sliding_window to null"
        )
    if types is None:
        types = _layer_types(published, family, layers)
    if family.model_type == "gemma4_text" and types:
        types = [*types[:-1], "full_attention"]  # as transformers does
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != layers:
        raise UnsupportedModelError(
            f"config.json: layer_types = {types!r} is not supported; must be sliding_attention or full_attention for "
            f"each of {layers} layers"
        )
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    return _period(windows) if any(windows) else ()


def _chunks(published: _Keys, layers: int) -> tuple[int, ...]:
    """The length of the chunks of each layer of a Llama 4, or 0."""
    size = published.get("attention_chunk_size") or 0
    rotary = _rotary_layers(published)
    types = published.get("layer_types") or ["chunked_attention" if yes else "full_attention" for yes in rotary]
    if set(types) - {"chunked_attention", "full_attention"} or len(types) != layers:
        raise UnsupportedModelError(
            f"config.json: layer_types = {types!r} is not supported; must be chunked_attention or full_attention for "
            f"each of {layers} layers"
        )
    chunks = tuple(size if kind == "chunked_attention" else 0 for kind in types)
    return _period(chunks) if any(chunks) else ()


def _period(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shortest sequence that repeats to `values`."""
    lengths = range(1, len(values) + 1)
    return next(values[:n] for n in lengths if all(value == values[i % n] for i, value in enumerate(values)))


def _layer_types(published: _Keys, family: Family, layers: int) -> list[str]:
    sliding, full = "sliding_attention", "full_attention"
    every = {"gemma2": 2, "gemma3_text": published.get("sliding_window_pattern") or 6, "olmo3": 4, "gpt_oss": 2}
    every["gemma4_text"] = 6
    if family.model_type in every:
        return [sliding if (i + 1) % every[family.model_type] else full for i in range(layers)]
    if family.model_type == "smollm3":
        return [full if rotated else sliding for rotated in _rotary_layers(published)]
    if family.model_type.startswith("qwen") and not family.one_window:
        first = published.get("max_window_layers")
        return [sliding if first is not None and i >= first else full for i in range(layers)]
    return [sliding] * layers


def _recurrent(published: _Keys, family: Family) -> GatedDelta | None:
    """The settings of the recurrent layers, if there are any."""
    if family.recurrent:
        return _gated_delta(published)
    if family.model_type != "granitemoehybrid":
        return None
    heads, width = published["mamba_n_heads"], published["mamba_d_head"]
    inner = published["mamba_expand"] * published["hidden_size"]
    width = inner // heads if width == "auto" else width
    groups, state, conv = (published[f"mamba_{name}"] for name in ("n_groups", "d_state", "d_conv"))
    limit = published.get("time_step_limit")
    # transformers 5 writes infinity as {"__float__": "Infinity"}.
    low, high = (float(end["__float__"] if isinstance(end, dict) else end) for end in limit or (0.0, math.inf))
    kinds = {"attention": True, "full_attention": True, "mamba": False, "linear_attention": False}
    types = published.get("layer_types") or published.get("layers_block_type") or ()
    if set(types) - set(kinds) or len(types) != published["num_hidden_layers"] or low > 0 or high < math.inf:
        raise UnsupportedModelError(
            f"config.json of a {family.architecture}: layer_types = {types!r} with time_step_limit = {limit!r} is not "
            "supported; must be attention or mamba for each layer, and no limit"
        )
    attends = _period(tuple(kinds[kind] for kind in types))
    if all(attends):
        return None
    attention = tuple(i for i, yes in enumerate(attends) if yes)
    if not attention:
        raise UnsupportedModelError(f"config.json of a {family.architecture} without a layer of attention")
    sizes = {"key_heads": groups, "value_heads": heads, "key_dim": state, "value_dim": width, "conv": conv}
    return GatedDelta(**sizes, every=len(attends), attention=attention, form="mamba2")


def _gated_delta(published: _Keys) -> GatedDelta:
    layers, every = published["num_hidden_layers"], published.get("full_attention_interval")
    types = published.get("layer_types")
    if types:
        every = types.index("full_attention") + 1 if "full_attention" in types else layers + 1
    kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if types not in (None, kinds) or every > layers:
        raise UnsupportedModelError(
            f"config.json: layer_types = {types!r} is not supported; must be full_attention after every so many layers "
            f"of linear_attention, for {layers} layers"
        )
    return GatedDelta(
        key_heads=published["linear_num_key_heads"],
        value_heads=published["linear_num_value_heads"],
        key_dim=published["linear_key_head_dim"],
        value_dim=published["linear_value_head_dim"],
        every=every,
        conv=published["linear_conv_kernel_dim"],
    )


def _rope(published: _Keys, family: Family) -> tuple[float, float, RopeScaling]:
    """(theta, theta of layers with a window or 0, rescaling), from `rope_parameters` (transformers 5) or from
    `rope_theta` and `rope_scaling` (4)."""
    parameters, theta, local = _rope_parameters(published, family)
    kind, scaling = _rescaling(published, family, parameters)
    if family.model_type == "olmo3":  # only layers without a window are rescaled
        local = 0.0 if kind == "default" and local in (0.0, theta) else local or theta
    if kind == "default":
        return float(theta), float(local or 0), NoRopeScaling()
    missing = set(_ROPE_SCALINGS[kind]) - set(scaling) - _OPTIONAL
    if missing:
        raise UnsupportedModelError(f"config.json: the rotary rescaling {kind!r} lacks {', '.join(sorted(missing))}")
    parameters_read = {field: scaling[key] for key, field in _ROPE_SCALINGS[kind].items() if key in scaling}
    return float(theta), float(local or 0), RopeScaling.kinds[kind](**parameters_read)


def _rope_parameters(published: _Keys, family: Family) -> tuple[dict[str, Any], float, float]:
    """(what is stated of the rescaling, theta, theta of layers with a window or 0)."""
    parameters = published.get("rope_parameters") or {}
    olmo, gemma3 = family.model_type == "olmo3", family.model_type in ("gemma3_text", "gemma4_text")
    theta, local = published.get("rope_theta"), published.get("rope_local_base_freq") if gemma3 else 0.0
    scaling = dict(published.get("rope_scaling") or {})
    if (gemma3 or olmo) and "full_attention" in parameters:
        local = parameters["sliding_attention"].get("rope_theta", theta)
        if parameters["sliding_attention"].get("rope_type", "default") != "default":
            raise UnsupportedModelError("config.json: rescaled rotary embeddings in sliding layers are not supported")
        parameters = parameters["full_attention"]
    both = [{k: v for k, v in stated.items() if not published.ignores_rotary(k)} for stated in (parameters, scaling)]
    if all(both) and _kind_and_numbers(both[0]) != _kind_and_numbers(both[1]):
        raise UnsupportedModelError(
            "config.json has rope_parameters and rope_scaling, and they differ; remove the one that is not meant"
        )
    if not (parameters or scaling) and family.model_type in ("gpt_oss", "ministral3"):
        raise UnsupportedModelError(
            f"config.json of a {family.architecture} has no rope_parameters, for which transformers takes YaRN; state "
            "them, as in {'rope_type': 'default', 'rope_theta': 10000.0}"
        )
    stated = dict(parameters or scaling)
    theta = stated.pop("rope_theta", theta)
    if theta is None:
        raise UnsupportedModelError("config.json has no rope_theta, neither at the top level nor in rope_parameters")
    return stated, theta, local


def _rescaling(published: _Keys, family: Family, parameters: Json) -> tuple[str, dict[str, Any]]:
    """(kind of the rotary rescaling, its parameters), complete as far as others determine them.

    Raises:
        UnsupportedModelError: The kind or a parameter is not known.
    """
    kind = _rescaling_kind(parameters)
    scaling = {key: v for key, v in parameters.items() if not (key in _KIND_KEYS or _is_neutral(kind, key, v))}
    if scaling.get("partial_rotary_factor") == 1.0 or family.partly_rotary:
        scaling.pop("partial_rotary_factor", None)
    if family.model_type == "ministral3":
        for key in ("llama_4_scaling_beta", "max_position_embeddings"):
            scaling.pop(key, None)
    if kind == "yarn":
        _complete_yarn(scaling)
    if kind == "proportional":
        scaling = {"partial_rotary_factor": 1.0, "factor": 1.0} | scaling
    if family.model_type == "phi3":
        kind = "longrope" if kind in ("su", "yarn") else kind  # names in older files
        scaling.pop("original_max_position_embeddings", None)
        published.get("original_max_position_embeddings")  # of no effect without a rescaling
    if kind in ("llama3", "yarn", "longrope") and (first := published.get("original_max_position_embeddings")):
        scaling["original_max_position_embeddings"] = first  # also where the rescaling states another one
    if kind == "longrope":
        _complete_longrope(published, scaling)
    if kind not in _ROPE_SCALINGS:
        raise UnsupportedModelError(
            f"config.json: the rotary rescaling {kind!r} is not supported; known are {', '.join(_ROPE_SCALINGS)}"
        )
    place = "rope_parameters" if published.get("rope_parameters") else "rope_scaling"
    unknown = [key for key in scaling if key not in _ROPE_SCALINGS[kind] and not published.ignores_rotary(key)]
    if unknown:
        listing = ", ".join(f"{key} = {scaling[key]!r}" for key in sorted(unknown))
        raise UnsupportedModelError(
            f"config.json: the rotary rescaling {kind!r} with {listing} is not supported; if it has no effect, list it "
            f"in model.ignore_keys, as {place}.{min(unknown)}"
        )
    return kind, scaling


_KIND_KEYS = ("rope_type", "type")


def _rescaling_kind(parameters: Json) -> str:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    return "default" if kind == "mrope" else kind


def _is_neutral(kind: str, key: str, value: Any) -> bool:
    """Whether a parameter of a rotary rescaling changes nothing. The sections of a vision-language model differ in the
    positions of images only; `finetuned` says how a model was trained."""
    if key.startswith("mrope_") or key == "finetuned" or value is None:
        return True
    return (key, value) == ("attn_factor", 1) or (kind, key, value) == ("default", "factor", 1)


def _kind_and_numbers(parameters: Json) -> tuple[str, dict[str, Any]]:
    """The kind of a rotary rescaling and its numbers, without theta, the rotated share, and what changes nothing."""
    kind, left_out = _rescaling_kind(parameters), (*_KIND_KEYS, "rope_theta", "partial_rotary_factor")
    numbers = {k: v for k, v in parameters.items() if k not in left_out and not _is_neutral(kind, k, v)}
    return kind, {k: v for k, v in numbers.items() if (k, v) != ("factor", 1)}


def _complete_yarn(scaling: dict[str, Any]) -> None:
    """The factor of queries and keys from two others, as transformers computes it."""
    above, below = scaling.pop("mscale", None), scaling.pop("mscale_all_dim", None)
    if above and below and "factor" in scaling and scaling.get("attention_factor") is None:
        grown = [0.1 * part * math.log(max(scaling["factor"], 1.0)) + 1.0 for part in (above, below)]
        scaling["attention_factor"] = grown[0] / grown[1]


def _complete_longrope(published: _Keys, scaling: dict[str, Any]) -> None:
    """Adds the factor of queries and keys, which follows from how much longer texts may get."""
    first = scaling.setdefault("original_max_position_embeddings", published["max_position_embeddings"])
    factor = scaling.pop("factor", None)
    if scaling.get("attention_factor") is None:
        factor = factor or published["max_position_embeddings"] / first
        scaling["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(first)) if factor > 1 else 1.0


def _experts(published: _Keys, family: Family) -> Mixture:
    keys = ("n_routed_experts", "num_experts", "num_local_experts")
    count = next((published[key] for key in keys if published.get(key)), 0) or published["num_experts"]
    more: dict[str, Any] = {"norm_weights": bool(published["norm_topk_prob"])}
    if family.recurrent:
        more |= {"shared": published["shared_expert_intermediate_size"], "shared_gate": True}
    if family.model_type == "gpt_oss":
        more["biases"] = True
    if family.model_type == "gemma4_text":
        more |= {"shared": published["intermediate_size"], "own_norms": True}
    if family.model_type == "llama4_text":
        more |= {"scores": "sigmoid_input", "shared": published["intermediate_size"]} | _sparse_layers(published)
    if family.sigmoid_experts:
        dense = _dense_layers(published, family)
        more |= {"scores": "sigmoid", "groups": published["n_group"], "top_groups": published["topk_group"]}
        more |= {"shared": published["n_shared_experts"] * published["moe_intermediate_size"]}
        more |= {"scale": float(published["routed_scaling_factor"]), "dense_layers": dense}
        more |= {"dense_ff": published["intermediate_size"] if dense else 0}
    try:
        per_token = "top_k_experts" if family.model_type == "gemma4_text" else "num_experts_per_tok"
        return Mixture(count, published[per_token], **more)
    except ValueError as error:
        raise UnsupportedModelError(f"config.json: {describe_error(error)}") from error


def _sparse_layers(published: _Keys) -> dict[str, int]:
    """Which layers of a Llama 4 have experts, and the width of the others."""
    layers, every = published["num_hidden_layers"], published["interleave_moe_layer_step"]
    stated = published.get("moe_layers")
    sparse = [*range(every - 1, layers, every)] if stated is None else stated
    every = sparse[0] + 1 if sparse else 0
    if not sparse or [*sparse] != [*range(every - 1, layers, every)]:
        raise UnsupportedModelError(
            f"config.json: moe_layers = {sparse!r} of {layers} layers is not supported; must be the last of every so "
            "many layers"
        )
    return {"every": every, "dense_ff": published["intermediate_size_mlp"] if every > 1 else 0}


def write_config(config: ModelConfig, family: Family | None = None) -> dict[str, Any]:
    """A `config.json` that `read_config` reads back as the same model, without dtype and special tokens.

    Args:
        config: Configuration of the model.
        family: The family whose architecture is written; by default the one that computes this model.

    Raises:
        UnsupportedModelError: no family has this combination of options.
    """
    family = family or infer_family(config)
    if family.indexed:
        raise UnsupportedModelError(
            f"a {family.architecture} has an indexer, whose tensors are copied from the published model; set model.path"
        )
    names = {value: key for key, value in _ACTIVATIONS.items()} | {"clamped_swiglu": "silu"}
    window = max(config.windows.sizes, default=0)
    sliding = ["sliding_attention" if w else "full_attention" for w in config.layer_windows or (0,) * config.layers]
    published = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_scaling(config),
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_activation" if family.gemma else "hidden_act": names[config.activation],
        "sliding_window": window or None,
        "max_position_embeddings": config.max_positions or 32_768,
    }
    if not family.one_window and (window or family.gemma or family.model_type == "olmo3"):
        published["layer_types"] = sliding
    if family.optional_windows:
        published["use_sliding_window"] = bool(window)
    return published | _own_keys(config, family) | dict(family.required or {})


def _dense_layers(published: _Keys, family: Family) -> int:
    """Number of layers without experts, which come first."""
    if family.model_type != "glm4_moe_lite" and not family.indexed:
        return published["first_k_dense_replace"] if published.get("first_k_dense_replace") else 0
    layers = published["num_hidden_layers"]
    stated = published.get("first_k_dense_replace")
    types = published.get("mlp_layer_types") or ["dense"] * (1 if stated is None else stated)
    dense = types.count("dense")
    if types[dense:] != ["sparse"] * (layers - dense) and len(types) > dense:
        raise UnsupportedModelError(
            f"config.json: mlp_layer_types = {types!r} is not supported; must be dense in the first layers and sparse "
            "in the others"
        )
    return dense


def _own_keys(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys that only this family has."""
    name, extras = family.model_type, config.extras
    published: dict[str, Any] = {}
    if name == "gemma4_text":
        published |= _gemma4_keys(config)
    elif family.gemma:
        scale = extras.query_scale or config.head_dim
        # transformers 5 refuses a float.
        published["query_pre_attn_scalar"] = int(scale) if scale == int(scale) else scale
    if name == "gemma2":
        published |= {"attn_logit_softcapping": extras.attention_cap or None}
        published |= {"final_logit_softcapping": extras.logit_cap or None}
    if name == "gemma3_text":
        published["rope_local_base_freq"] = config.windows.local_theta or config.rope_theta
    if name == "olmo3":  # transformers 5 takes its default theta in sliding layers if there is one theta for all
        full = (_rope_scaling(config) or {"rope_type": "default"}) | {"rope_theta": config.rope_theta}
        local = {"rope_type": "default", "rope_theta": config.windows.local_theta or config.rope_theta}
        published["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    if name == "smollm3":
        published["no_rope_layers"] = [int(rotated) for rotated in config.layer_rotary]
    if name == "llama4_text":
        published |= _llama4_keys(config)
    if name == "phi3":
        published["partial_rotary_factor"] = extras.rotary_share
        if isinstance(config.rope_scaling, LongRopeScaling):
            published["original_max_position_embeddings"] = config.rope_scaling.original_length
    if config.delta and family.recurrent:
        published |= _delta_keys(config)
    if family.partly_rotary:
        published["partial_rotary_factor"] = extras.rotary_share
    if family.states_bias:
        published["attention_bias"] = config.qkv_bias
    if family.granite:
        published["attention_multiplier"] = _twelve_digits((extras.query_scale or config.head_dim) ** -0.5)
        published |= {"embedding_multiplier": extras.embed_factor, "residual_multiplier": extras.residual_factor}
        published |= {"logits_scaling": extras.logit_divisor}
    if name == "granitemoehybrid":
        published |= _granite_hybrid_keys(config)
    if name == "gpt_oss" and config.rope_scaling.kind == "none":
        published["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if name == "ministral3":
        scaling = _rope_scaling(config) or {"rope_type": "default"}
        growth = {"llama_4_scaling_beta": extras.query_growth}
        growth |= {"original_max_position_embeddings": extras.query_length or 16_384}
        published["rope_parameters"] = growth | scaling | {"rope_theta": config.rope_theta}
        published["rope_scaling"] = None
    if family.latent:
        published |= _latent_keys(config)
    if family.has_experts and name != "gemma4_text":
        published |= _expert_keys(config, family)
    return published


def _granite_hybrid_keys(config: ModelConfig) -> dict[str, Any]:
    if mamba := config.delta:
        sizes = {"n_heads": mamba.value_heads, "n_groups": mamba.key_heads, "d_state": mamba.key_dim}
        sizes |= {"d_head": mamba.value_dim, "d_conv": mamba.conv}
        sizes["expand"] = mamba.value_heads * mamba.value_dim // config.d_model
    else:
        sizes = {"n_heads": 1, "d_head": 2 * config.d_model}  # of no layer; the defaults may not fit
    return {
        "shared_intermediate_size": config.d_ff,
        "layer_types": ["attention" if attends else "mamba" for attends in config.attends],
        "position_embedding_type": "rope" if config.layer_rotary[0] else "nope",
        **{f"mamba_{name}": size for name, size in sizes.items()},
    }


def _gemma4_keys(config: ModelConfig) -> dict[str, Any]:
    windows, theta, experts = config.windows, {"rope_theta": config.rope_theta}, config.experts
    routed = {"intermediate_size": experts.shared, "moe_intermediate_size": config.d_ff}
    routed |= {"num_experts": experts.count, "top_k_experts": experts.per_token}
    full = (_rope_scaling(config) or {"rope_type": "default"}) | theta
    if config.rope_scaling.kind == "proportional" and config.rope_scaling.factor == 1:
        del full["factor"]
    return {
        "global_head_dim": windows.full_head_dim,
        "num_global_key_value_heads": windows.full_kv_heads if windows.full_keys_as_values else None,
        "attention_k_eq_v": windows.full_keys_as_values,
        "final_logit_softcapping": config.extras.logit_cap or None,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": windows.local_theta},
        },
        "hidden_size_per_layer_input": config.extras.layer_embed,
        "vocab_size_per_layer_input": config.vocab_size,
        "num_kv_shared_layers": windows.shared_layers,
        "use_double_wide_mlp": bool(windows.shared_ff),
        "enable_moe_block": bool(experts.count),
        **(routed if experts.count else {}),
    }


def _llama4_keys(config: ModelConfig) -> dict[str, Any]:
    extras, experts = config.extras, config.experts
    chunks = config.layer_windows or (0,) * config.layers
    return {
        "no_rope_layers": [int(rotated) for rotated in config.layer_rotary],
        "layer_types": ["chunked_attention" if size else "full_attention" for size in chunks],
        "attention_chunk_size": max(chunks) or None,
        "sliding_window": None,
        "use_qk_norm": extras.rotated_norm,
        "attn_temperature_tuning": bool(extras.query_growth),
        "attn_scale": extras.query_growth or 0.1,
        "floor_scale": extras.query_length or 8192,
        "interleave_moe_layer_step": experts.every,
        "moe_layers": [*range(experts.every - 1, config.layers, experts.every)],
        "intermediate_size_mlp": experts.dense_ff or 2 * config.d_ff,
    }


def _latent_keys(config: ModelConfig) -> dict[str, Any]:
    extras, turned, scaling = config.extras, config.rotary_dim, _rope_scaling(config)
    published: dict[str, Any] = {"kv_lora_rank": extras.latent, "q_lora_rank": extras.latent_query or None}
    published |= {"qk_nope_head_dim": extras.latent_key, "qk_rope_head_dim": turned, "head_dim": turned}
    published |= {"v_head_dim": extras.latent_value, "rope_interleave": extras.rotary_pairs}
    published |= {"num_key_value_heads": config.heads}
    width = float(extras.latent_key + turned)
    if scaling and scaling.get("factor", 1.0) > 1.0 and extras.query_scale not in (0.0, width):
        unit = 0.1 * math.log(scaling["factor"])
        grown = (width / extras.query_scale) ** 0.25
        scaling["mscale_all_dim"] = _twelve_digits((grown - 1.0) / unit)
        published["rope_scaling"] = scaling
    return published


def _expert_keys(config: ModelConfig, family: Family) -> dict[str, Any]:
    experts = config.experts
    published: dict[str, Any] = {"num_experts_per_tok": experts.per_token}
    if family.model_type in ("gpt_oss", "llama4_text"):
        return published | {"num_local_experts": experts.count}
    published |= {"moe_intermediate_size": config.d_ff}
    if family.recurrent:
        return published | {"num_experts": experts.count, "shared_expert_intermediate_size": experts.shared}
    published["norm_topk_prob"] = experts.norm_weights
    if not family.sigmoid_experts:
        return published | {"num_experts": experts.count}
    published |= {"n_routed_experts": experts.count, "n_shared_experts": experts.shared // config.d_ff}
    published |= {"routed_scaling_factor": experts.scale, "n_group": experts.groups, "topk_group": experts.top_groups}
    published |= {"first_k_dense_replace": experts.dense_layers, "intermediate_size": experts.dense_ff or config.d_ff}
    published["num_nextn_predict_layers"] = 0
    if family.model_type == "glm4_moe_lite":
        kinds = ["dense"] * experts.dense_layers + ["sparse"] * (config.layers - experts.dense_layers)
        published["mlp_layer_types"] = kinds
    return published | ({"use_qk_norm": bool(config.qk_norm)} if family.model_type == "glm4_moe" else {})


def _delta_keys(config: ModelConfig) -> dict[str, Any]:
    delta = config.windows
    return {
        "layer_types": ["full_attention" if attends else "linear_attention" for attends in config.attends],
        "full_attention_interval": delta.every,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv,
        "rope_parameters": {"rope_theta": config.rope_theta, "partial_rotary_factor": config.extras.rotary_share}
        | (_rope_scaling(config) or {"rope_type": "default"}),
    }


def infer_family(config: ModelConfig) -> Family:
    """The family that computes this configuration, for models that came without a `config.json`.

    Raises:
        UnsupportedModelError: no family has this combination of options.
    """
    for family in FAMILIES:
        try:
            if same_model(read_config(write_config(config, family)), config):
                return family
        except (UnsupportedModelError, ValueError):
            continue
    raise UnsupportedModelError(
        "no published family computes this combination of model options; such a model can be trained and evaluated "
        "here, but not exported"
    )


def same_model(left: ModelConfig, right: ModelConfig) -> bool:
    """Whether both describe the same function; they may differ in dtype, origin and stated length."""

    def plain(config: ModelConfig) -> ModelConfig:
        extras_set, scaling = config.extras, config.rope_scaling
        extras = {name: getattr(extras_set, name) for name in fields_of(SomeExtras)}
        extras |= {
            "query_scale": extras_set.query_scale or float(_query_width(config)),
            "rotary_layers": config.layer_rotary,
        }
        if isinstance(scaling, YarnRopeScaling | LongRopeScaling):
            scaling = replace(scaling, attention_factor=scaling.magnitude)
        if isinstance(scaling, LongRopeScaling):
            scaling = replace(scaling, extended=False)
        local_theta = config.windows.local_theta or config.rope_theta
        attention = tuple(i for i, attends in enumerate(config.attends) if attends)
        delta = replace(config.delta, every=config.layers, attention=attention) if config.delta else None
        sizes = config.layer_windows or (0,)
        windows = config.windows if isinstance(config.windows, SlidingWindows) else SlidingWindows(sizes)
        windows = replace(windows, sizes=sizes, local_theta=local_theta, chunked=windows.chunked and any(sizes))
        experts = replace(config.experts, replay=False) if config.experts.replay else config.experts
        return replace(
            config,
            path="",
            ignore_keys=(),
            compute_dtype="auto",
            max_positions=0,
            windows=delta or windows,
            extras=SomeExtras(**extras),
            experts=experts,
            rope_scaling=scaling,
        )

    return plain(left) == plain(right)


def _query_width(config: ModelConfig) -> int:
    """The width of a query by whose root scores are divided where nothing else is stated."""
    return config.extras.latent_key + config.rotary_dim if config.extras.latent else config.head_dim


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling.kind == "none":
        return None
    written = {key: getattr(scaling, field) for key, field in _ROPE_SCALINGS[scaling.kind].items()}
    written |= {"attention_factor": scaling.magnitude} if "attention_factor" in written else {}
    return {"rope_type": scaling.kind} | {key: list(v) if isinstance(v, tuple) else v for key, v in written.items()}
