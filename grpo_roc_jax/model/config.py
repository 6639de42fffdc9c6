"""Shape and options of the policy model."""

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import wraps
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le, Len, MultipleOf
from pydantic import ValidationError

from grpo_roc_jax.model.rope_scaling import NoRopeScaling, RopeScaling
from grpo_roc_jax.settings.cli import describe_error
from grpo_roc_jax.settings.options import Axis, Count, NotNegative, Positive, PositiveShare, kind, settings

Layers = Annotated[int, Ge(1), Le(10_000)]
Width = Annotated[int, Ge(1), Le(1 << 20)]
Rows = Annotated[int, Ge(0), Le(1 << 27)]
FULL = "g_"
"""Prefix of the leaves of attention in layers without a window, where these have heads of their own (Gemma 4)."""
MOST_PARAMETERS = 10**14
"""A hundred times the largest published model. Shapes beyond it are mistakes, or meant to take all memory."""


class Experts(Axis, axis="model.experts"):
    """Whether the feed-forward is a mixture of experts."""

    count: ClassVar[int] = 0
    """Number of experts; 0 without experts. A kind whose setting has no default hides this value by `field()`."""
    per_token: ClassVar[int] = 0
    norm_weights: ClassVar[bool] = True
    shared: ClassVar[int] = 0
    shared_gate: ClassVar[bool] = False
    scores: ClassVar[str] = "softmax"
    groups: ClassVar[int] = 1
    top_groups: ClassVar[int] = 1
    scale: ClassVar[float] = 1.0
    dense_layers: ClassVar[int] = 0
    dense_ff: ClassVar[int] = 0
    every: ClassVar[int] = 1
    biases: ClassVar[bool] = False
    own_norms: ClassVar[bool] = False
    replay: ClassVar[bool] = False


@kind("none")
class DenseFeedForward(Experts):
    """One feed-forward for all tokens."""


@kind("mixture")
class Mixture(Experts):
    """Many feed-forwards, a few of which see each token (Qwen3-MoE)."""

    count: Width = field()
    """Experts of each layer."""
    per_token: Width = field()
    """Experts that see a token."""
    norm_weights: bool = True
    """The weights of a token's experts are divided by their sum."""
    shared: Rows = 0
    """Hidden width of a further feed-forward, which sees all tokens; 0 for none (Qwen3.5-MoE)."""
    shared_gate: bool = False
    """Its output is multiplied by the sigmoid of a number that each token computes (Qwen3.5-MoE)."""
    scores: Literal["softmax", "sigmoid", "sigmoid_input"] = "softmax"
    """How the router's numbers become weights. `sigmoid`: each by itself, and a bias of each expert counts in the
    choice but not in the weights (GLM-4.5, DeepSeek-V3). `sigmoid_input`: each by itself, and it multiplies the input
    of the expert instead of its output (Llama 4)."""
    groups: Annotated[int, Ge(1), Le(1 << 20)] = 1
    """Groups of consecutive experts, of which a token first chooses `top_groups` (DeepSeek-V3)."""
    top_groups: Annotated[int, Ge(1), Le(1 << 20)] = 1
    """Groups that a token chooses, by the sum of their two best experts."""
    scale: Positive = 1.0
    """Factor of the weights (`routed_scaling_factor`)."""
    dense_layers: Annotated[int, Ge(0), Le(10_000)] = 0
    """First layers that have one feed-forward of width `dense_ff` instead of experts."""
    dense_ff: Rows = 0
    """Hidden width of the layers without experts."""
    every: Layers = 1
    """The last of so many consecutive layers has experts, the others one feed-forward of width `dense_ff` (Llama 4
    Maverick)."""
    biases: bool = False
    """Biases on the router and on the matrices of the experts (gpt-oss)."""
    own_norms: bool = False
    """Experts have norms of their own before and after them, and so has the feed-forward of all tokens after it. The
    router reads the residual stream divided by its root mean square, times a scale, and the weights are multiplied by a
    number of each expert (Gemma 4)."""
    replay: bool = False
    """Training passes take the experts that the sampler chose for the tokens it decoded, weighted by the current
    router (R3, arXiv:2510.11370). Prompts and observations keep their own choice."""

    def __post_init__(self) -> None:
        if self.per_token > self.count:
            raise ValueError(
                f"model.experts.per_token = {self.per_token}; must be at most model.experts.count = {self.count}"
            )
        if self.count % self.groups or self.top_groups > self.groups:
            raise ValueError(
                f"model.experts.groups = {self.groups}, model.experts.top_groups = {self.top_groups}; the former must "
                f"divide model.experts.count = {self.count}, and the latter be at most as many"
            )
        if self.groups > 1 and (
            self.count // self.groups < 2 or self.per_token > self.top_groups * self.count // self.groups
        ):
            raise ValueError(
                f"model.experts.groups = {self.groups} of {self.count // self.groups} experts; a group must have at "
                f"least two, and the chosen groups model.experts.per_token = {self.per_token}"
            )
        if (self.dense_layers > 0 or self.every > 1) != bool(self.dense_ff):
            raise ValueError(
                f"model.experts.dense_layers = {self.dense_layers} and model.experts.every = {self.every} with "
                f"model.experts.dense_ff = {self.dense_ff}; layers without experts need a width, and only they have one"
            )
        if self.dense_layers and self.every > 1:
            raise ValueError(
                f"model.experts.dense_layers = {self.dense_layers} with model.experts.every = {self.every}; set one"
            )
        if self.own_norms and (not self.shared or self.dense_ff):
            raise ValueError(
                f"model.experts.own_norms with model.experts.shared = {self.shared} and model.experts.dense_ff = "
                f"{self.dense_ff}; must be a width and 0"
            )
        if self.shared_gate and not self.shared:
            raise ValueError(
                "model.experts.shared_gate with model.experts.shared = 0: there is no such feed-forward; set its width"
            )


