"""HiLL's reward of a hint writer: a hint is good when it makes a mixed group likely and is not needed later
(arXiv:2604.00698). Train the writer on groups of its hints with these rewards."""

import numpy as np


def mixed_probability(rate: float, size: int) -> float:
    """1 - p^G - (1 - p)^G."""
    return 1 - rate**size - (1 - rate) ** size


def hint_reward(
    rate: float, size: int, reliance: float, *, unhinted: float = 0.0, temperature: float = 0.3, gate: bool = True
) -> float:
    """mixed probability * exp(min(reliance, 0) / temperature); 0 where the hint makes a mixed group no likelier.

    Args:
        rate: Success rate under the hint.
        size: Group size.
        reliance: Mean over correct rollouts of log p(y | q) - log p(y | q, hint), a token's mean; negative when the
            rollout needs the hint.
        unhinted: Success rate without the hint.
        temperature: How fast reliance costs.
        gate: False for a hint that failed its checks (it gives the answer away): -1.
    """
    if not gate:
        return -1.0
    chance = mixed_probability(rate, size)
    return (
        chance * float(np.exp(min(reliance, 0.0) / temperature)) if chance > mixed_probability(unhinted, size) else 0.0
    )
