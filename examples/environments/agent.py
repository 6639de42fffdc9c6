"""An agent that stays as it is: a program with the `openai` client, which learns from being run.

python examples/environments/agent.py              # trains; the program below is started for each rollout
grpo-roc serve runs/agent            # afterwards: the policy for any client
"""

import json
import os
import sys


def agent() -> None:
    """Asks until the answer is right, three times at most, and writes its reward to the descriptor for it."""
    import openai

    problem, client = json.load(sys.stdin), openai.OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY name the policy
    messages = [{"role": "user", "content": problem["prompt"]}]
    reward = 0.0
    for turn in range(3):
        message = client.chat.completions.create(model="policy", messages=messages, max_tokens=24).choices[0].message
        if problem["answer"] in (message.content or ""):
            reward = 1.0 - 0.25 * turn
            break
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "no"}]
    if "GRPO_REWARD_FD" in os.environ:
        os.write(int(os.environ["GRPO_REWARD_FD"]), str(reward).encode())


def main(words: list[str]) -> dict:
    """Trains it."""
    import grpo_roc_jax as g

    command = f"{{kind: agent, command: {sys.executable} {__file__} agent}}"
    settings = ["--environment", command, "--reward.functions", "environment", "--reward.truncated", "score"]
    return g.train_policy(g.read_config("toy.yaml", *settings, "--run_dir", "runs/agent", *words))


if __name__ == "__main__":
    agent() if sys.argv[1:] == ["agent"] else main(sys.argv[1:])
