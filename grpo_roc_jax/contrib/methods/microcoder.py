"""MicroCoder-GRPO: truncated successes are masked at random, and the temperature rises when diversity falls.

Source: arXiv:2603.07777.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_roc_jax.method.advantage import Adjustment
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.planning import Temperature
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import Positive, Share, kind
from grpo_roc_jax.types import Group

DIVERSITY_GROUPS = 64
"""Groups of a step, in their random order, that diversity is measured on; sorting the 4-grams of each takes time."""
AVERAGE, STAGE = "diversity", "temperature_stage"
"""Names in the method's memory: moving average of the diversity (below 0 before the first step), position in the list
of temperatures."""
MIX = np.uint64(0x9E3779B97F4A7C15)
"""An odd constant whose products spread over 64 bits (Knuth's multiplicative hash, 2^64 over the golden ratio)."""


@kind("truncation_mask")
class TruncationMask(Adjustment):
    """Advantage 0, at random, for a correct, truncated, non-repeating trajectory (arXiv:2603.07777)."""

    draws = True

    probability: Share = 0.3
    """Probability of the 0."""

    def batch(self, advantages: Sequence[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        if batch.rng is None:
            raise ValueError("advantage.adjust truncation_mask draws at random; pass rng to train_rows")
        out = []
        for a, features, group in zip(advantages, batch.features, batch.groups, strict=True):
            repeating = np.array([repeats(t.tokens[t.prompt_length :]) for t in group.trajectories], bool)
            drawn = batch.rng.random(features.size) < self.probability
            out.append(np.where(features.truncated & features.correct & ~repeating & drawn, 0.0, a))
        return out


def repeats(tokens: np.ndarray, window: int = 128) -> bool:
    """Whether the last `window` tokens equal the `window` before them."""
    tail = tokens[-2 * window :]
    return len(tail) == 2 * window and bool(np.array_equal(tail[:window], tail[window:]))


@kind("rising")
class Rising(Temperature):
    """Rising temperatures; the next one begins when diversity falls below its target, and none returns, since a
    temperature that drifts moves the ratio's reference (arXiv:2603.07777)."""

    temperatures: tuple[Positive, ...] = (0.9, 1.0, 1.1)
    """The temperatures, from the first to the last."""
    diversity_target: Share = 0.5
    """Share of distinct 4-grams in a group's responses below which the temperature rises."""

    def __post_init__(self) -> None:
        if not self.temperatures or list(self.temperatures) != sorted(set(self.temperatures)):
            raise ValueError(f"plan.temperature rising: temperatures = {self.temperatures}; must rise, at least one")

    @property
    def all(self) -> tuple[float, ...]:
        return self.temperatures

    def now(self, state: AlgoState) -> float | None:
        return self.temperatures[int(state.recall(STAGE, 0))]

    def next_memory(
        self, sampled: Sequence[Group], trained: Sequence[Group], method: Any, state: AlgoState
    ) -> Mapping[str, np.ndarray]:
        """Moving average of the groups' diversity, and the stage that follows from it."""
        some = [group for group in sampled if group.size][:DIVERSITY_GROUPS]
        if not some:
            return {}
        mean = float(np.mean([diversity([t.tokens[t.policy_mask] for t in group.trajectories]) for group in some]))
        before, stage = state.recall(AVERAGE, -1.0), int(state.recall(STAGE, 0))
        average = mean if before < 0 else 0.9 * before + 0.1 * mean
        moved = min(stage + 1, len(self.temperatures) - 1) if average < self.diversity_target else stage
        # A new stage starts its own average, so that one low reading does not run through all temperatures.
        return {AVERAGE: np.array([average if moved == stage else -1.0]), STAGE: np.array([float(moved)])}


def diversity(token_rows: Sequence[np.ndarray]) -> float:
    """Share of distinct 4-grams among all 4-grams of a group's responses; 1 when no two are alike.

    They are compared by a 64-bit hash of two exact pairs, so that responses of thousands of tokens cost milliseconds.
    """
    grams = [np.zeros(0, np.uint64)]
    for row in token_rows:
        ids = np.asarray(row).astype(np.uint64)
        pairs = (ids[:-1] << np.uint64(32)) | ids[1:]
        grams.append(pairs[:-2] * MIX + pairs[2:])
    hashes = np.sort(np.concatenate(grams))  # ten times as fast as np.unique, which hashes
    return (1 + np.count_nonzero(hashes[1:] != hashes[:-1])) / len(hashes) if len(hashes) else 1.0