class Windows(Axis, axis="model.windows"):
    """Which earlier tokens a token sees, layer by layer."""

    sizes: ClassVar[tuple[int, ...]] = ()
    local_theta: ClassVar[float] = 0.0
    chunked: ClassVar[bool] = False
    full_head_dim: ClassVar[int] = 0
    full_kv_heads: ClassVar[int] = 0
    full_keys_as_values: ClassVar[bool] = False
    shared_layers: ClassVar[int] = 0
    shared_ff: ClassVar[int] = 0
    every: ClassVar[int] = 1
    attention: ClassVar[tuple[int, ...]] = ()


@kind("none")
class NoWindows(Windows):
    """A query sees all keys before it, in all layers."""


@kind("sliding")
class SlidingWindows(Windows):
    """A query sees the last few keys in some layers."""

    sizes: Annotated[tuple[Count, ...], Len(1)] = field()
    """Keys that a query sees, itself included, layer by layer, repeated over the layers; 0 sees all before it. Gemma 3
    repeats five windows and a 0; Mistral v0.1 has one window for all."""
    local_theta: NotNegative = 0.0
    """Base of the rotary frequencies in layers with a window, which are then not rescaled; 0: as in the others."""
    chunked: bool = False
    """A text is cut into chunks as long as the window, and a query sees the keys of its own chunk only (Llama 4)."""
    full_head_dim: Annotated[int, Ge(0), Le(1 << 20), MultipleOf(2)] = 0
    """Width of a head in layers without a window, whose matrices are then leaves of their own; 0: as in the others
    (Gemma 4)."""
    full_kv_heads: Rows = 0
    """Key-value heads of these layers; set together with their width."""
    full_keys_as_values: bool = False
    """Whether the values of these layers are the keys before their norm, so that they have no matrix (Gemma 4)."""
    shared_layers: Annotated[int, Ge(0), Le(10_000)] = 0
    """Last layers that read the keys and values of the last layer before them of the same kind, with or without a
    window, and have no matrices for keys and values (Gemma 4 E2B and E4B)."""
    shared_ff: Rows = 0
    """Hidden width of the feed-forward of these layers; 0: as in the others (Gemma 4 E2B)."""

    def __post_init__(self) -> None:
        if self.shared_ff and not self.shared_layers:
            raise ValueError(
                f"model.windows.shared_ff = {self.shared_ff} with model.windows.shared_layers = 0: no layer has this "
                "width; set the number of layers that share keys"
            )
        if bool(self.full_head_dim) != bool(self.full_kv_heads) or (
            self.full_keys_as_values > bool(self.full_head_dim)
        ):
            raise ValueError(
                f"model.windows.full_head_dim = {self.full_head_dim}, model.windows.full_kv_heads = "
                f"{self.full_kv_heads}, model.windows.full_keys_as_values = {self.full_keys_as_values}; set the first "
                "two, or none"
            )
        if self.full_head_dim and (0 not in self.sizes or not any(self.sizes) or not self.local_theta):
            raise ValueError(
                f"model.windows.full_head_dim = {self.full_head_dim} with model.windows.sizes = {self.sizes} and "
                f"model.windows.local_theta = {self.local_theta}; must be windows in some layers and 0 in others, and "
                "a base for those with a window"
            )


