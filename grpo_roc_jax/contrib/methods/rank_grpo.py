"""Rank-GRPO: an advantage for each position of a list, over the group. Source: arXiv:2510.20150.

The items of the paper are the entries of a recommendation list. Here they are the turns of a trajectory, with the
rewards that reward functions give by turn; the part of the reward that no turn was given belongs to the last one.
"""

from collections.abc import Sequence

import numpy as np

from grpo_roc_jax.method.advantage import Advantage, Deviation, flat, turn_pay
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.settings.options import AtLeast1, NotNegative, kind


@kind("positions")
class Positions(Deviation, Advantage):
    """z-scores over the group's items at each position, for the tokens of the item (Rank-GRPO, arXiv:2510.20150; with
    `surrogate.level turn`, so that items share a ratio too)."""

    items: AtLeast1 = 20
    """Items that were asked for."""
    overflow: NotNegative = 1.0
    """Size of the negative advantage of further items; not the paper's value, which was not available."""

    def tokens(self, batch: MethodBatch) -> list[np.ndarray]:
        out = []
        for group, rewards in zip(batch.groups, batch.rewards, strict=True):
            pays = [turn_pay(t, v, r) for (t, v), r in zip(group.pairs, rewards, strict=True)]
            for trajectory, values in zip(group.trajectories, self.by_position(pays), strict=True):
                out.append(np.zeros(trajectory.length, np.float32))
                for turn, value in zip(trajectory.turns, values, strict=True):
                    out[-1][turn.start : turn.end] = value
        return out

    def by_position(self, pays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """float64[items] of each trajectory of a group, from the reward of each item."""
        out = [np.full(len(pay), -self.overflow) for pay in pays]
        for k in range(min(self.items, max(map(len, pays), default=0))):
            rows = [i for i, pay in enumerate(pays) if k < len(pay)]
            values = np.array([pays[i][k] for i in rows])
            scaled = np.zeros(len(rows)) if flat(values) else (values - values.mean()) / self.divisor(values)
            for i, value in zip(rows, scaled, strict=True):
                out[i][k] = value
        return out
