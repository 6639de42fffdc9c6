"""(Log-ratio, advantage) -> loss of each token. Device side: pure functions of arrays.

Every method is `sum weights * phi(d, A)`: phi is here, A and the weights come from the host. d = log p - log p_old is
clamped and masked by `loss.py`, so that padding cannot overflow.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from grpo_roc_jax.method.config import LossConfig
from grpo_roc_jax.shapes import Array, Bool, Float, Int, checked

MAX_PRODUCT = 20.0
"""Largest summed log-ratio, nats; beyond it the product of ratios leaves float32 in the statistics."""
Surrogate = Callable[[Array, Array, Array], Array]
"""(log-ratio [..., T], advantages [..., T], log-probabilities [..., T]) -> loss [..., T]; lower is better."""


@checked
def segment_logratio(
    logratio: Float[Array, "R T"], mask: Bool[Array, "R T"], ratio_segments: Int[Array, "R T"]
) -> Float[Array, "R T"]:
    """For each token the mean log-ratio of the masked tokens in its segment, with the gradient of that token alone.

    The value is mean(d) over the segment; the gradient of entry t is that of d[t]. Summed with equal weights over a
    segment of n tokens this is n times the gradient of the mean, so weights of 1/n give the exact gradient of the
    segment's loss (arXiv:2507.18071, sec. 4.3). One segment a token is the identity, one a trajectory is GSPO.

    Args:
        logratio: d, in nats.
        mask: Tokens that count.
        ratio_segments: 0..T-1 within a row; off the mask the number is ignored.
    """
    T = logratio.shape[1]

    def row_mean(d: Array, on: Array, segments: Array) -> Array:
        sums = jax.ops.segment_sum(jnp.where(on, d, 0.0), segments, num_segments=T)
        counts = jax.ops.segment_sum(on.astype(d.dtype), segments, num_segments=T)
        return (sums / jnp.maximum(counts, 1.0))[segments]

    detached = jax.lax.stop_gradient(logratio)
    return logratio - detached + jax.vmap(row_mean)(detached, mask, ratio_segments)


@checked
def segment_sum_logratio(
    logratio: Float[Array, "R T"], mask: Bool[Array, "R T"], ratio_segments: Int[Array, "R T"]
) -> Float[Array, "R T"]:
    """For each token the summed log-ratio of its segment, clamped to +-20 and without gradient: log of a product."""
    T = logratio.shape[1]
    detached = jnp.where(mask, jax.lax.stop_gradient(logratio), 0.0)
    sums = jax.vmap(lambda d, segments: jax.ops.segment_sum(d, segments, num_segments=T)[segments])
    return jnp.clip(sums(detached, ratio_segments), -MAX_PRODUCT, MAX_PRODUCT)


def shared_logratio(
    logratio: Array, advantages: Array, mask: Array, ratio_segments: Array, config: LossConfig
) -> Array:
    """The log-ratio at the level of the config: means, or under `vespo` sums, over its segments.

    Under `geometric` (GMPO, arXiv:2507.20673) d[t] is first cut at -clip_low and clip_high, on the side its advantage
    pushes towards.
    """
    if config.level == "token":
        return logratio
    if config.kind == "geometric":
        high = jnp.where(advantages >= 0, config.clip_high, jnp.inf)
        low = jnp.where(advantages >= 0, -jnp.inf, -config.clip_low)
        logratio = jnp.clip(logratio, min=low, max=high)
    if config.kind == "vespo":
        return segment_sum_logratio(logratio, mask, ratio_segments)
    return segment_logratio(logratio, mask, ratio_segments)


def make_surrogate(config: LossConfig) -> Surrogate:
    """phi of the configured kind; see `LossConfig.kind` for the formulas and sources."""
    if config.kind == "clip":
        return lambda d, advantages, logprobs: clipped_surrogate(
            d,
            advantages,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            clip_dual=config.clip_dual,
            clip_delta=config.clip_delta,
        )
    if config.kind == "cispo":
        return lambda d, advantages, logprobs: cispo(
            d, advantages, logprobs, low=config.cispo_low, high=config.cispo_high
        )
    if config.kind == "sapo":
        return lambda d, advantages, logprobs: sapo(
            d, advantages, positive=config.sapo_positive, negative=config.sapo_negative
        )
    if config.kind == "vespo":
        return lambda d, advantages, logprobs: vespo(
            d, advantages, logprobs, positive=config.vespo_positive, negative=config.vespo_negative
        )
    if config.kind in ("geometric", "ratio"):
        return lambda d, advantages, logprobs: -jnp.exp(d) * advantages
    return lambda d, advantages, logprobs: -advantages * logprobs


@checked
def clipped_surrogate(
    logratio: Float[Array, "*B T"],
    advantages: Float[Array, "*B T"],
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float = 0.0,
    clip_delta: float = 0.0,
) -> Float[Array, "*B T"]:
    """-min(min(r, delta) A, clip(r, 1 - clip_low, 1 + clip_high) A), capped at -clip_dual A where A < 0.

    Source: arXiv:2402.03300, eq. 3; the separate upper clip arXiv:2503.14476, sec. 3.1; the dual clip
    arXiv:1912.09729; the cap delta arXiv:2505.07291. A cap of 0 is off.
    """
    ratio = jnp.exp(logratio)
    clipped = jnp.clip(ratio, min=1.0 - clip_low, max=1.0 + clip_high)
    free = jnp.minimum(ratio, clip_delta) if clip_delta else ratio
    loss = jnp.maximum(-free * advantages, -clipped * advantages)
    if clip_dual:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -clip_dual * advantages), loss)
    return loss


@checked
def cispo(
    logratio: Float[Array, "*B T"],
    advantages: Float[Array, "*B T"],
    logprobs: Float[Array, "*B T"],
    *,
    low: float,
    high: float,
) -> Float[Array, "*B T"]:
    """-sg(clip(r, low, high)) A log p: every token keeps a gradient (arXiv:2506.13585, eq. 4)."""
    ratio = jax.lax.stop_gradient(jnp.clip(jnp.exp(logratio), min=low, max=high))
    return -ratio * advantages * logprobs


@checked
def sapo(
    logratio: Float[Array, "*B T"], advantages: Float[Array, "*B T"], *, positive: float, negative: float
) -> Float[Array, "*B T"]:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A; slope 1 at r = 1 (arXiv:2511.20347)."""
    tau = jnp.where(advantages > 0, positive, negative)
    return -4.0 / tau * jax.nn.sigmoid(tau * (jnp.exp(logratio) - 1.0)) * advantages


