"""A token budget that shrinks over training: Train Long, Think Short. Source: arXiv:2508.08940.

The reward joins correctness, closeness to the budget and one well-formed answer; with `tell` the prompts say the
budget, in training and evaluation.
"""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import AtLeast1, PositiveShare, kind


@kind("budget")
class TokenBudget(Shaping):
    """Pays for correctness, for closeness to a shrinking token budget, and for form (arXiv:2508.08940).

    Closeness of n tokens to a budget of B is n / B up to B, 2 - n / B up to 2B, 0 beyond.
    """

    start: AtLeast1 = 256
    """Token budget at step 0."""
    decay: PositiveShare = 0.85
    """Factor on the budget every `every` steps."""
    every: AtLeast1 = 50
    """Steps between reductions of the budget."""
    weights: tuple[float, float, float] = (0.6, 0.3, 0.1)
    """Weights of correctness, of closeness to the budget, and of exactly one well-formed answer."""
    tell: str = ""
    """Text at the end of every prompt of a first wave and of evaluation, with {budget} for the budget of the step."""

    overwrites = True

    def tokens(self, step: int) -> float:
        """The budget at a training step: start decay^floor(step / every), at least 1."""
        return max(1.0, self.start * self.decay ** (step // self.every))

    def prompt_suffix(self, step: int) -> str:
        return "\n" + self.tell.replace("{budget}", str(int(self.tokens(step)))) if self.tell else ""

    def batch(self, rewards: Sequence[np.ndarray], groups: Sequence[Features], state: AlgoState) -> list[np.ndarray]:
        (correctness, closeness, tidy), budget, out = self.weights, self.tokens(state.step), []
        for features in groups:
            near = np.maximum(1 - np.abs(features.lengths / budget - 1), 0.0)
            one_answer = features.well_formed & (features.answers == 1)
            out.append(correctness * features.correct + closeness * near + tidy * one_answer)
        return out
