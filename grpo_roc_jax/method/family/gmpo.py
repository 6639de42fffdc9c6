"""GMPO: the geometric mean of clipped token ratios. Source: arXiv:2507.20673."""

import jax.numpy as jnp

from grpo_roc_jax.method.surrogate import Clip, Level, segment_logratio
from grpo_roc_jax.settings.options import NotNegative, kind
from grpo_roc_jax.shapes import Array


@kind("geometric")
class Geometric(Clip):
    """-A times the geometric mean of the ratios of a segment, each clipped where its advantage pushes (GMPO,
    arXiv:2507.20673)."""

    level: Level = "sequence"
    """The segment: a turn or a trajectory."""
    clip_low: NotNegative = 0.4
    """Log-ratios of tokens with negative advantage are cut at -clip_low, in nats."""
    clip_high: NotNegative = 0.4
    """Log-ratios of tokens with positive advantage are cut at clip_high, in nats."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level == "token":
            raise ValueError("surrogate geometric works on segments; set surrogate.level sequence or turn")

    def shared(self, logratio: Array, advantages: Array, mask: Array, ratio_segments: Array) -> Array:
        high = jnp.where(advantages >= 0, self.clip_high, jnp.inf)
        low = jnp.where(advantages >= 0, -jnp.inf, -self.clip_low)
        return segment_logratio(jnp.clip(logratio, min=low, max=high), mask, ratio_segments)

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        return -jnp.exp(logratio) * advantages
