"""On-policy distillation: the reverse divergence from a teacher, token by token, on what the student sampled.

The teacher is a second model (GKD, arXiv:2306.13649, with its reverse KL; Thinking Machines, "On-Policy Distillation",
2025), or the student itself with the answer in its prompt (SDFT, arXiv:2601.19897) or with another success of the group
(SDPO, arXiv:2601.20802). All read the log-probability of the sampled token alone. SDPO's default, a divergence over the
hundred likeliest tokens, is not implemented.
"""

from typing import ClassVar, Literal

import numpy as np

from grpo_roc_jax.method.advantage import Estimator
from grpo_roc_jax.method.divergence import TokenDivergence
from grpo_roc_jax.method.part import MethodBatch, WithReference
from grpo_roc_jax.method.planning import own_text
from grpo_roc_jax.settings.options import NotNegative, Share, kind, settings
from grpo_roc_jax.types import Group


@kind("none")
class NoAdvantage(Estimator):
    """Advantage 0, whatever the rewards are; adjustments make up the whole advantage."""

    reads_rewards = False

    def estimate(self, batch: MethodBatch) -> list[np.ndarray]:
        return [np.zeros(len(rewards)) for rewards in batch.rewards]


@settings
class Distilled(TokenDivergence):
    """A_t - beta (log p - log p_teacher) for each token, plus that of later tokens if `discount` is above 0."""

    other: ClassVar[str] = "teacher"

    coef: NotNegative = 1.0
    """beta: weight of a nat of divergence."""
    discount: Share = 0.0
    """Weight of the next token's divergence in that of a token; at 0 a token counts only its own."""

    @property
    def needs_teacher(self) -> bool:
        return self.coef > 0


@kind("teacher")
class Teacher(Distilled):
    """A_t - beta (log p - log p_teacher), the teacher being another model (arXiv:2306.13649)."""

    path: str = ""
    """A run, one of its checkpoints, or a published model or adapter (a directory or a hub id). It may be of any size
    but must have the vocabulary of this run."""


@kind("self_teacher")
class SelfTeacher(WithReference, Distilled):
    """A_t - beta (log p - log p_teacher), the teacher being the policy itself with more in its prompt
    (arXiv:2601.19897). Rows without anything to show, or whose prompt or row would be too long, keep A_t."""

    other_prompts = True

    shows: Literal["answer", "success"] = "answer"
    """What the teacher's prompt ends with: the answer, or the text of another success of the group (SDPO,
    arXiv:2601.20802)."""
    column: str = ""
    """Column of the data to show as the answer, such as a solution; empty: the reference answer."""
    intro: str = "Solution: "
    """Text before it."""
    weights: Literal["policy", "reference"] = "policy"
    """Whose parameters the teacher has. With the reference, `sync_every` 1 and `sync_mix` 0.05 it is SDPO's moving
    average."""

    @property
    def needs_reference(self) -> bool:
        return self.needs_teacher and self.weights == "reference"

    def suffix(self, group: Group, index: int) -> str:
        """Text at the end of the teacher's prompt for a trajectory; empty where there is nothing to show."""
        if self.shows == "success":
            others = [i for i in np.flatnonzero(group.correct) if i != index]
            text = own_text(group, others[0]) if others else ""
        else:
            text = str(group.problem.column(self.column, "") if self.column else group.problem.answer)
        return f"\n{self.intro}{text}" if text else ""
