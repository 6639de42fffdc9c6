"""Clip-Cov and KL-Cov: the few tokens that drive the fall of entropy are left out or held back. arXiv:2505.22617.

Entropy falls by the covariance of log-probability and advantage, cov_t = (A_t - mean A)(l_t - mean l) over the tokens
of the optimizer step, which few tokens make up. It is computed with the policy right before each step.
"""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.surrogate import Clip, RatioSurrogate, Surrogate
from grpo_roc_jax.settings.options import NotNegative, PositiveShare, kind, settings
from grpo_roc_jax.shapes import Array


@settings
class Covariance(Surrogate):
    """A loss that treats tokens of high covariance differently."""

    needs_scores = True
    follows_policy = True

    share: PositiveShare = 2e-4
    """Share of the tokens of an optimizer step that are treated differently, rounded down; at least one token is."""

    def choose(self, batch: MethodBatch, cov: np.ndarray, advantages: np.ndarray, count: int) -> np.ndarray:
        """Places of at most `count` tokens among the masked ones of the batch."""
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
        found = np.flatnonzero((cov > self.bounds[0]) & (cov < self.bounds[1]) & ~clipped)
        return batch.rng.permutation(found)[:count]

    def marked_loss(self, loss: Array, logratio: Array) -> Array:
        return jnp.zeros_like(loss)


@kind("kl_cov")
class KlCov(Covariance, RatioSurrogate):
    """-r A, plus weight |log r| for the tokens of highest covariance (KL-Cov, arXiv:2505.22617)."""

    share: PositiveShare = 2e-3
    """Share of the tokens of an optimizer step with the penalty, rounded down but at least one token: 2e-3 for the
    paper's 7B model, 2e-4 for 32B and in verl."""
    weight: NotNegative = 1.0
    """Of the penalty, which has no gradient before the policy has moved."""

    def choose(self, batch: MethodBatch, cov: np.ndarray, advantages: np.ndarray, count: int) -> np.ndarray:
        return np.argsort(-cov, kind="stable")[:count]

    def loss(self, logratio: Array, advantages: Array, logprobs: Array) -> Array:
        return -jnp.exp(logratio) * advantages

    def marked_loss(self, loss: Array, logratio: Array) -> Array:
        # jnp.abs has slope 1 at 0, where the penalty must not push.
        return loss + self.weight * logratio * jnp.sign(jax.lax.stop_gradient(logratio))


def masked(values: list[np.ndarray], batch: MethodBatch) -> np.ndarray:
    """float64[N]: the values of all masked tokens of the batch."""
    found = (np.asarray(v, np.float64)[mask] for v, mask in zip(values, batch.masks, strict=True))
    return np.concatenate([np.zeros(0), *found])
