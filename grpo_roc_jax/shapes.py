"""Dimension letters, array annotations and `@checked`, the runtime check of shapes and dtypes.

The letters are the same in annotations, einsum strings and prose: B rows, T tokens, S cache slots of a row, D model
width, F hidden width, N query heads, K key-value heads, H head width, L layers, V vocabulary, G group size,
P problems, M micro-batches. A checked signature costs nothing once a function is traced.
"""

from typing import TypeVar

from beartype import beartype
from jaxtyping import Array, Bool, Float, Int, Key, jaxtyped

__all__ = ["Array", "Bool", "Float", "Int", "Key", "checked"]

F = TypeVar("F")


def checked(function: F) -> F:
    """Verifies the annotated shapes and dtypes at each call (of a traced function: once per trace)."""
    return jaxtyped(typechecker=beartype)(function)