@kind("gated_delta")
class GatedDelta(Windows):
    """Most layers read a recurrent state instead of keys (Gated DeltaNet, arXiv:2412.06464), as in Qwen3.5, or a state
    without correction (Mamba 2, arXiv:2405.21060), as in Granite 4 H. In the other layers a query sees all keys before
    it; in Qwen3.5 their context is multiplied by a sigmoid gate."""

    key_heads: Width = field()
    """Heads of the keys and queries of the state."""
    value_heads: Width = field()
    """Heads of its values, each with a state of its own; a multiple of `key_heads`."""
    key_dim: Width = field()
    """Width of a key; rows of a state."""
    value_dim: Width = field()
    """Width of a value; columns of a state."""
    every: Layers = 4
    """The last of so many consecutive layers is one of attention, or those in `attention`."""
    attention: tuple[Count, ...] = ()
    """Which of `every` consecutive layers attend, counted from 0; empty: the last."""
    form: Literal["delta", "mamba2"] = "delta"
    """How a layer writes its state. `mamba2`: it adds keys and values, without what the state predicts, and convolution
    and output have biases and a skip."""
    conv: Annotated[int, Ge(2), Le(1 << 20)] = 4
    """Tokens that the convolution over queries, keys and values sees, its own included."""

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"model.windows.value_heads = {self.value_heads} is not a multiple of model.windows.key_heads = "
                f"{self.key_heads}; each key head serves the same number of value heads"
            )
        if list(self.attention) != sorted(set(self.attention)) or max(self.attention, default=0) >= self.every:
            raise ValueError(
                f"model.windows.attention = {self.attention}; must be increasing and below model.windows.every = "
                f"{self.every}"
            )


class Extras(Axis, axis="model.extras"):
    """Steps that only a few families compute."""

    scale_embed: ClassVar[bool] = False
    query_scale: ClassVar[float] = 0.0
    attention_cap: ClassVar[float] = 0.0
    logit_cap: ClassVar[float] = 0.0
    rotary_share: ClassVar[float] = 1.0
    rotary_layers: ClassVar[tuple[bool, ...]] = ()
    rotary_pairs: ClassVar[bool] = False
    embed_factor: ClassVar[float] = 1.0
    residual_factor: ClassVar[float] = 1.0
    logit_divisor: ClassVar[float] = 1.0
    sinks: ClassVar[bool] = False
    output_bias: ClassVar[bool] = False
    query_growth: ClassVar[float] = 0.0
    query_length: ClassVar[int] = 0
    query_unrotated: ClassVar[bool] = False
    rotated_norm: ClassVar[bool] = False
    value_norm: ClassVar[bool] = False
    layer_factors: ClassVar[bool] = False
    layer_embed: ClassVar[int] = 0
    latent: ClassVar[int] = 0
    latent_query: ClassVar[int] = 0
    latent_key: ClassVar[int] = 0
    latent_value: ClassVar[int] = 0
    indexed_keys: ClassVar[int] = 0


@kind("none")
class NoExtras(Extras):
    """No optional step, as in Qwen2.5, Qwen3, Llama and Mistral."""


