"""(Log-ratio, advantage) -> loss of each token. Device side: pure functions of arrays.

Every method is `sum weights * phi(d, A)`: phi is here, A and the weights come from the host. d = log p - log p_old is
clamped and masked by `learner.loss`, so that padding cannot overflow. `clip` is where the ratio is clipped; other
surrogates are below, or in `contrib/methods/`.
"""

from dataclasses import field
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.method.divergence import Kl, NoKl
from grpo_roc_jax.method.part import MethodBatch, Part
from grpo_roc_jax.settings.options import NotNegative, Positive, PositiveShare, kind, settings
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
        """Whether the ratio is taken against the update itself: its value is 1, its gradient that of the
        log-probability."""
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
        """[..., T] in, [..., T] out; lower is better. It scales linearly with positive factors of the advantage, or
        `linear` is false."""
        raise NotImplementedError

    @property
    def linear(self) -> bool:
        """Whether the loss of a token scales linearly with positive factors of the advantage. With a term beside the
        advantage it does not; importance weights then scale the advantages alone."""
        return True

    def marked(self, batch: MethodBatch, advantages: list[np.ndarray]) -> list[np.ndarray] | None:
        """Computed on the host: bool[T] of each trajectory, the tokens that are treated differently; None for
        surrogates that treat all tokens alike."""
        return None

    def marked_loss(self, loss: Array, logratio: Array) -> Array:
        """The loss of marked tokens, given the loss that they would have otherwise."""
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


# ---- further caps: dual clip (arXiv:1912.09729) and INTELLECT-2's delta (arXiv:2505.07291) --------------------------


@kind("capped_clip")
class CappedClip(Clip):
    """`clip` with a cap on the loss of negative advantages (dual clip, arXiv:1912.09729), on the unclipped ratio
    (INTELLECT-2, arXiv:2505.07291), or both."""

    dual: NotNegative = 0.0
    """Caps the loss of a token with negative advantage at this multiple of -A, above 1 (3 in verl); 0 is off."""
    delta: NotNegative = 0.0
    """Caps the unclipped ratio (4 in INTELLECT-2); 0 is off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.dual <= 1:
            raise ValueError(f"surrogate.dual = {self.dual}; must be above 1, or 0 for off")
        if 0 < self.delta <= 1:
            raise ValueError(
                f"surrogate.delta = {self.delta}; must be above 1, or 0 for off: at the ratio 1 of the first update "
                "positive advantages would have no gradient"
            )


# ---- CISPO: the clipped, detached ratio times the log-probability (arXiv:2506.13585, eq. 4) -------------------------


@kind("cispo")
class Cispo(RatioSurrogate):
    """-sg(clip(r, low, high)) A log p: every token keeps a gradient (arXiv:2506.13585)."""

    low: NotNegative = 0.0
    """Lower bound of the detached ratio; 0 leaves it free."""
    high: NotNegative = 5.0
    """Upper bound of the detached ratio."""

    def __post_init__(self) -> None:
        if not self.low <= 1 <= self.high:
            raise ValueError(
                f"surrogate.low = {self.low}, high = {self.high}; must hold 1 between them, the ratio of a first update"
            )

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        return detached_ratio_loss(logratio, advantages, logprobs, self.low, self.high)


def detached_ratio_loss(
    logratio: Array, advantages: Array, logprobs: Array, low: float | Array, high: float | Array
) -> Array:
    """-sg(clip(r, low, high)) A log p of each token; the bounds may be traced."""
    ratio = jax.lax.stop_gradient(jnp.clip(jnp.exp(logratio), min=low, max=high))
    return -ratio * advantages * logprobs


# ---- SAPO: a smooth gate instead of a clip (arXiv:2511.20347) -------------------------------------------------------


@kind("sapo")
class Sapo(RatioSurrogate):
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A; slope 1 at r = 1 (arXiv:2511.20347)."""

    positive: Positive = 1.0
    """Steepness of the gate for positive advantages."""
    negative: Positive = 1.05
    """Steepness of the gate for negative advantages; a steeper one damps them sooner."""

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        tau = jnp.where(advantages > 0, self.positive, self.negative)
        return -4.0 / tau * jax.nn.sigmoid(tau * (jnp.exp(logratio) - 1.0)) * advantages


