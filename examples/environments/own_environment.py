"""An environment of your own: it answers each turn, keeps a state, offers a tool and pays.

python examples/environments/own_environment.py --environment.host processes
"""

import sys

import grpo_roc_jax as g


class Countdown(g.Environment):
    """Name the number to start from, then count down to 1, a turn for each number."""

    def reset(self, problem):
        self.left = None
        return " Count down from 3 in turns."

    def hint(self) -> str:
        """Says which number comes next."""
        return str(3 if self.left is None else self.left - 1)

    def step(self, turn):
        if turn.calls:
            return None  # the output of `hint` is all that the policy reads
        right = turn.text.strip().endswith(self.hint())
        self.left = int(self.hint()) if right else self.left
        return g.Observation("go on" if right else "no", reward=float(right) / 3, done=self.left == 1)


def main(words: list[str]) -> dict:
    """Trains in it; the environment's pay is the reward."""
    settings = ["--reward.functions", "environment", "--reward.truncated", "score", "--rollout.max_prompt_tokens", "64"]
    return g.train_policy(g.read_config("toy.yaml", *settings, *words), environment=Countdown)


if __name__ == "__main__":
    main(sys.argv[1:])
