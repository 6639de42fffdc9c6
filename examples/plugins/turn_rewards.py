"""A reward per turn: a tenth for each turn whose calls all ran, beside the reward for the answer.

    python -m grpo_roc_jax.train methods/gigpo.yaml --reward.functions answer examples.plugins.turn_rewards:clean

The trajectory's reward is the sum. Methods that tell turns apart (`advantage.adjust turns`) read the single numbers;
there the reward for the answer belongs to the last turn.
"""

from collections.abc import Sequence

from grpo_roc_jax.types import Problem, Trajectory


def clean(problem: Problem, trajectories: Sequence[Trajectory]) -> list[list[float]]:
    """0.1 for each turn with calls of which none failed."""
    return [
        [0.1 * bool(turn.results and not any(r.counts_as_error for r in turn.results)) for turn in trajectory.turns]
        for trajectory in trajectories
    ]
