"""lambda-GRPO: trajectories weighted by their length, with one learned exponent. Source: arXiv:2510.06870."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_roc_jax.method.features import features
from grpo_roc_jax.method.part import MethodBatch, reward_weights
from grpo_roc_jax.method.shaping import shape_rewards
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.method.weights import Factor
from grpo_roc_jax.settings.options import NotNegative, Positive, kind
from grpo_roc_jax.types import Group

EXPONENT = "length_exponent"
"""Name of the learned exponent in the method's memory; 0 treats all lengths alike."""


@kind("learned_length")
class LearnedLength(Factor):
    """Weights trajectories by their length within the group, with one learned exponent (arXiv:2510.06870)."""

    strength: float = 1 / 9
    """How far a length one deviation from the mean moves the weight."""
    lr: NotNegative = 0.1
    """Step size of the learned exponent."""
    bound: Positive = 2.0
    """Largest size of the exponent. Nothing in the objective holds it back; at 2 a length two deviations above the mean
    weighs 2.4 times one that is two below, at 8 over 100 times."""

    def check(self, config: Any) -> None:
        if any(part.needs_reference for part in config.shaping):
            raise ValueError(
                "weights.factors learned_length reads rewards after the update, where the divergence of shaping kl is "
                "not known; use advantage.adjust kl, or leave the factor out"
            )
        if not hasattr(config.advantage, "trajectories"):
            raise ValueError(
                f"weights.factors learned_length follows advantages of rewards, which advantage "
                f"{config.advantage.kind} does not make; choose another advantage, or leave the factor out"
            )

    def trajectories(self, batch: MethodBatch) -> np.ndarray | None:
        exponent = batch.state.recall(EXPONENT, 0.0)
        return np.concatenate([length_preference(f.lengths, exponent, self.strength) for f in batch.features])

    def next_memory(
        self, sampled: Sequence[Group], trained: Sequence[Group], method: Any, state: AlgoState
    ) -> Mapping[str, np.ndarray]:
        """The exponent follows the advantages that trained, without what an adjustment draws at random."""
        if not trained:
            return {}
        exponent, feature_list = state.recall(EXPONENT, 0.0), [features(group) for group in trained]
        rewards = shape_rewards(feature_list, method.shaping, state)
        steady = replace(method.advantage, adjust=tuple(a for a in method.advantage.adjust if not a.draws))
        batch = MethodBatch(trained, feature_list, rewards, (), state, weights=reward_weights(method))
        values = steady.trajectories(batch)
        slope = exponent_gradient([f.lengths for f in feature_list], values, exponent, self.strength)
        return {EXPONENT: np.array([np.clip(exponent + self.lr * slope, -self.bound, self.bound)])}


def length_preference(lengths: np.ndarray, exponent: float, strength: float = 1 / 9) -> np.ndarray:
    """float64[G]: f_i = G softmax(h^exponent)_i with h_i = max(1 + strength (n_i - mean) / std, 1e-6); sums to G.

    Exponent 0 weights all alike, below 0 favors short trajectories, above long ones.
    """
    powers = length_bases(lengths, strength) ** exponent
    shares = np.exp(powers - powers.max())
    return len(lengths) * shares / shares.sum()


def length_bases(lengths: np.ndarray, strength: float) -> np.ndarray:
    spread = float(np.std(lengths))
    if spread == 0:
        return np.ones(len(lengths))
    return np.maximum(1 + strength * (np.asarray(lengths, np.float64) - np.mean(lengths)) / spread, 1e-6)


def exponent_gradient(
    lengths: Sequence[np.ndarray], advantages: Sequence[np.ndarray], exponent: float, strength: float = 1 / 9
) -> float:
    """dJ / d exponent = sum_i (df_i / d exponent) A_i n_i / sum n over the batch, at ratio 1; one array a group."""
    total, slope = sum(float(n.sum()) for n in lengths), 0.0
    for n, a in zip(lengths, advantages, strict=True):
        bases, weights = length_bases(n, strength), length_preference(n, exponent, strength)
        change = bases**exponent * np.log(bases)
        slope += (weights * (change - weights @ change / len(n))) @ (a * n)
    return float(slope) / max(total, 1.0)
