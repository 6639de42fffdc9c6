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
"""Values under which an unknown key enables nothing."""


def without_effect(key: str) -> str:
    """Whether a key of a `config.json` never changes what is computed, whatever its value: `silent` for keys in common
    use, `noted` for other keys, empty if it may. All other modules ask this function."""
    return "silent" if key in _COMMON else "noted" if _NOTED.fullmatch(key) else ""


_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

_ROPE_SCALINGS = {
    "default": {},
    "linear": {"factor": "factor"},
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
    d_model, heads = published["hidden_size"], published["num_attention_heads"]
    moe = family.model_type == "qwen3_moe"
    theta, local_theta, scaling = _rope(published, family)
    sizes = _windows(published, family)
    windows = SlidingWindows(sizes or (0,), local_theta) if sizes or local_theta else NoWindows()
    config = ModelConfig(
        d_model=d_model,
        layers=published["num_hidden_layers"],
        heads=heads,
        kv_heads=published.get("num_key_value_heads") or heads,
        head_dim=published.get("head_dim") or d_model // heads,
        d_ff=published["moe_intermediate_size" if moe else "intermediate_size"],
        vocab_size=published["vocab_size"],
        norm_eps=published["rms_norm_eps"],
        tie_embeddings=bool(published.get("tie_word_embeddings", False)),
        activation=_activation(published, "hidden_activation" if family.gemma else "hidden_act"),
        extras=_extras(published, family),
        max_positions=published.get("max_position_embeddings") or 0,
        rope_theta=theta,
        rope_scaling=scaling,
        windows=_gated_delta(published) if family.model_type == "qwen3_5_text" else windows,
        experts=_experts(published) if moe else DenseFeedForward(),
        **(family.fixed or {}),
    )
    for key in (("intermediate_size",) if moe else ()) + (("hidden_act",) if family.gemma else ()):
        published.get(key)  # the width of dense layers, of which this model has none; replaced by hidden_activation
    stored = published.peek("quantization_config")
    if isinstance(stored, dict) and stored.get("load_in_4bit") and stored.get("bnb_4bit_quant_type") == "nf4":
        published.get("quantization_config")  # `bitsandbytes_io` reads these matrices
    published.refuse_rest()
    return config


class _Keys:
    """A `config.json` that remembers which of its keys were read."""

    def __init__(self, config: Json, family: Family, ignore_keys: Sequence[str]):
        self._config = {**(family.defaults or {}), **config}
        self._family = family
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


@cache
def note(text: str) -> None:
    """Logs a text once; a `config.json` is read several times in a run."""
    log.warning(text)


def _activation(published: _Keys, key: str) -> str:
    name = published.get(key) or "silu"
    if name not in _ACTIVATIONS:
        known = " or ".join(_ACTIVATIONS)
        raise UnsupportedModelError(f"config.json: {key} = {name!r} is not supported; must be {known}")
    return _ACTIVATIONS[name]


def _extras(published: _Keys, family: Family) -> Extras:
    """The optional steps of this family; none if all have their neutral value."""
    settings: dict[str, Any] = {}
    if family.gemma:
        settings = {"scale_embed": True, "query_scale": float(published["query_pre_attn_scalar"])}
    if family.model_type == "gemma2":
        caps = {"attention_cap": "attn_logit_softcapping", "logit_cap": "final_logit_softcapping"}
        settings |= {name: float(published.get(key) or 0) for name, key in caps.items()}
    if family.partly_rotary:
        parameters = published.get("rope_parameters") or {}
        top = published.get("partial_rotary_factor")
        settings = {"rotary_share": float(parameters.get("partial_rotary_factor") or top or 1.0)}
    if family.model_type == "smollm3":
        rotary = _rotary_layers(published)
        settings = {"rotary_layers": () if all(rotary) else _period(rotary)}
    extras = SomeExtras(**settings)
    return NoExtras() if extras == SomeExtras() else extras


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
    types = published.get("layer_types")
    if not window or (family.optional_windows and not published.get("use_sliding_window", False)):
        window = 0
    if family.model_type == "phi3" and window >= (published.get("max_position_embeddings") or window + 1):
        window = 0  # Phi-4-mini has windows that are longer than its rows
    if types is None:
        types = _layer_types(published, family, layers)
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != layers:
        raise UnsupportedModelError(
            f"config.json: layer_types = {types!r} is not supported; must be sliding_attention or full_attention for "
            f"each of {layers} layers"
        )
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    return _period(windows) if any(windows) else ()


def _period(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shortest sequence that repeats to `values`."""
    lengths = range(1, len(values) + 1)
    return next(values[:n] for n in lengths if all(value == values[i % n] for i, value in enumerate(values)))


def _layer_types(published: _Keys, family: Family, layers: int) -> list[str]:
    sliding, full = "sliding_attention", "full_attention"
    every = {"gemma2": 2, "gemma3_text": published.get("sliding_window_pattern") or 6, "olmo3": 4}
    if family.model_type in every:
        return [sliding if (i + 1) % every[family.model_type] else full for i in range(layers)]
    if family.model_type == "smollm3":
        return [full if rotated else sliding for rotated in _rotary_layers(published)]
    if family.model_type.startswith("qwen"):
        first = published.get("max_window_layers")
        return [sliding if first is not None and i >= first else full for i in range(layers)]
    return [sliding] * layers


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
    parameters = published.get("rope_parameters") or {}
    olmo, gemma3 = family.model_type == "olmo3", family.model_type == "gemma3_text"
    theta, local = published.get("rope_theta"), published.get("rope_local_base_freq") if gemma3 else 0.0
    scaling = dict(published.get("rope_scaling") or {})
    if (gemma3 or olmo) and "full_attention" in parameters:
        local = parameters["sliding_attention"].get("rope_theta", theta)
        if parameters["sliding_attention"].get("rope_type", "default") != "default":
            raise UnsupportedModelError("config.json: rescaled rotary embeddings in sliding layers are not supported")
        parameters = parameters["full_attention"]
    # The sections of a vision-language model differ in the positions of images only.
    scaling = {key: value for key, value in (parameters or scaling).items() if not key.startswith("mrope_")}
    theta = scaling.pop("rope_theta", theta)
    if theta is None:
        raise UnsupportedModelError("config.json has no rope_theta, neither at the top level nor in rope_parameters")
    share = scaling.get("partial_rotary_factor", 1.0)
    scaling.pop("partial_rotary_factor", None) if share == 1.0 or family.partly_rotary else None
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    kind = "default" if kind == "mrope" else kind
    scaling.pop("type", None)
    if family.model_type == "phi3":
        kind = "longrope" if kind in ("su", "yarn") else kind  # names in older files
        _complete_longrope(published, kind, scaling)
    if kind not in _ROPE_SCALINGS or set(scaling) - set(_ROPE_SCALINGS[kind]):
        raise UnsupportedModelError(
            f"config.json: the rotary rescaling {kind!r} with {sorted(scaling)} is not supported; known are "
            f"{', '.join(_ROPE_SCALINGS)}"
        )
    if olmo:  # only layers without a window are rescaled
        local = 0.0 if kind == "default" and local in (0.0, theta) else local or theta
    if kind == "default":
        return float(theta), float(local or 0), NoRopeScaling()
    missing = set(_ROPE_SCALINGS[kind]) - set(scaling) - _OPTIONAL
    if missing:
        raise UnsupportedModelError(f"config.json: the rotary rescaling {kind!r} lacks {', '.join(sorted(missing))}")
    parameters_read = {
        field: scaling[key] for key, field in _ROPE_SCALINGS[kind].items() if scaling.get(key) is not None
    }
    return float(theta), float(local or 0), RopeScaling.kinds[kind](**parameters_read)


def _complete_longrope(published: _Keys, kind: str, scaling: dict[str, Any]) -> None:
    """Adds what a Phi-3 states outside of the rescaling: the first length, and by it the factor of queries and keys."""
    first = published.get("original_max_position_embeddings")
    factor = scaling.pop("factor", None) if kind == "longrope" else None
    scaling.pop("original_max_position_embeddings", None)
    if kind != "longrope":
        return
    scaling["original_max_position_embeddings"] = first
    if scaling.get("attention_factor") is None:
        factor = factor or published["max_position_embeddings"] / first
        scaling["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(first)) if factor > 1 else 1.0


def _experts(published: _Keys) -> Mixture:
    count = published.get("num_experts") or published["num_local_experts"]
    return Mixture(count, published["num_experts_per_tok"], bool(published["norm_topk_prob"]))


def write_config(config: ModelConfig, family: Family | None = None) -> dict[str, Any]:
    """A `config.json` that `read_config` reads back as the same model, without dtype and special tokens.

    Args:
        config: Configuration of the model.
        family: The family whose architecture is written; by default the one that computes this model.

    Raises:
        UnsupportedModelError: no family has this combination of options.
    """
    family = family or infer_family(config)
    names = {value: key for key, value in _ACTIVATIONS.items()}
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
    if family.model_type not in ("mistral", "phi3") and (window or family.gemma or family.model_type == "olmo3"):
        published["layer_types"] = sliding
    if family.optional_windows:
        published["use_sliding_window"] = bool(window)
    return published | _own_keys(config, family) | dict(family.required or {})


def _own_keys(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys that only this family has."""
    name, extras = family.model_type, config.extras
    published: dict[str, Any] = {}
    if family.gemma:
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
    if name == "phi3":
        published["partial_rotary_factor"] = extras.rotary_share
        if isinstance(config.rope_scaling, LongRopeScaling):
            published["original_max_position_embeddings"] = config.rope_scaling.original_length
    if config.delta:
        published |= _delta_keys(config)
    if name == "qwen3_moe":
        published |= {"num_experts": config.experts.count, "num_experts_per_tok": config.experts.per_token}
        published |= {"moe_intermediate_size": config.d_ff, "norm_topk_prob": config.experts.norm_weights}
    return published


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
            "query_scale": extras_set.query_scale or float(config.head_dim),
            "rotary_layers": config.layer_rotary,
        }
        if isinstance(scaling, YarnRopeScaling | LongRopeScaling):
            scaling = replace(scaling, attention_factor=scaling.magnitude)
        if isinstance(scaling, LongRopeScaling):
            scaling = replace(scaling, extended=False)
        local_theta = config.windows.local_theta or config.rope_theta
        experts = replace(config.experts, replay=False) if config.experts.replay else config.experts
        return replace(
            config,
            path="",
            ignore_keys=(),
            compute_dtype="auto",
            max_positions=0,
            windows=config.delta or SlidingWindows(config.layer_windows or (0,), local_theta),
            extras=SomeExtras(**extras),
            experts=experts,
            rope_scaling=scaling,
        )

    return plain(left) == plain(right)


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling.kind == "none":
        return None
    written = {key: getattr(scaling, field) for key, field in _ROPE_SCALINGS[scaling.kind].items()}
    written |= {"attention_factor": scaling.magnitude} if "attention_factor" in written else {}
    return {"rope_type": scaling.kind} | {key: list(v) if isinstance(v, tuple) else v for key, v in written.items()}
