"""Checks of the values that `types` holds."""

from typing import Any, get_args

import numpy as np


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Refuses a value that is none of the choices of a `Literal`.

    Raises:
        ValueError: The message names the choices.
    """
    if value not in get_args(choices):
        raise ValueError(f"{name} = {value!r:.80}; must be one of {', '.join(map(str, get_args(choices)))}")


def as_array(name: str, values: Any, dtype: type) -> np.ndarray:
    """The values, such as a list of numbers, as an array of a type; itself if it is one.

    Raises:
        ValueError: Values have no counterpart of that type, such as 0.5 for a token id.
    """
    array = np.asarray(values)
    if array.dtype == dtype and array.ndim:
        return array
    if not array.ndim or array.dtype.kind not in "biuf":
        raise ValueError(f"{name} is {values!r:.80}; must be an array, or a list, of {np.dtype(dtype).name}")
    with np.errstate(all="ignore"):  # what does not fit is refused below, or is infinite
        converted = array.astype(dtype)
    if not issubclass(dtype, np.floating) and (converted != array).any():
        wrong = array[converted != array][0]
        raise ValueError(f"{name} has {wrong}; must be an array, or a list, of {np.dtype(dtype).name}")
    return converted


def read_only(array: np.ndarray) -> np.ndarray:
    """A view of the array that nothing can write to."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view
