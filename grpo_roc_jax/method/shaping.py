"""Rewards -> rewards. Small functions of one group's arrays [G], and the chain that the config names.

Selection has happened on raw rewards; what is shaped here decides only how much a kept trajectory is worth.
"""

from collections.abc import Callable, Sequence

import numpy as np

from grpo_roc_jax.method.config import ShapingConfig
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.plugin import load_part
from grpo_roc_jax.method.state import AlgoState


def soft_overlong(lengths: np.ndarray, limit: int, buffer: int) -> np.ndarray:
    """0 up to limit - buffer, falling to -1 at the limit and beyond (DAPO, arXiv:2503.14476, eq. 13)."""
    return np.clip((limit - buffer - np.asarray(lengths, np.float64)) / buffer, -1.0, 0.0)


def weighted_sum(channels: np.ndarray, weights: Sequence[float] | np.ndarray) -> np.ndarray:
    """sum_k w_k h_k, [G,K] -> [G] (arXiv:2503.21819)."""
    return np.asarray(channels, np.float64) @ np.asarray(weights, np.float64)


def tool_error_penalised(
    rewards: np.ndarray, tool_calls: np.ndarray, tool_errors: np.ndarray, coef: float
) -> np.ndarray:
    """R - coef errors / calls: the penalty in the reward that resampling on correct does without."""
    return rewards - coef * tool_errors / np.maximum(tool_calls, 1)


def unlikeliness(rewards: np.ndarray, mean_logprobs: np.ndarray, beta: float = 0.25) -> np.ndarray:
    """R (1 - beta rank / G), rank 0 for the least likely trajectory (arXiv:2506.02355)."""
    rank = np.argsort(np.argsort(mean_logprobs, kind="stable"), kind="stable")
    return rewards * (1 - beta * rank / len(rewards))


def dynamic_length(
    correct: Sequence[np.ndarray], lengths: Sequence[np.ndarray], fraction: float = 0.2, alpha: float = 0.6
) -> list[np.ndarray]:
    """1 - alpha sigmoid((n - mean) / std) for successes of the best-solved `fraction` of the groups, 1 for the others'.

    Mean and deviation are over the group's successes; failures have 0. Source: GRPO-lambda, arXiv:2505.18086.
    """
    accuracy = np.array([np.mean(c) for c in correct])
    chosen = set(np.argsort(-accuracy, kind="stable")[: int(np.ceil(fraction * len(correct)))])
    shaped = []
    for g, (won, n) in enumerate(zip(correct, lengths, strict=True)):
        won = won.astype(bool)
        value = won.astype(np.float64)
        if g in chosen and won.any():
            spread = max(float(np.std(n[won])), 1e-6)
            # tanh keeps the exponential from overflowing: sigmoid(x) = (1 + tanh(x / 2)) / 2.
            gate = 0.5 * (1 + np.tanh(0.5 * (n - n[won].mean()) / spread))
            value = value * (1 - alpha * gate)
        shaped.append(value)
    return shaped


def serial_exits(correct: np.ndarray) -> np.ndarray:
    """2^-(c_i - 1) for the c-th correct exit in order, 0 for wrong ones (S-GRPO, arXiv:2505.07686)."""
    won = np.asarray(correct, bool)
    return np.where(won, 2.0 ** (1.0 - np.cumsum(won)), 0.0)


def soft_map(rewards: np.ndarray, tau: float = 0.8, above: float = 0.01, below: float = 1.0) -> np.ndarray:
    """tau + a1 ln(r - tau + 1) above tau, tau - (e^(a2 (tau - r)) - 1) / (e^a2 - 1) below (arXiv:2509.18056)."""
    rewards = np.asarray(rewards, np.float64)
    high = tau + above * np.log(np.maximum(rewards - tau, 0.0) + 1)
    low = tau - np.expm1(below * np.maximum(tau - rewards, 0.0)) / np.expm1(below)
    return np.where(rewards >= tau, high, low)


