"""Objectives of score-based methods, written out."""

import numpy as np


def _soft_maximum(scores: np.ndarray, tau: float) -> float:
    return scores.mean() if np.isinf(tau) else tau * np.log(np.mean(np.exp(scores / tau)))


def _disco(scores, rewards, lengths, tau=10.0):
    """mean_pos s - tau log mean_neg exp(s / tau) (arXiv:2505.12366)."""
    return scores[rewards > 0].mean() - _soft_maximum(scores[rewards <= 0], tau)


def _drpo(scores, rewards, lengths, tau=10.0, max_length=8192, length_temperature=0.1):
    """sum_pos w s - tau log mean_neg exp(s / tau), w = softmax of 1 - n / L over the successes (arXiv:2510.04474)."""
    shares = np.exp((1 - lengths[rewards > 0] / max_length) / length_temperature)
    return shares @ scores[rewards > 0] / shares.sum() - _soft_maximum(scores[rewards <= 0], tau)


def _rebel(scores, rewards, lengths, eta=1.0):
    """Minus the mean over all pairs of ((s_i - s_j) - eta (R_i - R_j))^2 (arXiv:2404.16767)."""
    first, second = np.triu_indices(len(scores), 1)
    gaps = (scores[first] - scores[second]) - eta * (rewards[first] - rewards[second])
    return -np.mean(gaps**2)


def _reg(scores, rewards, lengths, floor=1.0):
    """Minus mean (A - z)^2 with z = (s - mean) / (max(std, floor) + 1e-6) (arXiv:2506.07464)."""
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    predicted = (scores - scores.mean()) / (max(scores.std(ddof=1), floor) + 1e-6)
    return -np.mean((advantages - predicted) ** 2)


OBJECTIVES = {"disco": _disco, "drpo": _drpo, "rebel": _rebel, "reg": _reg}
"""J(scores, rewards, lengths, **settings) of a group, to be maximized, by the kind of `advantage`."""
