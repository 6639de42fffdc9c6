"""Where XLA should end a fusion."""

from typing import TypeVar

import jax

T = TypeVar("T")


def unfused(tree: T) -> T:
    """The arrays, each computed once and held in memory, on a CPU; unchanged elsewhere.

    XLA:CPU computes what comes before an array again for each of its uses, and in their order of elements: in a loop
    with strides where a use is transposed. Other compilers write several results in one loop, which this would end.
    """
    return jax.lax.platform_dependent(tree, cpu=jax.lax.optimization_barrier, default=lambda same: same)
