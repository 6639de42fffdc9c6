"""How far the sampler's probabilities are from the trainer's: ratios at three levels, and their figures in the metrics.

With m = scored - recorded log-probability of a token, the ratio x is e^m (`token`), e^(sum m) of a trajectory
(`product`) or e^(mean m) (`geometric`). The kinds of `mismatch` and `rejection` turn it into weights.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from grpo_roc_jax.method.divergence import k3
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.weights import Factor
from grpo_roc_jax.settings.options import settings
from grpo_roc_jax.types import Trajectory

MAX_GAP = 20.0
"""Differences of log-probabilities are clamped to +-20 before exp, also summed ones, as in verl."""
LEVELS: Mapping[str, Callable[[np.ndarray], Any]] = {"token": np.asarray, "product": np.sum, "geometric": np.mean}
"""How the log-ratios of a trajectory's tokens are combined."""


def clamped(gap: np.ndarray) -> np.ndarray:
    """Log-ratios within +-20, in float64."""
    return np.clip(np.asarray(gap, np.float64), -MAX_GAP, MAX_GAP)


def ratios(gap: np.ndarray, level: str) -> np.ndarray:
    """float64[n] at level token, else [1]: the ratios of a trajectory, `gap` being m of its trained tokens."""
    return np.exp(clamped(np.atleast_1d(LEVELS[level](clamped(gap)))))


def gap_of(trajectory: Trajectory, mask: np.ndarray, scores: np.ndarray | None) -> np.ndarray:
    """float64[n]: scored minus recorded log-probability of each masked token."""
    return np.asarray(scores, np.float64)[mask] - trajectory.logprobs[mask]


def gaps_of(batch: MethodBatch) -> Iterator[np.ndarray]:
    """`gap_of` each trajectory with a masked token."""
    parts = zip(batch.trajectories, batch.masks, batch.first_scores, strict=True)
    return (gap_of(*part) for part in parts if part[1].any())


def averages(batch: MethodBatch, measure: Callable[[np.ndarray], Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Means by name over the entries that `measure` gives for the gaps of each trajectory; 0 of nothing."""
    totals = {name: np.zeros(2) for name in measure(np.zeros(1))}
    for gap in gaps_of(batch):
        for name, values in measure(gap).items():
            totals[name] += values.sum(), len(values)
    return {name: float(total / max(count, 1)) for name, (total, count) in totals.items()}


def gap_metrics(batch: MethodBatch) -> dict[str, float]:
    """Of the ratios x at each level: the mean, (sum x)^2 / (n sum x^2), and the estimates k1 = -log x and
    k3 = x - 1 - log x of the divergence of the sampler from the trainer, in nats."""
    out = {}
    for level in LEVELS:

        def measure(gap: np.ndarray, level: str = level) -> dict[str, np.ndarray]:
            x = ratios(gap, level)
            return {"ratio": x, "squares": x * x, "kl_k1": -np.log(x), "kl_k3": k3(np.log(x))}

        found = averages(batch, measure)
        found["effective_sample_size"] = found["ratio"] ** 2 / (found.pop("squares") or 1.0)
        out |= {f"mismatch/{level}_{name}": value for name, value in found.items()}
    return out


@settings
class SamplerGap(Factor):
    """A weight from the differences of scored and recorded log-probabilities."""

    needs_scores = True
    common_metrics = staticmethod(gap_metrics)

    @property
    def label(self) -> str:
        """Names the part in the metrics."""
        return self.kind

    def found(self, gap: np.ndarray) -> np.ndarray:
        """float64[n]: the values that the bounds apply to, one per trained token or one for the trajectory."""
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

    def metrics(self, batch: MethodBatch) -> Mapping[str, float]:
        shares = averages(batch, lambda gap: self.outside(self.found(gap)))
        return {f"mismatch/{self.label}_{name}": value for name, value in shares.items()}
