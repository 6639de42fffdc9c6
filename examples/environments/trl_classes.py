"""Several classes of TRL's form: the column `environment` of a row chooses among them.

python examples/environments/trl_classes.py --data.sources rows.jsonl
"""

import sys

import grpo_roc_jax as g


class Counter:
    def reset(self, **row) -> None:
        self.n = 0

    def add(self, k: int) -> str:
        """Adds to the counter."""
        self.n += k
        return str(self.n)

    def get_reward(self) -> float:
        return float(self.n == 5)


class Halver(Counter):
    def halve(self) -> str:
        """Halves the counter."""
        self.n //= 2
        return str(self.n)


def main(words: list[str]) -> dict:
    """Trains on rows such as {"prompt": "Reach 5.", "answer": "5", "environment": "halver"}."""
    config = g.read_config("toy.yaml", "--reward.functions=environment", *words)
    return g.train_policy(config, environment={"counter": Counter, "halver": Halver})


if __name__ == "__main__":
    main(sys.argv[1:])
