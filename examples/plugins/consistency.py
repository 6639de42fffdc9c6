"""GRPO-CARE's consistency bonus: successes whose answer also follows for a slow copy of the policy earn more
(arXiv:2506.16141). `--method.edit_rows bonus` with `train_policy(config, functions={"bonus": Consistency()})`. A
resumed run starts its copy from the restored policy.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.method.advantage import z_score


class Consistency:
    """Advantages from rewards with the bonus; the slow copy moves every `every` steps."""

    def __init__(self, decay: float = 0.995, every: int = 10):
        self.decay, self.every, self.calls, self.slow = decay, every, 0, None

    def __call__(self, rows: Sequence, groups: Sequence, policy: Any) -> list:
        self.slow = jax.tree.map(jnp.copy, policy.trained) if self.slow is None else self.slow
        if self.calls and self.calls % self.every == 0:
            self.slow = averaged(self.slow, policy.trained, self.decay)
        self.calls += 1
        scores, values = policy.score(self.slow, groups), []
        for group in groups:
            logprobs = scores[len(values) : len(values) + group.size]
            answers = [in_last_turn(trajectory) for trajectory in group.trajectories]
            paid = consistency_rewards(group.correct * 1.0, answer_likelihoods(logprobs, answers))  # not what it earned
            values.extend(z_score(group.rewards + paid - group.correct))
        filled = [np.full_like(row.advantages, value) for row, value in zip(rows, values, strict=True)]
        return [dataclasses.replace(row, advantages=a) for row, a in zip(rows, filled, strict=True)]


def in_last_turn(trajectory: Any) -> np.ndarray:
    """bool[T]: the policy's tokens of the turn that answers."""
    start = trajectory.turns[-1].start if trajectory.turns else trajectory.length
    return trajectory.policy_mask & (np.arange(trajectory.length) >= start)


def answer_likelihoods(logprobs: list[np.ndarray], answer_masks: list[np.ndarray]) -> np.ndarray:
    """float64[G]: exp of the mean log-probability of the answer tokens under the slow copy; 0 without any."""
    return np.exp([float(l[m].mean()) if m.any() else -np.inf for l, m in zip(logprobs, answer_masks, strict=True)])


def consistency_rewards(accuracy: np.ndarray, likelihoods: np.ndarray, bonus: float = 0.5) -> np.ndarray:
    """accuracy (1 + bonus) for eligible rollouts (above 0.1 and the group mean) whose likelihood is at most 0.01 below
    the mean of the eligible, accuracy for the others."""
    eligible = (accuracy > 0.1) & (accuracy >= accuracy.mean())
    least = likelihoods[eligible].mean() - 0.01 if eligible.any() else np.inf
    return accuracy * (1 + bonus * (eligible & (likelihoods >= least)))


def averaged(slow: Any, params: Any, decay: float = 0.995) -> Any:
    """decay * slow + (1 - decay) * params, leaf by leaf."""
    return jax.tree.map(lambda s, p: decay * s + (1 - decay) * p, slow, params)
