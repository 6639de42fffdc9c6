"""Resample on correct under reward tokens: what a success that was sampled under the low token is worth.

RC-GRPO (arXiv:2602.03025) conditions each rollout on a high or a low reward token; combined with `roc`, the penalty
alone would rank successes of both conditions together.
"""

from typing import Any, Literal

import numpy as np

from grpo_roc_jax.method.features import Features
from grpo_roc_jax.method.planning import LOW
from grpo_roc_jax.method.roc import ResampleOnCorrect, quota, select_roc
from grpo_roc_jax.settings.options import kind

ABOVE_PENALTIES = 3.0
"""Penalties end at 2, so that this ranks a success after all others."""


@kind("rc_roc")
class ConditionalRoc(ResampleOnCorrect):
    """`roc` that tells the reward tokens of RC-GRPO (arXiv:2602.03025) apart."""

    conditions: Literal["low_last", "stratify"] = "low_last"
    """Successes sampled under the low token: ranked after all others, or given a share of the places."""

    def check(self, config: Any) -> None:
        if config.plan.condition.kind != "reward_tokens":
            raise ValueError("resample rc_roc without plan.condition reward_tokens has nothing to tell apart; use roc")

    def choose(self, features: Features, penalties: np.ndarray, keep: int, rng: np.random.Generator) -> np.ndarray:
        if self.conditions == "low_last":
            low = np.array([kind == LOW.kind for kind in features.conditions])
            return select_roc(features.correct, penalties + ABOVE_PENALTIES * low, keep, self, rng)
        if len(set(features.conditions)) > 1:
            return stratified_roc(features, penalties, keep, self, rng)
        return select_roc(features.correct, penalties, keep, self, rng)

    def quota_decided(self, negatives: int, positives: int, left: int, keep: int) -> bool:
        return self.conditions != "stratify" and super().quota_decided(negatives, positives, left, keep)


def stratified_roc(
    features: Features, penalties: np.ndarray, keep: int, config: ConditionalRoc, rng: np.random.Generator
) -> np.ndarray:
    """`roc` with the places of the successes shared among conditions in proportion, largest remainders first."""
    positive, negative = np.flatnonzero(features.correct), np.flatnonzero(~features.correct)
    _, k_pos = quota(len(negative), len(positive), keep, config.min_negative, config.min_positive)
    chosen = select_roc(features.correct, penalties, keep, config, rng)
    if not k_pos:
        return chosen
    conditions = np.array(features.conditions)[positive]
    names, counts = np.unique(conditions, return_counts=True)
    exact = counts * k_pos / len(positive)
    places = np.floor(exact).astype(int)
    for index in np.argsort(places - exact, kind="stable")[: k_pos - places.sum()]:
        places[index] += 1
    parts = [chosen[~features.correct[chosen]]]
    for name, count in zip(names, places, strict=True):
        members = positive[conditions == name]
        parts.append(members[np.argsort(penalties[members], kind="stable")[:count]])
    return np.sort(np.concatenate(parts))
