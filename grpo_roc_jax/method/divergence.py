"""The divergence between two policies: its estimates from one token, for NumPy on the host and JAX on the device, and
the kinds that put it into the loss or into the reward.

Source: Schulman, "Approximating KL divergence", 2020. With x = q(token) / p(token) for a token drawn from p, the terms
-log x, (log x)^2 / 2 and x - 1 - log x estimate KL(p || q). Here they are functions of m = log x, in nats.
"""

import math
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.method.advantage import Adjustment, later_sums
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.part import MethodBatch, Part, WithReference
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.settings.options import NotNegative, Share, kind, settings
from grpo_roc_jax.shapes import Array

Tail = Literal["flat", "linear"]

MAX_LOGRATIO = 20.0
"""Log-ratios are clamped to +-20 before exp, as in verl (`core_algos.py`); the clamped tokens are counted."""
CEILING = 10.0
"""k3 grows exponentially where p has dropped a token that q keeps; verl's bound on the estimate."""
EDGE = 2.610868638149876
"""m at which k3 reaches `CEILING` from below."""


def k2(m: Any) -> Any:
    """m^2 / 2."""
    return 0.5 * m * m


def k3(m: Any, xp: Any = np) -> Any:
    """e^m - 1 - m: unbiased and never negative.

    Args:
        m: Log-ratios, of any shape.
        xp: `numpy`, or `jax.numpy` for arrays of the device.
    """
    return xp.expm1(m) - m


def bounded_k3(m: Any, tail: Tail = "flat", xp: Any = np) -> Any:
    """k3 without its exponential growth: at most 10, so that it has no gradient where it would be more (`flat`), or
    continued along its tangent at 10, whose slope is 12.6 (`linear`)."""
    if tail == "flat":
        return xp.minimum(k3(xp.clip(m, -MAX_LOGRATIO, MAX_LOGRATIO), xp), CEILING)
    near = xp.minimum(m, EDGE)
    return k3(near, xp) + math.expm1(EDGE) * (m - near)


def kl_estimate(estimator: str, u: Any, logratio: Any = None, *, tail: Tail = "flat", xp: Any = np) -> Any:
    """Estimate of KL(policy || reference) of each token of the policy, in nats.

    k1 = u, k2 = u^2 / 2, k3 = e^-u - 1 + u (Schulman, 2020; k3 in arXiv:2402.03300). k3 grows exponentially where the
    policy has dropped a token, so u and the estimate are clamped as in verl. `corrected` is k3 times e^logratio
    (arXiv:2512.02556).

    Args:
        estimator: `k1`, `k2`, `k3` or `corrected`.
        u: log p - log p_ref of the tokens, of any shape.
        logratio: log p - log p of the policy that sampled, of the same shape; `corrected` reads it.
        tail: What k3 does beyond `CEILING`; see `bounded_k3`.
        xp: `numpy`, or `jax.numpy` for arrays of the device.

    Raises:
        ValueError: There is no such estimator.
    """
    if estimator == "k1":
        return u
    if estimator == "k2":
        return k2(u)
    if estimator == "k3":
        return bounded_k3(-u, tail, xp)
    if estimator == "corrected":
        return xp.minimum(xp.exp(logratio) * k3(xp.clip(-u, -MAX_LOGRATIO, MAX_LOGRATIO), xp), CEILING)
    raise ValueError(f"KL estimator {estimator!r}; must be k1, k2, k3 or corrected")


# ---- the divergence in the loss -------------------------------------------------------------------------------------


