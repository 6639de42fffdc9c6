"""CISPO: the clipped, detached ratio times the log-probability. Source: MiniMax-M1, arXiv:2506.13585, eq. 4."""

import jax
import jax.numpy as jnp

from grpo_roc_jax.method.surrogate import RatioSurrogate
from grpo_roc_jax.settings.options import NotNegative, kind
from grpo_roc_jax.shapes import Array


@kind("cispo")
class Cispo(RatioSurrogate):
    """-sg(clip(r, low, high)) A log p: every token keeps a gradient (arXiv:2506.13585)."""

    low: NotNegative = 0.0
    """Lower bound of the detached ratio; 0 leaves it free."""
    high: NotNegative = 5.0
    """Upper bound of the detached ratio."""

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        return detached_ratio_loss(logratio, advantages, logprobs, self.low, self.high)


def detached_ratio_loss(
    logratio: Array, advantages: Array, logprobs: Array, low: float | Array, high: float | Array
) -> Array:
    """-sg(clip(r, low, high)) A log p of each token; the bounds may be traced."""
    ratio = jax.lax.stop_gradient(jnp.clip(jnp.exp(logratio), min=low, max=high))
    return -ratio * advantages * logprobs
