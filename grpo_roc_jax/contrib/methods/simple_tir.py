"""SimpleTIR: trajectories with a void turn are left out of the loss. Source: arXiv:2509.02479."""

import numpy as np

from grpo_roc_jax.method.weights import Mask
from grpo_roc_jax.settings.options import kind
from grpo_roc_jax.types import Group


@kind("void_turns")
class VoidTurns(Mask):
    """Leaves out trajectories that have a turn with neither a call nor an answer (SimpleTIR, arXiv:2509.02479)."""

    def trains(self, group: Group, rewards: np.ndarray) -> np.ndarray:
        stays = []
        for trajectory, verdict in zip(group.trajectories, group.verdicts, strict=True):
            silent = [not turn.calls for turn in trajectory.turns]
            void = any(silent[:-1]) or (any(silent[-1:]) and verdict.answer is None)
            stays.append(not void)
        return np.array(stays, bool)
