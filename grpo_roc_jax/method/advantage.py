"""Rewards of groups -> advantages = post . scale . baseline.

Functions of one group take `rewards` float64[G] and return [G]; those of a batch take a list of groups. A group whose
rewards are equal gets exactly 0 from every centred estimator.
"""

from collections.abc import Sequence
from math import comb, exp, lgamma, log

import numpy as np

from grpo_roc_jax.method.resample import EQUAL_TOLERANCE


def flat(rewards: np.ndarray) -> bool:
    """Whether all rewards are equal, up to float noise."""
    return len(rewards) == 0 or float(rewards.max() - rewards.min()) <= EQUAL_TOLERANCE


def deviation(values: np.ndarray, ddof: int = 1) -> float:
    """Standard deviation with n - ddof; 0 when that leaves nothing to divide by."""
    return float(np.std(values, ddof=ddof)) if len(values) > ddof else 0.0


def z_score(rewards: np.ndarray, ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """(R - mean) / (std + eps); zeros for a flat group. Source: arXiv:2402.03300, sec. 4.1.2."""
    if flat(rewards):
        return np.zeros(len(rewards))
    return (rewards - rewards.mean()) / (deviation(rewards, ddof) + eps)


# Baselines: what is subtracted, [G].


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """Mean of the other trajectories; of itself in a group of one, so that the advantage is 0 (arXiv:2402.14740)."""
    n = len(rewards)
    return (rewards.sum() - rewards) / (n - 1) if n > 1 else rewards.copy()


def length_weighted_mean(rewards: np.ndarray, lengths: np.ndarray) -> float:
    """sum n R / sum n: the baseline of least variance when gradient norms grow with length (OPO, arXiv:2505.23585)."""
    return float(lengths @ rewards / max(lengths.sum(), 1))


def with_virtual(rewards: np.ndarray, virtual: float) -> np.ndarray:
    """The rewards with one virtual best, for the statistics of NGRPO (arXiv:2509.18851)."""
    return np.append(rewards, virtual)


# Scales: what it is divided by.


def mad_scale(rewards: np.ndarray, floor: float = 0.05, eps: float = 1e-3) -> float:
    """Median absolute deviation + 1e-3; the standard deviation where the former is below `floor`; else 1.

    With 0/1 rewards and an odd group the MAD is always 0, and dividing by 1e-3 alone would blow the step up.
    Source: MC-GRPO, arXiv:2601.22582; the guard is ours.
    """
    mad = float(np.median(np.abs(rewards - np.median(rewards))))
    if mad > floor:
        return mad + eps
    return deviation(rewards) or 1.0


def beta_weights(means: np.ndarray) -> np.ndarray:
    """float64[P]: 1 / density of a problem's mean reward under a Beta fitted to the batch (BNPO, arXiv:2506.02864).

    With m, v the mean and sample variance of the means: a = (m (1 - m) / v - 1) m, b likewise with 1 - m; the density
    is Beta(max(1, 1 + a/3), max(1, 1 + b/3)), its inverse at most 1e6. One problem or no spread gives 1.
    """
    if len(means) < 2 or np.ptp(means) <= EQUAL_TOLERANCE:
        return np.ones(len(means))
    m, v = means.mean(), means.var(ddof=1)
    common = m * (1 - m) / v - 1
    alpha, beta = max(1.0, 1 + common * m / 3), max(1.0, 1 + common * (1 - m) / 3)
    return np.array([min(1.0 / max(_beta_density(p, alpha, beta), 1e-12), 1e6) for p in means])


def _beta_density(p: float, alpha: float, beta: float) -> float:
    if not 0 < p < 1:
        return 0.0 if (p <= 0 and alpha > 1) or (p >= 1 and beta > 1) else 1.0
    log_norm = lgamma(alpha + beta) - lgamma(alpha) - lgamma(beta)
    return exp(log_norm + (alpha - 1) * log(p) + (beta - 1) * log(1 - p))


def pass_at_k_advantages(rewards: np.ndarray, k: int, eps: float = 1e-6) -> np.ndarray:
    """Advantages of pass@k for 0/1 rewards: each trajectory is worth the mean over the k-subsets that hold it.

    With n trajectories, c failures: p = 1 - C(c, k) / C(n, k) is the mean, s = sqrt(p (1 - p)) the deviation; a success
    gets (1 - p) / s, a failure (1 - p - C(c - 1, k - 1) / C(n - 1, k - 1)) / s. Source: arXiv:2508.10751.
    """
    n, c = len(rewards), int((rewards <= 0).sum())
    if flat(rewards) or n < k:
        return np.zeros(n)
    mean = 1 - comb(c, k) / comb(n, k)
    scale = (mean * (1 - mean)) ** 0.5 + eps
    failure = 1 - mean - (comb(c - 1, k - 1) / comb(n - 1, k - 1) if c else 0.0)
    return np.where(rewards > 0, (1 - mean) / scale, failure / scale)


# Posts of a group.


def stratified(rewards: np.ndarray, strata: np.ndarray, ddof: int = 1, eps: float = 1e-6) -> np.ndarray:
    """z-scores within strata; 0 in a stratum of one (Stratified GRPO, arXiv:2510.06214)."""
    out = np.zeros(len(rewards))
    for stratum in np.unique(strata):
        members = strata == stratum
        out[members] = z_score(rewards[members], ddof, eps)
    return out


def rescale_nonzero(advantages: np.ndarray) -> np.ndarray:
    """Times G over the number of non-zero entries, so that a zeroed pivot does not shrink the step."""
    nonzero = np.count_nonzero(advantages)
    return advantages * (len(advantages) / nonzero) if nonzero else advantages


def novelty_sharpened(
    advantages: np.ndarray, correct: np.ndarray, mean_logprobs: np.ndarray, strength: float = 1.0, cap: float = 1.0
) -> np.ndarray:
    """A + min(max(strength (1 - eta), 0), cap A) for successes, eta = exp(s - mean s), s the mean log-probability.

    Unlikely successes are paid more; failures keep their advantage. Source: XRPO, arXiv:2510.06672.
    """
    eta = np.exp(mean_logprobs - mean_logprobs.mean())
    bonus = np.minimum(np.maximum(strength * (1 - eta), 0.0), cap * np.maximum(advantages, 0.0))
    return np.where(correct, advantages + bonus, advantages)


def anchor_value(on_policy: np.ndarray, factor: float) -> float:
    """Advantage of an injected off-policy trajectory: `factor` times the best on-policy one, at least 0.

    The on-policy ones are standardised without it. Source: TempSamp-R1, arXiv:2509.18056, there with 1.2.
    """
    return factor * max(float(np.max(on_policy, initial=0.0)), 0.0)


def truncation_masked(
    advantages: np.ndarray,
    truncated: np.ndarray,
    correct: np.ndarray,
    repeating: np.ndarray,
    draws: np.ndarray,
    probability: float = 0.3,
) -> np.ndarray:
    """Advantage 0 where a correct, truncated, non-repeating trajectory draws below `probability`.

    Source: MicroCoder-GRPO, arXiv:2603.07777.
    """
    masked = truncated & correct & ~repeating & (draws < probability)
    return np.where(masked, 0.0, advantages)


def repeats(tokens: np.ndarray, window: int = 128) -> bool:
    """Whether the last `window` tokens equal the `window` before them."""
    tail = tokens[-2 * window :]
    return len(tail) == 2 * window and bool(np.array_equal(tail[:window], tail[window:]))


def sign_weighted(advantages: np.ndarray, positive: float, negative: float) -> np.ndarray:
    """Factors by sign, after scaling; before a group z-score they would cancel (arXiv:2602.03452)."""
    return np.where(advantages > 0, positive, negative) * advantages


# Over the batch.


def whitened(
    advantages: Sequence[np.ndarray], counts: Sequence[np.ndarray] | None = None, ddof: int = 1, eps: float = 1e-8
) -> list[np.ndarray]:
    """(A - mean) / sqrt(var + eps) over the batch; `counts` (tokens of each trajectory) weights it by tokens.

    Source: REINFORCE++, arXiv:2501.03262 (tokens); SPO, arXiv:2509.13232 (rows).
    """
    values = np.concatenate([np.asarray(a, np.float64) for a in advantages]) if advantages else np.zeros(0)
    weights = np.ones(len(values)) if counts is None else np.concatenate(list(counts)).astype(np.float64)
    total = weights.sum()
    if total <= ddof or np.ptp(values) <= EQUAL_TOLERANCE:
        return [np.zeros(len(a)) for a in advantages]
    mean = weights @ values / total
    variance = weights @ (values - mean) ** 2 / (total - ddof)
    return [(a - mean) / np.sqrt(variance + eps) for a in advantages]


def standardised(advantages: Sequence[np.ndarray], ddof: int = 1, eps: float = 1e-6) -> list[np.ndarray]:
    """(A - mean) / (std + eps) over the trajectories of the batch (GDPO, arXiv:2601.05242)."""
    values = np.concatenate(list(advantages)) if advantages else np.zeros(0)
    if flat(values):
        return [np.zeros(len(a)) for a in advantages]
    return [(a - values.mean()) / (deviation(values, ddof) + eps) for a in advantages]


# Token level.


def tree_differences(rewards: np.ndarray, tokens: Sequence[np.ndarray]) -> list[np.ndarray]:
    """V(prefix with token t) - V(prefix before t) for each response token, V the mean reward over the group's
    responses that start with the prefix.

    Differs from 0 only where responses part. A response that ends inside another's is a branch of its own.
    Source: TEMPO, arXiv:2509.18314. Cost O(T) for each pair of a branch and a row in it, by splitting the set of rows
    where they part.
    """
    out = [np.zeros(len(row)) for row in tokens]
    stack = [(np.arange(len(rewards)), 0)]
    while stack:
        rows, depth = stack.pop()
        depth = _parting(tokens, rows, depth)
        parent = rewards[rows].mean()
        heads: dict[int, list[int]] = {}
        for row in rows:
            if depth < len(tokens[row]):
                heads.setdefault(int(tokens[row][depth]), []).append(int(row))
        for members in heads.values():
            value = rewards[members].mean()
            for row in members:
                out[row][depth] = value - parent
            # A branch of one has the same value to its end.
            if len(members) > 1:
                stack.append((np.array(members), depth + 1))
    return out


def _parting(tokens: Sequence[np.ndarray], rows: np.ndarray, depth: int) -> int:
    """First position from `depth` on at which these rows are no longer all alike, or one of them ends."""
    first = tokens[rows[0]]
    end = len(first)
    for row in rows[1:]:
        end = min(end, len(tokens[row]))
        differ = first[depth:end] != tokens[row][depth:end]
        end = depth + int(differ.argmax()) if differ.any() else end
    return end
