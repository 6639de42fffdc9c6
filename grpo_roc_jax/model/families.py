"""Published model families: their tensor names, and what their `config.json` may contain.

`model.published` reads and writes `config.json`; `model.convert` reads and writes the tensors.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_roc_jax.model.config import ModelConfig
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
    "(J X)" the parts of X (`delta.channels`) are stored one after the other, each for all J."""
    order: str
    """Dimensions of the leaf, without layers and experts."""
    before: tuple[str, ...] = ()
    """Outermost dimensions of the leaves that come before it in the same tensor; the tables list them in this order."""


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

_NORMS = (TensorRule("mlp_norm", _LAYER + "post_attention_layernorm.weight", "D", "D"),)
_GEMMA_NORMS = (
    TensorRule("attn_post_norm", _LAYER + "post_attention_layernorm.weight", "D", "D"),
    TensorRule("mlp_norm", _LAYER + "pre_feedforward_layernorm.weight", "D", "D"),
    TensorRule("mlp_post_norm", _LAYER + "post_feedforward_layernorm.weight", "D", "D"),
)

_OLMO_NORMS = (
    TensorRule("q_norm", _LAYER + "self_attn.q_norm.weight", "(N H)", "N H"),
    TensorRule("k_norm", _LAYER + "self_attn.k_norm.weight", "(K H)", "K H"),
    TensorRule("attn_post_norm", _LAYER + "post_attention_layernorm.weight", "D", "D"),
    TensorRule("mlp_post_norm", _LAYER + "post_feedforward_layernorm.weight", "D", "D"),
)

_QKV, _GATE_UP = _LAYER + "self_attn.qkv_proj.weight", _LAYER + "mlp.gate_up_proj.weight"
_FUSED = (
    TensorRule("attn_norm", _LAYER + "input_layernorm.weight", "D", "D"),
    TensorRule("wq", _QKV, "(N H) D", "D N H"),
    TensorRule("wk", _QKV, "(K H) D", "D K H", before=("N H",)),
    TensorRule("wv", _QKV, "(K H) D", "D K H", before=("N H", "K H")),
    TensorRule("wo", _LAYER + "self_attn.o_proj.weight", "D (N H)", "N H D"),
    TensorRule("w_gate", _GATE_UP, "F D", "D F"),
    TensorRule("w_up", _GATE_UP, "F D", "D F", before=("F",)),
    TensorRule("w_down", _LAYER + "mlp.down_proj.weight", "D F", "F D"),
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

# `rules` drops the leaves that a model does not have (biases, a tied unembedding).
_DENSE_RULES = (*_TOP, *_ATTENTION, *_NORMS, *_MLP)
_GEMMA_RULES = (*_TOP, *_ATTENTION, *_GEMMA_NORMS, *_MLP)
_GEMMA_FIXED = {"norm_offset": True, "post_norms": True}
_GEMMA_DEFAULTS = {"query_pre_attn_scalar": 256, "head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096}
_GEMMA_DEFAULTS |= {"tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh"}


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
    def gemma(self) -> bool:
        return self.model_type.startswith("gemma")

    @property
    def partly_rotary(self) -> bool:
        """Whether the key `partial_rotary_factor` determines which share of a head is rotated."""
        return self.model_type in ("phi3", "qwen3_5_text")

    @property
    def optional_windows(self) -> bool:
        """Whether windows apply only if the key `use_sliding_window` is set."""
        return self.model_type.startswith(("qwen", "smollm"))


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
    return [rule for rule in family.table if rule.leaf not in absent]


class Layout:
    """The dimensions of a rule with their sizes, which map the layout of the leaf to the published one."""

    def __init__(self, rule: TensorRule, config: ModelConfig):
        sizes = {"D": config.d_model, "N": config.heads, "K": config.kv_heads, "H": config.head_dim}
        sizes |= {"F": config.d_ff, "E": config.experts.count, "V": config.vocab_size}
        sizes |= {"Q": (2 if config.delta else 1) * config.head_dim, "1": 1}
        self.parts: tuple[int, ...] = ()
        """Widths that make up the second dimension of "(J X)"; empty in other rules."""
        if config.delta:
            delta, self.parts = config.delta, channels(config.delta) if "J X" in rule.dims else ()
            sizes |= {"J": delta.key_heads, "X": sum(channels(delta)), "M": delta.value_heads}
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
        first, last = (bound // sum(self.parts) for bound in (published[0].start, published[0].stop))
        before = 0
        for width in self.parts:
            rows = slice(*(self._sizes["J"] * before + head * width for head in (first, last)))
            yield [rows, *published[1:]], (slice(None), slice(before, before + width))
            before += width

    def to_published(self, leaf: np.ndarray) -> np.ndarray:
        """The published tensor, from a complete leaf."""
        value = leaf.transpose(self.permutation).reshape(self.published_shape)
        return value[self.row_order()] if self.parts else value

    def row_order(self) -> np.ndarray | slice:
        """For each published row, its index among the rows of the leaf."""
        if not self.parts:
            return slice(None)
        rows = np.arange(self.published_shape[0]).reshape(self._sizes["J"], -1)
        return np.concatenate([part.ravel() for part in np.split(rows, np.cumsum(self.parts)[:-1], axis=1)])
