"""Shape and options of the policy model."""

from typing import Literal

from grpo_roc_jax.settings.options import settings


@settings
class ModelConfig:
    """A decoder-only transformer: grouped-query attention, rotary positions, RMSNorm, gated feed-forward.

    The options are those of the published families; `model.families` reads them from a `config.json`.
    """

    path: str = ""
    """Directory or hub id of a published checkpoint. Its `config.json` then gives every field below except
    `compute_dtype`; setting one to something else is refused. Empty: random parameters of the shape below."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of that `config.json` which are unknown here and known to change nothing; others are refused by name."""
    d_model: int = 64
    """Width of the residual stream."""
    layers: int = 2
    """Number of blocks, stacked on the leading axis of every layer leaf."""
    heads: int = 4
    """Query heads."""
    kv_heads: int = 2
    """Key-value heads; divides `heads`."""
    head_dim: int = 16
    """Width of one head, even (rotary positions pair its halves)."""
    d_ff: int = 192
    """Hidden width of the gated feed-forward; of each expert where there are experts."""
    vocab_size: int = 0
    """Rows of the embedding; 0 takes the tokenizer's size. A larger value pads, e.g. to a multiple of the mesh."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2.5)."""
    qk_norm: bool = False
    """RMSNorm on each query and key head before the rotation (Qwen3)."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Of the gate: SwiGLU (arXiv:2002.05202), or Gemma's GeGLU with the tanh approximation."""
    norm_offset: bool = False
    """Norm scales are stored as their distance from 1 (Gemma)."""
    post_norms: bool = False
    """RMSNorm on what attention and feed-forward add to the residual stream, besides the norms before (Gemma)."""
    scale_embed: bool = False
    """Embeddings times sqrt(d_model) on their way in (Gemma)."""
    query_scale: float = 0.0
    """Attention scores are divided by its root; 0 means `head_dim` (Gemma's `query_pre_attn_scalar`)."""
    windows: tuple[int, ...] = ()
    """Keys that a query sees, itself included, layer by layer, repeated over the layers; 0 sees all before it. Empty:
    all layers see all. Gemma 3 repeats five windows and a 0; Mistral v0.1 has one window for all."""
    rope_local_theta: float = 0.0
    """Base of the rotary frequencies in layers with a window, which are then not rescaled; 0: as in the others."""
    rope_scaling: Literal["none", "linear", "llama3"] = "none"
    """Rescaling of the frequencies for long texts: all divided by `rope_factor`, or Llama 3.1's, which divides the
    slow ones and leaves the fast ones."""
    rope_factor: float = 1.0
    """How much longer texts may get."""
    rope_low_freq: float = 1.0
    """llama3: frequencies with fewer turns than this over `rope_original_length` are divided by the factor."""
    rope_high_freq: float = 4.0
    """llama3: frequencies with more turns than this are left alone; those between are interpolated."""
    rope_original_length: int = 8192
    """llama3: tokens of the texts before the extension."""
    max_positions: int = 0
    """Longest text the model was made for, tokens; 0 for unknown. Longer rows are refused, and exports state it."""
    experts: int = 0
    """Experts of each feed-forward, a few of which see each token (Qwen3-MoE); 0 for one dense feed-forward."""
    experts_per_token: int = 0
    """Experts that see a token."""
    norm_expert_weights: bool = True
    """The weights of a token's experts are divided by their sum."""
    tie_embeddings: bool = True
    """One matrix for embedding and unembedding."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of matrix products; masters stay float32. `auto`: float32 on CPU, bfloat16 elsewhere."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.heads = {self.heads} is no multiple of model.kv_heads = {self.kv_heads}; "
                "each key-value head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim = {self.head_dim} is odd; rotary positions pair the halves of a head")
        for name in ("d_model", "layers", "heads", "kv_heads", "head_dim", "d_ff", "rope_factor"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} = {getattr(self, name)}; at least 1 is wanted")
        if any(window < 0 for window in self.windows) or len(self.windows) > self.layers:
            raise ValueError(
                f"model.windows = {self.windows}; for the {self.layers} layers at most as many numbers are wanted, "
                "each a number of keys or 0"
            )
        if self.rope_scaling == "llama3" and not 0 < self.rope_low_freq < self.rope_high_freq:
            raise ValueError(
                f"model.rope_low_freq = {self.rope_low_freq} and model.rope_high_freq = {self.rope_high_freq}; the "
                "first positive and below the second is wanted"
            )
        if not 0 <= self.experts_per_token <= self.experts or bool(self.experts) != bool(self.experts_per_token):
            raise ValueError(
                f"model.experts = {self.experts} with model.experts_per_token = {self.experts_per_token}; 0 and 0 "
                "(dense), or between 1 and all experts for a token, is wanted"
            )

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """The window of each layer; empty when no layer has one."""
        if not any(self.windows):
            return ()
        return tuple(self.windows[i % len(self.windows)] for i in range(self.layers))
