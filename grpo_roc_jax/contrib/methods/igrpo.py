"""iGRPO: a second wave sees the best rollout of the first and trains alone. Source: arXiv:2602.09000."""

from grpo_roc_jax.method.planning import SecondWave, Wave, best_text
from grpo_roc_jax.settings.options import kind
from grpo_roc_jax.types import Condition, Group, RolloutRequest, condition_kind

DRAFT = condition_kind("draft")
"""Condition of rollouts that saw the best draft of their group."""


@kind("draft")
class Draft(SecondWave):
    """A second wave that sees the best rollout of the first, a success if there is one, and trains alone (iGRPO,
    arXiv:2602.09000)."""

    intro: str = "An earlier attempt:\n"
    """Text before the draft."""

    def next(self, wave: Wave) -> list[RolloutRequest]:
        if wave.number > 1:
            return []
        some = [(index, g) for index, g in enumerate(wave.groups) if g.size]
        return [
            RolloutRequest(g.problem, index, g.size, 0, Condition(DRAFT), f"\n{self.intro}{best_text(g)}")
            for index, g in some
        ]

    def merged(self, group: Group, request: RolloutRequest, result: Group) -> Group:
        return result if result.size else group
