"""A reward function: numbers for the trajectories of one problem. It is added to the reward for a right answer.

What a function can read:

    problem.prompt, problem.answer   the question and the reference answer
    problem.extra["level"]           any further column of the row in data/problems.jsonl
    trajectory.turns[-1].text        what the policy wrote in its last turn, as sampled
    g.final_answer(trajectory)       the answer that it gives, or None (`import grpo_roc_jax as g`)
    turn.calls, turn.results         its calls (name, arguments) and what came back (kind, stdout, observation)
    trajectory.policy_mask.sum()     tokens that the policy sampled

`grpo-roc check-reward rewards.py:asked data/problems.jsonl` tries it on made-up trajectories of your problems, and
`--trajectories runs/first` on those that a run recorded.
"""


def asked(problem, trajectories):
    """0.1 for a trajectory that calls the tool. Where all answers are wrong, this is what still tells them apart."""
    return [0.1 * any(turn.calls for turn in trajectory.turns) for trajectory in trajectories]
