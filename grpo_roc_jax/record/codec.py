"""Exact conversion of host values to JSON and arrays and back, shared by traces and checkpoints.

Fields with their default value are dropped, so a tool result with 25 fields takes a few. Per-token arrays are separate
from the JSON: a checkpoint stores them as arrays, a trace as base64.
"""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import numpy as np

from grpo_roc_jax.settings.options import default_of, fields_of
from grpo_roc_jax.types import Condition, Group, Problem, ToolCall, ToolResult, Trajectory, Turn, Verdict

T = TypeVar("T")

TAGS = ("__tuple__", "__bytes__", "__ndarray__", "__scalar__", "__dict__")
"""Keys that mark a value without a JSON form. A mapping that has such a key, or keys that are not text, is wrapped."""

TRAJECTORY_ARRAYS = {"tokens": np.int32, "policy_mask": np.bool_, "logprobs": np.float32, "versions": np.int32}
"""Per-token arrays of a trajectory and the dtypes that `types.Trajectory` promises."""


PLAIN = frozenset({str, int, float, bool, type(None)})
"""Types that JSON stores exactly."""


def to_json(value: Any) -> Any:
    """`value` as JSON types; tuples, bytes, arrays and NumPy scalars are tagged.

    Raises:
        TypeError: A value has no exact form.
    """
    if type(value) in PLAIN:
        return value
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, tuple):
        return {"__tuple__": [to_json(item) for item in value]}
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        if all(type(key) is str and key not in TAGS for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {"__dict__": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        tag = "__ndarray__" if isinstance(value, np.ndarray) else "__scalar__"
        return {tag: [value.dtype.str, list(value.shape), encode_array(np.asarray(value))]}
    raise TypeError(
        f"cannot store a {type(value).__name__} ({str(value)[:80]!r}) exactly; use numbers, text, lists, tuples, "
        "mappings or numeric arrays"
    )


def from_json(value: Any) -> Any:
    """Inverse of `to_json`."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        tag, content = next(iter(value.items()))
        if tag == "__tuple__":
            return tuple(from_json(item) for item in content)
        if tag == "__bytes__":
            return base64.b64decode(content)
        if tag == "__dict__":
            return {from_json(key): from_json(item) for key, item in content}
        if tag in ("__ndarray__", "__scalar__"):
            dtype, shape, data = content
            array = decode_array(data, np.dtype(dtype)).reshape(shape)
            return array if tag == "__ndarray__" else array[()]
    return {key: from_json(item) for key, item in value.items()}


def finite(value: Any) -> Any:
    """The value with NaN and infinities replaced by None, for JSON."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


def encode_array(array: np.ndarray) -> str:
    """Base64 of the raw little-endian bytes."""
    array = np.ascontiguousarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return base64.b64encode(array).decode("ascii") if array.size else ""


def decode_array(text: str, dtype: Any) -> np.ndarray:
    """Inverse of `encode_array`, one-dimensional and writable."""
    return np.frombuffer(base64.b64decode(text), dtype=np.dtype(dtype).newbyteorder("<")).astype(dtype)


@cache
def _fields(kind: type) -> dict[str, Any]:
    """Name -> default of each field; the default is `dataclasses.MISSING` if there is none."""
    return {name: default_of(field) for name, field in fields_of(kind).items()}


def pack(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    packed = {}
    for name, default in _fields(type(record)).items():
        value = getattr(record, name)
        # The type is compared too: 1, 1.0 and True are equal but must be restored as different values.
        if value is not default and (type(value) is not type(default) or value != default):
            packed[name] = value if type(value) in PLAIN else to_json(value)
    return packed


def unpack(kind: type[T], packed: Mapping[str, Any]) -> T:
    """Builds the record. Stored fields that this version lacks are dropped."""
    return kind(**{name: from_json(packed[name]) for name in _fields(kind) if name in packed})


def pack_turn(turn: Turn) -> dict[str, Any]:
    """A turn with its calls and results."""
    packed: dict[str, Any] = {"start": int(turn.start), "end": int(turn.end), "text": turn.text}
    if turn.calls:
        packed["calls"] = [pack(call) for call in turn.calls]
    if turn.results:
        packed["results"] = [pack(result) for result in turn.results]
    if turn.reply or turn.reward:
        packed |= {"reply": turn.reply, "reward": float(turn.reward)}
    return packed


def unpack_turn(packed: Mapping[str, Any]) -> Turn:
    return Turn(
        start=packed["start"],
        end=packed["end"],
        text=packed["text"],
        calls=tuple(unpack(ToolCall, call) for call in packed.get("calls", ())),
        results=tuple(unpack(ToolResult, result) for result in packed.get("results", ())),
        reply=packed.get("reply", ""),
        reward=packed.get("reward", 0.0),
    )


def token_arrays(trajectory: Trajectory) -> dict[str, np.ndarray]:
    """The per-token arrays by name."""
    return {name: getattr(trajectory, name) for name in TRAJECTORY_ARRAYS}


def groups_to_tree(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Groups as a flat mapping of arrays: concatenated tokens, their lengths, and everything else as JSON bytes."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    arrays = [token_arrays(trajectory) for trajectory in trajectories]
    words = [
        {
            "problem": pack(group.problem),
            "verdicts": [pack(verdict) for verdict in group.verdicts],
            "trajectories": [
                trajectory_to_json(trajectory) | {"routes": to_json(trajectory.routes)}
                for trajectory in group.trajectories
            ],
        }
        for group in groups
    ]
    tree = {
        name: np.concatenate([a[name] for a in arrays]) if arrays else np.zeros(0, dtype)
        for name, dtype in TRAJECTORY_ARRAYS.items()
    }
    tree["lengths"] = np.array([trajectory.length for trajectory in trajectories], np.int64)
    tree["words"] = np.frombuffer(json.dumps(words).encode("ascii"), np.uint8).copy()
    return tree


def groups_from_tree(tree: Mapping[str, np.ndarray]) -> tuple[Group, ...]:
    """Inverse of `groups_to_tree`."""
    words = json.loads(tree["words"].tobytes().decode("ascii"))
    ends = np.cumsum(tree["lengths"])
    bounds = iter(zip(ends - tree["lengths"], ends, strict=True))
    groups = []
    for group in words:
        trajectories = []
        for entry in group["trajectories"]:
            start, end = next(bounds)
            arrays = {name: tree[name][start:end].copy() for name in TRAJECTORY_ARRAYS}
            trajectory = trajectory_from_json(entry, arrays)
            trajectories.append(replace(trajectory, routes=from_json(entry.get("routes"))))
        verdicts = tuple(unpack(Verdict, verdict) for verdict in group["verdicts"])
        groups.append(Group(unpack(Problem, group["problem"]), tuple(trajectories), verdicts))
    return tuple(groups)


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as JSON, without its per-token arrays."""
    rare: dict[str, Any] = {} if trajectory.reward is None else {"reward": float(trajectory.reward)}
    rare |= {"rewards": dict(trajectory.rewards)} if trajectory.rewards else {}
    rare |= {"parts": list(trajectory.parts)} if trajectory.parts else {}
    rare |= {"fault": trajectory.fault} if trajectory.fault else {}
    rare |= {"opening": trajectory.opening} if trajectory.opening else {}
    return rare | {
        "prompt_length": int(trajectory.prompt_length),
        "turns": [pack_turn(turn) for turn in trajectory.turns],
        "stop": trajectory.stop,
        "sample": int(trajectory.sample),
        "seconds": float(trajectory.seconds),
        "condition": str(trajectory.condition),
        "temperature": trajectory.temperature,
    }


def trajectory_from_json(fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Trajectory:
    """A trajectory from its JSON and its per-token arrays."""
    return Trajectory(
        **arrays,
        prompt_length=fields["prompt_length"],
        turns=tuple(unpack_turn(turn) for turn in fields["turns"]),
        stop=fields["stop"],
        sample=fields["sample"],
        seconds=fields["seconds"],
        condition=Condition.parse(fields["condition"]),
        temperature=fields.get("temperature"),
        reward=fields.get("reward"),
        rewards=fields.get("rewards", {}),
        parts=tuple(fields.get("parts", ())),
        fault=fields.get("fault", ""),
        opening=fields.get("opening", ""),
    )