@checked
def vespo(
    logratio: Float[Array, "*B T"],
    advantages: Float[Array, "*B T"],
    logprobs: Float[Array, "*B T"],
    *,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Float[Array, "*B T"]:
    """-sg(W^k exp(lambda (1 - W))) A log p, (k, lambda) by the sign of A; the factor is 1 at W = 1.

    Source: arXiv:2602.10693; W = exp(log-ratio) is the product of ratios over a trajectory.
    """
    k, rate = (jnp.where(advantages >= 0, p, n) for p, n in zip(positive, negative, strict=True))
    factor = jnp.exp(k * logratio + rate * (1.0 - jnp.exp(logratio)))
    return -jax.lax.stop_gradient(factor) * advantages * logprobs


@checked
def kl_estimate(kind: str, logprobs: Float[Array, "*B T"], logprobs_ref: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
    """Per-token estimate of KL(policy || reference) from tokens of the policy, u = log p - log p_ref.

    k1 = u, k2 = u^2 / 2, k3 = e^-u - 1 + u (Schulman, "Approximating KL divergence", 2020; k3 in arXiv:2402.03300).
    """
    u = logprobs - logprobs_ref
    if kind == "k1":
        return u
    if kind == "k2":
        return 0.5 * u * u
    if kind == "k3":
        return jnp.expm1(-u) + u
    raise ValueError(f"loss.kl_kind = {kind!r}; k1, k2 or k3 is wanted")
