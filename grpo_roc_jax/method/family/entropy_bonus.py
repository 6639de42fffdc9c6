"""A bonus for the policy's entropy, with a coefficient that holds entropy near a target.

Source: Skywork-OR1, arXiv:2505.22312. The entropy in the loss is that of the full vocabulary under the current
parameters, with the normalizer of the loss. The controller sees the mean of -log p over the tokens that the policy
sampled for the step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_roc_jax.method.advantage import Adjustment
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.options import NotNegative, kind
from grpo_roc_jax.types import Group

COEFFICIENT, ENTROPY = "entropy_coefficient", "entropy"
"""Names in the method's memory: the coefficient after the last step, and the entropy that it saw."""


@kind("entropy_bonus")
class EntropyBonus(Adjustment):
    """Adds -a H to the loss where H is below its target; a rises by `step` there, and else falls (Skywork-OR1,
    arXiv:2505.22312). Advantages stay as they are."""

    target: NotNegative = 0.2
    """Entropy, in nats per token, from which on there is no bonus."""
    step: NotNegative = 1e-4
    """Change of the coefficient in a training step; 0 keeps it constant."""
    start: NotNegative = 0.0
    """Coefficient before the first step."""
    most: NotNegative = 5e-3
    """Largest coefficient."""

    def batch(self, advantages: Sequence[np.ndarray], batch: MethodBatch) -> list[np.ndarray]:
        return list(advantages)

    def entropy_coefficient(self, groups: Sequence[Group], state: AlgoState) -> float:
        coefficient, entropy = self.moved(groups, state)
        return coefficient if entropy < self.target else 0.0

    def moved(self, groups: Sequence[Group], state: AlgoState) -> tuple[float, float]:
        """(coefficient of this step, entropy of its trajectories)."""
        entropy = sampled_entropy(groups)
        change = self.step if entropy < self.target else -self.step
        return float(np.clip(state.recall(COEFFICIENT, self.start) + change, 0.0, self.most)), entropy

    def next_memory(
        self, sampled: Sequence[Group], trained: Sequence[Group], method: Any, state: AlgoState
    ) -> Mapping[str, np.ndarray]:
        if not trained:
            return {}
        return {name: np.array([v]) for name, v in zip((COEFFICIENT, ENTROPY), self.moved(trained, state), strict=True)}

    def metrics(self, batch: MethodBatch) -> Mapping[str, float]:
        coefficient, entropy = self.moved(batch.groups, batch.state)
        return {"entropy/coefficient": coefficient if entropy < self.target else 0.0, "entropy/sampled": entropy}


def sampled_entropy(groups: Sequence[Group]) -> float:
    """Mean of -log p over the policy's tokens, in nats; 0 without any."""
    drawn = [t.logprobs[t.policy_mask] for group in groups for t in group.trajectories]
    values = np.concatenate([np.zeros(0), *drawn])
    return -float(values.mean()) if len(values) else 0.0
