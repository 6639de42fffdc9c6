"""BNPO: groups weighted by the inverse density of a Beta fitted to the batch. Source: arXiv:2506.02864."""

from collections.abc import Sequence
from math import exp, lgamma, log

import numpy as np

from grpo_roc_jax.method.advantage import Scale
from grpo_roc_jax.method.features import EQUAL_TOLERANCE, flat
from grpo_roc_jax.settings.layers import ConfigError
from grpo_roc_jax.settings.options import kind


@kind("beta")
class Beta(Scale):
    """The density of a Beta distribution fitted to the mean rewards of the batch (BNPO, arXiv:2506.02864)."""

    low: float = 0.0
    """Least reward after shaping; rewards are mapped from [low, high] to [0, 1]."""
    high: float = 1.0
    """Largest reward after shaping."""

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"advantage.scale beta: low = {self.low}; must be below high = {self.high}")

    def batch(self, centered: Sequence[np.ndarray], rewards: Sequence[np.ndarray]) -> list[np.ndarray]:
        pooled, width = np.concatenate([*rewards, [self.low]]), self.high - self.low
        rounding = EQUAL_TOLERANCE * max(abs(self.low), abs(self.high))
        if pooled.min() < self.low - rounding or pooled.max() > self.high + rounding:
            raise ConfigError(
                f"advantage.scale beta: shaped rewards reach from {pooled.min():g} to {pooled.max():g}, but must "
                f"be within {self.low:g} and {self.high:g}; set advantage.scale.low and advantage.scale.high to the "
                "least and the largest reward that can be"
            )
        weights = beta_weights(np.array([(r.mean() - self.low) / width if len(r) else 0.0 for r in rewards]))
        return [w * c / width for w, c in zip(weights, centered, strict=True)]


def beta_weights(means: np.ndarray) -> np.ndarray:
    """float64[P]: 1 / density of a problem's mean reward under the fitted Beta, at most 1e6.

    With m, v the mean and sample variance of the means: a = (m (1 - m) / v - 1) m, b likewise with 1 - m; the density
    is that of Beta(max(1, 1 + a/3), max(1, 1 + b/3)). One problem or no spread gives 1.
    """
    if len(means) < 2 or flat(means):
        return np.ones(len(means))
    m, v = means.mean(), means.var(ddof=1)
    common = m * (1 - m) / v - 1
    alpha, beta = max(1.0, 1 + common * m / 3), max(1.0, 1 + common * (1 - m) / 3)
    return np.array([min(1.0 / max(_beta_density(p, alpha, beta), 1e-12), 1e6) for p in means])


def _beta_density(p: float, alpha: float, beta: float) -> float:
    if not 0 < p < 1:
        return 0.0 if (p <= 0 and alpha > 1) or (p >= 1 and beta > 1) else 1.0
    log_norm = lgamma(alpha + beta) - lgamma(alpha) - lgamma(beta)
    return exp(log_norm + (alpha - 1) * log(p) + (beta - 1) * log(1 - p))
