"""(Log-ratio, advantage) -> loss of each token. Device side: pure functions of arrays.

Every method is `sum weights * phi(d, A)`: phi is here, A and the weights come from the host. d = log p - log p_old is
clamped and masked by `learner.loss`, so that padding cannot overflow. `clip` is where the ratio is clipped; other
surrogates are kinds in files of `method/family/`.
"""

import math
from dataclasses import field
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.method.divergence import CEILING, MAX_LOGRATIO, Tail, bounded_k3, k2, k3
from grpo_roc_jax.method.part import MethodBatch, Part, WithReference
from grpo_roc_jax.settings.options import NotNegative, kind, settings
from grpo_roc_jax.shapes import Array, Bool, Float, Int, checked

Level = Literal["token", "turn", "sequence"]


@checked
def segment_logratio(
    logratio: Float[Array, "R T"], mask: Bool[Array, "R T"], ratio_segments: Int[Array, "R T"]
) -> Float[Array, "R T"]:
    """For each token the mean log-ratio of the masked tokens in its segment, with the gradient of that token alone.

    The value is mean(d) over the segment; the gradient of entry t is that of d[t]. Summed with equal weights over a
    segment of n tokens this is n times the gradient of the mean, so weights of 1/n give the exact gradient of the
    segment's loss (arXiv:2507.18071, sec. 4.3). One segment a token is the identity, one a trajectory is GSPO.

    Args:
        logratio: d, in nats.
        mask: Tokens that count.
        ratio_segments: 0..T-1 within a row; off the mask the number is ignored.
    """
    T = logratio.shape[1]

    def row_mean(d: Array, on: Array, segments: Array) -> Array:
        sums = jax.ops.segment_sum(jnp.where(on, d, 0.0), segments, num_segments=T)
        counts = jax.ops.segment_sum(on.astype(d.dtype), segments, num_segments=T)
        return (sums / jnp.maximum(counts, 1.0))[segments]

    detached = jax.lax.stop_gradient(logratio)
    return logratio - detached + jax.vmap(row_mean)(detached, mask, ratio_segments)


# ---- divergence from the reference ----------------------------------------------------------------------------------


class Kl(Part, axis="surrogate.kl"):
    """A divergence from the reference policy, added to the loss."""

    coef: ClassVar[float] = 0.0
    ceiling: ClassVar[float] = math.inf
    """Estimate of a token at which its growth ends; tokens that reach it are counted (`loss/kl_clamped_fraction`)."""
    tail: ClassVar[Tail] = "flat"

    @property
    def needs_reference(self) -> bool:
        return self.coef > 0

    def estimate(self, logprobs: Array, logprobs_ref: Array, logratio: Array) -> Array:
        """`kl_estimate` of this kind."""
        return kl_estimate(self.kind, logprobs, logprobs_ref, logratio, tail=self.tail)


@kind("none")
class NoKl(Kl):
    """No term, no reference policy."""


@settings
class KlTerm(WithReference, Kl):
    """A term with a weight."""

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
    """Beyond an estimate of 10, at 2.6 nats below the reference. `flat`: the estimate stays there, so that the tokens
    which have drifted most are not pulled back. `linear`: it goes on along its tangent, with 12.6 a nat."""


@kind("corrected")
class CorrectedK3(KlTerm):
    """ratio (e^-u - 1 + u), with the gradient ratio u: unbiased in value and gradient for tokens of an older policy
    (DeepSeek-V3.2, arXiv:2512.02556). The ratio is the token's, and the estimate is at most 10."""

    ceiling = CEILING


@checked
def kl_estimate(
    kind: str,
    logprobs: Float[Array, "*B T"],
    logprobs_ref: Float[Array, "*B T"],
    logratio: Float[Array, "*B T"] | None = None,
    *,
    tail: Tail = "flat",
) -> Float[Array, "*B T"]:
    """Per-token estimate of KL(policy || reference) from tokens of the policy, u = log p - log p_ref.

    k1 = u, k2 = u^2 / 2, k3 = e^-u - 1 + u (Schulman, "Approximating KL divergence", 2020; k3 in arXiv:2402.03300).
    k3 grows exponentially where the policy has dropped a token, so u and the estimate are clamped as in verl.
    `corrected` is k3 times e^logratio, the ratio to the policy that sampled (arXiv:2512.02556). `tail` is that of k3.
    """
    u = logprobs - logprobs_ref
    if kind == "k1":
        return u
    if kind == "k2":
        return k2(u)
    if kind == "k3":
        return bounded_k3(-u, tail, jnp)
    if kind == "corrected":
        within = jnp.clip(-u, -MAX_LOGRATIO, MAX_LOGRATIO)
        return jnp.minimum(jnp.exp(logratio) * k3(within, jnp), CEILING)
    raise ValueError(f"surrogate.kl = {kind!r}; must be k1, k2, k3 or corrected")


# ---- the loss of a token --------------------------------------------------------------------------------------------


