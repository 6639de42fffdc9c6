"""Pay by stages, each worth something only after the ones before it. Source: arXiv:2512.07478."""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import kind


@kind("staged")
class Staged(Shaping):
    """Clean calls, then a well-formed answer, then a correct one (arXiv:2512.07478)."""

    weights: tuple[float, float, float] = (0.1, 0.2, 0.7)
    """Pay of each passed stage: clean calls, well-formed answer, correct answer."""

    overwrites = True

    def group(self, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray:
        passes = [found.tool_errors == 0, found.well_formed & (found.answers == 1), found.correct]
        return staged(np.stack(passes, axis=1), self.weights)


def staged(passes: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """sum_s w_s prod_{u <= s} pass_u, [G,S] -> [G]: a stage pays only when those before it did (arXiv:2512.07478)."""
    return np.cumprod(np.asarray(passes, np.float64), axis=-1) @ np.asarray(weights, np.float64)
