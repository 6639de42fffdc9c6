"""Coefficients of objectives that depend on current scores.

DisCO, DRPO, REBEL and Reg-GRPO maximise J(s) of a group's scores s. Their gradient is that of sum_i c_i s_i with
c = dJ/ds held fixed, so a scoring pass right before the update turns them into advantages of a loss that is linear in
the score, and the loss keeps its one form. `tests/method/test_score_based.py` holds every c to finite differences.
"""

import numpy as np

from grpo_roc_jax.method.advantage import deviation, flat, z_score
from grpo_roc_jax.method.config import AdvantageConfig


def disco_objective(scores: np.ndarray, correct: np.ndarray, tau: float) -> float:
    """mean_pos s - tau log mean_neg exp(s / tau); tau = inf is DisCO-b, the difference of means (arXiv:2505.12366)."""
    return float(scores[correct].mean()) - soft_maximum(scores[~correct], tau)


def disco_coefficients(scores: np.ndarray, correct: np.ndarray, tau: float) -> np.ndarray:
    """1 / #pos for successes, -softmax_neg(s / tau) for failures; zeros for a group of one kind."""
    return _contrast(scores, correct, np.full(int(correct.sum()), 1 / max(int(correct.sum()), 1)), tau)


def drpo_weights(lengths: np.ndarray, max_length: int, temperature: float = 0.1) -> np.ndarray:
    """softmax(u / temperature) over the successes, u = 1 - n / max_length: short ones count more (arXiv:2510.04474)."""
    logits = (1 - np.asarray(lengths, np.float64) / max_length) / temperature
    shares = np.exp(logits - logits.max(initial=-np.inf))
    return shares / shares.sum() if len(shares) else shares


def drpo_objective(
    scores: np.ndarray, correct: np.ndarray, lengths: np.ndarray, max_length: int, temperature: float, tau: float
) -> float:
    """sum_pos w s - tau log mean_neg exp(s / tau), w from `drpo_weights`."""
    weights = drpo_weights(lengths[correct], max_length, temperature)
    return float(weights @ scores[correct]) - soft_maximum(scores[~correct], tau)


def drpo_coefficients(
    scores: np.ndarray, correct: np.ndarray, lengths: np.ndarray, max_length: int, temperature: float, tau: float
) -> np.ndarray:
    """`drpo_weights` for successes, -softmax_neg(s / tau) for failures; zeros for a group of one kind."""
    return _contrast(scores, correct, drpo_weights(lengths[correct], max_length, temperature), tau)


def rebel_loss(scores: np.ndarray, rewards: np.ndarray, eta: float = 1.0) -> float:
    """Mean over all pairs of ((s_i - s_j) - eta (R_i - R_j))^2, s the summed log-ratio (arXiv:2404.16767)."""
    first, second = np.triu_indices(len(scores), 1)
    gaps = (scores[first] - scores[second]) - eta * (rewards[first] - rewards[second])
    return float(np.mean(gaps**2)) if len(gaps) else 0.0


def rebel_coefficients(scores: np.ndarray, rewards: np.ndarray, eta: float = 1.0) -> np.ndarray:
    """-d loss / ds = -2 sum_j (x_i - x_j) / #pairs with x = s - eta R."""
    n = len(scores)
    if n < 2:
        return np.zeros(n)
    x = scores - eta * rewards
    return -2 * (n * x - x.sum()) / (n * (n - 1) / 2)


REG_FLOOR = 1e-2
"""Least deviation of the log-ratios that Reg-GRPO divides by: right after sampling they are all 0 and a z-score of
them means nothing."""


def reg_targets(scores: np.ndarray, floor: float = REG_FLOOR, eps: float = 1e-6) -> np.ndarray:
    """The predicted advantage (s - mean) / (max(std, floor) + eps) (Reg-GRPO, arXiv:2506.07464)."""
    return (scores - scores.mean()) / (max(deviation(scores), floor) + eps)


def reg_loss(scores: np.ndarray, advantages: np.ndarray, floor: float = REG_FLOOR, eps: float = 1e-6) -> float:
    """mean (A - predicted)^2."""
    return float(np.mean((advantages - reg_targets(scores, floor, eps)) ** 2))


def reg_coefficients(
    scores: np.ndarray, advantages: np.ndarray, floor: float = REG_FLOOR, eps: float = 1e-6
) -> np.ndarray:
    """-d loss / ds. With z predicted and u = (2/G)(A - z): (u - mean u - z sum(u z) / (G - 1)) / std, the last term of
    the bracket only where the deviation is above its floor."""
    n, spread = len(scores), deviation(scores)
    scale = max(spread, floor) + eps
    z = (scores - scores.mean()) / scale
    u = 2 / n * (advantages - z)
    bracket = u - u.mean()
    if spread > floor:
        # d std / ds_i = (s_i - mean) / ((G - 1) std), and s - mean = z scale.
        bracket = bracket - z * scale / spread * (u @ z) / (n - 1)
    return bracket / scale


def soft_maximum(scores: np.ndarray, tau: float) -> float:
    """tau log mean exp(s / tau); the mean for tau = inf."""
    if np.isinf(tau):
        return float(scores.mean())
    top = scores.max()
    return float(top + tau * np.log(np.mean(np.exp((scores - top) / tau))))


def _contrast(scores: np.ndarray, correct: np.ndarray, positive: np.ndarray, tau: float) -> np.ndarray:
    out = np.zeros(len(scores))
    if not correct.any() or correct.all():
        return out
    out[correct] = positive
    shares = np.exp((scores[~correct] - scores[~correct].max()) / tau)
    out[~correct] = -shares / shares.sum()
    return out


def divergence_push(divergence: float, delta: float = 1e-4, beta: float = 1e3) -> float:
    """max(0, beta (KL - delta)): the detached factor of DisCO's penalty factor * KL (arXiv:2505.12366)."""
    return max(0.0, beta * (divergence - delta))


def coefficients(
    scores: np.ndarray, rewards: np.ndarray, correct: np.ndarray, lengths: np.ndarray, config: AdvantageConfig
) -> np.ndarray:
    """float64[G]: the coefficients of one group under the configured objective.

    Args:
        scores: Mean log-probability (disco, drpo) or summed log-ratio (rebel, reg) of each trajectory, now.
        rewards: After shaping.
        correct: Sign of the raw reward.
        lengths: Policy tokens.
        config: `score` and its settings.
    """
    if config.score == "disco":
        return disco_coefficients(scores, correct, config.score_tau)
    if config.score == "drpo":
        return drpo_coefficients(scores, correct, lengths, config.max_length, config.score_lambda, config.score_tau)
    if config.score == "rebel":
        return rebel_coefficients(scores, rewards, config.score_eta)
    if flat(rewards):
        return np.zeros(len(rewards))
    return reg_coefficients(scores, z_score(rewards, config.ddof, config.eps))