@kind("some")
class SomeExtras(Extras):
    """The optional steps that are set here."""

    scale_embed: bool = False
    """Embeddings times sqrt(d_model) on their way in (Gemma)."""
    query_scale: NotNegative = 0.0
    """Attention scores are divided by its root; 0 means `head_dim` (Gemma's `query_pre_attn_scalar`)."""
    attention_cap: NotNegative = 0.0
    """Attention scores s become cap * tanh(s / cap); 0 leaves them unchanged (Gemma 2)."""
    logit_cap: NotNegative = 0.0
    """Soft cap of the logits, before the temperature (Gemma 2); 0 leaves them unchanged."""
    rotary_share: PositiveShare = 1.0
    """Share of each head, from its first column on, that is rotated (Phi-4-mini, Qwen3.5)."""
    rotary_layers: tuple[bool, ...] = ()
    """Whether queries and keys are rotated, layer by layer, repeated over the layers; empty: in all (SmolLM3)."""
    rotary_pairs: bool = False
    """Neighbouring columns are rotated together, instead of the columns of the two halves (GLM-4)."""
    embed_factor: Positive = 1.0
    """Embeddings times this number on their way in (Granite)."""
    residual_factor: Positive = 1.0
    """What attention and feed-forward add to the residual stream, times this number (Granite)."""
    logit_divisor: Positive = 1.0
    """Logits are divided by this number, before the cap (Granite)."""
    sinks: bool = False
    """Each query head has a score of its own that takes part in the softmax and brings no value (gpt-oss)."""
    output_bias: bool = False
    """A bias on the output of attention (gpt-oss)."""
    query_growth: NotNegative = 0.0
    """Queries are multiplied by 1 + this number * ln(1 + position // `query_length`); 0 leaves them (Ministral 3)."""
    query_length: Count = 0
    """Positions up to which they are left unchanged."""
    query_unrotated: bool = False
    """They grow in layers without rotation only, and from the position before (Llama 4)."""
    rotated_norm: bool = False
    """Queries and keys are divided by their root mean square after the rotation, in layers that have one (Llama 4)."""
    value_norm: bool = False
    """Values are divided by their root mean square (Gemma 4)."""
    layer_factors: bool = False
    """The residual stream after a layer is multiplied by a number of the layer, which is not trained (Gemma 4)."""
    layer_embed: Rows = 0
    """Width of a second embedding with a row for each token and layer; 0 for none. Each layer adds to the residual
    stream a gate of the stream times this row, which also depends on the first embedding (Gemma 4 E2B and E4B)."""
    latent: Rows = 0
    """Width of the vector of a token from which every head makes its keys and values (multi-head latent attention,
    arXiv:2405.04434, sec. 2.1; DeepSeek-V3); 0 for attention of the usual kind. The cache holds this vector and the
    rotated part of the keys, `model.head_dim` numbers together, as the one key-value head."""
    latent_query: Rows = 0
    """Width of the vector from which the queries are made; 0: from the input of the layer."""
    latent_key: Rows = 0
    """Columns of a query and key head that are not rotated."""
    latent_value: Rows = 0
    """Width of a value head."""
    indexed_keys: Rows = 0
    """Keys that a query of the published model sees, which an indexer chooses (DeepSeek-V3.2, GLM-5); 0: no indexer. It
    is not computed here, so rows must not be longer: then all keys are chosen."""


