"""Packs trajectories of different lengths into rows of one length: `TrainRow`s -> one `TrainBatch` of fixed shape.

Packing drops nothing and changes no number: positions restart with each trajectory, attention stays within it, and
padding has weight 0. The shape depends on the configuration only, so the update compiles once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import flax.struct
import jax
import numpy as np

from grpo_roc_jax import checks
from grpo_roc_jax.settings.options import AtLeast1, Axis, Count, kind, settings
from grpo_roc_jax.shapes import Array, Bool, Float, Int
from grpo_roc_jax.types import TRAIN_ROW_FIELDS, TrainRow


class Updates(Axis, axis="batch.updates"):
    """The optimizer steps of a rollout batch. In settings a plain number N means N parts."""

    parts: ClassVar[int] = 1
    epochs: ClassVar[int] = 1

    @classmethod
    def read(cls, value: Any) -> Any:
        return super().read(str(value) if type(value) is int else value)

    @classmethod
    def spelled_out(cls, text: str) -> dict[str, Any]:
        if not text.isdigit():
            return {"kind": text}
        return {"kind": "one"} if text == "1" else {"kind": "several", "parts": int(text)}

    @property
    def total(self) -> int:
        """Optimizer steps."""
        return self.parts * self.epochs


@kind("one")
class OneUpdate(Updates):
    """One optimizer step, on policy: the released recipe of GRPO-RoC."""


@kind("several")
class SeveralUpdates(Updates):
    """Several optimizer steps. All but the first are off-policy, so that clips and importance ratios take effect."""

    parts: AtLeast1 = 1
    """Number of parts that the groups are divided into, with an optimizer step each."""
    epochs: AtLeast1 = 1
    """Number of passes over the parts, with the advantages of the first pass."""


USUAL_ROWS = 8
"""Rows of a micro-batch where `batch.rows` is 0 and no run has measured a better number."""


@settings
class BatchConfig:
    """How trajectories are laid out for the update."""

    row_length: AtLeast1 = 512
    """Tokens of a packed row: at least the longest trajectory (prompt, sampled tokens and observations). Several times
    the mean length fills rows to 90% and more."""
    rows: Count = 0
    """Rows of a micro-batch over all devices: rows x row_length tokens are in the backward pass at once, which bounds
    the memory of activations. Rounded up to a multiple of sharding.data x sharding.fsdp. 0: a run times some numbers of
    rows that fit its memory at its start and takes the fastest."""
    updates: Updates = field(default_factory=OneUpdate)
    """Optimizer steps per rollout batch."""


@flax.struct.dataclass
class TrainBatch:
    """Packed rows in micro-batches: leaves [M,R,T], where the first `count` micro-batches are in use."""

    tokens: Int[Array, "M R T"]
    segment_ids: Int[Array, "M R T"]
    """1, 2, ... for the trajectories of a row or their parts, 0 for padding."""
    positions: Int[Array, "M R T"]
    """Positions, starting at 0 for each trajectory."""
    policy_mask: Bool[Array, "M R T"]
    logprobs_old: Float[Array, "M R T"]
    advantages: Float[Array, "M R T"]
    weights: Float[Array, "M R T"]
    """Token weight times the global normalizer, so that the loss is a plain sum over micro-batches and devices."""
    ratio_segments: Int[Array, "M R T"]
    """Tokens of a row with the same number (0..T-1) share an importance ratio; trajectories never share one. Padding
    has 0 and is masked out."""
    logprobs_ref: Float[Array, "M R T"]
    count: Int[Array, ""]
    temperatures: Float[Array, "M R T"] | None = None
    """Temperature of each token's trajectory, where a run has several; padding has 1."""
    marked: Bool[Array, "M R T"] | None = None
    """Tokens that the surrogate treats differently; None for surrogates that treat all tokens alike."""
    entropy_coefficients: Float[Array, "M R T"] | None = None
    """Weight of the policy's entropy, where the loss rewards it."""
    routes: Int[Array, "M R T L X"] | None = None
    """Experts to replay, if the rows have any; -1 where the router chooses."""


