"""Rotary position embeddings: frequencies, and the rotation of queries and keys."""

import jax.numpy as jnp

from grpo_roc_jax.model.config import ModelConfig
from grpo_roc_jax.shapes import Array, Float, Int, checked

Rope = tuple[Array, ...]
"""Cosine and sine of the rotary angles, float32, without a head axis; third, where there is one, the factor of the
queries [B,T]; fourth, where there is one, whether rotated queries and keys are normalized."""


def rope_names(config: ModelConfig) -> tuple[str, ...]:
    """The rotation of each layer: `plain`; `local`, with the frequencies of layers with a window; or `none`."""
    windows = config.layer_windows if config.windows.local_theta else ()
    local = [window > 0 for window in windows or (0,) * config.layers]
    pairs = zip(config.layer_rotary, local, strict=True)
    return tuple(("local" if local_base else "plain") if rotated else "none" for rotated, local_base in pairs)


def rotary_frequencies(config: ModelConfig, name: str) -> Float[Array, " R"]:
    """theta^(-2i/H), rescaled as configured; layers with a window may have a theta of their own, not rescaled."""
    width = config.windows.full_head_dim or config.rotary_dim if name == "plain" else config.rotary_dim
    if name == "none":
        return jnp.zeros(width // 2, jnp.float32)
    theta = config.windows.local_theta if name == "local" else config.rope_theta
    plain = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    return plain if name == "local" else config.rope_scaling.rescaled(plain, theta)


@checked
def rotary_angles(positions: Int[Array, "*B"], frequencies: Float[Array, " R"]) -> Rope:
    """Cosine and sine of position times frequency, float32.

    Source: arXiv:2104.09864, in the half-split layout of the published checkpoints.
    """
    angles = jnp.multiply.outer(positions.astype(jnp.float32), frequencies)
    return jnp.cos(angles), jnp.sin(angles)


def rotary_tables(positions: Int[Array, "*B"], config: ModelConfig) -> dict[str, Rope]:
    """The angles by `rope_names`, computed once and shared by the layers. Frequency 0 rotates nothing."""
    tables = {
        name: rotary_angles(positions, rotary_frequencies(config, name)) for name in dict.fromkeys(rope_names(config))
    }
    if "plain" in tables and config.rope_scaling.magnitude != 1:
        tables["plain"] = tuple(config.rope_scaling.magnitude * part for part in tables["plain"])
    if config.extras.query_growth:
        unrotated = config.extras.query_unrotated
        steps = ((positions + unrotated) // config.extras.query_length).astype(jnp.float32)
        factor = 1.0 + config.extras.query_growth * jnp.log1p(steps)
        plain = jnp.ones_like(factor) if unrotated else factor
        tables = {name: (*table, factor if name == "none" else plain) for name, table in tables.items()}
    if config.extras.rotated_norm:
        factor = () if config.extras.query_growth else (jnp.ones(positions.shape, jnp.float32),)
        tables = {name: (*table, *factor, jnp.array(name != "none")) for name, table in tables.items()}
    return tables


def layer_ropes(positions: Int[Array, "*B"], config: ModelConfig) -> list[Rope]:
    """The angles of each layer, for code that unrolls the layers."""
    tables = rotary_tables(positions, config)
    return [tables[name] for name in rope_names(config)]


def paired_halves(x: Float[Array, "*B X H"], columns: int) -> Float[Array, "*B X H"]:
    """The first `columns` columns of each head with the even ones before the odd ones, so that the rotation by halves
    turns those that were neighbours. Products of queries and keys do not depend on the order."""
    return jnp.concatenate([x[..., :columns:2], x[..., 1:columns:2], x[..., columns:]], axis=-1)


def apply_rotary(
    x: Float[Array, "*B X H"], cos: Float[Array, "*B R"], sin: Float[Array, "*B R"]
) -> Float[Array, "*B X H"]:
    """Rotates the first 2 R columns of each head, by halves. `cos` and `sin` have no head axis. Keeps the dtype."""
    R = cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), [R, 2 * R], axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1).astype(x.dtype)
