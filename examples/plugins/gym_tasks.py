"""Tasks of reasoning-gym as data and as reward; needs the package `reasoning-gym`.

python examples/plugins/gym_tasks.py              # writes gym_tasks.jsonl and trains
"""

import json
import sys
from pathlib import Path

import reasoning_gym

import grpo_roc_jax as g

TASKS = reasoning_gym.create_dataset("chain_sum", size=500, seed=0, max_terms=3, max_digits=1)


def write(file: str) -> None:
    """A row for each task; the column `entry` is what the package scores by."""
    rows = [{"prompt": task["question"], "answer": task["answer"], "entry": task} for task in TASKS]
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def score(problem: g.Problem, trajectories: list[g.Trajectory]) -> list[float]:
    """The package's own score of each answer, 0 to 1."""
    return [TASKS.score_answer(g.final_answer(trajectory), problem.extra["entry"]) for trajectory in trajectories]


def main(words: list[str], file: str = "gym_tasks.jsonl") -> dict:
    """Trains on them."""
    write(file)
    settings = ["--data.sources", file, "--data.eval_problems", "0", "--reward.functions", f"{__file__}:score"]
    return g.train_policy(g.read_config("toy.yaml", *settings, "--run_dir", "runs/gym", *words))


if __name__ == "__main__":
    main(sys.argv[1:])
