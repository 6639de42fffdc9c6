"""Sampling: logits -> (token, log-probability, surviving mass), with random numbers by trajectory and position.

One pass of exponentials serves the draw, the log-sum-exp and all truncation: greedy, top-k, top-p and min-p are each a
threshold on exp(logit - max). The draw inverts the CDF in two levels: a block of the vocabulary, then a token in it.
Nothing is sorted, and no Gumbel noise is drawn over the vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from grpo_roc_jax.rollout.config import SamplingConfig
from grpo_roc_jax.shapes import Array, Float, Int, checked

BLOCK = 128
"""Tokens in a block of the inverse CDF; the resolution within a block is that of float32 for any vocabulary size."""

_TOP_BITS = 0x3F800000
"""Bit pattern of 1.0f. Non-negative floats sort like their bits, so bisection over the bits is exact in 30 steps."""


class Draw(NamedTuple):
    """One token per row."""

    token: Array
    """int32[B]."""
    logprob: Array
    """float32[B]: under the full softmax at the row's temperature (at 1 for greedy rows)."""
    mass: Array
    """float32[B]: total probability of the tokens that could be drawn; 1 without truncation."""


def trajectory_keys(seed: Int[Array, " B"], path: Int[Array, "3 B"]) -> Array:
    """uint32[B,2]: one key per trajectory from the seed and (step, problem, sample).

    The key does not depend on slot, batch, admission order or device, so neither does the trajectory.
    """

    def derive(seed: Array, step: Array, problem: Array, sample: Array) -> Array:
        key = jax.random.key(0, impl="threefry2x32")
        for part in (seed, step, problem, sample):
            key = jax.random.fold_in(key, part)
        return jax.random.key_data(key)

    return jax.vmap(derive)(seed, path[0], path[1], path[2])


def uniforms(keys: Array, positions: Int[Array, " B"]) -> Float[Array, "B 2"]:
    """Two uniforms in [0, 1) of 24 bits for the token at each position of its trajectory."""

    def draw(key: Array, position: Array) -> Array:
        folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.bits(folded, (2,), jnp.uint32)

    return (jax.vmap(draw)(keys, positions) >> 8).astype(jnp.float32) * 2.0**-24


@checked
def sample(
    logits: Float[Array, "B V"],
    uniform: Float[Array, "B 2"],
    temperature: Float[Array, " B"],
    config: SamplingConfig,
    vocab_size: int | None = None,
) -> Draw:
    """Draws one token per row.

    With e = exp(logit / temperature - max) the log-probability is log(e / sum e) over the whole vocabulary. Tokens
    whose e is at least the row's threshold are drawn with weight e.

    Args:
        logits: Float32.
        uniform: Two numbers in [0, 1) per row: the block, then the token within it.
        temperature: Of each row; 0 is greedy, with ties to the lowest id.
        config: Truncation; static.
        vocab_size: Ids from here on pad the embedding and are never drawn; None draws all.
    """
    V = logits.shape[1]
    greedy = temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    e, top = _exponentials(scaled)
    total = jnp.sum(e, axis=(1, 2))
    drawable = e
    if vocab_size is not None and vocab_size < V:
        drawable = jnp.where(jnp.arange(e.shape[1] * BLOCK).reshape(1, -1, BLOCK) < vocab_size, e, 0.0)
    threshold = _threshold(drawable, config) if config.truncated else jnp.zeros_like(total)
    highest = jnp.max(drawable, axis=(1, 2)) if drawable is not e else jnp.ones_like(total)
    threshold = jnp.where(greedy, highest, threshold)
    weight = jnp.where(drawable >= threshold[:, None, None], drawable, 0.0)
    uniform = jnp.where(greedy[:, None], 0.0, uniform)
    block_weight = jnp.sum(weight, axis=2)
    block = _inverse_cdf(block_weight, uniform[:, 0])
    inside = jnp.take_along_axis(weight, block[:, None, None], axis=1)[:, 0]
    token = block * BLOCK + _inverse_cdf(inside, uniform[:, 1])
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
    mass = jnp.where(greedy, 1.0, jnp.sum(block_weight, axis=1) / total)
    return Draw(token.astype(jnp.int32), chosen - top - jnp.log(total), mass)


def _exponentials(scaled: Float[Array, "B V"]) -> tuple[Float[Array, "B V/128 128"], Float[Array, " B"]]:
    """(exp(logit - max) in blocks, 0 after the end of the vocabulary; the maximum)."""
    B, V = scaled.shape
    top = jnp.max(scaled, axis=1)
    padded = jnp.pad(scaled, ((0, 0), (0, -V % BLOCK)), constant_values=-jnp.inf)
    return jnp.exp(padded - top[:, None]).reshape(B, -1, BLOCK), top


def _inverse_cdf(weight: Float[Array, "B X"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """The first index whose cumulative weight exceeds uniform times the total; never one of weight 0."""
    cumulative = jnp.cumsum(weight, axis=1)
    index = jnp.sum(cumulative <= (uniform * cumulative[:, -1])[:, None], axis=1)
    # Rounding can make the target equal the total; take the last token of positive weight then.
    last = weight.shape[1] - 1 - jnp.argmax(weight[:, ::-1] > 0, axis=1)
    return jnp.minimum(index, last)


def _threshold(e: Float[Array, "B X Y"], config: SamplingConfig) -> Float[Array, " B"]:
    """The largest threshold on e that keeps at least top-k tokens and, of those, the top-p mass; at least min-p."""
    B = e.shape[0]
    threshold = jnp.zeros(B, jnp.float32)
    if config.top_k:
        target = jnp.full(B, float(config.top_k))
        threshold = _bisect(lambda t: jnp.sum(e >= t[:, None, None], axis=(1, 2), dtype=jnp.float32), target)
    if config.top_p < 1.0:
        kept = jnp.where(e >= threshold[:, None, None], e, 0.0)
        target = config.top_p * jnp.sum(kept, axis=(1, 2))
        by_mass = _bisect(lambda t: jnp.sum(jnp.where(kept >= t[:, None, None], kept, 0.0), axis=(1, 2)), target)
        threshold = jnp.maximum(threshold, by_mass)
    if config.min_p > 0.0:
        threshold = jnp.maximum(threshold, config.min_p * jnp.max(e, axis=(1, 2)))
    return threshold


def _bisect(measure: Callable[[Array], Array], target: Float[Array, " B"]) -> Float[Array, " B"]:
    """The largest t in [0, 1] with measure(t) >= target; `measure` decreases with t and suffices at t = 0."""

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        enough = measure(jax.lax.bitcast_convert_type(middle, jnp.float32)) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    start = (jnp.zeros(target.shape, jnp.int32), jnp.full(target.shape, _TOP_BITS, jnp.int32))
    low, _ = jax.lax.fori_loop(0, 31, halve, start)
    return jax.lax.bitcast_convert_type(low, jnp.float32)