# ---- GMPO: the geometric mean of clipped token ratios (arXiv:2507.20673) --------------------------------------------


@kind("geometric")
class Geometric(Clip):
    """-A times the geometric mean of the ratios of a segment, each clipped where its advantage pushes (GMPO,
    arXiv:2507.20673)."""

    level: Level = "sequence"
    """The segment: a turn or a trajectory."""
    clip_low: NotNegative = 0.4
    """Log-ratios of tokens with negative advantage are cut at -clip_low, in nats."""
    clip_high: NotNegative = 0.4
    """Log-ratios of tokens with positive advantage are cut at clip_high, in nats."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level == "token":
            raise ValueError("surrogate geometric works on segments; set surrogate.level sequence or turn")

    def shared(self, logratio: Array, advantages: Array, mask: Array, ratio_segments: Array) -> Array:
        high = jnp.where(advantages >= 0, self.clip_high, jnp.inf)
        low = jnp.where(advantages >= 0, -jnp.inf, -self.clip_low)
        return segment_logratio(jnp.clip(logratio, min=low, max=high), mask, ratio_segments)

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        return -jnp.exp(logratio) * advantages


# ---- DPPO: the divergence of the two policies bounds a token, not their ratio (arXiv:2602.04879) --------------------
# The divergences are the binary ones of the paper, which see the sampled token against all others, from its
# probability under both policies. Its top-k forms need further probabilities of the sampling policy, which are not
# recorded.


EPS = 1e-8
"""Added inside the logarithm of the binary divergence, as in verl: in float32 a probability can be 1."""


@kind("dppo")
class Dppo(TokenRatioSurrogate):
    """-r A for tokens within the bounds, 0 for those outside (DPPO, arXiv:2602.04879), plus `penalty` d^2 for all
    (prime-rl), with d = log r."""

    divergence: Literal["tv", "kl", "two_sided"] = "tv"
    """With p and p_old of the sampled token: `tv` compares p - p_old with the bound on the side that the advantage
    pushes to, `kl` the binary KL(p_old || p) on that side, and `two_sided` p - p_old with both bounds (prime-rl's
    IPO)."""
    low: NotNegative = 0.2
    """Bound where p has fallen; 0.05 for `kl` and 0.1 for `two_sided` in the released scripts."""
    high: NotNegative = 0.2
    """Bound where p has risen."""
    penalty: NotNegative = 0.0
    """Weight of d^2; 1e-3 in prime-rl."""

    def clipped(self, logratio: Array, advantages: Array, logprobs: Array) -> tuple[Array, Array]:
        """Which tokens are out of bounds below and above."""
        now = jax.lax.stop_gradient(logprobs)
        old = now - jax.lax.stop_gradient(logratio)
        change = jnp.exp(now) - jnp.exp(old)
        fell, rose = change < 0, change > 0
        if self.divergence == "two_sided":
            return change < -self.low, change > self.high
        size = jnp.abs(change) if self.divergence == "tv" else binary_kl(old, now)
        return fell & (size > self.low) & (advantages < 0), rose & (size > self.high) & (advantages > 0)

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        low, high = self.clipped(logratio, advantages, logprobs)
        bounded_loss = jnp.where(low | high, 0.0, -jnp.exp(logratio) * advantages)
        return bounded_loss + self.penalty * logratio**2 if self.penalty else bounded_loss

    @property
    def linear(self) -> bool:
        return not self.penalty


def binary_kl(old: Array, now: Array) -> Array:
    """KL between the distributions over (this token, any other) under two log-probabilities of the token, in nats."""
    others = jnp.log((-jnp.expm1(old) + EPS) / (-jnp.expm1(now) + EPS))
    return jnp.exp(old) * (old - now) - jnp.expm1(old) * others


# ---- Clip-Cov, KL-Cov: few tokens, which drive the fall of entropy, are held back (arXiv:2505.22617) ----------------
# Entropy falls by the covariance of log-probability and advantage, cov_t = (A_t - mean A)(l_t - mean l) over the
# tokens of the optimizer step, which few tokens make up. It is computed with the policy right before each step.


@settings
class Covariance(Surrogate):
    """A loss that treats tokens of high covariance differently."""

    needs_scores = True
    follows_policy = True

    share: PositiveShare = 2e-4
    """Share of the tokens of an optimizer step that are treated differently, rounded down; at least one token is."""

    def choose(self, batch: MethodBatch, cov: np.ndarray, advantages: np.ndarray, count: int) -> np.ndarray:
        """Indices of at most `count` tokens among the masked ones of the batch."""
        raise NotImplementedError

    def marked(self, batch: MethodBatch, advantages: list[np.ndarray]) -> list[np.ndarray]:
        a, now = masked(advantages, batch), masked(batch.scores, batch)
        marks = np.zeros(len(a), bool)
        if len(a):
            cov = (a - a.mean()) * (now - now.mean())
            marks[self.choose(batch, cov, a, max(int(self.share * len(a)), 1))] = True
        pieces = np.split(marks, np.cumsum([np.count_nonzero(mask) for mask in batch.masks])[:-1])
        out = [np.zeros(len(mask), bool) for mask in batch.masks]
        for row, mask, piece in zip(out, batch.masks, pieces, strict=True):
            row[mask] = piece
        return out


@kind("clip_cov")
class ClipCov(Covariance, Clip):
    """`clip` without the loss of random tokens whose covariance is within bounds (Clip-Cov, arXiv:2505.22617)."""

    clip_low: NotNegative = 1.0
    """The ratio is clipped below 1 - clip_low; 1, as in the authors' script, leaves it free."""
    clip_high: NotNegative = 1.0
    """The ratio is clipped above 1 + clip_high."""
    bounds: tuple[float, float] = (1.0, 5.0)
    """Covariances between which a token may be chosen, if its ratio is not clipped."""

    def __post_init__(self) -> None:
        low, high = self.bounds
        if self.clip_low > 1 or low >= high:
            raise ValueError(
                f"surrogate clip_cov: clip_low = {self.clip_low:g}, bounds = {low:g}, {high:g}; clip_low must be at "
                "most 1, and bounds must rise"
            )

    def choose(self, batch: MethodBatch, cov: np.ndarray, advantages: np.ndarray, count: int) -> np.ndarray:
        if batch.rng is None:
            raise ValueError("surrogate clip_cov draws at random; pass rng to train_rows")
        old = batch.first_scores if self.scored_ratio else [t.logprobs for t in batch.trajectories]
        ratio = np.exp(masked(batch.scores, batch) - masked(old, batch))
        clipped = np.where(advantages < 0, ratio < 1 - self.clip_low, ratio > 1 + self.clip_high)
        candidates = np.flatnonzero((cov > self.bounds[0]) & (cov < self.bounds[1]) & ~clipped)
        return batch.rng.permutation(candidates)[:count]

    def marked_loss(self, loss: Array, logratio: Array) -> Array:
        return jnp.zeros_like(loss)


