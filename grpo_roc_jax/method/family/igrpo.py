"""iGRPO: a second wave sees the best rollout of the first and trains alone. Source: arXiv:2602.09000."""

from grpo_roc_jax.method.planning import SecondWave, Wave, best_draft, own_text
from grpo_roc_jax.settings.options import kind
from grpo_roc_jax.types import Condition, Group, RolloutRequest


@kind("draft")
class Draft(SecondWave):
    """A second wave that sees the best rollout of the first and trains alone (iGRPO, arXiv:2602.09000)."""

    intro: str = "An earlier attempt:\n"
    """Text before the draft."""

    def next(self, wave: Wave) -> list[RolloutRequest]:
        if wave.number > 1:
            return []
        condition = Condition("draft")
        return [
            RolloutRequest(
                group.problem,
                place,
                group.size,
                0,
                condition,
                f"\n{self.intro}{own_text(group, best_draft(group.rewards))}",
            )
            for place, group in enumerate(wave.groups)
            if group.size
        ]

    def merged(self, group: Group, request: RolloutRequest, result: Group) -> Group:
        return result if result.size else group
