"""The divergence from the reference as a part of the reward, instead of a term of the loss.

Per trajectory it is subtracted before the baseline (RLOO, arXiv:2402.14740; verl's `use_kl_in_reward`). Per token it is
subtracted after the baseline, from the tokens up to that one (REINFORCE++, arXiv:2501.03262). Both read the recorded
log-probabilities, or those of the scoring pass under `surrogate.old_logprobs` scored.
"""

from typing import ClassVar, Literal

import numpy as np

from grpo_roc_jax.method.advantage import Adjustment
from grpo_roc_jax.method.divergence import bounded_k3, k2
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.part import MethodBatch, WithReference
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.settings.options import NotNegative, Share, kind, settings


@settings
class RewardedKl(WithReference):
    """Settings of a divergence that is paid for."""

    coef: NotNegative = 0.05
    """beta: what a nat of divergence costs."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimate of a token's divergence; k1 is unbiased here, since no gradient passes through a reward."""

    @property
    def needs_reference(self) -> bool:
        return self.coef > 0


@kind("kl")
class TrajectoryKl(RewardedKl, Shaping):
    """R - beta sum_t KL_t before the baseline (RLOO, arXiv:2402.14740)."""

    def group(self, rewards: np.ndarray, found: Features) -> np.ndarray:
        if not self.coef:
            return rewards
        sums = [divergence(self.estimator, u).sum() for u in found.gap("reference", self.prefix)]
        return rewards - self.coef * np.array(sums)


@settings
class TokenDivergence(Adjustment):
    """A_t - beta sum over i >= t of discount^(i - t) KL_i: every token pays for itself and for what follows it."""

    estimator: ClassVar[str] = "k1"
    other: ClassVar[str] = "reference"
    """The policy that the divergence is from."""

    coef: NotNegative = 0.05
    """beta: what a nat of divergence costs."""
    discount: Share = 1.0
    """Weight of the next token's divergence in that of a token; 0 leaves each token its own."""

    def tokens(self, advantages: list[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        if not self.coef:
            return advantages
        gaps = [u for found in batch.features for u in found.gap(self.other, self.prefix)]
        out = []
        for a, u, trajectory in zip(advantages, gaps, batch.trajectories, strict=True):
            cost = np.zeros(len(a))
            cost[trajectory.policy_mask] = later_sums(divergence(self.estimator, u), self.discount)
            out.append((a - self.coef * cost).astype(np.float32))
        return out


@kind("kl")
class TokenKl(RewardedKl, TokenDivergence):
    """A_t - beta sum over i >= t of discount^(i - t) KL_i (REINFORCE++, arXiv:2501.03262); list `whiten` after it."""


def divergence(estimator: str, u: np.ndarray) -> np.ndarray:
    """`surrogate.kl_estimate` on the host: u = log p - log p_ref of the tokens, in nats."""
    if estimator == "k1":
        return u
    if estimator == "k2":
        return k2(u)
    return bounded_k3(-u)


def later_sums(values: np.ndarray, discount: float) -> np.ndarray:
    """float64[n]: sum over i >= t of discount^(i - t) values[i], by doubling the span that is summed."""
    out, span = values.astype(np.float64), 1
    while span < len(out):
        out[:-span] += discount**span * out[span:]
        span *= 2
    return out
