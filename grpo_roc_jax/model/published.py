"""`config.json` of published models, read into a `ModelConfig` and written from one.

Every key is read, known to have no effect, or refused by name with its value. Keys of transformers 4 (`rope_theta`,
`rope_scaling`) and 5 (`rope_parameters`) are read. The former are written, since both versions read them.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from grpo_roc_jax.model.config import DenseFeedForward, GatedDelta, Mixture, ModelConfig, NoWindows, SlidingWindows
from grpo_roc_jax.model.families import FAMILIES, Family, Json, UnsupportedModelError, find_family
from grpo_roc_jax.model.rope_scaling import NoRopeScaling, RopeScaling

log = logging.getLogger(__name__)

# fmt: off
_NEUTRAL = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "_sliding_window_pattern",
    "architectures", "attention_dropout", "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id",
    "mamba_ssm_dtype", "max_window_layers", "model_type", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
    "return_dict", "router_aux_loss_coef", "sliding_window_pattern", "tokenizer_class", "torch_dtype",
    "transformers_version", "unk_token_id", "use_cache", "use_sliding_window",
})
# fmt: on
"""Keys without effect on the function computed, or read together with another key."""

_MEANINGLESS = (None, False, 0, 0.0, [], {}, "")
"""Values under which an unknown key enables nothing."""


_HARMLESS = re.compile(r"unsloth_.*|auto_map|is_llama_config")
"""Keys that tools leave in a `config.json` and that change nothing; they are ignored with a note."""


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
}
"""Published kind of rescaling of the rotary frequencies -> its published parameters and our settings."""


def text_part(published: Json) -> dict[str, Any]:
    """A `config.json` of vision and language as one of its text model alone; others unchanged."""
    text = published.get("text_config")
    if not isinstance(text, dict):
        return dict(published)
    names = [family.architecture for family in FAMILIES if family.model_type == text.get("model_type")]
    outer = {key: published[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype") if key in published}
    text = {key: value for key, value in text.items() if not key.startswith("mtp_")}  # its tensors are left out
    return text | outer | {"architectures": names or published.get("architectures")}


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
    gemma = family.model_type == "gemma3_text"
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
        activation=_activation(published, "hidden_activation" if gemma else "hidden_act"),
        query_scale=float(published["query_pre_attn_scalar"]) if gemma else 0.0,
        max_positions=published.get("max_position_embeddings") or 0,
        rope_theta=theta,
        rope_scaling=scaling,
        windows=_gated_delta(published) if family.model_type == "qwen3_5_text" else windows,
        experts=_experts(published) if moe else DenseFeedForward(),
        **(family.fixed or {}),
    )
    if moe:
        published.get("intermediate_size")  # the width of dense layers, of which there are none
    published.refuse_rest()
    return config


class _Keys:
    """A `config.json` that remembers which of its keys were read."""

    def __init__(self, config: Json, family: Family, ignore_keys: Sequence[str]):
        self._config = {**(family.defaults or {}), **config}
        self._family = family
        self._read = set(ignore_keys) | _NEUTRAL
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

    def refuse_rest(self) -> None:
        rest = [key for key, value in self._config.items() if key not in self._read and value not in _MEANINGLESS]
        ignored = [key for key in rest if self._harmless(key)]
        if ignored:
            _note(
                f"config.json of a {self._family.architecture}: ignored, without effect: {', '.join(sorted(ignored))}"
            )
        rest = [key for key in rest if key not in ignored]
        if rest:
            said = ", ".join(f"{key} = {self._config[key]!r}" for key in sorted(rest))
            raise UnsupportedModelError(
                f"config.json of a {self._family.architecture}: not supported: {said}; if it has no effect, list "
                f"it in model.ignore_keys"
            )

    def _harmless(self, key: str) -> bool:
        value = self._config[key]
        if key == "layer_types":  # of a family without windows
            return isinstance(value, list) and all(kind == "full_attention" for kind in value)
        return _HARMLESS.fullmatch(key) is not None


@cache
def _note(text: str) -> None:
    """Logs a text once; a `config.json` is read several times in a run."""
    log.warning(text)


def _activation(published: _Keys, key: str) -> str:
    name = published.get(key) or "silu"
    if name not in _ACTIVATIONS:
        known = " or ".join(_ACTIVATIONS)
        raise UnsupportedModelError(f"config.json: {key} = {name!r} is not supported; must be {known}")
    return _ACTIVATIONS[name]


def _windows(published: _Keys, family: Family) -> tuple[int, ...]:
    """The window of each layer, as the shortest sequence that repeats."""
    if not family.has_windows:
        return ()
    window, layers = published.get("sliding_window"), published["num_hidden_layers"]
    types = published.get("layer_types")
    if not window or (family.model_type.startswith("qwen") and not published.get("use_sliding_window", False)):
        window = 0
    if types is None:
        types = _layer_types(published, family, layers)
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != layers:
        raise UnsupportedModelError(
            f"config.json: layer_types = {types!r} is not supported; must be sliding_attention or full_attention for "
            f"each of {layers} layers"
        )
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in types)
    for length in range(layers + 1):
        period = windows[:length]
        if length and all(windows[i] == period[i % length] for i in range(layers)):
            return period if any(period) else ()
    return ()


def _layer_types(published: _Keys, family: Family, layers: int) -> list[str]:
    sliding, full = "sliding_attention", "full_attention"
    if family.model_type == "gemma3_text":
        pattern = published.get("sliding_window_pattern") or 6
        return [sliding if (i + 1) % pattern else full for i in range(layers)]
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
    parameters = published.get("rope_parameters") or {}
    share = parameters.get("partial_rotary_factor", published.get("partial_rotary_factor", 0.25))
    return GatedDelta(
        key_heads=published["linear_num_key_heads"],
        value_heads=published["linear_num_value_heads"],
        key_dim=published["linear_key_head_dim"],
        value_dim=published["linear_value_head_dim"],
        every=every,
        conv=published["linear_conv_kernel_dim"],
        rotary_share=share,
    )


def _rope(published: _Keys, family: Family) -> tuple[float, float, RopeScaling]:
    """(theta, theta of layers with a window or 0, rescaling), from `rope_parameters` (transformers 5) or from
    `rope_theta` and `rope_scaling` (4)."""
    gemma = family.model_type == "gemma3_text"
    parameters = published.get("rope_parameters") or {}
    theta, local = published.get("rope_theta"), published.get("rope_local_base_freq") if gemma else 0.0
    scaling = dict(published.get("rope_scaling") or {})
    if gemma and "full_attention" in parameters:
        local = parameters["sliding_attention"]["rope_theta"]
        if parameters["sliding_attention"].get("rope_type", "default") != "default":
            raise UnsupportedModelError("config.json: rescaled rotary embeddings in sliding layers are not supported")
        parameters = parameters["full_attention"]
    scaling = dict(parameters) or scaling
    theta = scaling.pop("rope_theta", theta)
    if theta is None:
        raise UnsupportedModelError("config.json has no rope_theta, neither at the top level nor in rope_parameters")
    if family.model_type == "qwen3_5_text":  # sections differ in the positions of images only
        scaling = {key: scaling[key] for key in set(scaling) - {"mrope_section", "mrope_interleaved"}}
        scaling.pop("partial_rotary_factor", None)
    scaling.pop("partial_rotary_factor", None) if scaling.get("partial_rotary_factor", 1.0) == 1.0 else None
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind not in _ROPE_SCALINGS or set(scaling) - set(_ROPE_SCALINGS[kind]):
        raise UnsupportedModelError(
            f"config.json: the rotary rescaling {kind!r} with {sorted(scaling)} is not supported; known are "
            f"{', '.join(_ROPE_SCALINGS)}"
        )
    if kind == "default":
        return float(theta), float(local), NoRopeScaling()
    missing = set(_ROPE_SCALINGS[kind]) - set(scaling)
    if missing:
        raise UnsupportedModelError(f"config.json: the rotary rescaling {kind!r} lacks {', '.join(sorted(missing))}")
    own = {field: scaling[key] for key, field in _ROPE_SCALINGS[kind].items()}
    return float(theta), float(local), RopeScaling.kinds[kind](**own)


def _experts(published: _Keys) -> Mixture:
    count = published.get("num_experts") or published["num_local_experts"]
    return Mixture(count, published["num_experts_per_tok"], bool(published["norm_topk_prob"]))


def write_config(config: ModelConfig, family: Family | None = None) -> dict[str, Any]:
    """A `config.json` that `read_config` reads back as the same model, without dtype and special tokens.

    Args:
        config: Of the model.
        family: Its architecture is named; by default the family that computes this model.

    Raises:
        UnsupportedModelError: no family has this combination of options.
    """
    family = family or infer_family(config)
    gemma, moe = family.model_type == "gemma3_text", family.model_type == "qwen3_moe"
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
        "hidden_activation" if gemma else "hidden_act": names[config.activation],
        "sliding_window": window or None,
        "max_position_embeddings": config.max_positions or 32_768,
    }
    if family.model_type != "mistral" and (window or gemma):
        published["layer_types"] = sliding
    if family.model_type.startswith("qwen"):
        published["use_sliding_window"] = bool(window)
    if config.delta:
        published |= _delta_keys(config)
    if gemma:
        published |= {"query_pre_attn_scalar": config.query_scale or config.head_dim}
        published |= {"rope_local_base_freq": config.windows.local_theta or config.rope_theta}
    if moe:
        published |= {"num_experts": config.experts.count, "num_experts_per_tok": config.experts.per_token}
        published |= {"moe_intermediate_size": config.d_ff, "norm_topk_prob": config.experts.norm_weights}
    return published | dict(family.required or {})


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
        "rope_parameters": {"rope_theta": config.rope_theta, "partial_rotary_factor": delta.rotary_share}
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


def same_model(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether both describe the same function; they may differ in dtype, origin and stated length."""

    def plain(config: ModelConfig) -> ModelConfig:
        return replace(
            config,
            path="",
            ignore_keys=(),
            compute_dtype="auto",
            max_positions=0,
            windows=config.delta
            or SlidingWindows(config.layer_windows or (0,), config.windows.local_theta or config.rope_theta),
            query_scale=config.query_scale or float(config.head_dim),
        )

    return plain(one) == plain(other)


def _rope_scaling(config: ModelConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling.kind == "none":
        return None
    return {"rope_type": scaling.kind} | {
        key: getattr(scaling, field) for key, field in _ROPE_SCALINGS[scaling.kind].items()
    }
