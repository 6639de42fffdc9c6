"""DAPO's soft penalty for responses that come near the token budget. Source: arXiv:2503.14476, eq. 13."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.settings.options import AtLeast1, kind


@kind("overlong")
class Overlong(Shaping):
    """A penalty that grows from 0 to 1 over the last tokens before a limit (DAPO, arXiv:2503.14476, eq. 13)."""

    limit: int = 20480
    """Response tokens (observations included) from which the penalty is 1."""
    buffer: AtLeast1 = 4096
    """Tokens before the limit over which the penalty grows."""

    def __post_init__(self) -> None:
        if self.limit < self.buffer:
            raise ValueError(f"shaping overlong: buffer = {self.buffer} is longer than limit = {self.limit}; lower it")

    def group(self, rewards: np.ndarray, found: Features) -> np.ndarray:
        left = self.limit - self.buffer - found.response_lengths.astype(np.float64)
        return rewards + np.clip(left / self.buffer, -1.0, 0.0)
