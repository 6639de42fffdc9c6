"""What a method remembers between steps: a table by problem, dual variables, learned scalars.

Arrays only, keyed by a stable hash of the problem's uid, so that a checkpoint restores curricula, trackers and duals
exactly. Updates return a new state; nothing is changed in place.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_roc_jax.types import Problem

COLUMNS: Mapping[str, float] = {
    "alpha": 0.5,
    "beta": 0.5,
    "visits": 0.0,
    "successes": 0.0,
    "accuracy": 0.5,
    "level": 0.0,
}
"""Columns of the table with the value of an unseen problem: the tracker's Beta counts, trajectories seen, successes
among them, accuracy at the last visit, hint level."""


def problem_key(uid: str) -> int:
    """64 bits of a hash of the uid; the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(uid.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, eq=False)
class ProblemTable:
    """Rows by problem, sorted by key."""

    keys: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """uint64[P]."""
    values: np.ndarray = field(default_factory=lambda: np.zeros((0, len(COLUMNS))))
    """float64[P, columns]."""

    def get(self, uids: Sequence[str]) -> dict[str, np.ndarray]:
        """float64[n] of each column; the defaults for unseen problems."""
        keys = np.array([problem_key(uid) for uid in uids], np.uint64)
        rows = np.tile(np.array(list(COLUMNS.values())), (len(uids), 1))
        if len(self.keys) and len(keys):
            positions = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
            known = self.keys[positions] == keys
            rows[known] = self.values[positions[known]]
        return {name: rows[:, column].copy() for column, name in enumerate(COLUMNS)}

    def put(self, uids: Sequence[str], columns: Mapping[str, np.ndarray]) -> "ProblemTable":
        """The table with the given columns of these (distinct) problems replaced."""
        current = self.get(uids) | dict(columns)
        rows = np.stack([np.asarray(current[name], np.float64) for name in COLUMNS], axis=1)
        keys = np.array([problem_key(uid) for uid in uids], np.uint64)
        # The first occurrence wins in `unique`, so new rows go first.
        merged, first = np.unique(np.concatenate([keys, self.keys]), return_index=True)
        return ProblemTable(merged, np.concatenate([rows, self.values])[first])


@dataclass(frozen=True, eq=False)
class AlgoState:
    """Everything of a method that outlives a step."""

    step: int = 0
    """Training steps done."""
    table: ProblemTable = field(default_factory=ProblemTable)
    memory: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays by name: what the parts of the method remember (dual variables, learned exponents, averages, texts)."""

    def recall(self, name: str, default: float) -> float:
        """A remembered number, or its value before anything was remembered."""
        return float(self.memory[name][0]) if name in self.memory else default

    def to_tree(self) -> dict[str, Any]:
        """Arrays of at least one dimension, for a checkpoint."""
        return {
            "step": np.array([self.step], np.int64),
            "keys": self.table.keys,
            "values": self.table.values,
            "memory": {name: np.asarray(value) for name, value in sorted(self.memory.items())},
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> "AlgoState":
        """The state that `to_tree` wrote."""
        return cls(
            step=int(np.asarray(tree["step"])[0]),
            table=ProblemTable(np.asarray(tree["keys"], np.uint64), np.asarray(tree["values"], np.float64)),
            memory={name: np.asarray(value) for name, value in tree.get("memory", {}).items()},
        )


def begun(state: AlgoState, problems: Sequence[Problem]) -> AlgoState:
    """The state with trackers initialized from the success rates that the command `difficulty` wrote into the data.

    For S successes of n samples: alpha = 8 (S + 1/2) / (n + 1), beta = 8 (n - S + 1/2) / (n + 1), for problems that
    were not seen. Source: SPO, arXiv:2509.13232, where 8 is the weight of all visits at the fastest forgetting.
    """
    judged = {p.uid: (float(p.extra["judged"]), float(p.extra["success_rate"])) for p in problems if _judged(p)}
    if not judged:
        return state
    fresh = [uid for uid, seen in zip(judged, state.table.get(list(judged))["visits"], strict=True) if not seen]
    if not fresh:
        return state
    samples, rates = np.array([judged[uid] for uid in fresh]).T
    columns = {
        "alpha": 8 * (samples * rates + 0.5) / (samples + 1),
        "beta": 8 * (samples * (1 - rates) + 0.5) / (samples + 1),
    }
    return dataclasses.replace(state, table=state.table.put(fresh, columns))


def _judged(problem: Problem) -> bool:
    return problem.column("judged") is not None and problem.column("success_rate") is not None


def visited(
    state: AlgoState, uids: Sequence[str], successes: np.ndarray, trials: np.ndarray, decay: float | np.ndarray
) -> AlgoState:
    """The state after these problems were sampled: counts, last accuracy and tracker are updated. Repeated uids add up;
    of several decays for one problem the first counts."""
    names, firsts = list(dict.fromkeys(uids)), {uid: i for i, uid in reversed(list(enumerate(uids)))}
    decay = np.broadcast_to(decay, len(uids))[[firsts[name] for name in names]]
    positions = np.array([names.index(uid) for uid in uids], np.int64)
    won = np.bincount(positions, successes, minlength=len(names))
    seen = np.bincount(positions, trials, minlength=len(names))
    rows = state.table.get(names)
    share = won / np.maximum(seen, 1)
    some = seen > 0
    # A group counts as one observation of its accuracy, so that the group size does not set the memory.
    columns = {
        "alpha": np.where(some, decay * rows["alpha"] + share, rows["alpha"]),
        "beta": np.where(some, decay * rows["beta"] + (1 - share), rows["beta"]),
        "visits": rows["visits"] + seen,
        "successes": rows["successes"] + won,
        "accuracy": np.where(some, share, rows["accuracy"]),
    }
    return dataclasses.replace(state, table=state.table.put(names, columns))
