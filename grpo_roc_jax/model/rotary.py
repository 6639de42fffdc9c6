"""Rotary position embeddings: frequencies, and the rotation of queries and keys."""

import jax.numpy as jnp

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.shapes import Array, Float, Int, checked

Rope = tuple[Array, Array]
"""Cosine and sine of the rotary angles, float32, without a head axis."""


def rotary_frequencies(config: ModelConfig, *, windowed: bool) -> Float[Array, " R"]:
    """theta^(-2i/H), with H the width that rotates, rescaled as configured; layers with a window may have a theta of
    their own, not rescaled."""
    local = windowed and config.windows.local_theta > 0
    theta = config.windows.local_theta if local else config.rope_theta
    plain = theta ** (-jnp.arange(0, config.rotary_dim, 2, dtype=jnp.float32) / config.rotary_dim)
    return plain if local else config.rope_scaling.rescaled(plain)


@checked
def rotary_angles(positions: Int[Array, "*B"], frequencies: Float[Array, " R"]) -> Rope:
    """Cosine and sine of position times frequency, float32.

    Source: arXiv:2104.09864, in the half-split layout of the published checkpoints.
    """
    angles = jnp.multiply.outer(positions.astype(jnp.float32), frequencies)
    return jnp.cos(angles), jnp.sin(angles)


def rotary_tables(positions: Int[Array, "*B"], config: ModelConfig) -> dict[bool, Rope]:
    """The angles of layers without (False) and with a window (True), computed once and shared by the layers."""
    plain = rotary_angles(positions, rotary_frequencies(config, windowed=False))
    if not config.windows.local_theta:
        return {False: plain, True: plain}
    return {False: plain, True: rotary_angles(positions, rotary_frequencies(config, windowed=True))}


def layer_ropes(positions: Int[Array, "*B"], config: ModelConfig) -> list[Rope]:
    """The angles of each layer, for code that unrolls the layers."""
    tables = rotary_tables(positions, config)
    return [tables[window > 0] for window in config.layer_windows or (0,) * config.layers]


def apply_rotary(
    x: Float[Array, "*B X H"], cos: Float[Array, "*B R"], sin: Float[Array, "*B R"]
) -> Float[Array, "*B X H"]:
    """Rotates the halves of the first 2R numbers of each head; `cos` and `sin` have no head axis. Keeps the dtype of
    `x`."""
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    first, second = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
