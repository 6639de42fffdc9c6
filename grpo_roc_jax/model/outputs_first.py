"""Matrices with the axes of their outputs first: how the sampler keeps them on a CPU.

A product of few rows with a large matrix takes the time of reading the matrix. XLA:CPU computes x [M,K] times W [K,N]
with a copy of W in blocks, which is written and read again. As W' [N,K] times x' [K,M] it copies the rows instead. With
SmolLM2-135M on two cores, a decode step of 4 rows then takes 57 instead of 88 ms, and one of 32 rows 220 ms instead of
259 ms.
"""

import math
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from grpo_roc_jax.model.experts import BY_EXPERT
from grpo_roc_jax.model.low_precision import MATRICES, summed_axes
from grpo_roc_jax.shapes import Array


@flax.struct.dataclass
class OutputsFirst:
    """Stands where a matrix stood."""

    values: Array
    """The matrix, with the axes of its outputs first."""
    inputs: int = flax.struct.field(pytree_node=False)
    """Number of axes that a product sums over."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        shape, outputs = self.values.shape, self.values.ndim - self.inputs
        return shape[outputs:] + shape[:outputs]

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype


FEW_ROWS = 64
"""Rows from which on the copy of the matrix is the smaller part, and a product with the rows first is faster."""


def _product(x: Array, table: Array, dtype: jnp.dtype | None) -> Array:
    """`x` [M,K] times the transposed table [N,K], as [M,N]; sums and result have this dtype, by default that of `x`."""
    product = partial(jax.lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())), preferred_element_type=dtype)
    if len(x) >= FEW_ROWS:
        return product(x, table)
    # Without the barrier XLA exchanges the operands, to leave out the transposition.
    return jax.lax.optimization_barrier(product(table, x)).T


def multiply(x: Array, matrix: OutputsFirst, dtype: jnp.dtype | None) -> Array:
    """`jnp.tensordot(x, matrix, matrix.inputs)` for an `x` that ends with the axes that are summed over."""
    rows, outputs = x.shape[: x.ndim - matrix.inputs], matrix.shape[matrix.inputs :]
    table = matrix.values.reshape(math.prod(outputs), -1)
    return _product(x.reshape(math.prod(rows), -1), table, dtype).reshape(*rows, *outputs)


def turned(matrix: Array, inputs: int) -> OutputsFirst:
    """A matrix whose first `inputs` axes are summed over."""
    return OutputsFirst(jnp.moveaxis(matrix, range(inputs), range(-inputs, 0)), inputs)


def turned_layer(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer with its matrices turned; those of experts, which are multiplied in groups, stay as they are."""
    turns = {name for name in layer if name in MATRICES and not ("router" in layer and name in BY_EXPERT)}
    return {name: turned(leaf, len(summed_axes(name))) if name in turns else leaf for name, leaf in layer.items()}
