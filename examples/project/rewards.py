"""A reward function: numbers for the trajectories of one problem. It is added to the reward for a right answer."""


def asked(problem, trajectories):
    """0.1 for a trajectory that calls the tool. Where all answers are wrong, this is what still tells them apart."""
    return [0.1 * any(turn.calls for turn in trajectory.turns) for trajectory in trajectories]
