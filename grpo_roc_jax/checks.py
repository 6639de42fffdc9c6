"""Checks of the values that `types` holds, and of what is passed to the public functions."""

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

# ---- types of arguments --------------------------------------------------------------------------------------------


def expect(value: Any, kind: Any, name: str, must: str) -> None:
    """Refuses a value of another type.

    Raises:
        TypeError: `must` says what to pass instead.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {shown(value)}; must be {must}")


def listed(values: Any, kind: type, name: str, must: str) -> list[Any]:
    """The values as a list; a generator is read.

    Raises:
        TypeError: It is a single value, or one is of another type. `must` says what to pass instead.
    """
    if isinstance(values, kind) or not isinstance(values, Iterable):
        raise TypeError(f"{name} is {shown(values)}; must be {must}")
    out = list(values)
    if wrong := [value for value in out if not isinstance(value, kind)]:
        raise TypeError(f"{name} has {shown(wrong[0])}; must be {must}")
    return out


def expect_sections(value: Any, names: str) -> None:
    """Refuses what lacks one of these sections of a configuration, such as a section alone.

    Raises:
        TypeError: The message names what it lacks.
    """
    if missing := [name for name in names.split() if not hasattr(value, name)]:
        raise TypeError(
            f"the method is {shown(value)} without {', '.join(missing)}; must be a configuration, such as "
            "read_config('toy.yaml'), or an object with its sections"
        )


def expect_generator(rng: Any) -> None:
    """Refuses a seed where a generator belongs.

    Raises:
        TypeError: The message says how to make one.
    """
    expect(rng, np.random.Generator, "rng", "a generator: np.random.default_rng(0)")


def shown(value: Any) -> str:
    """A value in a message. Others than numbers and texts are shown by their type, since they may be large."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, str | bytes | int | float):
        return f"{value!r:.80} ({type(value).__name__})"
    return f"of type {type(value).__name__}"


# ---- numbers and names ---------------------------------------------------------------------------------------------


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Refuses a value that is none of the choices of a `Literal`.

    Raises:
        ValueError: The message names the choices.
    """
    if value not in get_args(choices):
        raise ValueError(f"{name} = {value!r:.80}; must be one of {', '.join(map(str, get_args(choices)))}")


def check_number(name: str, value: Any) -> None:
    """Refuses what is no finite number: text, arrays with an axis, NaN and infinities.

    Raises:
        ValueError: The message shows it.
    """
    try:
        finite = not getattr(value, "ndim", 0) and math.isfinite(value)
    except (TypeError, OverflowError):
        finite = False
    if not finite:
        raise ValueError(f"{name} = {value!r:.80}; must be a finite number")


def check_count(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Refuses what is no whole number from `low` to `high`.

    Raises:
        ValueError: The message names the bounds.
    """
    try:
        whole = not isinstance(value, bool | np.bool_) and operator.index(value) == value
    except TypeError:
        whole = False
    if not whole or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} = {value!r:.80}; must be a whole number {bounds}")


# ---- arrays --------------------------------------------------------------------------------------------------------


def as_array(name: str, values: Any, dtype: type, ndim: int = 1) -> np.ndarray:
    """The values, such as a list of numbers, as an array of a type; itself if it is one.

    Raises:
        ValueError: Values have no counterpart of that type, such as 0.5 for a token id, or not `ndim` axes.
    """
    array = np.asarray(values)
    if array.dtype == dtype and array.ndim == ndim:
        return array
    if array.ndim != ndim or not np.can_cast(array.dtype, np.longdouble):
        got = f"of shape {array.shape}" if array.ndim > ndim else f"{values!r:.80}"
        axes = "" if ndim == 1 else f" with {ndim} axes"
        raise ValueError(f"{name} is {got}; must be an array, or a list, of {np.dtype(dtype).name}{axes}")
    if array.dtype.kind == "V":  # bfloat16 and the like, which NumPy compares with no integer
        array = array.astype(np.float32)
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


AXES = {"routes": 3}
"""Number of axes of an array by token; of the others one."""


def set_arrays(value: Any, dtypes: Mapping[str, type], optional: Collection[str], *, frozen: bool = False) -> None:
    """Makes these fields of a dataclass arrays of their dtypes and of one length.

    Args:
        value: The dataclass.
        dtypes: Names of its fields with the dtypes of their arrays.
        optional: Those that may be None.
        frozen: Whether the arrays become read-only.

    Raises:
        ValueError: A field is no such array, or they differ in length.
    """
    kind, lengths = type(value).__name__, {}
    for name, dtype in dtypes.items():
        if (given := getattr(value, name)) is None and name in optional:
            continue
        array = as_array(f"{kind}.{name}", given, dtype, AXES.get(name, 1))
        object.__setattr__(value, name, read_only(array) if frozen else array)
        lengths[name] = len(array)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"a {kind} got lengths {lengths}; must be arrays of one length")


