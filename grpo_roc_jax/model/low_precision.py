"""Keys, values and matrices in fewer bits, with scales.

A number x is stored as round(x / s), where s is the largest |x| among those that share the scale, divided by the
largest number of the dtype. Keys and values have a scale for each token and head, matrices one for each output channel,
so that a product with a matrix is scaled after the sum (LLM.int8, arXiv:2208.07339, sec. 2.1). Matrices in 4 bits are
NF4: a scale for each block of 64 inputs, and 16 levels at quantiles of a normal distribution (QLoRA, arXiv:2305.14314,
sec. 3 and appendix E).

A `QuantizedWeight` stands where a matrix stood. It is dequantized inside the programs, one matrix at a time, and it has
no gradient. The sampler may use matrices in int8, and so may the frozen weights of an adapter, or 4 bits.
"""

import math
from functools import partial
from itertools import pairwise
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from grpo_roc_jax.shapes import Array

DTYPES = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}
MATRICES = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down", "w_qkv", "w_z", "w_out")
MATRICES += ("g_wq", "g_wk", "g_wv", "g_wo", "d_gate", "d_up", "d_down")
MATRICES += ("s_gate", "s_up", "s_down", "q_down", "kv_down")
"""Leaves of a layer that are stored in fewer bits. `router`, `kv_up` of latent attention, the small matrices of
recurrent layers and everything outside of the layers are not."""


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


NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 numbers of NF4 (arXiv:2305.14314, appendix E)."""

BLOCK = 64
"""Inputs that share a scale in 4 bits, or fewer where 64 does not divide their axis."""


@flax.struct.dataclass
class QuantizedWeight:
    """A matrix in fewer bits. Its number at an index is number(code) * scale + offset, where number(code) depends on
    `kind`: the code (`int8`, `uint4`), the code - 8 (`int4`), or its entry of `NF4_LEVELS` (`nf4`)."""

    codes: Array
    """int8 of the shape of the matrix, or uint8 with two codes of 4 bits: that of the even index in the lower half."""
    scales: Array
    """With the axes of the matrix. An axis may be shorter by a factor; so many consecutive indices share a scale."""
    offsets: Array | None = None
    """Like `scales`, or None for zeros."""
    kind: str = flax.struct.field(pytree_node=False, default="int8")
    axis: int = flax.struct.field(pytree_node=False, default=0)
    """The axis along which codes of 4 bits share a byte."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        shape = self.codes.shape
        return shape if self.kind == "int8" else (*shape[: self.axis], 2 * shape[self.axis], *shape[self.axis + 1 :])

    @property
    def ndim(self) -> int:
        return len(self.codes.shape)

    def plain(self, dtype: jnp.dtype) -> Array:
        """The matrix in a floating dtype, computed in float32."""
        parts = self.parts(dtype)
        return parts[0] if len(parts) == 1 else jnp.stack(parts, self.axis + 1).reshape(self.shape)

    def parts(self, dtype: jnp.dtype) -> list[Array]:
        """The matrix; of 4 bits its even and its odd indices along `axis`, which products take one by one: to bring
        them in order costs a TPU seven times the memory traffic of all the rest."""
        if self.kind == "int8":
            numbers = [self.codes.astype(jnp.float32)]
        else:
            halves = (self.codes & 15, self.codes >> 4)
            zero = 8.0 if self.kind == "int4" else 0.0
            numbers = [_levels(half) if self.kind == "nf4" else half.astype(jnp.float32) - zero for half in halves]
        return [_scaled(part, self.scales, self.offsets).astype(dtype) for part in numbers]

    def channels(self, inputs: int) -> Array | None:
        """The scales of the outputs, if all inputs of an output share one, so that a product can be scaled after its
        sum."""
        by_channel = self.kind == "int8" and set(self.scales.shape[:inputs]) == {1}
        return self.scales.reshape(self.shape[inputs:]) if by_channel else None


def pack(codes: Any, axis: int) -> Any:
    """uint8 with two codes of 4 bits each, of an array of JAX or NumPy."""
    even, odd = (codes[(slice(None),) * axis + (slice(first, None, 2),)] for first in (0, 1))
    return (even | odd << 4).astype(np.uint8)


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedWeight)


def plain(leaf: Array | QuantizedWeight, dtype: jnp.dtype) -> Array:
    """A matrix in a floating dtype, however it is stored."""
    return leaf.plain(dtype) if isinstance(leaf, QuantizedWeight) else leaf.astype(dtype)