def outcome(correct: np.ndarray, negative: float = 1.0) -> np.ndarray:
    """+1 for success, -negative for failure (arXiv:2602.03452)."""
    return np.where(correct, 1.0, -negative)


def token_budget(step: int, start: float, decay: float, every: int) -> float:
    """max(1, start decay^floor(step / every)) tokens (Train Long, Think Short, arXiv:2508.08940)."""
    return max(1.0, start * decay ** (step // every))


def triangle(lengths: np.ndarray, budget: float) -> np.ndarray:
    """n / B up to the budget, 2 - n / B up to twice it, 0 beyond (arXiv:2508.08940)."""
    return np.maximum(1 - np.abs(np.asarray(lengths, np.float64) / budget - 1), 0.0)


def surrogate_length(share: np.ndarray, peak: float = 0.5) -> np.ndarray:
    """1 - (1 - x/p)^2 up to the peak p, 1 - 2 ((x - p) / (1 - p))^2 above, x = n / L (arXiv:2505.19439)."""
    share = np.asarray(share, np.float64)
    return np.where(share <= peak, 1 - (1 - share / peak) ** 2, 1 - 2 * ((share - peak) / (1 - peak)) ** 2)


def surrogate_signal(format_reward: np.ndarray, answered: np.ndarray, share: np.ndarray) -> np.ndarray:
    """format + length where an answer parses, else min(0, length): no reference needed (arXiv:2505.19439)."""
    length = surrogate_length(share)
    return np.where(answered, format_reward + length, np.minimum(length, 0.0))


def posterior(format_reward: np.ndarray, outcome_reward: np.ndarray, process: np.ndarray) -> np.ndarray:
    """format + outcome + outcome process: the process counts for successes only (P-GRPO, arXiv:2508.05170)."""
    return format_reward + outcome_reward + outcome_reward * process


def quality_blend(outcomes: np.ndarray, quality: np.ndarray, weight: float = 0.3, relative: bool = True) -> np.ndarray:
    """(1 - w) o + w q / max q for successes, o for failures (C-GRPO, arXiv:2601.06021); `relative` divides by max q."""
    won = np.asarray(outcomes) > 0
    top = float(np.max(quality, initial=0.0)) if relative else 1.0
    scaled = quality / top if top > 0 else np.zeros(len(quality))
    return np.where(won, (1 - weight) * outcomes + weight * scaled, outcomes)


def win_rate(wins: np.ndarray) -> np.ndarray:
    """Mean over the other trajectories of wins[i, j] in {0, 0.5, 1}, [G,G] -> [G] (Pref-GRPO, arXiv:2508.20751)."""
    wins = np.asarray(wins, np.float64)
    return (wins.sum(axis=1) - np.diag(wins)) / max(len(wins) - 1, 1)


def tidier(found: Features) -> np.ndarray:
    """[G,G]: a correct trajectory wins against a wrong one, among alike the one with fewer failed calls; else a tie."""
    rank = 2.0 * found.correct * (1 + found.tool_errors.max(initial=0)) - found.tool_errors
    return 0.5 * (1 + np.sign(rank[:, None] - rank[None, :]))


def staged(passes: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """sum_s w_s prod_{u <= s} pass_u, [G,S] -> [G]: a stage pays only when those before it did (arXiv:2512.07478)."""
    return np.cumprod(np.asarray(passes, np.float64), axis=-1) @ np.asarray(weights, np.float64)


def shape_rewards(
    groups: Sequence[Features],
    config: ShapingConfig,
    state: AlgoState,
    custom: Callable[[np.ndarray, Features, AlgoState], np.ndarray] | None = None,
) -> list[np.ndarray]:
    """float64[G] of each group after the steps of the config, in order, and the custom map.

    Raises:
        ValueError: A step reads a channel that no reward function provides, or the custom map broke its contract.
    """
    rewards = [found.rewards.astype(np.float64) for found in groups]
    for step in config.steps:
        if step == "dynamic_length":
            rewards = dynamic_length(
                [found.correct for found in groups],
                [found.lengths for found in groups],
                config.dynamic_fraction,
                config.dynamic_alpha,
            )
        else:
            rewards = [_shape(step, r, found, config, state) for r, found in zip(rewards, groups, strict=True)]
    if custom is not None:
        rewards = [checked_map("shaping.custom", custom(r, f, state), r) for r, f in zip(rewards, groups, strict=True)]
    return rewards


def checked_map(name: str, values: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The values of a custom map as float64, of the shape of its input and finite, or a ValueError naming it."""
    values = np.asarray(values, np.float64)
    if values.shape != like.shape or not np.isfinite(values).all():
        raise ValueError(
            f"{name} returned shape {values.shape} with {int((~np.isfinite(values)).sum())} non-finite values; "
            f"{like.shape} finite numbers are wanted, one a trajectory"
        )
    return values


def judged(wins: np.ndarray, size: int) -> np.ndarray:
    """The judge's matrix, or a ValueError: each pair shares one point."""
    wins = np.asarray(wins, np.float64)
    if wins.shape != (size, size) or not np.allclose((wins + wins.T)[~np.eye(size, dtype=bool)], 1):
        raise ValueError(
            f"shaping.judge returned shape {wins.shape}; [{size},{size}] is wanted, with 1 for a win, 0 for the loss "
            "across the diagonal, 0.5 twice for a tie"
        )
    return wins


def channel(found: Features, name: str, reader: str) -> np.ndarray:
    """The named reward channel of a group, NaN as 0.

    Raises:
        ValueError: No reward function provides it; the message lists those that exist.
    """
    if name not in found.channels:
        raise ValueError(
            f"{reader} reads reward channel {name!r}, but the channels are {sorted(found.channels) or 'none'}; add a "
            "function of that name to reward.functions (channels exist from two functions on)"
        )
    return np.nan_to_num(found.channels[name])


def _shape(step: str, rewards: np.ndarray, found: Features, config: ShapingConfig, state: AlgoState) -> np.ndarray:
    if step == "overlong":
        return rewards + soft_overlong(found.response_lengths, config.overlong_limit, config.overlong_buffer)
    if step == "tool_errors":
        return tool_error_penalised(rewards, found.tool_calls, found.tool_errors, config.tool_error_coef)
    if step == "unlikeliness":
        return unlikeliness(rewards, found.mean_logprobs, config.unlikeliness_beta)
    if step == "serial":
        return serial_exits(found.correct)
    if step == "soft":
        return soft_map(rewards, config.soft_tau, config.soft_above, config.soft_below)
    if step == "outcome":
        return outcome(found.correct, config.outcome_negative)
    if step == "budget":
        budget = token_budget(state.step, config.budget_start, config.budget_decay, config.budget_every)
        correctness, closeness, tidy = config.budget_weights
        one_answer = found.well_formed & (found.answers == 1)
        return correctness * found.correct + closeness * triangle(found.lengths, budget) + tidy * one_answer
    if step == "surrogate":
        paid = channel(found, config.format_channel, "shaping.steps surrogate")
        return surrogate_signal(paid, found.answers > 0, found.lengths / config.surrogate_length)
    if step == "posterior":
        return posterior(
            channel(found, config.format_channel, "shaping.steps posterior"),
            found.correct.astype(np.float64),
            channel(found, config.quality_channel, "shaping.steps posterior"),
        )
    if step == "quality":
        return quality_blend(
            rewards, channel(found, config.quality_channel, "shaping.steps quality"), config.quality_weight
        )
    if step == "win_rate":
        judge = load_part("shaping.judge", config.judge) or tidier
        return win_rate(judged(judge(found), found.size))
    passes = [found.tool_errors == 0, found.well_formed & (found.answers == 1), found.correct]
    return staged(np.stack(passes, axis=1), config.staged_weights)
