"""How float32 products and sums are added up, `model.sums`: in float32, or in float64 and rounded once.

Float32 sums depend on their order, and every program has its own: one token against a cache, a span, a packed row.
One unit in the last place is enough for sharp heads to make 1e-5 of it in a log-probability. Added up in float64 the
product of float32 values is exact and the order is lost in the one rounding at the end, so that sampler and trainer
agree to the bit but for rare ties. The products of gradients stay in float32: nothing compares them bit by bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from grpo_roc_jax.shapes import Array


@dataclass(frozen=True)
class Sums:
    """The products and sums of a forward pass."""

    wide: bool = False
    """Added up in float64, for float32 operands."""

    def einsum(self, equation: str, x: Array, y: Array, dtype: jnp.dtype | None = None) -> Array:
        """`jnp.einsum` of two operands; `dtype` of the result, by default theirs."""
        return self.product(partial(jnp.einsum, equation), x, y, dtype)

    def product(self, multiply: Callable[..., Array], x: Array, y: Array, dtype: jnp.dtype | None = None) -> Array:
        """`multiply(x, y)`, linear in both, such as `jnp.tensordot` of some axes."""
        return _wide_product(multiply, x, y) if self.wide else multiply(x, y, preferred_element_type=dtype)

    def total(self, x: Array, axis: int | tuple[int, ...], keepdims: bool = False) -> Array:
        """`jnp.sum`."""
        return _wide_total(axis, keepdims, x) if self.wide else jnp.sum(x, axis, keepdims=keepdims)

    def mean(self, x: Array) -> Array:
        """Over the last axis, which stays with length 1."""
        return self.total(x, -1, keepdims=True) / x.shape[-1] if self.wide else jnp.mean(x, axis=-1, keepdims=True)

    def softmax(self, x: Array) -> Array:
        """Over the last axis; a wide one takes its exponentials in float64 too, which compilers round differently in
        long rows and short ones."""
        return _wide_softmax(x) if self.wide else jax.nn.softmax(x, axis=-1)


NARROW = Sums()


def _rounded(x: Array) -> Array:
    """Float64 to float32. XLA may leave out a conversion that the next product takes back, as excess precision; not
    so this."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23).astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wide_product(multiply: Callable[..., Array], x: Array, y: Array) -> Array:
    with jax.enable_x64(True):
        return _rounded(multiply(x.astype(jnp.float64), y.astype(jnp.float64)))


def _wide_product_fwd(multiply: Callable[..., Array], x: Array, y: Array) -> tuple[Array, tuple[Array, Array]]:
    return _wide_product(multiply, x, y), (x, y)


def _wide_product_bwd(multiply: Callable[..., Array], kept: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
    return jax.vjp(multiply, *kept)[1](d)


_wide_product.defvjp(_wide_product_fwd, _wide_product_bwd)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _wide_total(axis: int | tuple[int, ...], keepdims: bool, x: Array) -> Array:
    with jax.enable_x64(True):
        return _rounded(jnp.sum(x.astype(jnp.float64), axis, keepdims=keepdims))


@_wide_total.defjvp
def _wide_total_jvp(
    axis: int | tuple[int, ...], keepdims: bool, x: tuple[Array], d: tuple[Array]
) -> tuple[Array, Array]:
    return _wide_total(axis, keepdims, *x), jnp.sum(*d, axis, keepdims=keepdims)


@jax.custom_jvp
def _wide_softmax(x: Array) -> Array:
    with jax.enable_x64(True):
        return _rounded(jax.nn.softmax(x.astype(jnp.float64), axis=-1))


@_wide_softmax.defjvp
def _wide_softmax_jvp(x: tuple[Array], d: tuple[Array]) -> tuple[Array, Array]:
    p = _wide_softmax(*x)
    weighted = p * d[0]
    return p, weighted - p * jnp.sum(weighted, axis=-1, keepdims=True)
