"""A class written for TRL's `environment_factory`, used as it stands: reset(**row), typed tools, get_reward().

python -m grpo_roc_jax.train --environment examples/environments/trl_class.py:Counter --reward.functions environment
"""

import sys

import grpo_roc_jax as g


class Counter:
    """Reach 5."""

    def reset(self, start: int = 0, **row) -> str:
        self.n = start
        return f" Start: {self.n}."

    def add(self, k: int) -> str:
        """Add to the counter.

        Args:
            k: How much.
        """
        self.n += k
        return str(self.n)

    def get_reward(self) -> float:
        return float(self.n == 5)


def main(words: list[str]) -> dict:
    """Trains on it."""
    settings = ["--environment", f"{__file__}:Counter", "--reward.functions", "environment"]
    return g.train_policy(g.read_config("toy.yaml", *settings, "--rollout.max_prompt_tokens", "64", *words))


if __name__ == "__main__":
    main(sys.argv[1:])
