"""Failures that the policy has moved away from already leave the loss. Source: DeepSeek-V3.2, arXiv:2512.02556."""

import numpy as np

from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.weights import Mask
from grpo_roc_jax.settings.options import NotNegative, kind


@kind("drift")
class Drift(Mask):
    """Leaves out failures that have become unlikely since they were sampled (DeepSeek-V3.2, arXiv:2512.02556)."""

    needs_scores = True
    follows_policy = True

    threshold: NotNegative = 0.05
    """Mean of recorded minus scored log-probability, in nats per token, above which a failure is left out."""

    def tokens(self, masks: list[np.ndarray], advantages: list[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        remaining = []
        for trajectory, mask, advantage, now in zip(batch.trajectories, masks, advantages, batch.scores, strict=True):
            drift = np.mean(trajectory.logprobs - now, where=mask) if mask.any() else 0.0
            left = drift > self.threshold and advantage[mask].sum() < 0
            remaining.append(np.zeros_like(mask) if left else mask)
        return remaining
