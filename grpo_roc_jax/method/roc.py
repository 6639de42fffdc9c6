"""Resample on correct: from the oversampled group to the trajectories that train.

This is the core of GRPO-RoC (arXiv:2508.20722, sec. 2.2.3): failures are kept at random, successes by how clean they
are. Selection reads raw rewards and the status of tool calls, never shaped rewards or words in an output. Every
selector returns rollout indices in ascending order; all randomness comes from the generator passed in.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from grpo_roc_jax import checks
from grpo_roc_jax.method.features import Features, features, flat, text_compat
from grpo_roc_jax.method.part import Part
from grpo_roc_jax.settings.options import Axis, Count, NotNegative, Positive, kind, settings
from grpo_roc_jax.types import Group

Reason = Literal["kept", "equal_rewards", "all_correct", "short_group", "penalty", "quota", "not_drawn"]
"""Why a trajectory is trained on or not. `kept`: it is trained on. `equal_rewards`, `all_correct`, `short_group`: its
whole group is dropped. `penalty`: a success that was not chosen because of its penalty. `quota`: a failure beyond
the quota. `not_drawn`: not in the drawn or chosen subset."""


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
    """False if the whole group is dropped."""


# ---- penalties and quotas ------------------------------------------------------------------------------------------


def error_penalty(tool_calls: np.ndarray, tool_errors: np.ndarray, no_tool: float = 0.5) -> np.ndarray:
    """Failed share of the calls; `no_tool` without a call. Source: arXiv:2508.20722, eq. 4."""
    tool_calls, tool_errors = np.asarray(tool_calls), np.asarray(tool_errors)
    return np.where(tool_calls > 0, tool_errors / np.maximum(tool_calls, 1), no_tool)


def format_penalty(answers: np.ndarray, well_formed: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """min(1, (answers - 1) / turns); 1 without an answer, with unbalanced tags, or without a turn.

    Source: arXiv:2508.20722, eq. 5; the tag balance is the released code's.
    """
    answers, turns = np.asarray(answers), np.asarray(turns)
    repeated = np.minimum((answers - 1) / np.maximum(turns, 1), 1.0)
    return np.where((answers < 1) | ~np.asarray(well_formed, bool) | (turns < 1), 1.0, repeated)


def quota(negatives: int, positives: int, keep: int, min_negative: int = 2, min_positive: int = 2) -> tuple[int, int]:
    """(failures, successes) to keep, `keep` in all: in proportion, with a minimum of each where they exist.

    failures = clip(round(negatives * keep / N), min(min_negative, negatives), keep - min(min_positive, positives)),
    rounding half to even; successes are the rest, so odd sizes add up. The minima are cut to half of `keep`, which
    leaves room for both kinds in the smallest groups. Equals the released code for even `keep` from 4 on.
    """
    if not 1 <= keep <= negatives + positives:
        raise ValueError(f"cannot keep {keep} of {negatives + positives} trajectories; sample more or keep fewer")
    low = min(min_negative, negatives, keep // 2)
    high = keep - min(min_positive, positives, keep // 2)
    failures = round(negatives * keep / (negatives + positives))
    failures = min(max(failures, low), high)
    return failures, keep - failures


# ---- selectors -----------------------------------------------------------------------------------------------------


@settings
class Selector(Part, axis="resample"):
    """Selects the trajectories to train on from the sampled group."""

    drop: Literal["equal", "all_correct", "none"] = "equal"
    """Groups that are dropped before selection: those with equal rewards (they carry no signal), only those solved by
    every trajectory, or none."""
    short_groups: Literal["keep", "drop"] = "keep"
    """A group left with fewer trajectories than needed after infrastructure failures: train on what is there, or drop
    it."""

    def sampled(self, size: int) -> int:
        """Trajectories to sample for a trained group of `size`."""
        return size

    def penalties(self, features: Features) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(penalty, its error part, its format part) of each trajectory; `roc` ranks successes by the penalty."""
        errors = error_penalty(features.tool_calls, features.tool_errors)
        formats = format_penalty(features.answers, features.well_formed, features.turns)
        return errors + formats, errors, formats

    def seen(self, group: Group) -> Features:
        """The features that selection reads."""
        return features(group)

    def choose(self, features: Features, penalties: np.ndarray, keep: int, rng: np.random.Generator) -> np.ndarray:
        """Ascending indices of the trajectories to keep; the group has more than `keep`."""
        raise NotImplementedError

    def left_out(self, features: Features) -> list[Reason]:
        """The reason for each trajectory in case it is not chosen."""
        return ["not_drawn"] * features.size

    def quota_decided(self, negatives: int, positives: int, left: int, keep: int) -> bool:
        """Whether no outcome of the `left` unfinished trajectories can change how many of each kind are kept.

        There must be enough finished ones to fill the quota. Which trajectories of a kind are kept may still change if
        the rest is cancelled: slow ones are then missing from the choice. False for selectors without a quota by kind.
        """
        return False

    def select(self, features: Features, keep: int, rng: np.random.Generator) -> Selection:
        """The selection of one group from its features."""
        penalties, errors, formats = self.penalties(features)
        dropped = self._dropped(features, keep)
        if dropped:
            return Selection(np.zeros(0, np.int64), (dropped,) * features.size, penalties, errors, formats, kept=False)
        indices = np.arange(features.size) if features.size <= keep else self.choose(features, penalties, keep, rng)
        reasons = self.left_out(features)
        for index in indices:
            reasons[index] = "kept"
        return Selection(indices, tuple(reasons), penalties, errors, formats, kept=True)

    def _dropped(self, features: Features, keep: int) -> Reason | None:
        """Why the whole group is dropped; None if it is not. Decided on the raw rewards of this group alone."""
        if features.size == 0 or (features.size < keep and self.short_groups == "drop"):
            return "short_group"
        equal = flat(features.rewards)
        if self.drop == "equal" and equal:
            return "equal_rewards"
        if self.drop == "all_correct" and equal and features.correct.all():
            return "all_correct"
        return None


