"""A token budget that shrinks over training: Train Long, Think Short. Source: arXiv:2508.08940.

The reward joins correctness, closeness to the budget and one well-formed answer; with `tell` the prompts say the
budget, in training and evaluation.
"""

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import Shaping
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import AtLeast1, PositiveShare, kind


@kind("budget")
class TokenBudget(Shaping):
    """Pays for correctness, for closeness to a shrinking token budget, and for form (arXiv:2508.08940)."""

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
        """The budget at a training step."""
        return token_budget(step, self.start, self.decay, self.every)

    def prompt_suffix(self, step: int) -> str:
        """What prompts of this step end with; empty where the policy is told nothing."""
        return "\n" + self.tell.replace("{budget}", str(int(self.tokens(step)))) if self.tell else ""

    def group(self, rewards: np.ndarray, found: Features, state: AlgoState) -> np.ndarray:
        correctness, closeness, tidy = self.weights
        one_answer = found.well_formed & (found.answers == 1)
        near = triangle(found.lengths, self.tokens(state.step))
        return correctness * found.correct + closeness * near + tidy * one_answer


def token_budget(step: int, start: float, decay: float, every: int) -> float:
    """max(1, start decay^floor(step / every)) tokens (Train Long, Think Short, arXiv:2508.08940)."""
    return max(1.0, start * decay ** (step // every))


def triangle(lengths: np.ndarray, budget: float) -> np.ndarray:
    """n / B up to the budget, 2 - n / B up to twice it, 0 beyond (arXiv:2508.08940)."""
    return np.maximum(1 - np.abs(np.asarray(lengths, np.float64) / budget - 1), 0.0)
