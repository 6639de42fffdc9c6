"""ARISE's skill library: which skill to show, and how its worth moves (arXiv:2603.16060); and rubric rewards."""

import numpy as np


def choose_skill(
    logprobs: np.ndarray, sigma: float, rng: np.random.Generator, *, least: float = 0.35, explore: float = 0.1
) -> int:
    """Index of the skill to show, -1 for none: the likeliest under softmax(log-probability / sigma), if likely enough.

    Args:
        logprobs: Length-normalised log p(skill | question) of each skill.
        sigma: Temperature.
        rng: For the share `explore` of random choices.
        least: Probability under which no skill is shown.
        explore: Share of choices at random.
    """
    if rng.random() < explore:
        return int(rng.integers(len(logprobs)))
    shares = np.exp((logprobs - logprobs.max()) / sigma)
    shares /= shares.sum()
    return int(shares.argmax()) if shares.max() >= least else -1


def utility_step(utility: float, reward: float, decay: float = 0.9) -> float:
    """decay * utility + (1 - decay) * reward."""
    return decay * utility + (1 - decay) * reward


def rubric_reward(weights: np.ndarray, passed: np.ndarray) -> float:
    """sum w c / sum w over the items of a rubric (RGR-GRPO, arXiv:2511.12344)."""
    return float(np.dot(weights, passed) / np.sum(weights))
