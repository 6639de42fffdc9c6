"""The composition post . scale . baseline over a batch of groups, as `AdvantageConfig` names it.

The formulas live in `advantage.py`; here is only their order: baseline and scale (by channel or on the sum), strata,
novelty, constraints, factors, masks, and last what spans the batch.
"""

from collections.abc import Callable, Sequence

import numpy as np

from grpo_roc_jax.method import advantage as adv
from grpo_roc_jax.method.config import AdvantageConfig
from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.shaping import channel, checked_map
from grpo_roc_jax.method.state import AlgoState

DEMONSTRATION = "demonstration"
"""Condition of a trajectory that was not sampled from the policy; `advantage.anchor` prices it."""

Custom = Callable[[np.ndarray, Features, AlgoState], np.ndarray]


def batch_advantages(
    groups: Sequence[Features],
    rewards: Sequence[np.ndarray],
    config: AdvantageConfig,
    state: AlgoState,
    *,
    rng: np.random.Generator | None = None,
    repeating: Sequence[np.ndarray] | None = None,
    custom: Custom | None = None,
) -> list[np.ndarray]:
    """float64[G] for each group: one advantage a trajectory.

    Args:
        groups: The kept trajectories of the optimiser batch.
        rewards: After shaping.
        config: The composition.
        state: Trackers and duals.
        rng: Wanted by `truncation_mask` only.
        repeating: bool[G] for each group, whether a trajectory ends in a loop; wanted by `truncation_mask` only.
        custom: (rewards, features, state) -> advantages of one group, instead of baseline and scale.
    """
    if custom is not None:
        out = [checked_map("advantage.custom", custom(r, f, state), r) for r, f in zip(rewards, groups, strict=True)]
    elif config.channels == "sum":
        out = _anchored_estimate(groups, rewards, config, state)
    else:
        out = _by_channel(groups, config, state)
    out = [_posts_of_group(a, f, r, config, state) for a, f, r in zip(out, groups, rewards, strict=True)]
    if config.truncation_mask:
        out = _truncation_masked(out, groups, config, rng, repeating)
    if config.channels == "each_batch":
        out = adv.standardised(out, config.ddof, config.eps)
    if config.whiten != "none":
        counts = [found.lengths for found in groups] if config.whiten == "token" else None
        out = adv.whitened(out, counts, config.ddof)
    return out


def _anchored_estimate(
    groups: Sequence[Features], rewards: Sequence[np.ndarray], config: AdvantageConfig, state: AlgoState
) -> list[np.ndarray]:
    """Baseline and scale, with demonstrations kept out of the statistics when `anchor` prices them."""
    if not config.anchor:
        return estimate(groups, rewards, config, state)
    own = [np.array([condition != DEMONSTRATION for condition in found.conditions], bool) for found in groups]
    on_policy = estimate(
        [found.take(np.flatnonzero(mask)) for found, mask in zip(groups, own, strict=True)],
        [r[mask] for r, mask in zip(rewards, own, strict=True)],
        config,
        state,
    )
    out = []
    for values, mask in zip(on_policy, own, strict=True):
        full = np.full(len(mask), adv.anchor_value(values, config.anchor))
        full[mask] = values
        out.append(full)
    return out


def estimate(
    groups: Sequence[Features], rewards: Sequence[np.ndarray], config: AdvantageConfig, state: AlgoState
) -> list[np.ndarray]:
    """scale . baseline of every group."""
    if config.scale == "pass_at_k":
        return [adv.pass_at_k_advantages(r, config.pass_k, config.eps) for r in rewards]
    priors = _priors(groups, state) if config.baseline == "tracker" else [0.0] * len(groups)
    centred = [r - _baseline(r, found, prior, config) for r, found, prior in zip(rewards, groups, priors, strict=True)]
    if config.scale == "beta":
        weights = adv.beta_weights(np.array([r.mean() if len(r) else 0.0 for r in rewards]))
        return [w * c for w, c in zip(weights, centred, strict=True)]
    if config.scale == "batch_std":
        pooled = np.concatenate(list(rewards)) if rewards else np.zeros(0)
        return [c / (adv.deviation(pooled, config.ddof) + config.eps) for c in centred]
    return [c / _scale(r, config) for r, c in zip(rewards, centred, strict=True)]


