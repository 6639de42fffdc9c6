"""A random subset of the rollouts: the control arm of resampling on correct, at equal cost of sampling."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.roc import Oversampled
from grpo_roc_jax.settings.options import kind


@kind("uniform")
class Uniform(Oversampled):
    """A random subset: the control arm of `roc` (arXiv:2508.20722)."""

    def choose(self, found: Features, penalties: np.ndarray, keep: int, rng: np.random.Generator) -> np.ndarray:
        return np.sort(rng.permutation(found.size)[:keep])

    def quota_decided(self, negatives: int, positives: int, left: int, keep: int) -> bool:
        return left >= 1 and negatives + positives >= keep