def _levels(codes: Array) -> Array:
    """NF4's number of each code. A tree of selections by the bits, since a lookup would gather element by element."""
    levels = [jnp.float32(level) for level in NF4_LEVELS]
    for bit in range(4):
        upper = (codes >> bit) & 1 == 1
        levels = [jnp.where(upper, high, low) for low, high in zip(levels[::2], levels[1::2], strict=True)]
    return levels[0]


def _scaled(numbers: Array, scales: Array, offsets: Array | None = None) -> Array:
    """numbers * scales + offsets in float32, where so many consecutive indices of an axis share one of these."""
    pairs = [(have, need // have) for have, need in zip(scales.shape, numbers.shape, strict=True)]
    by_block = numbers.reshape([size for pair in pairs for size in pair])

    def wide(leaf: Array) -> Array:
        return jnp.broadcast_to(
            leaf.astype(jnp.float32).reshape([n for have, _ in pairs for n in (have, 1)]), by_block.shape
        )

    by_block = by_block * wide(scales)
    return (by_block if offsets is None else by_block + wide(offsets)).reshape(numbers.shape)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def product(x: Array, weight: QuantizedWeight, inputs: int, dtype: jnp.dtype | None, flat: bool) -> Array:
    """`jnp.tensordot(x, weight, inputs)` without a gradient for the weight.

    The backward pass dequantizes again, so that no matrix is kept in a floating dtype between the passes. Neither pass
    dequantizes before its other operand is there (`_after`), which would have all layers in a floating dtype at once.

    Args:
        x: Ends with the axes that are summed over; one axis if `flat`.
        weight: The matrix, whose first `inputs` axes are summed over.
        inputs: Number of these axes.
        dtype: Dtype of the result; that of `x` by default.
        flat: The result has one axis of outputs.
    """
    x, weight = _after(x, weight, flat)
    numbers, scale = _numbers(weight, inputs, x.dtype, flat)
    summed = 1 if flat else inputs
    xs = [x] if len(numbers) == 1 else [x.reshape(*x.shape[:-1], -1, 2)[..., part] for part in (0, 1)]
    dot = partial(jnp.tensordot, axes=summed, preferred_element_type=jnp.float32)
    y = sum(dot(x, part) for x, part in zip(xs, numbers, strict=True))
    return (y if scale is None else y * _like(scale, y)).astype(dtype or x.dtype)


def _after(x: Array, weight: QuantizedWeight, flat: bool) -> tuple[Array, QuantizedWeight]:
    """Both, where XLA cannot use the weight before `x`. XLA:CPU, for which products are `flat`, drops barriers before
    it orders a program, so there the codes are made to depend on `x`."""
    x, weight = jax.lax.optimization_barrier((x, weight))
    if not flat:
        return x, weight
    zero = (x[(0,) * x.ndim] * 0).astype(weight.codes.dtype)
    return x, weight.replace(codes=weight.codes + zero)


def _numbers(weight: QuantizedWeight, inputs: int, dtype: jnp.dtype, flat: bool) -> tuple[list[Array], Array | None]:
    """(parts of the matrix to multiply with, scales of the outputs or None)."""
    scale = weight.channels(inputs)
    numbers = weight.parts(dtype) if scale is None else [weight.codes.astype(dtype)]
    if flat:
        numbers = [part.reshape(math.prod(part.shape[:inputs]), -1) for part in numbers]
        scale = None if scale is None else scale.reshape(-1)
    return numbers, scale


def _like(leaf: Array, x: Array) -> Array:
    return leaf.reshape((1,) * (x.ndim - leaf.ndim) + leaf.shape)


def _product_fwd(x: Array, weight: QuantizedWeight, inputs: int, dtype: jnp.dtype | None, flat: bool) -> tuple:
    return product(x, weight, inputs, dtype, flat), (weight, jnp.zeros((), x.dtype))


def _product_bwd(inputs: int, dtype: jnp.dtype | None, flat: bool, residuals: tuple, d_y: Array) -> tuple:
    weight, like = residuals
    d_y, weight = _after(d_y, weight, flat)
    numbers, scale = _numbers(weight, inputs, like.dtype, flat)
    d_y = d_y if scale is None else d_y.astype(jnp.float32) * _like(scale, d_y)
    outputs = numbers[0].ndim - (1 if flat else inputs)
    over = [[*range(d_y.ndim - outputs, d_y.ndim)], [*range(numbers[0].ndim - outputs, numbers[0].ndim)]]
    d_x = [jnp.tensordot(d_y.astype(like.dtype), part, over) for part in numbers]
    return d_x[0] if len(d_x) == 1 else jnp.stack(d_x, -1).reshape(*d_x[0].shape[:-1], -1), None


product.defvjp(_product_fwd, _product_bwd)


def grouped_product(x: Array, matrices: Array | QuantizedWeight, sizes: Array, dtype: jnp.dtype | None = None) -> Array:
    """`jax.lax.ragged_dot` with the matrices of experts, which are dequantized again in the backward pass."""

    def dot(x: Array, matrices: Array | QuantizedWeight, sizes: Array) -> Array:
        numbers = matrices.plain(x.dtype) if isinstance(matrices, QuantizedWeight) else matrices
        return jax.lax.ragged_dot(x, numbers, sizes, preferred_element_type=dtype)

    return (jax.checkpoint(dot) if isinstance(matrices, QuantizedWeight) else dot)(x, matrices, sizes)


# ---- matrices of layers in fewer bits ------------------------------------------------------------------------------


def summed_axes(name: str, ndim: int = 0) -> tuple[int, ...]:
    """The axes of a layer's matrix that a product with it sums over; experts have one axis more before them."""
    if ndim == 3 and name in ("w_gate", "w_up", "w_down"):
        return (1,)
    return (0, 1) if name in ("wo", "w_out", "g_wo") else (0,)


def quantize(matrix: Array, axes: tuple[int, ...], bits: int) -> QuantizedWeight:
    """A matrix in int8 with a scale for each output, or in NF4 with one for each block of inputs.

    Args:
        matrix: Of a floating dtype.
        axes: Those that a product sums over.
        bits: 8 or 4.

    Raises:
        ValueError: 4 bits along an axis of odd width.
    """
    if bits == 8:
        codes, scales = rounded(matrix, axes, jnp.int8)
        return QuantizedWeight(codes, jnp.expand_dims(scales, axes))
    x, axis = matrix.astype(jnp.float32), axes[-1]
    width = x.shape[axis]
    if width % 2:
        raise ValueError(f"a matrix with {width} inputs in 4 bits; must be an even number; set lora.base_bits 8")
    block = max(size for size in range(2, min(BLOCK, width) + 1, 2) if width % size == 0)
    blocks = x.reshape(*x.shape[:axis], width // block, block, *x.shape[axis + 1 :])
    # Scales are rounded first, so that each code is the nearest under the scale that is stored.
    scales = jnp.max(jnp.abs(blocks), axis + 1).astype(jnp.bfloat16)
    scales = jnp.where(scales > 0, scales, jnp.ones_like(scales))
    x = _scaled(x, 1 / scales.astype(jnp.float32))
    middles = [(low + high) / 2 for low, high in pairwise(NF4_LEVELS)]
    codes = sum((x > middle).astype(jnp.uint8) for middle in middles)
    return QuantizedWeight(pack(codes, axis), scales, kind="nf4", axis=axis)


def quantized_layer(layer: dict[str, Any], bits: int) -> dict[str, Any]:
    """A layer with its matrices in fewer bits; those that are already stay as they are."""

    def stored(name: str, leaf: Any) -> Any:
        if name not in MATRICES or is_quantized(leaf):
            return leaf
        return quantize(leaf, summed_axes(name, leaf.ndim), bits)

    return {name: stored(name, leaf) for name, leaf in layer.items()}


def plain_layer(layer: dict[str, Any], dtype: jnp.dtype) -> dict[str, Array]:
    """A layer with its quantized matrices in a floating dtype."""
    return {name: leaf.plain(dtype) if is_quantized(leaf) else leaf for name, leaf in layer.items()}


def split_quantized(sharding: NamedSharding, weight: QuantizedWeight) -> QuantizedWeight:
    """Shardings of a quantized matrix from that of the matrix. An axis of the scales that does not divide is not split;
    they are small."""
    spec = (*sharding.spec, *(None,) * (weight.ndim - len(sharding.spec)))

    def parts(axes: Any) -> int:
        return math.prod(sharding.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))

    def split(leaf: Any) -> NamedSharding:
        few = (axes if size % parts(axes) == 0 else None for axes, size in zip(spec, leaf.shape, strict=True))
        return NamedSharding(sharding.mesh, PartitionSpec(*few))

    return jax.tree.map(split, weight)


def split_all(shardings: Any, like: Any) -> Any:
    """Shardings in the structure of `like`, from those of its matrices as arrays."""

    def split(sharding: Any, leaf: Any) -> Any:
        return split_quantized(sharding, leaf) if is_quantized(leaf) else jax.tree.map(lambda _: sharding, leaf)

    return jax.tree.map(split, shardings, like)


def stored_bytes(dtype: str, width: int, compute: int) -> int:
    """Bytes of one head of keys or values of one token, in the compute dtype or with a scale."""
    return width * compute if dtype == "full" else width * jnp.dtype(DTYPES[dtype]).itemsize + 4