def _priors(groups: Sequence[Features], state: AlgoState) -> list[float]:
    rows = state.table.get([found.uid for found in groups])
    return list(rows["alpha"] / (rows["alpha"] + rows["beta"]))


def _baseline(rewards: np.ndarray, found: Features, prior: float, config: AdvantageConfig) -> np.ndarray | float:
    if not len(rewards) or config.baseline == "none":
        return 0.0
    if config.baseline == "tracker":
        return prior
    if config.baseline == "virtual_max":
        return float(adv.with_virtual(rewards, config.virtual_reward).mean())
    if adv.flat(rewards):
        return rewards  # exactly 0, whatever the last bits of a mean
    if config.baseline == "leave_one_out":
        return adv.leave_one_out(rewards)
    if config.baseline == "median":
        return float(np.median(rewards))
    if config.baseline == "length_weighted":
        return adv.length_weighted_mean(rewards, found.lengths)
    return float(rewards.mean())


def _scale(rewards: np.ndarray, config: AdvantageConfig) -> float:
    if config.scale == "std":
        return adv.deviation(rewards, config.ddof) + config.eps
    if config.scale == "virtual_std":
        return adv.deviation(adv.with_virtual(rewards, config.virtual_reward), config.ddof) + config.eps
    if config.scale == "mad" and len(rewards):
        return adv.mad_scale(rewards)
    return 1.0


def _by_channel(groups: Sequence[Features], config: AdvantageConfig, state: AlgoState) -> list[np.ndarray]:
    """sum_k w_k estimate(R_k), each channel over the trajectories that have it; 0 for one without any channel."""
    names = list(dict.fromkeys(name for found in groups for name in found.channels))
    weights = config.channel_weights or (1.0,) * len(names)
    if not names or len(weights) != len(names):
        raise ValueError(
            f"advantage.channels = {config.channels} found reward channels {names or 'none'} and "
            f"{len(config.channel_weights)} channel_weights; name two or more reward.functions and give a weight each"
        )
    out = [np.zeros(found.size) for found in groups]
    for name, weight in zip(names, weights, strict=True):
        present = [
            np.flatnonzero(np.isfinite(found.channels.get(name, np.full(found.size, np.nan)))) for found in groups
        ]
        parts = estimate(
            [found.take(rows) for found, rows in zip(groups, present, strict=True)],
            [
                found.channels[name][rows] if len(rows) else np.zeros(0)
                for found, rows in zip(groups, present, strict=True)
            ],
            config,
            state,
        )
        for total, rows, part in zip(out, present, parts, strict=True):
            total[rows] += weight * part
    return out


def _posts_of_group(
    advantages: np.ndarray, found: Features, rewards: np.ndarray, config: AdvantageConfig, state: AlgoState
) -> np.ndarray:
    if config.strata != "none":
        counts = found.tool_calls if config.strata == "tool_calls" else found.turns
        within = adv.stratified(rewards, np.minimum(counts, config.strata_cap), config.ddof, config.eps)
        advantages = config.strata_blend * within + (1 - config.strata_blend) * advantages
    if config.novelty:
        advantages = adv.novelty_sharpened(
            advantages, found.correct, found.mean_logprobs, config.novelty, config.novelty_cap
        )
    for name, dual in zip(config.constraints, state.duals, strict=True):
        held = channel(found, name, "advantage.constraints")
        advantages = advantages + dual * adv.z_score(held, config.ddof, config.eps)
    advantages = adv.sign_weighted(advantages, config.positive_weight, config.negative_weight)
    if config.focal:
        advantages = advantages * (1 - found.correct.mean()) ** config.focal
    return adv.rescale_nonzero(advantages) if config.rescale_nonzero else advantages


def _truncation_masked(
    advantages: Sequence[np.ndarray],
    groups: Sequence[Features],
    config: AdvantageConfig,
    rng: np.random.Generator | None,
    repeating: Sequence[np.ndarray] | None,
) -> list[np.ndarray]:
    if rng is None or repeating is None:
        raise ValueError("advantage.truncation_mask draws at random; pass rng to train_rows")
    return [
        adv.truncation_masked(a, f.truncated, f.correct, loops, rng.random(f.size), config.truncation_mask)
        for a, f, loops in zip(advantages, groups, repeating, strict=True)
    ]