def check_parts(name: str, parts: Sequence[int], length: int) -> None:
    """Refuses parts of another length than the whole.

    Raises:
        ValueError: The message names both.
    """
    if len(parts) and (min(parts) < 1 or sum(parts) != length):
        raise ValueError(f"{name} = {parts!r:.80}; must be lengths that add up to the {length} tokens")


def check_range(name: str, values: np.ndarray, low: float, high: float) -> None:
    """Refuses values outside of low..high.

    Raises:
        ValueError: The message names both ranges.
    """
    if len(values) and not low <= values.min() <= values.max() <= high:
        raise ValueError(f"{name} spans {values.min()}..{values.max()}; must be in {low}..{high}")


def check_no_negative(name: str, values: np.ndarray, mask: np.ndarray) -> None:
    """Refuses negative values on a mask; off the mask nothing reads them.

    Raises:
        ValueError: The message names the first one.
    """
    refused = values < 0
    if refused.any() and (refused := refused & mask).any():
        first = int(refused.argmax())
        raise ValueError(
            f"{name} has {values[first]} at token {first}, which the policy mask holds; must be at least 0"
        )


def check_shapes(shape: tuple[int, ...], **arrays: Any) -> None:
    """Refuses arrays of another shape.

    Raises:
        ValueError: The message names the first one with both shapes.
    """
    for name, array in arrays.items():
        if np.shape(array) != shape:
            raise ValueError(f"{name} is of shape {np.shape(array)}; must be {shape}")


# ---- groups and parameters -----------------------------------------------------------------------------------------


def check_group(group: Any) -> None:
    """Refuses a group whose trajectories and verdicts differ in number, or whose verdicts have rewards for another
    number of turns than the trajectory has.

    Raises:
        ValueError: The message names the problem.
    """
    count, verdicts = len(group.trajectories), len(group.verdicts)
    if count != verdicts:
        raise ValueError(
            f"group {group.problem.uid!r}: {count} trajectories but {verdicts} verdicts; score every trajectory before "
            "building the group"
        )
    for index, (trajectory, verdict) in enumerate(zip(group.trajectories, group.verdicts, strict=True)):
        if verdict.turn_rewards and len(verdict.turn_rewards) != len(trajectory.turns):
            raise ValueError(
                f"group {group.problem.uid!r}: turn_rewards of verdict {index} has {len(verdict.turn_rewards)} numbers "
                f"for {len(trajectory.turns)} turns; must have one for each turn, or none"
            )


def check_scores(name: str, arrays: Sequence[Any] | None, lengths: Sequence[int]) -> None:
    """Refuses scores that are not one array for each trajectory, of its length; None stands for no scores.

    Raises:
        ValueError: The message names the number of arrays, or the lengths.
    """
    if arrays is not None and len(arrays) != len(lengths):
        raise ValueError(
            f"scores.{name} has {len(arrays)} arrays for {len(lengths)} trajectories; pass one each, in order"
        )
    for index, (array, length) in enumerate(zip(() if arrays is None else arrays, lengths, strict=False)):
        if array is not None or name != "teacher":  # a teacher may leave out trajectories
            check_shapes((length,), **{f"scores.{name} of trajectory {index}": array})


def check_params(params: Any, like: Mapping[str, Any]) -> None:
    """Refuses parameters that are not those of a model. Layers may be stacked or a tuple, and low-rank pairs may lie
    beside their matrices.

    Args:
        params: A tree of arrays.
        like: The tree of the model, with layers stacked; its leaves have shapes.

    Raises:
        TypeError: `params` is no mapping.
        ValueError: The message names the first leaf that differs.
    """
    expect(params, Mapping, "params", "the parameters of the model, as init_params(key, model) makes them")
    given, needed = _shapes(params), _shapes(like)
    for name in needed | given:
        got, must = given.get(name, {"absent"}), needed.get(name, {"absent"})
        if got != must and (name in needed or "_lora_" not in name):
            raise ValueError(
                f"params do not fit the model: {name} is {min(got - must)} in params and {min(must)} in the model; "
                "pass the parameters that were made for this ModelConfig, or the ModelConfig that they were made for"
            )


def _shapes(tree: Any, path: str = "") -> dict[str, set[tuple[int, ...]]]:
    """The shapes of each leaf, by its path; leaves of a tuple of layers as if they were stacked."""
    if isinstance(tree, Mapping):
        parts = [_shapes(part, f"{path}/{name}".lstrip("/")) for name, part in tree.items()]
        return {name: shapes for part in parts for name, shapes in part.items()}
    if not isinstance(tree, tuple | list):
        return {path: {tuple(tree.shape) if hasattr(tree, "shape") else np.shape(tree)}}
    layers = [_shapes(layer, path) for layer in tree]
    names = dict.fromkeys(name for layer in layers for name in layer)
    alike = {name: [layer[name] for layer in layers if name in layer] for name in names}
    return {name: {(len(each), *shape) for shapes in each for shape in shapes} for name, each in alike.items()}