@settings
class ModelConfig:
    """A decoder-only transformer: grouped-query attention, rotary positions, RMSNorm, gated feed-forward.

    The options are those of the published families; `model.families` reads them from a `config.json`.
    """

    path: str = ""
    """Directory or hub id (`ORG/NAME`) of a published checkpoint, or a GGUF file: `FILE.gguf`, `ORG/NAME/FILE.gguf` of
    the hub, or `package:NAME` of an installed package that carries one. Its configuration then gives every field below
    except `compute_dtype`; setting one to something else is refused. Empty: random parameters of the shape below."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of that `config.json` which are unknown here and known to change nothing; others are refused by name.
    `rope_scaling.KEY` or `rope_parameters.KEY` is a parameter of the rotary rescaling."""
    d_model: Width = 64
    """Width of the residual stream."""
    layers: Layers = 2
    """Number of blocks, stacked on the leading axis of every layer leaf."""
    heads: Width = 4
    """Query heads."""
    kv_heads: Width = 2
    """Key-value heads; divides `heads`."""
    head_dim: Annotated[int, Ge(2), Le(1 << 20), MultipleOf(2)] = 16
    """Width of one head; even, since rotary positions pair its halves."""
    d_ff: Width = 192
    """Hidden width of the gated feed-forward; of each expert where there are experts."""
    vocab_size: Rows = 0
    """Rows of the embedding; 0 takes the tokenizer's size. A larger value pads, e.g. to a multiple of the mesh."""
    rope_theta: Positive = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: Positive = 1e-6
    """Added to the mean square in RMSNorm."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2.5)."""
    qk_norm: bool | Literal["whole"] = False
    """RMSNorm on each query and key head before the rotation (Qwen3); `whole`: on all heads as one vector (OLMo 3)."""
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    """Activation of the gate: SwiGLU (arXiv:2002.05202), Gemma's GeGLU with the tanh approximation, or the form of
    gpt-oss: (min(max(up, -7), 7) + 1) g sigmoid(1.702 g) with g = min(gate, 7)."""
    norm_offset: bool = False
    """Norm scales are stored as their distance from 1 (Gemma)."""
    post_norms: bool | Literal["only"] = False
    """RMSNorm on what attention and feed-forward add to the residual stream, in addition to the norms before them
    (Gemma); `only`: instead of those (OLMo 3)."""
    extras: Extras = field(default_factory=NoExtras)
    """Steps that only a few families compute."""
    windows: Windows = field(default_factory=NoWindows)
    """What a token sees of those before it, layer by layer."""
    rope_scaling: RopeScaling = field(default_factory=NoRopeScaling)
    """How the rotary frequencies are rescaled for long texts."""
    max_positions: Count = 0
    """Longest text the model was made for, tokens; 0 for unknown. Longer rows are refused, and exports state it."""
    experts: Experts = field(default_factory=DenseFeedForward)
    """Whether the feed-forward is a mixture of experts."""
    tie_embeddings: bool = True
    """One matrix for embedding and unembedding."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of matrix products; masters stay float32. `auto`: float32 on CPU, bfloat16 elsewhere."""

    def __post_init__(self) -> None:
        if (count := self.most_parameters) > MOST_PARAMETERS:
            raise ValueError(
                f"model.layers = {self.layers}, model.d_model = {self.d_model}, model.d_ff = {self.d_ff} and "
                f"model.vocab_size = {self.vocab_size} come to {count:.1e} parameters; must be at most "
                f"{MOST_PARAMETERS:.0e}"
            )
        self._check_heads()
        self._check_layers()
        self._check_positions()

    def _check_heads(self) -> None:
        """Raises a ValueError for numbers and widths of heads that do not fit each other."""
        extras, windows = self.extras, self.windows
        for name, kv_heads in {"kv_heads": self.kv_heads, "windows.full_kv_heads": windows.full_kv_heads}.items():
            if kv_heads and self.heads % kv_heads:
                raise ValueError(
                    f"model.heads = {self.heads} is not a multiple of model.{name} = {kv_heads}; "
                    "each key-value head serves the same number of query heads"
                )
        if extras.latent and (
            self.kv_heads != 1 or self.head_dim <= extras.latent or not (extras.latent_key and extras.latent_value)
        ):
            raise ValueError(
                f"model.extras.latent = {extras.latent} with model.kv_heads = {self.kv_heads}, model.head_dim = "
                f"{self.head_dim}, model.extras.latent_key = {extras.latent_key} and model.extras.latent_value = "
                f"{extras.latent_value}; must be one key-value head, wider than the latent vector by the rotated "
                "columns, and positive widths of keys and values"
            )
        if windows.full_head_dim and (self.qkv_bias or self.qk_norm == "whole" or extras.rotary_share != 1):
            raise ValueError(
                "model.windows.full_head_dim with model.qkv_bias, model.qk_norm whole or model.extras.rotary_share is "
                "not supported"
            )

    def _check_layers(self) -> None:
        """Raises a ValueError for kinds of layers that `layers` of them cannot hold."""
        experts = self.experts
        if experts.dense_layers >= self.layers:
            raise ValueError(
                f"model.experts.dense_layers = {experts.dense_layers}; must be below model.layers = {self.layers}"
            )
        if experts.every > self.layers or (experts.every > 1 and self.delta):
            raise ValueError(
                f"model.experts.every = {experts.every}; must be at most model.layers = {self.layers}, and 1 with "
                "recurrent layers"
            )
        if experts.dense_layers and self.delta:
            raise ValueError("model.experts.dense_layers with recurrent layers is not supported; set it to 0")
        patterns = {"windows.sizes": self.windows.sizes, "extras.rotary_layers": self.extras.rotary_layers}
        for name, pattern in patterns.items():
            if len(pattern) > self.layers:
                raise ValueError(
                    f"model.{name} has {len(pattern)} entries; must be at most one for each of "
                    f"model.layers = {self.layers}"
                )
        self._check_shared()
        if self.windows.every > self.layers:
            raise ValueError(
                f"model.windows.every = {self.windows.every}; must be at most model.layers = {self.layers}, so that "
                "one layer attends to keys"
            )

    def _check_shared(self) -> None:
        """Raises a ValueError for layers that share keys which no layer before them has."""
        shared = self.windows.shared_layers
        if not shared:
            return
        kinds = [size > 0 for size in self.layer_windows] or [False] * self.layers
        with_keys = max(0, self.layers - shared)
        if set(kinds[with_keys:]) - set(kinds[:with_keys]):
            raise ValueError(
                f"model.windows.shared_layers = {shared} of model.layers = {self.layers} with model.windows.sizes = "
                f"{self.windows.sizes}; layers with and without a window that share keys each need one before them "
                "that has keys"
            )
        if self.qkv_bias or self.experts.dense_layers or (self.experts.count and self.windows.shared_ff):
            raise ValueError(
                f"model.windows.shared_layers = {shared} with model.qkv_bias, model.experts.dense_layers, or "
                "model.windows.shared_ff and experts is not supported"
            )

    def _check_positions(self) -> None:
        """Raises a ValueError for rotations that do not fit the width of a head, and for a scale of the queries of
        long texts of which one half is missing."""
        extras = self.extras
        if bool(extras.query_growth) != bool(extras.query_length):
            raise ValueError(
                f"model.extras.query_growth = {extras.query_growth} with model.extras.query_length = "
                f"{extras.query_length}; set both, or neither"
            )
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise ValueError(
                f"model.extras.rotary_share = {extras.rotary_share} of model.head_dim = {self.head_dim} rotates "
                f"{self.rotary_dim} columns; must be an even number of them"
            )
        for name in ("short", "long"):
            factors = getattr(self.rope_scaling, name, None)
            if factors and len(factors) != self.rotary_dim // 2:
                raise ValueError(
                    f"model.rope_scaling.{name} has {len(factors)} factors; must be one for each of "
                    f"{self.rotary_dim // 2} frequencies"
                )

    @property
    def most_parameters(self) -> int:
        """Number of elements of all matrices, to detect shapes that no machine could hold."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        if self.extras.latent:
            attention = self.heads * (self.extras.latent_key + self.rotary_dim + self.extras.latent_value)
        ffn = 3 * (self.d_ff * max(1, self.experts.count) + self.experts.shared + self.experts.dense_ff)
        ffn += 3 * self.windows.shared_ff
        by_layer = self.extras.layer_embed * self.layers * (self.vocab_size + self.d_model)
        return self.d_model * (self.layers * (attention + ffn) + 2 * self.vocab_size) + by_layer

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """The window of each layer; empty when no layer has one."""
        sizes = self.windows.sizes
        return tuple(sizes[i % len(sizes)] for i in range(self.layers)) if any(sizes) else ()

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers without a window whose heads are others than those of the layers with one; most models have none."""
        return tuple(i for i, size in enumerate(self.layer_windows) if not size) if self.windows.full_head_dim else ()

    @property
    def attention_heads(self) -> tuple[tuple[int, int], ...]:
        """(key-value heads, head width) of each layer that attends to keys."""
        full, usual = (self.windows.full_kv_heads, self.windows.full_head_dim), (self.kv_heads, self.head_dim)
        return tuple(full if i in self.full_layers else usual for i, attends in enumerate(self.attends) if attends)

    @property
    def key_layers(self) -> tuple[int, ...]:
        """For each layer the one whose keys and values it reads: itself, unless it shares those of an earlier layer."""
        with_keys = self.layers - self.windows.shared_layers
        kinds = [size > 0 for size in self.layer_windows] or [False] * self.layers
        last = {kinds[i]: i for i in range(with_keys)}
        return tuple(i if i < with_keys else last[kinds[i]] for i in range(self.layers))

    @property
    def cached_heads(self) -> tuple[tuple[int, int], ...]:
        """(key-value heads, head width) of each layer with keys of its own, which the cache stores."""
        return self.attention_heads[: len(self.attention_heads) - self.windows.shared_layers]

    @property
    def attention_width(self) -> int:
        """Columns of all query heads, summed over the layers that attend to keys."""
        return self.heads * sum(width for _, width in self.attention_heads)

    @property
    def key_columns(self) -> int:
        """Columns of all keys of a token, summed over the layers that have keys of their own."""
        return sum(heads * width for heads, width in self.cached_heads)

    @property
    def key_reads(self) -> float:
        """How often attention of all layers reads a key, on average; 1 unless layers share keys."""
        return sum(heads * width for heads, width in self.attention_heads) / self.key_columns

    @property
    def period(self) -> int:
        """Number of consecutive layers after which leaves of the same names and the same rotations follow; 1 if all
        layers have the same leaves."""
        if self.delta:
            return math.lcm(self.windows.every, max(1, len(self.extras.rotary_layers)))
        kinds = bool(self.full_layers) or self.windows.shared_layers > 0
        patterns = [self.experts.every, len(self.windows.sizes) if kinds else 1]
        patterns += [len(pattern) for pattern in (self.windows.sizes, self.extras.rotary_layers) if max(patterns) > 1]
        return math.lcm(*(max(1, count) for count in patterns))

    @property
    def layer_rotary(self) -> tuple[bool, ...]:
        """Whether each layer rotates queries and keys."""
        pattern = self.extras.rotary_layers or (True,)
        return tuple(pattern[i % len(pattern)] for i in range(self.layers))

    @property
    def rotary_dim(self) -> int:
        """Columns of a head that are rotated."""
        if self.extras.latent:
            return self.head_dim - self.extras.latent
        return int(self.head_dim * self.extras.rotary_share)

    @property
    def delta(self) -> GatedDelta | None:
        """The settings of the recurrent layers; None when there are none."""
        return self.windows if isinstance(self.windows, GatedDelta) else None

    @property
    def attends(self) -> tuple[bool, ...]:
        """Whether each layer attends to keys; the others read a recurrent state."""
        every, attention = self.windows.every, self.windows.attention or (self.windows.every - 1,)
        return tuple(i % every in attention for i in range(self.layers))

    @property
    def gated_attention(self) -> bool:
        """Whether the context of attention is multiplied by a gate that `wq` computes too."""
        return isinstance(self.windows, GatedDelta) and self.windows.form == "delta"


def bounded(read: Callable[..., ModelConfig]) -> Callable[..., ModelConfig]:
    """Wraps a reader of `config.json`: checks the sizes first, since others are computed from them, and reports values
    of a wrong type.

    Raises:
        ValueError: A size is not a whole number, or larger than in any model.
    """

    @wraps(read)
    def checked(published: Mapping[str, Any], *arguments: Any, **named: Any) -> ModelConfig:
        text = published.get("text_config")
        for values in (published, text if isinstance(text, Mapping) else {}):
            for key, value in values.items():
                limit = 10_000 if key == "num_hidden_layers" else 1 << 27
                counts = key.startswith("num_") or key.endswith(("_size", "_dim", "_layers", "_heads", "_interval"))
                if counts and isinstance(value, int | float | str) and not _is_count(value, limit):
                    raise ValueError(f"config.json: {key} = {value!r:.80}; must be a whole number from 0 to {limit}")
        try:
            return read(published, *arguments, **named)
        except ValidationError as error:
            raise ValueError(f"config.json: {describe_error(error)}") from error
        except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"config.json: a value has another form than it may: {error!r:.200}") from error

    return checked


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and 0 <= value <= most