@kind("kl_cov")
class KlCov(Covariance, RatioSurrogate):
    """-r A, plus weight |log r| for the tokens of highest covariance (KL-Cov, arXiv:2505.22617)."""

    share: PositiveShare = 2e-3
    """Share of the tokens of an optimizer step with the penalty, rounded down but at least one token: 2e-3 for the
    paper's 7B model, 2e-4 for 32B and in verl."""
    weight: NotNegative = 1.0
    """Weight of the penalty, which has no gradient before the policy has moved."""

    def choose(self, batch: MethodBatch, cov: np.ndarray, advantages: np.ndarray, count: int) -> np.ndarray:
        return np.argsort(-cov, kind="stable")[:count]

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        return -jnp.exp(logratio) * advantages

    @property
    def linear(self) -> bool:
        return False

    def marked_loss(self, loss: Array, logratio: Array) -> Array:
        # jnp.abs has slope 1 at 0, where the penalty must not push.
        return loss + self.weight * logratio * jnp.sign(jax.lax.stop_gradient(logratio))


def masked(values: list[np.ndarray], batch: MethodBatch) -> np.ndarray:
    """float64[N]: the values of all masked tokens of the batch."""
    masked_values = (np.asarray(v, np.float64)[mask] for v, mask in zip(values, batch.masks, strict=True))
    return np.concatenate([np.zeros(0), *masked_values])
