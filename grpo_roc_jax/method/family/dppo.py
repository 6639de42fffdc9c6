"""DPPO: what bounds a token is the divergence of the two policies instead of their ratio. Source: arXiv:2602.04879.

The divergences are the binary ones of the paper, which see the sampled token against all others, from its probability
under both policies. Its top-k forms need further probabilities of the sampling policy, which are not recorded.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from grpo_roc_jax.method.surrogate import TokenRatioSurrogate
from grpo_roc_jax.settings.options import NotNegative, kind
from grpo_roc_jax.shapes import Array

EPS = 1e-8
"""Added inside the logarithm of the binary divergence, as in verl: in float32 a probability can be 1."""


@kind("dppo")
class Dppo(TokenRatioSurrogate):
    """-r A for tokens within the bounds, 0 for those outside (DPPO, arXiv:2602.04879), plus `penalty` d^2 for all
    (prime-rl), with d = log r."""

    divergence: Literal["tv", "kl", "two_sided"] = "tv"
    """With p and p_old of the sampled token: `tv` compares p - p_old with the bound on the side that the advantage
    pushes to, `kl` the binary KL(p_old || p) on that side, and `two_sided` p - p_old with both bounds (prime-rl's
    IPO)."""
    low: NotNegative = 0.2
    """Bound where p has fallen; 0.05 for `kl` and 0.1 for `two_sided` in the released scripts."""
    high: NotNegative = 0.2
    """Bound where p has risen."""
    penalty: NotNegative = 0.0
    """Weight of d^2; 1e-3 in prime-rl."""

    def clipped(self, logratio: Array, advantages: Array, logprobs: Array) -> tuple[Array, Array]:
        """Which tokens are out of bounds below and above."""
        now = jax.lax.stop_gradient(logprobs)
        old = now - jax.lax.stop_gradient(logratio)
        change = jnp.exp(now) - jnp.exp(old)
        fell, rose = change < 0, change > 0
        if self.divergence == "two_sided":
            return change < -self.low, change > self.high
        size = jnp.abs(change) if self.divergence == "tv" else binary_kl(old, now)
        return fell & (size > self.low) & (advantages < 0), rose & (size > self.high) & (advantages > 0)

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        low, high = self.clipped(logratio, advantages, logprobs)
        kept = jnp.where(low | high, 0.0, -jnp.exp(logratio) * advantages)
        return kept + self.penalty * logratio**2 if self.penalty else kept


def binary_kl(old: Array, now: Array) -> Array:
    """KL between the distributions over (this token, any other) under two log-probabilities of the token, in nats."""
    others = jnp.log((-jnp.expm1(old) + EPS) / (-jnp.expm1(now) + EPS))
    return jnp.exp(old) * (old - now) - jnp.expm1(old) * others