@settings
class Surrogate(Part, axis="surrogate"):
    """The loss of a token, given its log-ratio and advantage."""

    kl: Kl = field(default_factory=NoKl)
    """Divergence from the reference policy."""

    @property
    def shared_level(self) -> Level:
        """Which tokens share an importance ratio."""
        return "token"

    @property
    def scored_ratio(self) -> bool:
        """Whether the ratio is taken against log-probabilities of a scoring pass."""
        return False

    @property
    def own_ratio(self) -> bool:
        """Whether the ratio is that of the update to itself: 1, with the gradient of the log-probability."""
        return False

    @property
    def needs_scores(self) -> bool:
        return self.scored_ratio

    @property
    def clip_bounds(self) -> tuple[float, float, float]:
        """(low, high, dual): a token counts as clipped in the metrics where its ratio leaves [1 - low, 1 + high]."""
        return 0.2, 0.28, 0.0

    def clipped(self, logratio: Array, advantages: Array, logprobs: Array) -> tuple[Array, Array]:
        """Which tokens the metrics count as clipped below and above."""
        low, high, _ = self.clip_bounds
        ratio = jnp.exp(logratio)
        return (ratio < 1.0 - low) & (advantages < 0), (ratio > 1.0 + high) & (advantages > 0)

    def shared(self, logratio: Array, advantages: Array, mask: Array, ratio_segments: Array) -> Array:
        """The log-ratio [R,T] at the level of the surrogate; by default its mean over each segment."""
        if self.shared_level == "token":
            return logratio
        return segment_logratio(logratio, mask, ratio_segments)

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        """[..., T] in, [..., T] out; lower is better. A positive factor of the advantage is one of the loss."""
        raise NotImplementedError

    def marked(self, batch: MethodBatch, advantages: list[np.ndarray]) -> list[np.ndarray] | None:
        """On the host: bool[T] of each trajectory, the tokens that are treated differently; None if none ever are."""
        return None

    def marked_loss(self, loss: Array, logratio: Array) -> Array:
        """The loss of marked tokens, given what it would be otherwise."""
        return loss


@settings
class TokenRatioSurrogate(Surrogate):
    """A loss of the ratio of a token to the sampling policy."""

    old_logprobs: Literal["recorded", "scored", "current"] = "recorded"
    """What the ratio is taken against: log-probabilities recorded while sampling, those of a scoring pass, or those of
    the update itself. With `current` the ratio is exactly 1 however sampler and update round, and no pass is added; it
    allows one optimizer step per rollout batch."""

    @property
    def scored_ratio(self) -> bool:
        return self.old_logprobs == "scored"

    @property
    def own_ratio(self) -> bool:
        return self.old_logprobs == "current"


@settings
class RatioSurrogate(TokenRatioSurrogate):
    """A loss of the ratio to the sampling policy."""

    level: Level = "token"
    """Which tokens share an importance ratio: none, those of a turn, all of a trajectory (GSPO, arXiv:2507.18071)."""

    @property
    def shared_level(self) -> Level:
        return self.level


# ---- surrogates ----------------------------------------------------------------------------------------------------


@kind("clip")
class Clip(RatioSurrogate):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO (arXiv:1707.06347), GRPO, DAPO, GRPO-RoC."""

    clip_low: NotNegative = 0.2
    """The ratio is clipped below 1 - clip_low; less than 1."""
    clip_high: NotNegative = 0.28
    """The ratio is clipped above 1 + clip_high; larger than clip_low lets unlikely tokens grow (arXiv:2503.14476)."""

    dual: ClassVar[float] = 0.0
    delta: ClassVar[float] = 0.0
    """Further caps of `capped_clip`; 0 is off."""

    def __post_init__(self) -> None:
        if self.clip_low >= 1:
            raise ValueError(f"surrogate.clip_low = {self.clip_low}; must be below 1, since ratios are positive")

    @property
    def clip_bounds(self) -> tuple[float, float, float]:
        return self.clip_low, self.clip_high, self.dual

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        low, high, dual = self.clip_bounds
        return clipped_surrogate(
            logratio, advantages, clip_low=low, clip_high=high, clip_dual=dual, clip_delta=self.delta
        )


@kind("ratio")
class Ratio(RatioSurrogate):
    """-r A, without a clip."""

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        return -jnp.exp(logratio) * advantages


@kind("logp")
class LogProbability(Surrogate):
    """-A log p: REINFORCE, and the score-based objectives."""

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        return -advantages * logprobs


@kind("nll")
class NegativeLogLikelihood(LogProbability):
    """-A log p with advantage 1: supervised training."""


@checked
def clipped_surrogate(
    logratio: Float[Array, "*B T"],
    advantages: Float[Array, "*B T"],
    *,
    clip_low: float | Float[Array, ""],
    clip_high: float | Float[Array, ""],
    clip_dual: float = 0.0,
    clip_delta: float = 0.0,
) -> Float[Array, "*B T"]:
    """-min(min(r, delta) A, clip(r, 1 - clip_low, 1 + clip_high) A), capped at -clip_dual A where A < 0.

    Source: arXiv:2402.03300, eq. 3; the separate upper clip arXiv:2503.14476, sec. 3.1; the dual clip
    arXiv:1912.09729; the cap delta arXiv:2505.07291. A cap of 0 is off.
    """
    ratio = jnp.exp(logratio)
    clipped = jnp.clip(ratio, min=1.0 - clip_low, max=1.0 + clip_high)
    free = jnp.minimum(ratio, clip_delta) if clip_delta else ratio
    loss = jnp.maximum(-free * advantages, -clipped * advantages)
    if clip_dual:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -clip_dual * advantages), loss)
    return loss
