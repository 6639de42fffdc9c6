"""`grpo-roc check-reward package.module:function`: tries a reward function before training.

It runs on five small made-up trajectories: a right answer, a wrong answer, no answer, a failing tool call, and a
truncated one. Each line shows the reward and the status that training would use.
"""

from grpo_roc_jax.reward.config import Reward
from grpo_roc_jax.reward.score import RewardError
from grpo_roc_jax.reward.trial import check_reward


def main(argv: list[str]) -> int:
    """Exit status 0 if every trajectory was scored; 2 if the function failed or left trajectories unscored."""
    if len(argv) != 1:
        print(f"usage: grpo-roc check-reward FUNCTION, one of {', '.join(sorted(Reward.kinds))} or a path")
        return 2
    try:
        lines = check_reward(argv[0])
    except (RewardError, ValueError) as error:
        print(error)
        return 2
    print("\n".join(lines))
    return 2 if any("not scored" in line for line in lines) else 0
