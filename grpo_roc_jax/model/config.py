"""Shape and options of the policy model."""

from collections.abc import Callable, Mapping
from dataclasses import field
from functools import wraps
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le, Len, MultipleOf

from grpo_roc_jax.model.rope_scaling import NoRopeScaling, RopeScaling
from grpo_roc_jax.settings.options import Axis, Count, NotNegative, Positive, PositiveShare, kind, settings

Layers = Annotated[int, Ge(1), Le(10_000)]
Width = Annotated[int, Ge(1), Le(1 << 20)]
Rows = Annotated[int, Ge(0), Le(1 << 27)]
MOST_PARAMETERS = 10**14
"""A hundred times the largest published model. Shapes beyond it are mistakes, or meant to take all memory."""


class Experts(Axis, axis="model.experts"):
    """Whether the feed-forward is a mixture of experts."""

    count: ClassVar[int] = 0
    """Number of experts; 0 without experts. A kind whose setting has no default hides this value by `field()`."""
    per_token: ClassVar[int] = 0
    norm_weights: ClassVar[bool] = True
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
    replay: bool = False
    """Training passes take the experts that the sampler chose for the tokens it decoded, weighted by the current
    router (R3, arXiv:2510.11370). Prompts and observations keep their own choice."""

    def __post_init__(self) -> None:
        if self.per_token > self.count:
            raise ValueError(
                f"model.experts.per_token = {self.per_token}; must be at most model.experts.count = {self.count}"
            )


class Windows(Axis, axis="model.windows"):
    """Which earlier tokens a token sees, layer by layer."""

    sizes: ClassVar[tuple[int, ...]] = ()
    local_theta: ClassVar[float] = 0.0
    every: ClassVar[int] = 1


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


@kind("gated_delta")
class GatedDelta(Windows):
    """Most layers read a recurrent state instead of keys (Gated DeltaNet, arXiv:2412.06464), as in Qwen3.5. In the
    other layers a query sees all keys before it, and the context is multiplied by a sigmoid gate."""

    key_heads: Width = field()
    """Heads of the keys and queries of the state."""
    value_heads: Width = field()
    """Heads of its values, each with a state of its own; a multiple of `key_heads`."""
    key_dim: Width = field()
    """Width of a key; rows of a state."""
    value_dim: Width = field()
    """Width of a value; columns of a state."""
    every: Layers = 4
    """The last of so many consecutive layers is one of attention."""
    conv: Annotated[int, Ge(2), Le(1 << 20)] = 4
    """Tokens that the convolution over queries, keys and values sees, its own included."""

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"model.windows.value_heads = {self.value_heads} is not a multiple of model.windows.key_heads = "
                f"{self.key_heads}; each key head serves the same number of value heads"
            )


class Extras(Axis, axis="model.extras"):
    """Steps that only a few families compute."""

    scale_embed: ClassVar[bool] = False
    query_scale: ClassVar[float] = 0.0
    attention_cap: ClassVar[float] = 0.0
    logit_cap: ClassVar[float] = 0.0
    rotary_share: ClassVar[float] = 1.0
    rotary_layers: ClassVar[tuple[bool, ...]] = ()


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
    """Keys of that `config.json` which are unknown here and known to change nothing; others are refused by name."""
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
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the gate: SwiGLU (arXiv:2002.05202), or Gemma's GeGLU with the tanh approximation."""
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
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads = {self.heads} is not a multiple of model.kv_heads = {self.kv_heads}; "
                "each key-value head serves the same number of query heads"
            )
        patterns = {"windows.sizes": self.windows.sizes, "extras.rotary_layers": self.extras.rotary_layers}
        for name, pattern in patterns.items():
            if len(pattern) > self.layers:
                raise ValueError(
                    f"model.{name} has {len(pattern)} entries; must be at most one for each of "
                    f"model.layers = {self.layers}"
                )
        if self.rotary_dim % 2 or not self.rotary_dim:
            raise ValueError(
                f"model.extras.rotary_share = {self.extras.rotary_share} of model.head_dim = {self.head_dim} rotates "
                f"{self.rotary_dim} columns; must be an even number of them"
            )
        for name in ("short", "long"):
            factors = getattr(self.rope_scaling, name, None)
            if factors and len(factors) != self.rotary_dim // 2:
                raise ValueError(
                    f"model.rope_scaling.{name} has {len(factors)} factors; must be one for each of "
                    f"{self.rotary_dim // 2} frequencies"
                )
        if self.windows.every > self.layers:
            raise ValueError(
                f"model.windows.every = {self.windows.every}; must be at most model.layers = {self.layers}, so that "
                "one layer attends to keys"
            )

    @property
    def most_parameters(self) -> int:
        """Number of elements of all matrices, to detect shapes that no machine could hold."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        ffn = 3 * self.d_ff * max(1, self.experts.count)
        return self.d_model * (self.layers * (attention + ffn) + 2 * self.vocab_size)

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """The window of each layer; empty when no layer has one."""
        sizes = self.windows.sizes
        return tuple(sizes[i % len(sizes)] for i in range(self.layers)) if any(sizes) else ()

    @property
    def layer_rotary(self) -> tuple[bool, ...]:
        """Whether each layer rotates queries and keys."""
        pattern = self.extras.rotary_layers or (True,)
        return tuple(pattern[i % len(pattern)] for i in range(self.layers))

    @property
    def rotary_dim(self) -> int:
        """Columns of a head that are rotated."""
        return int(self.head_dim * self.extras.rotary_share)

    @property
    def delta(self) -> GatedDelta | None:
        """The settings of the recurrent layers; None when there are none."""
        return self.windows if isinstance(self.windows, GatedDelta) else None

    @property
    def attends(self) -> tuple[bool, ...]:
        """Whether each layer attends to keys; the others read a recurrent state."""
        return tuple((i + 1) % self.windows.every == 0 for i in range(self.layers))


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
        except (TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"config.json: a value has another form than it may: {error!r:.200}") from error

    return checked


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and 0 <= value <= most
