"""VESPO: log-probability times a detached function of the product of ratios. Source: arXiv:2602.10693."""

import jax
import jax.numpy as jnp

from grpo_roc_jax.method.surrogate import Level, RatioSurrogate
from grpo_roc_jax.settings.options import kind
from grpo_roc_jax.shapes import Array

MAX_PRODUCT = 20.0
"""Largest summed log-ratio, nats; beyond it the product of ratios leaves float32 in the statistics."""


@kind("vespo")
class Vespo(RatioSurrogate):
    """-sg(W^k exp(lambda (1 - W))) A log p, W the product of ratios over a segment (arXiv:2602.10693)."""

    level: Level = "sequence"
    """The segment: a turn or a trajectory."""
    positive: tuple[float, float] = (2.0, 3.0)
    """(k, lambda) where the advantage is positive; the released values."""
    negative: tuple[float, float] = (3.0, 2.0)
    """(k, lambda) where it is negative."""

    def __post_init__(self) -> None:
        if self.level == "token":
            raise ValueError("surrogate vespo works on segments; set surrogate.level sequence or turn")

    def shared(self, logratio: Array, advantages: Array, mask: Array, ratio_segments: Array) -> Array:
        """The summed log-ratio of each token's segment, clamped to +-20 and without gradient: log of a product."""
        T = logratio.shape[1]
        detached = jnp.where(mask, jax.lax.stop_gradient(logratio), 0.0)
        sums = jax.vmap(lambda d, segments: jax.ops.segment_sum(d, segments, num_segments=T)[segments])
        return jnp.clip(sums(detached, ratio_segments), -MAX_PRODUCT, MAX_PRODUCT)

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        pairs = zip(self.positive, self.negative, strict=True)
        k, rate = (jnp.where(advantages >= 0, p, n) for p, n in pairs)
        factor = jnp.exp(k * logratio + rate * (1.0 - jnp.exp(logratio)))
        return -jax.lax.stop_gradient(factor) * advantages * logprobs
