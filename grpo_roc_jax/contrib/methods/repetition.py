"""Less weight for repetitive successes: an option that GRPO-RoC tried and left out."""

import numpy as np

from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.weights import Factor
from grpo_roc_jax.settings.options import AtLeast1, Share, kind


@kind("repetition")
class Repetition(Factor):
    """`weight` for correct trajectories in which more than `limit` of the n-grams occurred before.

    Share of a trajectory: 1 - distinct / all n-grams of its turns, in tokens. In arXiv:2508.20722, sec. 4.3.1, this
    made length and scores worse, since it also counts a second check with other inputs.
    """

    n: AtLeast1 = 10
    """Tokens of an n-gram."""
    limit: Share = 0.2
    """Largest share that keeps its weight."""
    weight: Share = 0.5
    """Weight above it."""

    def trajectories(self, batch: MethodBatch) -> np.ndarray:
        pairs = [pair for group in batch.groups for pair in group.pairs]
        repeats = [v.status == "correct" and self.share(t.tokens, t.turns) > self.limit for t, v in pairs]
        return np.where(repeats, self.weight, 1.0)

    def share(self, tokens: np.ndarray, turns: tuple) -> float:
        """Share of the n-grams that occurred before, in this turn or an earlier one; 0 without any."""
        each = [tokens[turn.start : turn.end] for turn in turns if turn.end - turn.start >= self.n]
        if not each:
            return 0.0
        grams = np.concatenate([np.lib.stride_tricks.sliding_window_view(turn_tokens, self.n) for turn_tokens in each])
        return 1.0 - len(np.unique(grams, axis=0)) / len(grams)
