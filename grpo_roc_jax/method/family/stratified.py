"""Stratified GRPO: advantages within trajectories of an equal number of tool calls. Source: arXiv:2510.06214."""

from typing import Literal

import numpy as np

from grpo_roc_jax.method.advantage import Adjustment, z_score
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import AtLeast1, NotNegative, Share, kind


@kind("strata")
class Strata(Adjustment):
    """Blends in z-scores within trajectories of equal count (Stratified GRPO, arXiv:2510.06214)."""

    by: Literal["tool_calls", "turns"] = "tool_calls"
    """The count that makes a stratum."""
    cap: AtLeast1 = 4
    """Counts from here on share a stratum."""
    blend: Share = 0.5
    """Weight of the advantage within the stratum; 0 is plain."""
    ddof: Literal[0, 1] = 1
    """1 divides by n - 1, 0 by n."""
    eps: NotNegative = 1e-6
    """Added to the deviation."""

    def group(self, advantages: np.ndarray, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray:
        counts = found.tool_calls if self.by == "tool_calls" else found.turns
        within = stratified(rewards, np.minimum(counts, self.cap), self.ddof, self.eps)
        return self.blend * within + (1 - self.blend) * advantages


def stratified(rewards: np.ndarray, strata: np.ndarray, ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """z-scores within strata; 0 in a stratum of one (Stratified GRPO, arXiv:2510.06214)."""
    out = np.zeros(len(rewards))
    for stratum in np.unique(strata):
        members = strata == stratum
        out[members] = z_score(rewards[members], ddof, eps)
    return out
