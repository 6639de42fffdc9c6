"""Oversampled group -> the trajectories that train: resample on correct, and the other selectors.

Selection reads raw rewards and the status of tool calls, never shaped rewards or words in an output. Every selector
returns rollout indices in ascending order; all randomness comes from the generator passed in.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from grpo_roc_jax.method.config import ResampleConfig
from grpo_roc_jax.method.features import Features, features, text_compat
from grpo_roc_jax.types import Group

Reason = Literal["kept", "equal_rewards", "all_correct", "short_group", "penalty", "quota", "not_drawn"]
"""Why a trajectory is trained on or not: kept; its group left (equal rewards, all correct, too few trajectories); a
success that was not chosen under its penalty; a failure beyond the quota; not in the subset drawn or chosen."""

EQUAL_TOLERANCE = 1e-6
"""Rewards closer than this are equal; float noise of a custom reward must not become a signal."""
LOW_CONDITION = "low_reward"
"""Condition of a rollout under the low reward token (RC-GRPO)."""


@dataclass(frozen=True, eq=False)
class Selection:
    """Which trajectories of a group train, and why; arrays over the N sampled ones unless said otherwise."""

    indices: np.ndarray
    """int64[n], ascending: the trajectories to train on; empty when the group is dropped."""
    reasons: tuple[Reason, ...]
    penalties: np.ndarray
    """float64: what `roc` ranks successes by, with the switched-off parts left out."""
    error_penalties: np.ndarray
    """float64 in [0, 1]: share of failed calls, or the setting for no call."""
    format_penalties: np.ndarray
    """float64 in [0, 1]."""
    kept: bool
    """False when the whole group left."""


def error_penalty(tool_calls: np.ndarray, tool_errors: np.ndarray, no_tool: float = 0.5) -> np.ndarray:
    """Failed share of the calls; `no_tool` without a call. Source: arXiv:2508.20722, eq. 4."""
    return np.where(tool_calls > 0, tool_errors / np.maximum(tool_calls, 1), no_tool)


def format_penalty(answers: np.ndarray, well_formed: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """min(1, (answers - 1) / turns); 1 without an answer, with unbalanced tags, or without a turn.

    Source: arXiv:2508.20722, eq. 5; the tag balance is the released code's.
    """
    repeated = np.minimum((answers - 1) / np.maximum(turns, 1), 1.0)
    return np.where((answers < 1) | ~well_formed.astype(bool) | (turns < 1), 1.0, repeated)


def quota(negatives: int, positives: int, keep: int, min_negative: int = 2, min_positive: int = 2) -> tuple[int, int]:
    """(failures, successes) to keep, `keep` in all: in proportion, with a minimum of each where they exist.

    failures = clip(round(negatives * keep / N), min(min_negative, negatives), keep - min(min_positive, positives)),
    rounding half to even; successes are the rest, so odd sizes add up. The minima are cut to half of `keep`, which
    leaves room for both kinds in the smallest groups. Equals the released code for even `keep` from 4 on.
    """
    if not 1 <= keep <= negatives + positives:
        raise ValueError(f"{keep} trajectories wanted of {negatives + positives}; sample more or keep fewer")
    low = min(min_negative, negatives, keep // 2)
    high = keep - min(min_positive, positives, keep // 2)
    failures = round(negatives * keep / (negatives + positives))
    failures = min(max(failures, low), high)
    return failures, keep - failures


def settled(negatives: int, positives: int, left: int, keep: int, config: ResampleConfig) -> bool:
    """Whether no outcome of the `left` unfinished trajectories can change how many of each kind are kept.

    The finished ones must fill those places, and be given the same ones when they are all there is. Selectors without
    places by kind are never settled, apart from `uniform`, which is with `keep` finished. Which trajectories of a kind
    are kept may still change with what is cut off: those that take long are missing from the choice.
    """
    if left < 1 or negatives + positives < keep or config.conditions == "stratify":
        return False
    if config.method == "uniform":
        return True
    if config.method != "roc":
        return False
    minima = (config.min_negative, config.min_positive)
    places = {quota(negatives + more, positives + left - more, keep, *minima) for more in range(left + 1)}
    places.add(quota(negatives, positives, keep, *minima))
    (failures, successes), *others = places
    return not others and negatives >= failures and positives >= successes


def select_roc(
    correct: np.ndarray, penalties: np.ndarray, keep: int, config: ResampleConfig, rng: np.random.Generator
) -> np.ndarray:
    """Resample on correct: the cleanest successes and a fair share of the failures, `keep` in all.

    Source: arXiv:2508.20722, sec. 2.2.3, and the released code, as settled in `quota` and the settings.
    """
    positive, negative = np.flatnonzero(correct), np.flatnonzero(~correct)
    k_neg, k_pos = quota(len(negative), len(positive), keep, config.min_negative, config.min_positive)
    if config.positive_select == "sort":
        order = np.argsort(penalties[positive], kind="stable")
    elif config.positive_select == "inverse":
        # Gumbel top-k: a draw without replacement with probability proportional to 1 / (penalty + epsilon).
        keys = rng.gumbel(size=len(positive)) - np.log(penalties[positive] + config.inverse_epsilon)
        order = np.argsort(-keys, kind="stable")
    else:
        order = rng.permutation(len(positive))
    drawn = rng.permutation(len(negative)) if config.negative_select == "uniform" else np.arange(len(negative))
    return np.sort(np.concatenate([positive[order[:k_pos]], negative[drawn[:k_neg]]]))


def select_uniform(count: int, keep: int, rng: np.random.Generator) -> np.ndarray:
    """`keep` of `count` without replacement: the control arm of resampling."""
    return np.sort(rng.permutation(count)[:keep])


def select_max_variance(rewards: np.ndarray, keep: int) -> np.ndarray:
    """The subset of `keep` with the largest reward variance: always some highest and the rest lowest.

    Source: PODS, arXiv:2504.13818. Ties go to fewer highest ones, and within equal rewards to rollout order.
    """
    order = np.argsort(rewards, kind="stable")
    # Rounding makes a tie of what differs by the last bits, so that the choice is the same on every machine.
    highest = int(np.argmax(np.round(split_variances(rewards[order], keep), 12)))
    return np.sort(np.concatenate([order[: keep - highest], order[len(order) - highest :]]))


def split_variances(ascending: np.ndarray, keep: int) -> np.ndarray:
    """float64[keep + 1]: population variance of the k largest and keep - k smallest rewards, for k = 0..keep."""
    highest = np.arange(keep + 1)
    centred = ascending - ascending.mean()
    first, second = (np.concatenate([[0.0], np.cumsum(centred**power)]) for power in (1, 2))
    split = lambda sums: sums[keep - highest] + sums[-1] - sums[len(ascending) - highest]  # noqa: E731
    return split(second) / keep - (split(first) / keep) ** 2


def pivot_index(rewards: np.ndarray) -> int:
    """First trajectory whose reward is the median of an odd group (MC-GRPO, arXiv:2601.22582); -1 for an even one."""
    return int(np.flatnonzero(rewards == np.median(rewards))[0]) if len(rewards) % 2 else -1


def select(found: Features, keep: int, config: ResampleConfig, rng: np.random.Generator) -> Selection:
    """The selection of one group from its features; `resample_group` is the same from the group itself."""
    errors = error_penalty(found.tool_calls, found.tool_errors, config.no_tool_penalty)
    formats = format_penalty(found.answers, found.well_formed, found.turns)
    penalties = config.error_penalty * errors + config.format_penalty * formats
    dropped = _dropped(found, keep, config)
    if dropped:
        return Selection(np.zeros(0, np.int64), (dropped,) * found.size, penalties, errors, formats, kept=False)
    indices = _chosen(found, penalties, min(keep, found.size), config, rng)
    reasons: list[Reason] = ["not_drawn"] * found.size
    if config.method == "roc":
        reasons = ["penalty" if correct else "quota" for correct in found.correct]
    for index in indices:
        reasons[index] = "kept"
    return Selection(indices, tuple(reasons), penalties, errors, formats, kept=True)


def select_group(group: Group, keep: int, config: ResampleConfig, rng: np.random.Generator) -> Selection:
    """The selection of one group.

    Args:
        group: All scored trajectories of a problem.
        keep: Trajectories wanted; fewer are kept when there are not more (setting `short_groups`).
        config: The selector and its settings.
        rng: Advanced only by selectors that draw.
    """
    found = features(group)
    return select(text_compat(group, found) if config.penalty_source == "text_compat" else found, keep, config, rng)


def _dropped(found: Features, keep: int, config: ResampleConfig) -> Reason | None:
    """Why the whole group leaves; None when it stays. Decided on raw rewards (never on a batch's spread)."""
    if found.size == 0 or (found.size < keep and config.short_groups == "drop"):
        return "short_group"
    spread = float(found.rewards.max() - found.rewards.min())
    if config.drop == "equal" and spread <= EQUAL_TOLERANCE:
        return "equal_rewards"
    if config.drop == "all_correct" and spread <= EQUAL_TOLERANCE and found.correct.all():
        return "all_correct"
    return None


def _chosen(
    found: Features, penalties: np.ndarray, keep: int, config: ResampleConfig, rng: np.random.Generator
) -> np.ndarray:
    if config.method == "none" or keep == found.size:
        return np.arange(found.size if config.method == "none" else keep)
    if config.method == "uniform":
        return select_uniform(found.size, keep, rng)
    if config.method == "max_variance":
        return select_max_variance(found.rewards, keep)
    if config.conditions == "stratify" and len(set(found.conditions)) > 1:
        return _stratified_roc(found, penalties, keep, config, rng)
    if config.conditions == "low_last":
        # Penalties end at 2, so 3 puts every success under the low token behind all the others.
        penalties = penalties + 3.0 * np.array([condition == LOW_CONDITION for condition in found.conditions])
    return select_roc(found.correct, penalties, keep, config, rng)


def _stratified_roc(
    found: Features, penalties: np.ndarray, keep: int, config: ResampleConfig, rng: np.random.Generator
) -> np.ndarray:
    """`roc` with the places of the successes shared among conditions in proportion, largest remainders first."""
    positive, negative = np.flatnonzero(found.correct), np.flatnonzero(~found.correct)
    _, k_pos = quota(len(negative), len(positive), keep, config.min_negative, config.min_positive)
    chosen = select_roc(found.correct, penalties, keep, config, rng)
    if not k_pos:
        return chosen
    conditions = np.array(found.conditions)[positive]
    names, counts = np.unique(conditions, return_counts=True)
    exact = counts * k_pos / len(positive)
    places = np.floor(exact).astype(int)
    for index in np.argsort(places - exact, kind="stable")[: k_pos - places.sum()]:
        places[index] += 1
    kept = [chosen[~found.correct[chosen]]]
    for name, count in zip(names, places, strict=True):
        members = positive[conditions == name]
        kept.append(members[np.argsort(penalties[members], kind="stable")[:count]])
    return np.sort(np.concatenate(kept))
