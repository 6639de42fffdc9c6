"""GRPO-CARE's consistency bonus: successes whose answer also follows for a slow copy of the policy earn more
(arXiv:2506.16141). Score the rollouts with the averaged parameters, then shape the rewards of each group.
"""

from typing import Any

import jax
import numpy as np


def answer_likelihoods(logprobs: list[np.ndarray], answer_masks: list[np.ndarray]) -> np.ndarray:
    """float64[G]: exp of the mean log-probability of the answer tokens under the slow copy."""
    return np.exp([float(l[m].mean()) if m.any() else -np.inf for l, m in zip(logprobs, answer_masks, strict=True)])


def consistency_rewards(
    accuracy: np.ndarray, likelihoods: np.ndarray, bonus: float = 0.5, margin: float = 0.01, least: float = 0.1
) -> np.ndarray:
    """accuracy, plus bonus * accuracy for eligible rollouts whose likelihood is at least the eligible mean - margin.

    Eligible: accuracy above `least` and not below the group mean.
    """
    eligible = (accuracy > least) & (accuracy >= accuracy.mean())
    if not eligible.any():
        return accuracy
    likely = likelihoods >= likelihoods[eligible].mean() - margin
    return accuracy + np.where(eligible & likely, bonus * accuracy, 0.0)


def averaged(slow: Any, params: Any, decay: float = 0.995) -> Any:
    """decay * slow + (1 - decay) * params, leaf by leaf; call it every tenth step."""
    return jax.tree.map(lambda s, p: decay * s + (1 - decay) * p, slow, params)
