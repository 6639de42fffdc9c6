"""RGR-GRPO: a rubric gives rewards (`reward.functions criteria`) and guides a second attempt. Source: arXiv:2511.12344.

The attempt sees all criteria instead of only the failed ones. Its ratio is that of the policy without the guidance to
the policy with it, clipped as usual; the paper's shaping of that ratio was not available.
"""

from grpo_roc_jax.method.edit import joined, take_trajectories
from grpo_roc_jax.method.planning import SecondWave, Wave, best_text, standings
from grpo_roc_jax.settings.options import kind
from grpo_roc_jax.types import Condition, Group, Problem, RolloutRequest, condition_kind

REFINEMENT = condition_kind("refinement", helped=True, moves=True)
"""Condition of a second attempt after the best rollout and a rubric."""


@kind("refine")
class Refine(SecondWave):
    """The best rollout of a poor group again with the rubric in the prompt; a better one replaces the worst rollout and
    trains under the plain prompt (RGR-GRPO, arXiv:2511.12344)."""

    below: float = 1.0
    """Groups whose best reward is below this are refined."""
    column: str = "rubric"
    """Column of the data with a problem's criteria: a list of texts, or of mappings with `text`."""
    intro: str = "Improve this:\n"
    """Text before the rollout; the criteria follow it."""

    trains_plain = other_prompts = True

    def next(self, wave: Wave) -> list[RolloutRequest]:
        poor = [i for i, g in enumerate(wave.groups) if g.size and g.rewards.max() < self.below and wave.number == 1]
        texts = {i: f"\n{self.intro}{best_text(wave.groups[i])}{self.criteria(wave.problems[i])}" for i in poor}
        return [RolloutRequest(wave.problems[i], i, 1, 0, Condition(REFINEMENT), text) for i, text in texts.items()]

    def criteria(self, problem: Problem) -> str:
        """The rubric as lines of text; empty without one."""
        items = [item["text"] if isinstance(item, dict) else item for item in problem.listed(self.column)]
        return "".join(f"\n- {item}" for item in items)

    def merged(self, group: Group, request: RolloutRequest, result: Group) -> Group:
        before = standings(group)
        if not result.size or standings(result)[0] <= max(before):
            return group
        worst = before.index(min(before))
        return joined(take_trajectories(group, [i for i in range(group.size) if i != worst]), result)
