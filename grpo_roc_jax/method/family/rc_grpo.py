"""RC-GRPO: rollouts conditioned on reward tokens. Source: arXiv:2602.03025."""

from typing import Literal

import numpy as np

from grpo_roc_jax.method.planning import Conditioning, Wave
from grpo_roc_jax.settings.options import InnerShare, NotNegative, kind
from grpo_roc_jax.types import Condition, RolloutRequest

HIGH, LOW = Condition("high_reward"), Condition("low_reward")
"""Conditions of rollouts under the high and the low reward token; evaluation uses the high one."""


@kind("reward_tokens")
class RewardTokens(Conditioning):
    """Conditions each rollout on a reward token (RC-GRPO, arXiv:2602.03025); the policy must be fine-tuned on both."""

    draw: Literal["iid", "fixed"] = "iid"
    """Tokens drawn one by one, as in the paper, or in fixed numbers."""
    high_share: InnerShare = 0.5
    """Probability or share of the high token; the paper takes the share of successes in its fine-tuning data."""
    form: Literal["token", "text"] = "token"
    """How a reward token is written: as the special token of the vocabulary (characters where it has none), or in
    words, which every vocabulary reads alike."""
    evaluate: Literal["high", "low", "none"] = "high"
    """Reward token of the prompts in evaluation."""
    separation: NotNegative = 0.05
    """Least gap between held-out success under the high and under the low token before the first step; without one the
    conditioning does nothing (arXiv:2602.03025, prop. 4.3), so the run is refused. 0 skips the check."""

    warms_up = False  # a policy was fine-tuned on the tokens

    def requests(self, place: int, count: int, wave: Wave) -> list[RolloutRequest]:
        drawn = reward_conditions(count, self.high_share, self.draw, wave.rng)
        return [
            RolloutRequest(wave.problems[place], place, drawn.count(c), 0, c, reward_goal(c, self.form))
            for c in sorted(set(drawn), key=str)
        ]


def reward_conditions(count: int, high_share: float, mode: str, rng: np.random.Generator) -> tuple[Condition, ...]:
    """The reward token of each rollout of a group.

    `iid` draws each independently, as in the paper; `fixed` takes round(count high_share) high ones, at least one of
    each kind, shuffled.
    """
    if mode == "iid":
        high = rng.random(count) < high_share
    else:
        number = min(max(round(count * high_share), 1), count - 1)
        high = rng.permutation(count) < number
    return tuple(HIGH if h else LOW for h in high)


def reward_goal(condition: Condition, form: str = "token") -> str:
    """The line that a first user message ends with under a reward token; empty for the plain prompt."""
    if condition not in (HIGH, LOW):
        return ""
    return f"\n[Reward Goal: {f'<|{condition}|>' if form == 'token' else str(condition).replace('_', ' ')}]"


def check_separation(success_high: float, success_low: float, least: float = 0.05) -> None:
    """Refuses to begin the second stage of RC-GRPO with a policy that ignores the reward token.

    The variance that conditioning adds to a group is bounded by the gap between the two success rates
    (arXiv:2602.03025, prop. 4.3); without one the method is plain GRPO at a higher price.

    Raises:
        ValueError: With both rates, and what to do.
    """
    if success_high - success_low < least:
        raise ValueError(
            f"success is {success_high:.3f} under the high reward token and {success_low:.3f} under the low one; the "
            f"gap must be at least {least}: run the reward-conditioned fine-tuning on mixed-quality traces first"
        )
