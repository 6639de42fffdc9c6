"""Several reward channels, each through its own baseline and scale: MO-GRPO and GDPO.

Sources: arXiv:2509.22047 (MO-GRPO), arXiv:2601.05242 (GDPO, which standardizes the sum over the batch).
"""

from collections.abc import Sequence
from dataclasses import field

import numpy as np

from grpo_roc_jax.method.advantage import Estimator, GroupRelative, deviation, flat
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import NotNegative, kind


@kind("channels")
class Channels(Estimator):
    """The weighted sum of an estimate per reward channel (MO-GRPO); `standardize` makes it GDPO.

    It reads the channels as they come, so `shaping` must be empty.
    """

    weights: tuple[float, ...] = ()
    """Weight of each channel, in the order of `reward.functions`; empty means 1 each."""
    of: GroupRelative = field(default_factory=GroupRelative)
    """The estimate of one channel."""
    standardize: bool = False
    """Standardizes the sum over the batch (GDPO)."""
    eps: NotNegative = 1e-6
    """Added to the deviation over the batch."""

    def estimate(self, groups: Sequence[Features], rewards: Sequence[np.ndarray], state: AlgoState) -> list[np.ndarray]:
        out = self._summed(groups, state)
        return standardized(out, eps=self.eps) if self.standardize else out

    def _summed(self, groups: Sequence[Features], state: AlgoState) -> list[np.ndarray]:
        """Each channel over the trajectories that have it; 0 for one without any channel."""
        names = list(dict.fromkeys(name for found in groups for name in found.channels))
        weights = self.weights or (1.0,) * len(names)
        if not names or len(weights) != len(names):
            raise ValueError(
                f"advantage channels found reward channels {names or 'none'} and {len(self.weights)} weights; name two "
                "or more reward.functions and give a weight each"
            )
        out = [np.zeros(found.size) for found in groups]
        for name, weight in zip(names, weights, strict=True):
            held = [found.channels.get(name, np.full(found.size, np.nan)) for found in groups]
            present = [np.flatnonzero(np.isfinite(values)) for values in held]
            parts = self.of.estimate(
                [found.take(rows) for found, rows in zip(groups, present, strict=True)],
                [values[rows] for values, rows in zip(held, present, strict=True)],
                state,
            )
            for total, rows, part in zip(out, present, parts, strict=True):
                total[rows] += weight * part
        return out


def standardized(advantages: Sequence[np.ndarray], ddof: int = 1, eps: float = 1e-6) -> list[np.ndarray]:
    """(A - mean) / (std + eps) over the trajectories of the batch (GDPO, arXiv:2601.05242)."""
    values = np.concatenate(list(advantages)) if advantages else np.zeros(0)
    if flat(values):
        return [np.zeros(len(a)) for a in advantages]
    return [(a - values.mean()) / (deviation(values, ddof) + eps) for a in advantages]
