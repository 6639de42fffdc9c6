"""Several reward channels, each through its own baseline and scale: MO-GRPO and GDPO.

Sources: arXiv:2509.22047 (MO-GRPO), arXiv:2601.05242 (GDPO, which standardizes the sum over the batch).
"""

from dataclasses import field, replace

import numpy as np

from grpo_roc_jax.method.advantage import Estimator, GroupRelative, deviation, flat
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.settings.options import NotNegative, kind


@kind("channels")
class Channels(Estimator):
    """The weighted sum of an estimate per reward channel, over the trajectories that have it (MO-GRPO,
    arXiv:2509.22047); `standardize` makes it GDPO (arXiv:2601.05242).

    It reads the channels as they come, so `shaping` must be empty.
    """

    weights: tuple[float, ...] = ()
    """Weight of each channel, in the order of `reward.functions`; empty takes the weights of the functions."""
    of: GroupRelative = field(default_factory=GroupRelative)
    """The estimate of one channel."""
    standardize: bool = False
    """Standardizes the sum over the batch (GDPO)."""
    eps: NotNegative = 1e-6
    """Added to the deviation over the batch."""

    def estimate(self, batch: MethodBatch) -> list[np.ndarray]:
        """Each channel over the trajectories that have it; 0 for one without any channel."""
        names = list(dict.fromkeys(name for found in batch.features for name in found.channels))
        weights = self.weights or [batch.weights.get(name, 1.0) for name in names]
        if not names or len(weights) != len(names):
            raise ValueError(
                f"advantage channels found reward channels {names or 'none'} and {len(self.weights)} weights; name two "
                "or more reward.functions and give a weight each"
            )
        out = [np.zeros(found.size) for found in batch.features]
        for name, weight in zip(names, weights, strict=True):
            held = [found.channels.get(name, np.full(found.size, np.nan)) for found in batch.features]
            present = [np.flatnonzero(np.isfinite(values)) for values in held]
            parts = self.of.estimate(replace(batch, rewards=held).only(present))
            for total, rows, part in zip(out, present, parts, strict=True):
                total[rows] += weight * part
        return self._standardized(out) if self.standardize else out

    def _standardized(self, advantages: list[np.ndarray]) -> list[np.ndarray]:
        values = np.concatenate(advantages) if advantages else np.zeros(0)
        if flat(values):
            return [np.zeros(len(a)) for a in advantages]
        return [(a - values.mean()) / (deviation(values) + self.eps) for a in advantages]