def select_group(group: Group, keep: int, selector: Selector, rng: np.random.Generator) -> Selection:
    """The selection of one group.

    Args:
        group: All scored trajectories of a problem.
        keep: Trajectories to keep; fewer are kept when there are not more (setting `short_groups`).
        selector: `resample` of the configuration.
        rng: Advanced only by selectors that draw.
    """
    return selector.select(selector.seen(group), keep, rng)


@kind("none")
class NoSelection(Selector):
    """Sample exactly the group that trains."""

    def choose(self, features: Features, penalties: np.ndarray, keep: int, rng: np.random.Generator) -> np.ndarray:
        return np.arange(features.size)


@settings
class Oversampled(Selector):
    """Sample more than the group that trains."""

    oversample: Annotated[float, Ge(1)] = 2.0
    """Trajectories sampled for each one trained; 32 for 16 in the paper."""

    def sampled(self, size: int) -> int:
        return max(size, round(size * self.oversample))


class PositiveSelect(Axis, axis="resample.positive_select"):
    """Which successes are kept."""

    def order(self, penalties: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Indices into these penalties of successes, in the order in which they are kept."""
        raise NotImplementedError


@kind("sort")
class LowestPenalties(PositiveSelect):
    """The successes with the lowest penalties, as in the released code."""

    def order(self, penalties: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.argsort(penalties, kind="stable")


@kind("inverse")
class InverseDraw(PositiveSelect):
    """A draw weighted by 1 / (penalty + epsilon), as in the paper's text."""

    epsilon: Positive = 0.05
    """Added to the penalty; smaller is sharper (0.01 to 0.1 is the useful range)."""

    def order(self, penalties: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        # Gumbel top-k: a draw without replacement with probability proportional to 1 / (penalty + epsilon).
        return np.argsort(-(rng.gumbel(size=len(penalties)) - np.log(penalties + self.epsilon)), kind="stable")


@kind("uniform")
class UniformDraw(PositiveSelect):
    """A uniform draw."""

    def order(self, penalties: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return rng.permutation(len(penalties))


@kind("roc")
class ResampleOnCorrect(Oversampled):
    """Resample on correct (arXiv:2508.20722): the cleanest successes and a fair share of the failures."""

    positive_select: PositiveSelect = field(default_factory=LowestPenalties)
    """Which successes are kept."""
    negative_select: Literal["uniform", "first"] = "uniform"
    """Which failures are kept: a uniform draw, or the first in rollout order. Never ranked: ranking failures did not
    help (the authors, in issue 49 of their repository)."""
    min_positive: Count = 2
    """Successes kept at least, where they exist; without it one success of many is lost and the group goes flat."""
    min_negative: Count = 2
    """Failures kept at least, where they exist."""
    no_tool_penalty: NotNegative = 0.5
    """Error part of the penalty of a success without any tool call; the paper's value, which favors tool use."""
    error_penalty: bool = True
    """Counts failed tool calls in the penalty."""
    format_penalty: bool = True
    """Counts missing, repeated and unbalanced answer tags in the penalty."""
    penalty_source: Literal["structured", "text_compat"] = "structured"
    """`structured` reads the status of each call. `text_compat` repeats the released scorer, for parity studies: it
    reads text only, takes "error" in an observation for a failed call, and does not count the first turn."""

    def penalties(self, features: Features) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        errors = error_penalty(features.tool_calls, features.tool_errors, self.no_tool_penalty)
        formats = format_penalty(features.answers, features.well_formed, features.turns)
        return self.error_penalty * errors + self.format_penalty * formats, errors, formats

    def seen(self, group: Group) -> Features:
        structured = features(group)
        return text_compat(group, structured) if self.penalty_source == "text_compat" else structured

    def choose(self, features: Features, penalties: np.ndarray, keep: int, rng: np.random.Generator) -> np.ndarray:
        return select_roc(features.correct, penalties, keep, self, rng)

    def left_out(self, features: Features) -> list[Reason]:
        return ["penalty" if correct else "quota" for correct in features.correct]

    def quota_decided(self, negatives: int, positives: int, left: int, keep: int) -> bool:
        if left < 1 or negatives + positives < keep:
            return False
        minima = (self.min_negative, self.min_positive)
        places = {quota(negatives + more, positives + left - more, keep, *minima) for more in range(left + 1)}
        places.add(quota(negatives, positives, keep, *minima))
        (failures, successes), *others = places
        return not others and negatives >= failures and positives >= successes


def select_roc(
    correct: np.ndarray, penalties: np.ndarray, keep: int, config: ResampleOnCorrect, rng: np.random.Generator
) -> np.ndarray:
    """Resample on correct: the cleanest successes and a fair share of the failures, `keep` in all.

    Source: arXiv:2508.20722, sec. 2.2.3, and the released code, in the readings of `quota` and the settings.

    Args:
        correct: [N]: whether each trajectory is a success, as bool or 0 and 1.
        penalties: [N]: what successes are ranked by, lowest first.
        keep: Number of trajectories to keep.
        config: The minima, and how successes and failures are chosen.
        rng: Advanced by what is drawn.

    Raises:
        ValueError: `correct` holds other numbers, such as rewards, there are fewer than `keep`, or sizes differ.
    """
    checks.expect(config, ResampleOnCorrect, "config", "the settings, such as ResampleOnCorrect()")
    checks.expect_generator(rng)
    given, penalties = np.asarray(correct), np.asarray(penalties)
    checks.check_shapes((given.size,), correct=given, penalties=penalties)
    correct = given.astype(bool)
    if (given != correct).any():
        raise ValueError(
            f"correct has {given[given != correct][0]}; must be True or False, or 1 and 0, for each trajectory; "
            "of rewards, pass rewards > 0"
        )
    positive, negative = np.flatnonzero(correct), np.flatnonzero(~correct)
    k_neg, k_pos = quota(len(negative), len(positive), keep, config.min_negative, config.min_positive)
    order = config.positive_select.order(penalties[positive], rng)
    drawn = rng.permutation(len(negative)) if config.negative_select == "uniform" else np.arange(len(negative))
    return np.sort(np.concatenate([positive[order[:k_pos]], negative[drawn[:k_neg]]]))


# ---- PODS: the subset of rollouts with the largest reward variance (arXiv:2504.13818) -------------------------------


@kind("max_variance")
class MaxVariance(Oversampled):
    """The subset with the largest reward variance (PODS, arXiv:2504.13818): always some highest and the rest lowest.

    Ties go to fewer highest ones, and within equal rewards to rollout order.
    """

    def choose(self, features: Features, penalties: np.ndarray, keep: int, rng: np.random.Generator) -> np.ndarray:
        order = np.argsort(features.rewards, kind="stable")
        variances = split_variances(features.rewards[order], keep)
        # Rounding makes ties of values that differ in the last bits, so that the choice is the same on every machine.
        highest = int(np.argmax(np.round(variances / (variances.max() or 1.0), 12)))
        return np.sort(np.concatenate([order[: keep - highest], order[len(order) - highest :]]))


def split_variances(ascending: np.ndarray, keep: int) -> np.ndarray:
    """float64[keep + 1]: population variance of the k largest and keep - k smallest rewards, for k = 0..keep."""
    highest = np.arange(keep + 1)
    centered = ascending - ascending.mean()
    first, second = (np.concatenate([[0.0], np.cumsum(centered**power)]) for power in (1, 2))

    def split(sums: np.ndarray) -> np.ndarray:
        return sums[keep - highest] + sums[-1] - sums[len(ascending) - highest]

    return split(second) / keep - (split(first) / keep) ** 2


# ---- a random subset: the control arm of resampling on correct, at equal cost of sampling ---------------------------


@kind("uniform")
class Uniform(Oversampled):
    """A random subset: the control arm of `roc` (arXiv:2508.20722)."""

    def choose(self, features: Features, penalties: np.ndarray, keep: int, rng: np.random.Generator) -> np.ndarray:
        return np.sort(rng.permutation(features.size)[:keep])

    def quota_decided(self, negatives: int, positives: int, left: int, keep: int) -> bool:
        return left >= 1 and negatives + positives >= keep
