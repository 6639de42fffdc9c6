"""A reward function: numbers for the trajectories of one problem. It is added to the reward for a right answer."""


def short(problem, trajectories):
    """A little for every token that was not needed."""
    return [0.1 / max(trajectory.length, 1) for trajectory in trajectories]
