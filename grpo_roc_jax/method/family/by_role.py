"""Advantages within roles: one policy solves problems and writes something else, each with a reward of its own."""

from dataclasses import field

import numpy as np

from grpo_roc_jax.method.advantage import Estimator, GroupRelative
from grpo_roc_jax.method.features import SIDE_KINDS
from grpo_roc_jax.method.part import MethodBatch
from grpo_roc_jax.settings.options import kind


@kind("by_role")
class ByRole(Estimator):
    """An estimate for the attempts of a group and one for each kind of other trajectory in it, such as predictions
    (MASA, arXiv:2510.03259) or hints (HiLL, arXiv:2604.00698)."""

    of: GroupRelative = field(default_factory=GroupRelative)
    """The estimate of one role."""

    def estimate(self, batch: MethodBatch) -> list[np.ndarray]:
        roles = [np.array([c if c in SIDE_KINDS else "" for c in found.conditions]) for found in batch.features]
        out = [np.zeros(found.size) for found in batch.features]
        for role in sorted({role for row in roles for role in row.tolist()}):
            members = [np.flatnonzero(row == role) for row in roles]
            for total, rows, values in zip(out, members, self.of.estimate(batch.only(members)), strict=True):
                total[rows] = values
        return out
