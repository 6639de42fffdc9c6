"""Shape and options of the policy model."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: grouped-query attention, rotary positions, RMSNorm, SwiGLU."""

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
    """Hidden width of the gated feed-forward."""
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
        for name in ("d_model", "layers", "heads", "kv_heads", "head_dim", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} = {getattr(self, name)}; at least 1 is wanted")
