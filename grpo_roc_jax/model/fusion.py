"""Controls where XLA ends a fusion."""

from typing import TypeVar

import jax

T = TypeVar("T")


def unfused(tree: T) -> T:
    """Makes XLA compute each array once and store it, on a CPU; has no effect elsewhere.

    XLA:CPU recomputes the operations before an array for each of its uses, in the order in which the use reads it: with
    strides if the use is transposed. Other compilers write several results in one loop, which this would prevent.
    """
    return jax.lax.platform_dependent(tree, cpu=jax.lax.optimization_barrier, default=lambda same: same)