class Kl(Part, axis="surrogate.kl"):
    """A divergence from the reference policy, added to the loss."""

    coef: ClassVar[float] = 0.0
    ceiling: ClassVar[float] = math.inf
    """Estimate for a token at which its growth ends; tokens that reach it are counted (`loss/kl_clamped_fraction`)."""
    tail: ClassVar[Tail] = "flat"

    @property
    def needs_reference(self) -> bool:
        return self.coef > 0

    def estimate(self, logprobs: Array, logprobs_ref: Array, logratio: Array) -> Array:
        """`kl_estimate` of this kind for every token: log-probabilities under the policy and the reference, and the
        log-ratio to the policy that sampled."""
        return kl_estimate(self.kind, logprobs - logprobs_ref, logratio, tail=self.tail, xp=jnp)


@kind("none")
class NoKl(Kl):
    """No divergence term and no reference policy."""


@settings
class KlTerm(WithReference, Kl):
    """A divergence term with a weight."""

    coef: NotNegative = 0.1
    """Weight of the divergence in the loss; RC-GRPO uses 0.1."""


@kind("k1")
class K1(KlTerm):
    """u = log p - log p_ref; as a loss its gradient is zero in expectation (Schulman, 2020)."""


@kind("k2")
class K2(KlTerm):
    """u^2 / 2; as a loss it has the right gradient (Schulman, 2020)."""


@kind("k3")
class K3(KlTerm):
    """e^-u - 1 + u (arXiv:2402.03300), with u within +-20 and the estimate at most 10 as in verl."""

    ceiling = CEILING

    tail: Tail = "flat"
    """The estimate beyond 10, at 2.6 nats below the reference. `flat`: it stays at 10, so that the tokens which have
    drifted most are not pulled back. `linear`: it continues along its tangent, with 12.6 per nat."""


@kind("corrected")
class CorrectedK3(KlTerm):
    """ratio (e^-u - 1 + u), with the gradient ratio u: unbiased in value and gradient for tokens of an older policy
    (DeepSeek-V3.2, arXiv:2512.02556). The ratio is the token's, and the estimate is at most 10."""

    ceiling = CEILING


# ---- the divergence in the reward -----------------------------------------------------------------------------------
# The divergence from the reference as a part of the reward, instead of a term of the loss.
#
# Per trajectory it is subtracted before the baseline (RLOO, arXiv:2402.14740; verl's `use_kl_in_reward`). Per token it
# is subtracted after the baseline, from the tokens up to that one (REINFORCE++, arXiv:2501.03262). Both read the
# recorded log-probabilities, or those of the scoring pass under `surrogate.old_logprobs` scored.


@settings
class RewardedKl(WithReference):
    """Settings of a divergence that is subtracted from rewards or advantages."""

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

    def group(self, rewards: np.ndarray, features: Features) -> np.ndarray:
        if not self.coef:
            return rewards
        sums = [kl_estimate(self.estimator, u).sum() for u in features.gap("reference", self.prefix)]
        return rewards - self.coef * np.array(sums)


@settings
class TokenDivergence(Adjustment):
    """A_t - beta sum over i >= t of discount^(i - t) KL_i: every token is charged for itself and for what
    follows it."""

    reads_rewards = False
    estimator: ClassVar[str] = "k1"
    other: ClassVar[str] = "reference"
    """Name of the policy that the divergence is from."""

    coef: NotNegative = 0.05
    """beta: what a nat of divergence costs."""
    discount: Share = 1.0
    """Weight of the next token's divergence in that of a token; at 0 a token counts only its own."""

    def tokens(self, advantages: list[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        if not self.coef:
            return advantages
        gaps = [u for group_features in batch.features for u in group_features.gap(self.other, self.prefix)]
        out = []
        for a, u, trajectory in zip(advantages, gaps, batch.trajectories, strict=True):
            cost = np.zeros(len(a))
            cost[trajectory.policy_mask] = later_sums(kl_estimate(self.estimator, u), self.discount)
            out.append((a - self.coef * cost).astype(np.float32))
        return out


@kind("kl")
class TokenKl(RewardedKl, TokenDivergence):
    """A_t - beta sum over i >= t of discount^(i - t) KL_i (REINFORCE++, arXiv:2501.03262); list `whiten` after it."""
