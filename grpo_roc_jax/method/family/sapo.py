"""SAPO: a smooth gate instead of a clip. Source: arXiv:2511.20347."""

import jax
import jax.numpy as jnp

from grpo_roc_jax.method.surrogate import RatioSurrogate
from grpo_roc_jax.settings.options import kind
from grpo_roc_jax.shapes import Array


@kind("sapo")
class Sapo(RatioSurrogate):
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A; slope 1 at r = 1 (arXiv:2511.20347)."""

    positive: float = 1.0
    """Steepness of the gate for positive advantages."""
    negative: float = 1.05
    """Steepness of the gate for negative advantages; a steeper one damps them sooner."""

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        tau = jnp.where(advantages > 0, self.positive, self.negative)
        return -4.0 / tau * jax.nn.sigmoid(tau * (jnp.exp(logratio) - 1.0)) * advantages