def halved(batch: TrainBatch) -> TrainBatch:
    """The same rows in twice as many micro-batches. Takes host arrays with an even number of rows."""

    def split(leaf: np.ndarray) -> np.ndarray:
        if np.ndim(leaf) < 3:
            return leaf * np.asarray(2, leaf.dtype)  # the count
        return leaf.reshape(2 * leaf.shape[0], leaf.shape[1] // 2, *leaf.shape[2:])

    return jax.tree.map(split, batch)


@dataclass(frozen=True, eq=False)
class Placement:
    """The location of each trajectory in the batch, and how full the rows are."""

    micro: np.ndarray
    """int[N]: micro-batch of trajectory n."""
    row: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    row_length: int
    rows_used: int
    """Number of rows that hold at least one trajectory."""
    count: int
    """Number of micro-batches in use."""

    @property
    def fill(self) -> float:
        """Share of the positions in used rows that hold tokens; the rest is padding."""
        return float(self.length.sum() / max(self.rows_used * self.row_length, 1))


def rows_per_micro_batch(config: BatchConfig, row_multiple: int) -> int:
    """`rows` rounded up so that every device has the same number; the usual number if none was chosen."""
    return math.ceil((config.rows or USUAL_ROWS) / row_multiple) * row_multiple


def worst_case_micro_batches(trajectories: int, longest: int, config: BatchConfig, row_multiple: int = 1) -> int:
    """Number of micro-batches that always suffices for so many trajectories of at most `longest` tokens.

    First fit opens a row only for a trajectory that fits in no other, so every row but the last holds at least
    floor(row_length / longest) trajectories.

    Raises:
        ValueError: One trajectory can be longer than a row.
    """
    checks.check_count("longest", longest, 1)
    if longest > config.row_length:
        raise ValueError(
            f"a trajectory may have {longest} tokens but batch.row_length = {config.row_length}; raise "
            f"batch.row_length to {longest} or lower the budgets of prompt and response"
        )
    rows = math.ceil(trajectories / (config.row_length // longest))
    return max(math.ceil(rows / rows_per_micro_batch(config, row_multiple)), 1)


def first_fit_decreasing(lengths: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(row, offset) of each length and the number of rows: longest first, each into the first row with room.

    Ties keep their order, so the layout depends on the lengths only. It needs at most 11/9 of the optimal number of
    rows plus one.
    """
    free = np.full(len(lengths), row_length, dtype=np.int64)
    row = np.zeros(len(lengths), dtype=np.int64)
    offset = np.zeros(len(lengths), dtype=np.int64)
    used = 0
    for index in np.argsort(-lengths, kind="stable"):
        # Rows beyond `used` are empty, so some row always fits.
        target = int(np.argmax(free[: used + 1] >= lengths[index]))
        row[index], offset[index] = target, row_length - free[target]
        free[target] -= lengths[index]
        used = max(used, target + 1)
    return row, offset, used


OPTIONAL = {
    "marked": ("marked", np.bool_, False),
    "entropy_coefficients": ("entropy_coefficient", np.float32, 0),
    "routes": ("routes", np.int16, -1),
}
"""Leaf of a batch: field of a row, dtype, and the value for tokens without one. The leaf is None if no row has the
field."""


def _empty_leaves(rows: Sequence[TrainRow], shape: tuple[int, int], temperature: float | None) -> dict[str, np.ndarray]:
    dtypes = {**TRAIN_ROW_FIELDS, "segment_ids": np.int32, "positions": np.int32}
    leaves = {name: np.zeros(shape, dtype) for name, dtype in dtypes.items()}
    if temperature is not None:
        leaves["temperatures"] = np.ones(shape, np.float32)
    for name, (field_name, dtype, fill) in OPTIONAL.items():
        sample = next((value for row in rows if (value := getattr(row, field_name)) is not None), None)
        if sample is not None:
            leaves[name] = np.full((*shape, *np.shape(sample)[1:]), fill, dtype)
    return leaves


def pack(
    rows: Sequence[TrainRow],
    config: BatchConfig,
    max_micro_batches: int,
    row_multiple: int = 1,
    temperature: float | None = None,
) -> tuple[TrainBatch, Placement]:
    """All trajectories as a batch of [max_micro_batches, R, T] with NumPy leaves, and the placement of each one.

    Args:
        rows: In any order; the order only decides ties.
        config: Row length T and rows R of a micro-batch.
        max_micro_batches: M, static, from `worst_case_micro_batches`; `count` is the number in use.
        row_multiple: R is rounded up to a multiple of it (`sharding.row_shards`).
        temperature: Temperature of rows without one of their own; if given, the batch holds one for every token.

    Raises:
        ValueError: A trajectory is longer than a row, or the rows do not fit into `max_micro_batches`.
    """
    lengths = np.array([row.length for row in rows], dtype=np.int64)
    T, R = config.row_length, rows_per_micro_batch(config, row_multiple)
    if lengths.size and lengths.max() > T:
        raise ValueError(
            f"trajectory {int(lengths.argmax())} has {lengths.max()} tokens but batch.row_length = {T}; raise "
            f"batch.row_length to at least {lengths.max()}"
        )
    flat_row, offset, used = first_fit_decreasing(lengths, T)
    count = math.ceil(used / R)
    if count > max_micro_batches:
        raise ValueError(
            f"{len(rows)} trajectories ({lengths.sum()} tokens) fill {used} rows, that is {count} micro-batches of {R}"
            f", but {max_micro_batches} are allocated; raise the learner's `rows`, the most rows of a step"
        )
    leaves = _empty_leaves(rows, (max_micro_batches * R, T), temperature)
    for index in np.lexsort((offset, flat_row)):
        row, start, length = flat_row[index], offset[index], lengths[index]
        span = slice(start, start + length)
        for name in TRAIN_ROW_FIELDS:
            leaves[name][row, span] = getattr(rows[index], name)
        leaves["ratio_segments"][row, span] += start
        parts = rows[index].parts or (length,)
        first = leaves["segment_ids"][row, start - 1] + 1 if start else 1
        leaves["segment_ids"][row, span] = first + np.repeat(np.arange(len(parts)), parts)
        leaves["positions"][row, span] = np.concatenate([np.arange(n) for n in parts])
        if temperature is not None:
            sampled_at = rows[index].temperature
            sampled_at = temperature if sampled_at is None else sampled_at
            leaves["temperatures"][row, span] = sampled_at or 1.0  # greedy: recorded at 1
        for name, (field_name, _, _) in OPTIONAL.items():
            if (value := getattr(rows[index], field_name)) is not None:
                leaves[name][row, span] = value
    shaped = {name: leaf.reshape(max_micro_batches, R, *leaf.shape[1:]) for name, leaf in leaves.items()}
    batch = TrainBatch(**shaped, count=np.asarray(count, np.int32))
    placement = Placement(flat_row // R, flat_row % R, offset, lengths, T, used, count)
    return batch, placement


def unpack(array: np.ndarray, placement: Placement) -> list[np.ndarray]:
    """The entries of each trajectory in an array [M,R,T], in the order in which the trajectories were packed."""
    places = zip(placement.micro, placement.row, placement.offset, placement.length, strict=True)
    return [np.asarray(array[m, r, start : start + length]) for m, r, start, length in places]
