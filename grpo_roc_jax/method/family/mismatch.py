"""Importance weights for a sampler whose probabilities differ from the trainer's, truncated or masked.

TIS and MIS are as in verl (`rollout_corr_helper`), TRL and NeMo-RL; `sampler_gap` says what the ratio is at each level.
Products decay with length, and geometric means lie close to 1, so each level needs bounds of its own.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np

from grpo_roc_jax.method.family.sampler_gap import SamplerGap, averages, ratios
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.settings.options import NotNegative, kind, settings


@settings
class Bounded(SamplerGap):
    """A weight from ratios with bounds."""

    level: Literal["token", "product", "geometric"] = "token"
    """Whether the ratio is a token's, or the product or geometric mean over a trajectory."""
    low: NotNegative = 0.5
    """Lower bound, at most 1."""
    high: NotNegative = 2.0
    """Upper bound, at least 1."""

    def __post_init__(self) -> None:
        if not self.low <= self.agreement <= self.high:
            raise ValueError(
                f"weights.factors {self.kind}: low = {self.low:g}, high = {self.high:g}; must be bounds around "
                f"{self.agreement:g}, where sampler and trainer agree"
            )

    @property
    def agreement(self) -> float:
        """What is found where sampler and trainer agree."""
        return 1.0

    @property
    def label(self) -> str:
        return f"{self.kind}_{self.level}"

    def found(self, gap: np.ndarray) -> np.ndarray:
        return ratios(gap, self.level)

    def outside(self, found: np.ndarray) -> Mapping[str, np.ndarray]:
        return {"below": found < self.low, "above": found > self.high}


@kind("truncated_is")
class TruncatedImportance(Bounded):
    """The ratio, clipped to [low, high]: truncated importance sampling (TIS)."""

    low: NotNegative = 0.0
    """Lower bound, at most 1; 0 leaves small ratios as they are."""
    normalize: bool = False
    """Divides by the mean weight of the batch: of its tokens at level token, else of its trajectories."""

    def weight(self, found: np.ndarray) -> np.ndarray:
        return np.clip(found, self.low, self.high)

    def importance(self, batch: MethodBatch) -> list[np.ndarray | None]:
        weights = super().importance(batch)
        if not self.normalize:
            return weights
        average = averages(batch, lambda gap: {"weight": self.weight(self.found(gap))})["weight"]
        return [weight / (average or 1.0) for weight in weights]


@kind("masked_is")
class MaskedImportance(Bounded):
    """The ratio within [low, high]; outside, token or trajectory leaves the loss and its counts: masked importance
    sampling (MIS); with bounds 0.5 and 5 IcePop (arXiv:2510.18855)."""

    def weight(self, found: np.ndarray) -> np.ndarray:
        return super().weight(found) * found
