"""Pay by stages, each worth something only after the ones before it. Source: arXiv:2512.07478."""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.settings.options import kind


@kind("staged")
class Staged(Shaping):
    """sum_s w_s prod_{u <= s} pass_u: clean calls, then a well-formed answer, then a correct one; a stage pays only
    when those before it did (arXiv:2512.07478)."""

    weights: tuple[float, float, float] = (0.1, 0.2, 0.7)
    """Pay of each passed stage: clean calls, well-formed answer, correct answer."""

    overwrites = True

    def group(self, rewards: np.ndarray, found: Features) -> np.ndarray:
        passes = [found.tool_errors == 0, found.well_formed & (found.answers == 1), found.correct]
        return np.cumprod(np.stack(passes, axis=1).astype(np.float64), axis=-1) @ np.asarray(self.weights, np.float64)
