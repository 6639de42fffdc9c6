"""SimpleTIR: trajectories with a turn that does nothing leave the loss. Source: arXiv:2509.02479."""

import numpy as np

from grpo_roc_jax.method.weights import Mask
from grpo_roc_jax.settings.options import kind
from grpo_roc_jax.types import Group, Trajectory, Verdict


@kind("void_turns")
class VoidTurns(Mask):
    """Leaves trajectories with a turn of neither call nor answer out (SimpleTIR, arXiv:2509.02479)."""

    def trains(self, group: Group, rewards: np.ndarray) -> np.ndarray:
        pairs = zip(group.trajectories, group.verdicts, strict=True)
        return np.array([not has_void_turn(trajectory, verdict) for trajectory, verdict in pairs], bool)


def has_void_turn(trajectory: Trajectory, verdict: Verdict) -> bool:
    """Whether some turn holds neither a tool call nor the answer (SimpleTIR, arXiv:2509.02479)."""
    silent = [not turn.calls for turn in trajectory.turns]
    return any(silent[:-1]) or (bool(silent) and silent[-1] and verdict.answer is None)
