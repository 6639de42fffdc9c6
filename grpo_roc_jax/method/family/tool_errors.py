"""The penalty in the reward that resampling on correct does without (a control arm)."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.settings.options import kind


@kind("tool_errors")
class ToolErrors(Shaping):
    """R - coef errors / calls: the reward penalty that GRPO-RoC (arXiv:2508.20722, sec. 2.2.3) argues against."""

    coef: float = 0.5
    """Reward subtracted where every call failed."""

    def group(self, rewards: np.ndarray, found: Features) -> np.ndarray:
        return rewards - self.coef * found.tool_errors / np.maximum(found.tool_calls, 1)
