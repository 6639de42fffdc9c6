"""Importance weights for a sampler whose probabilities differ from the trainer's, truncated or masked.

With m = scored - recorded log-probability of a token, the ratio x is e^m (`token`), e^(sum m) of a trajectory
(`product`) or e^(mean m) (`geometric`). Products decay with length, and geometric means lie close to 1, so each level
needs bounds of its own. TIS and MIS are as in verl (`rollout_corr_helper`), TRL and NeMo-RL.

The metrics `mismatch/...` have mean ratio, effective sample size and divergence at every level, and the share that each
kind found out of bounds.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.weights import Factor
from grpo_roc_jax.settings.options import NotNegative, kind, settings
from grpo_roc_jax.types import Trajectory

MAX_GAP = 20.0
"""Differences of log-probabilities are clamped to +-20 before exp, also summed ones, as in verl."""
LEVELS: Mapping[str, Callable[[np.ndarray], Any]] = {"token": np.asarray, "product": np.sum, "geometric": np.mean}
"""What is made of the log-ratios of a trajectory's tokens."""


def clamped(gap: np.ndarray) -> np.ndarray:
    """Log-ratios within +-20, in float64."""
    return np.clip(np.asarray(gap, np.float64), -MAX_GAP, MAX_GAP)


def ratios(gap: np.ndarray, level: str) -> np.ndarray:
    """float64[n] at level token, else [1]: the ratios of a trajectory, `gap` being m of its trained tokens."""
    return np.exp(clamped(np.atleast_1d(LEVELS[level](clamped(gap)))))


@settings
class SamplerGap(Factor):
    """A weight from the differences of scored and recorded log-probabilities."""

    @property
    def needs_scores(self) -> bool:
        return True

    @property
    def label(self) -> str:
        """Names the part in the metrics."""
        return self.kind

    def found(self, gap: np.ndarray) -> np.ndarray:
        """float64[n]: what is held to bounds, an entry per trained token or one for the trajectory."""
        raise NotImplementedError

    def outside(self, found: np.ndarray) -> Mapping[str, np.ndarray]:
        """bool[n] by name: what is out of bounds."""
        raise NotImplementedError

    def weight(self, found: np.ndarray) -> np.ndarray:
        """float64[n]: 0 out of bounds, else 1."""
        return np.where(np.any(list(self.outside(found).values()), axis=0), 0.0, 1.0)

    def tokens(self, trajectory: Trajectory, mask: np.ndarray, scores: np.ndarray | None) -> np.ndarray | None:
        out = np.ones(len(mask))
        if mask.any():
            out[mask] = self.weight(self.found(gap_of(trajectory, mask, scores)))
        return out

    def everywhere(self, batch: MethodBatch) -> np.ndarray:
        """`found` of all trajectories."""
        return np.concatenate([np.zeros(0), *map(self.found, gaps_of(batch))])

    def metrics(self, batch: MethodBatch) -> Mapping[str, float]:
        out = self.outside(self.everywhere(batch))
        return mismatch_metrics(gaps_of(batch)) | {f"mismatch/{self.label}_{name}": mean(v) for name, v in out.items()}


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
        average = mean(self.weight(self.everywhere(batch))) if self.normalize else 1.0
        return [weight / (average or 1.0) for weight in super().importance(batch)]


@kind("masked_is")
class MaskedImportance(Bounded):
    """The ratio within [low, high]; outside, token or trajectory leaves the loss and its counts: masked importance
    sampling (MIS); with bounds 0.5 and 5 IcePop (arXiv:2510.18855)."""

    def weight(self, found: np.ndarray) -> np.ndarray:
        return super().weight(found) * found


def gap_of(trajectory: Trajectory, mask: np.ndarray, scores: np.ndarray | None) -> np.ndarray:
    """float64[n]: scored minus recorded log-probability of each masked token."""
    return np.asarray(scores, np.float64)[mask] - trajectory.logprobs[mask]


def gaps_of(batch: MethodBatch) -> list[np.ndarray]:
    """`gap_of` each trajectory with a masked token."""
    parts = zip(batch.trajectories, batch.masks, batch.scores, strict=True)
    return [gap_of(*part) for part in parts if part[1].any()]


def mismatch_metrics(gaps: list[np.ndarray]) -> dict[str, float]:
    """Of the ratios x at each level: the mean, (sum x)^2 / (n sum x^2), and the estimates k1 = -log x and
    k3 = x - 1 - log x of the divergence of the sampler from the trainer, in nats."""
    out = {}
    for level in LEVELS:
        x = np.concatenate([np.zeros(0), *(ratios(gap, level) for gap in gaps)])
        out[f"mismatch/{level}_ratio"] = mean(x)
        out[f"mismatch/{level}_effective_sample_size"] = mean(x) ** 2 / (mean(x * x) or 1.0)
        out[f"mismatch/{level}_kl_k1"] = mean(-np.log(x))
        out[f"mismatch/{level}_kl_k3"] = mean(x - 1 - np.log(x))
    return out


def mean(values: np.ndarray) -> float:
    """The mean; 0 of nothing."""
    return float(np.mean(values)) if len(values) else 0.0
