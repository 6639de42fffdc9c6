"""Stratified GRPO: advantages within trajectories of an equal number of tool calls. Source: arXiv:2510.06214."""

from typing import Literal

import numpy as np

from grpo_roc_jax.method.advantage import Adjustment, Deviation, z_score
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.settings.options import AtLeast1, Share, kind


@kind("strata")
class Strata(Deviation, Adjustment):
    """Blends in z-scores within trajectories of equal count (Stratified GRPO, arXiv:2510.06214)."""

    by: Literal["tool_calls", "turns"] = "tool_calls"
    """The count that makes a stratum."""
    cap: AtLeast1 = 4
    """Counts from here on share a stratum."""
    blend: Share = 1.0
    """Weight of the advantage within the stratum; the paper blends with the plain one for small groups, 0 is plain."""

    def group(self, advantages: np.ndarray, rewards: np.ndarray, features: Features) -> np.ndarray:
        strata = np.minimum(getattr(features, self.by), self.cap)
        within = np.zeros(len(rewards))
        for stratum in np.unique(strata):
            members = strata == stratum
            within[members] = z_score(rewards[members], self.ddof, self.eps)
        return self.blend * within + (1 - self.blend) * advantages
