"""The penalty in the reward that resampling on correct does without (a control arm)."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import kind


@kind("tool_errors")
class ToolErrors(Shaping):
    """Subtracts a multiple of the failed share of the calls: the reward penalty that RoC argues against."""

    coef: float = 0.5
    """Reward subtracted where every call failed."""

    def group(self, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray:
        return tool_error_penalized(rewards, found.tool_calls, found.tool_errors, self.coef)


def tool_error_penalized(
    rewards: np.ndarray, tool_calls: np.ndarray, tool_errors: np.ndarray, coef: float
) -> np.ndarray:
    """R - coef errors / calls: the penalty in the reward that resampling on correct does without."""
    return rewards - coef * tool_errors / np.maximum(tool_calls, 1)
