"""Keys, values and matrices in int8 or float8, with scales.

A number x is stored as round(x / s), where s is the largest |x| among those that share the scale, divided by the
largest number of the dtype. Keys and values have a scale for each token and head, matrices one for each output channel,
so that a product with a matrix is scaled after the sum (LLM.int8, arXiv:2208.07339, sec. 2.1). Only the sampler
computes so.
"""

import jax.numpy as jnp

from grpo_roc_jax.shapes import Array

DTYPES = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}
MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down", "w_qkv", "w_z", "w_out")
"""Leaves of a layer that are stored in int8. `router`, the small matrices of recurrent layers and everything outside of
the layers are not."""


def rounded(x: Array, axes: int | tuple[int, ...], dtype: jnp.dtype) -> tuple[Array, Array]:
    """(numbers of the dtype, float32 scales without these axes); the scale of zeros is 1."""
    x = x.astype(jnp.float32)
    integral = jnp.issubdtype(dtype, jnp.integer)
    top = float(jnp.iinfo(dtype).max if integral else jnp.finfo(dtype).max)
    scale = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / top
    scale = jnp.where(scale > 0, scale, 1.0)
    x = jnp.clip(x / scale, -top, top)
    return (jnp.round(x) if integral else x).astype(dtype), jnp.squeeze(scale, axes)


def scaled_orders(orders: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of keys and values of the cache, then those of their scales, which have no head width."""
    return (*orders, *(order.replace("h", "") for order in orders))


def exact(leaves: tuple[Array, ...], orders: tuple[str, ...], dtype: jnp.dtype) -> tuple[Array, ...]:
    """Keys and values in `dtype`, from the arrays of a cache with these orders; other axes may come first."""
    if len(orders) < 4:
        return leaves
    pairs = zip(leaves[:2], leaves[2:], orders[:2], strict=True)
    return tuple(
        (x.astype(jnp.float32) * jnp.expand_dims(s, x.ndim - 3 + order.index("h"))).astype(dtype)
        for x, s, order in pairs
    )


def summed_axes(name: str) -> tuple[int, ...]:
    """The axes of a layer's matrix that a product with it sums over."""
    return (0, 1) if name in ("wo", "w_out") else (0,)


def int8_layer(layer: dict[str, Array]) -> dict[str, Array]:
    """A layer of the sampler with its matrices in int8; the scales of `w` are `w_scale`."""
    stored = dict(layer)
    for name in layer.keys() & set(MATRICES):
        stored[name], stored[f"{name}_scale"] = rounded(layer[name], summed_axes(name), jnp.int8)
    return stored


def exact_layer(layer: dict[str, Array], dtype: jnp.dtype) -> dict[str, Array]:
    """A layer with its matrices in a floating dtype."""
    matrices = {name: leaf for name, leaf in layer.items() if not name.endswith("_scale")}
    for name in matrices.keys() & set(MATRICES):
        if f"{name}_scale" in layer:
            scale = jnp.expand_dims(layer[f"{name}_scale"], summed_axes(name))
            matrices[name] = (layer[name].astype(jnp.float32) * scale).astype(dtype)
    return matrices


def stored_bytes(dtype: str, width: int, compute: int) -> int:
    """Bytes of one head of keys or values of one token, in the compute dtype or with a scale."""
    return width * compute if dtype == "full" else width * jnp.dtype(DTYPES[dtype]).itemsize + 4
