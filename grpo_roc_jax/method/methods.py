"""What the training loop calls: `resample_group`, `train_rows`, `next_state`.

Everything a method does on the host meets here, as the composition that the config names: selection on raw rewards,
shaping, advantages, token weights with the normaliser of the whole optimiser batch. `registry.py` names compositions.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from grpo_roc_jax.method import score_based
from grpo_roc_jax.method.advantage import deviation, flat, repeats, tree_differences
from grpo_roc_jax.method.config import (
    AdvantageConfig,
    LossConfig,
    ResampleConfig,
    ShapingConfig,
    needs_scores,
)
from grpo_roc_jax.method.edit import EXAMPLES, HINT
from grpo_roc_jax.method.estimate import batch_advantages
from grpo_roc_jax.method.features import Features, features
from grpo_roc_jax.method.plan import diversity, temperature_stage
from grpo_roc_jax.method.plan_config import PlanConfig
from grpo_roc_jax.method.plugin import load_part
from grpo_roc_jax.method.resample import Selection, pivot_index, select_group
from grpo_roc_jax.method.shaping import channel, shape_rewards
from grpo_roc_jax.method.state import AlgoState, dual_step, hint_level_step, visited
from grpo_roc_jax.method.weights import (
    exponent_gradient,
    kept_tokens,
    length_preference,
    mismatch_weights,
    normalisers,
    ratio_segments,
    trained,
)
from grpo_roc_jax.pack import TrainRow
from grpo_roc_jax.types import Group, Trajectory


class GroupSection(Protocol):
    """How many trajectories of a problem train."""

    size: int


class MethodConfig(Protocol):
    """The sections of a run's configuration that make up its method."""

    group: GroupSection
    shaping: ShapingConfig
    resample: ResampleConfig
    advantage: AdvantageConfig
    loss: LossConfig
    plan: PlanConfig


DIVERSITY_GROUPS = 64
"""Groups of a step, in their random order, whose mean diversity stands for all: each one sorts its 4-grams."""

CustomMap = Callable[[np.ndarray, Features, AlgoState], np.ndarray]


def resample_group(group: Group, config: MethodConfig, state: AlgoState, rng: np.random.Generator) -> Selection:
    """Which of a problem's scored trajectories train, with a reason for each."""
    del state  # no selector remembers anything yet; the loop passes the same arguments to every stage
    return select_group(group, config.group.size, config.resample, rng)


def subset(group: Group, selection: Selection) -> Group:
    """The group of the selected trajectories."""
    return Group(
        group.problem,
        tuple(group.trajectories[i] for i in selection.indices),
        tuple(group.verdicts[i] for i in selection.indices),
    )


def scoring_rows(groups: Sequence[Group], level: str = "token") -> list[TrainRow]:
    """Rows for a scoring pass: weights and advantages 0, in the order `train_rows` keeps."""
    return [
        _row(t, t.policy_mask, t.logprobs, np.zeros(t.length), np.zeros(t.length), level, None)
        for group in groups
        for t in group.trajectories
    ]


def train_rows(
    groups: Sequence[Group],
    config: MethodConfig,
    state: AlgoState,
    *,
    rng: np.random.Generator | None = None,
    scores: Sequence[np.ndarray] | None = None,
    reference: Sequence[np.ndarray] | None = None,
    entropies: Sequence[np.ndarray] | None = None,
    custom_advantage: CustomMap | None = None,
    custom_shaping: CustomMap | None = None,
) -> list[TrainRow]:
    """One row for every trajectory of the optimiser batch, groups in order, advantages and weights filled in.

    The weights carry the normaliser of exactly these groups: pass all of one optimiser step, and only those.

    Args:
        groups: After selection.
        config: shaping, advantage and loss are read.
        state: Trackers, duals, learned scalars.
        rng: Wanted by `advantage.truncation_mask` only.
        scores: float32[T] for each trajectory: log-probabilities under the parameters about to be updated.
        reference: float32[T] for each trajectory: log-probabilities under the reference policy.
        entropies: float32[T] for each trajectory: of the policy that the scores are of, wanted by `loss.top_entropy`.
        custom_advantage: Instead of `advantage.custom`, for use from Python.
        custom_shaping: Instead of `shaping.custom`, for use from Python.

    Raises:
        ValueError: A pass that the config needs is missing.
    """
    _check_passes(config, groups, scores, reference)
    found = [features(group) for group in groups]
    rewards = shape_rewards(
        found, config.shaping, state, custom_shaping or load_part("shaping.custom", config.shaping.custom)
    )
    masks = _masks(groups, rewards, config)
    advantages = _advantages(groups, found, rewards, masks, config, state, rng, scores, custom_advantage)
    if config.loss.mask_drift or config.loss.top_entropy < 1:
        trajectories = [t for group in groups for t in group.trajectories]
        masks = kept_tokens(trajectories, masks, advantages, scores, entropies, config.loss)
    weights = _weights(groups, found, masks, config, state, scores)
    rows, index = [], 0
    for group in groups:
        for trajectory in group.trajectories:
            old = scores[index] if config.loss.old_logprobs == "scored" else trajectory.logprobs
            ref = None if reference is None else reference[index]
            rows.append(_row(trajectory, masks[index], old, advantages[index], weights[index], config.loss.level, ref))
            index += 1
    return rows


def supervised_rows(
    groups: Sequence[Group],
    scores: Sequence[np.ndarray],
    weight: float,
    level: str,
    reference: Sequence[np.ndarray] | None = None,
) -> list[TrainRow]:
    """Rows whose gradient is that of weight * mean over trajectories of the mean negative log-likelihood.

    The ratio is taken against the current log-probabilities, so it is 1 and every surrogate has the gradient of
    -log p at advantage 1. Append these rows to those of `train_rows`; they have their own normaliser.

    Args:
        groups: Correct explanations under the plain prompt (ExPO, arXiv:2507.02834); others would teach errors.
        scores: float32[T] for each trajectory: log-probabilities under the parameters about to be updated.
        weight: Of the term in the loss.
        level: `loss.level`.
        reference: As in `train_rows`, wanted where `loss.kl_coef` is on: it then holds these rows too.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    rows = []
    for index, (trajectory, now) in enumerate(zip(trajectories, scores, strict=True)):
        each = weight / (len(trajectories) * max(int(trajectory.policy_mask.sum()), 1))
        weights = np.where(trajectory.policy_mask, each, 0.0)
        ref = None if reference is None else reference[index]
        rows.append(_row(trajectory, trajectory.policy_mask, now, np.ones(trajectory.length), weights, level, ref))
    return rows


def renormalised(rows: Sequence[TrainRow], whole: Sequence[TrainRow], config: LossConfig) -> list[TrainRow]:
    """A part of `whole` with the normaliser of that part, for several optimiser steps per rollout batch.

    Args:
        rows: Members of `whole` that make one optimiser step.
        whole: All rows that `train_rows` returned together.
        config: `normalizer`.
    """
    counts = lambda some: np.array([row.policy_mask.sum() for row in some])  # noqa: E731
    before = dict(zip((id(row) for row in whole), normalisers(counts(whole), config), strict=True))
    after = normalisers(counts(rows), config)
    scale = [new / before[id(row)] if before[id(row)] else 0.0 for row, new in zip(rows, after, strict=True)]
    return [
        dataclasses.replace(row, weights=(row.weights * factor).astype(np.float32))
        for row, factor in zip(rows, scale, strict=True)
    ]


def next_state(
    sampled: Sequence[Group],
    trained_groups: Sequence[Group],
    config: MethodConfig,
    state: AlgoState,
    *,
    custom_advantage: CustomMap | None = None,
    custom_shaping: CustomMap | None = None,
) -> AlgoState:
    """The state after a step: success table from everything sampled, duals and learned scalars from what trained.

    The custom parts are those of `train_rows`: a learned exponent follows the advantages that trained.
    """
    found = [features(group) for group in sampled]
    plan = config.plan
    state = visited(
        state,
        [f.uid for f in found],
        np.array([_unaided(f, plan).sum() for f in found], np.float64),
        np.array([f.size for f in found], np.float64),
        config.advantage.tracker_decay,
    )
    changes: dict[str, object] = {"step": state.step + 1}
    if plan.hints == "level":
        uids = list(dict.fromkeys(f.uid for f in found))
        state = levels_moved(state, uids, plan.hint_levels)
    if plan.temperatures and sampled:
        changes |= temperature_moved(state, sampled, plan)
    kept = [features(group) for group in trained_groups]
    if config.advantage.constraints and kept:
        held = [[channel(f, name, "advantage.constraints") for f in kept] for name in config.advantage.constraints]
        means = np.array([np.concatenate(values).mean() for values in held])
        changes["duals"] = dual_step(
            state.duals,
            means,
            np.array(config.advantage.constraint_targets),
            config.advantage.dual_lr,
            config.advantage.dual_max,
        )
    if config.loss.length_weight == "learned" and kept:
        shaping = custom_shaping or load_part("shaping.custom", config.shaping.custom)
        rewards = shape_rewards(kept, config.shaping, state, shaping)
        plain = dataclasses.replace(config.advantage, truncation_mask=0.0)
        custom = custom_advantage or load_part("advantage.custom", config.advantage.custom)
        values = batch_advantages(kept, rewards, plain, state, custom=custom)
        slope = exponent_gradient([f.lengths for f in kept], values, state.length_exponent, config.loss.length_strength)
        changes["length_exponent"] = state.length_exponent + config.loss.length_lr * slope
    return dataclasses.replace(state, **changes)


def _unaided(found: Features, plan: PlanConfig) -> np.ndarray:
    """bool[G]: successes that tell how hard the problem is.

    A hint after failing stands for a failure, since it was asked for because every plain rollout failed; the hints of
    `level` belong to the problem's state.
    """
    helped = np.array([c.startswith((HINT, EXAMPLES)) and plan.hints != "level" for c in found.conditions], bool)
    return found.correct & ~helped


def levels_moved(state: AlgoState, uids: Sequence[str], levels: int) -> AlgoState:
    """Hint levels one up or down by the accuracy of the last visit (SAGE, arXiv:2602.03143)."""
    rows = state.table.get(uids)
    moved = [hint_level_step(int(l), a, levels=levels) for l, a in zip(rows["level"], rows["accuracy"], strict=True)]
    return dataclasses.replace(state, table=state.table.put(uids, {"level": np.array(moved, np.float64)}))


def temperature_moved(state: AlgoState, sampled: Sequence[Group], plan: PlanConfig) -> dict[str, object]:
    """Moving average of the groups' diversity, and the temperature stage that follows from it."""
    some = [group for group in sampled if group.size][:DIVERSITY_GROUPS]
    seen = [diversity([t.tokens[t.policy_mask] for t in group.trajectories]) for group in some]
    if not seen:
        return {}
    average = float(np.mean(seen)) if state.diversity < 0 else 0.9 * state.diversity + 0.1 * float(np.mean(seen))
    stage = temperature_stage(average, plan.temperatures, state.temperature_stage, plan.diversity_target)
    # A new stage starts its own average, so that one low reading does not run through all temperatures.
    return {"diversity": average if stage == state.temperature_stage else -1.0, "temperature_stage": stage}


def _check_passes(
    config: MethodConfig,
    groups: Sequence[Group],
    scores: Sequence[np.ndarray] | None,
    reference: Sequence[np.ndarray] | None,
) -> None:
    count = sum(group.size for group in groups)
    if scores is None and needs_scores(config.advantage, config.loss):
        raise ValueError(
            f"advantage.score = {config.advantage.score}, loss.old_logprobs = {config.loss.old_logprobs}, "
            f"loss.mask_drift = {config.loss.mask_drift}, loss.top_entropy = {config.loss.top_entropy}: these need a "
            "scoring pass; score scoring_rows(groups) and pass the log-probabilities as scores"
        )
    if reference is None and config.loss.kl_coef:
        raise ValueError(
            f"loss.kl_coef = {config.loss.kl_coef} needs log-probabilities under a reference; pass reference, or set "
            "loss.kl_coef 0"
        )
    for name, given in (("scores", scores), ("reference", reference)):
        if given is not None and len(given) != count:
            raise ValueError(f"{name} has {len(given)} arrays for {count} trajectories; one each is wanted, in order")


def _masks(groups: Sequence[Group], rewards: Sequence[np.ndarray], config: MethodConfig) -> list[np.ndarray]:
    """bool[T] for each trajectory: the tokens that train and count."""
    masks = []
    for group, shaped in zip(groups, rewards, strict=True):
        pivot = pivot_index(shaped) if config.advantage.drop_pivot else -1
        for index, (trajectory, verdict) in enumerate(zip(group.trajectories, group.verdicts, strict=True)):
            train = index != pivot and trained(trajectory, verdict, config.loss)
            masks.append(trajectory.policy_mask if train else np.zeros_like(trajectory.policy_mask))
    return masks


def _advantages(
    groups: Sequence[Group],
    found: Sequence[Features],
    rewards: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    config: MethodConfig,
    state: AlgoState,
    rng: np.random.Generator | None,
    scores: Sequence[np.ndarray] | None,
    custom: CustomMap | None,
) -> list[np.ndarray]:
    """float32[T] for each trajectory."""
    if config.advantage.score != "none":
        return _score_advantages(groups, found, rewards, masks, config, scores)
    custom = custom or load_part("advantage.custom", config.advantage.custom)
    repeating = None
    if config.advantage.truncation_mask:
        repeating = [np.array([repeats(t.tokens[t.prompt_length :]) for t in group.trajectories]) for group in groups]
    values = batch_advantages(found, rewards, config.advantage, state, rng=rng, repeating=repeating, custom=custom)
    out = []
    for group, shaped, row in zip(groups, rewards, values, strict=True):
        spread = [np.full(t.length, a, np.float32) for t, a in zip(group.trajectories, row, strict=True)]
        if config.advantage.tree_td and not flat(shaped):
            scale = deviation(shaped, config.advantage.ddof) + config.advantage.eps
            responses = [t.tokens[t.prompt_length :] for t in group.trajectories]
            for trajectory, values_of, change in zip(
                group.trajectories, spread, tree_differences(shaped, responses), strict=True
            ):
                values_of[trajectory.prompt_length :] += change / scale
        out += spread
    return out


def _score_advantages(
    groups: Sequence[Group],
    found: Sequence[Features],
    rewards: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    config: MethodConfig,
    scores: Sequence[np.ndarray],
) -> list[np.ndarray]:
    """Coefficients of a score-based objective, so that the loss is -(1/P) sum over problems of J.

    disco and drpo score by the mean log-probability, so `loss.normalizer` sequence_mean gives the 1/n_i; rebel and reg
    by the summed log-ratio, so sequence_sum does. Both divide by B trajectories, hence the factor B / P.
    """
    average = config.advantage.score in ("disco", "drpo")
    out: list[np.ndarray] = []
    index, drift, tokens = 0, 0.0, 0
    live = max(sum(bool(mask.any()) for mask in masks), 1)
    for group, f, shaped in zip(groups, found, rewards, strict=True):
        values = []
        for trajectory in group.trajectories:
            mask, now = masks[index + len(values)], scores[index + len(values)]
            count = np.count_nonzero(mask)
            summed = float(np.sum(now, where=mask, dtype=np.float64))
            change = summed - float(np.sum(trajectory.logprobs, where=mask, dtype=np.float64))
            drift, tokens = drift - change, tokens + count
            total = summed / max(count, 1) if average else change
            values.append(total)
        c = score_based.coefficients(np.array(values), shaped, f.correct, f.lengths, config.advantage)
        scale = live / len(groups)
        out += [np.full(t.length, a * scale, np.float32) for t, a in zip(group.trajectories, c, strict=True)]
        index += len(values)
    if not average:
        return out
    # The constraint factor * mean_t(log p_old - log p) pulls each token up by factor / N; divided by the token's
    # weight 1 / (B n_i), since the loss multiplies by it.
    push = score_based.divergence_push(
        drift / max(tokens, 1), config.advantage.score_kl_delta, config.advantage.score_kl_beta
    )
    counts = [np.count_nonzero(mask) for mask in masks]
    return [a + np.float32(push * live * n / max(tokens, 1)) for a, n in zip(out, counts, strict=True)]


def _weights(
    groups: Sequence[Group],
    found: Sequence[Features],
    masks: Sequence[np.ndarray],
    config: MethodConfig,
    state: AlgoState,
    scores: Sequence[np.ndarray] | None,
) -> list[np.ndarray]:
    """float32[T] for each trajectory: factors times the normaliser of the batch, 0 off the mask."""
    counts = np.array([np.count_nonzero(mask) for mask in masks], np.int64)
    norm = normalisers(counts, config.loss)
    factors = np.ones(len(masks))
    if config.loss.length_weight == "learned":
        factors = np.concatenate(
            [length_preference(f.lengths, state.length_exponent, config.loss.length_strength) for f in found]
        )
    out = [np.multiply(mask, f, dtype=np.float32) for mask, f in zip(masks, (norm * factors).tolist(), strict=True)]
    if config.loss.mismatch != "none":
        trajectories = [t for group in groups for t in group.trajectories]
        for weights, mask, trajectory, now in zip(out, masks, trajectories, scores, strict=True):
            weights *= mismatch_weights(trajectory.logprobs, np.asarray(now), mask, config.loss).astype(np.float32)
    return out


def _row(
    trajectory: Trajectory,
    mask: np.ndarray,
    old: np.ndarray,
    advantages: np.ndarray,
    weights: np.ndarray,
    level: str,
    reference: np.ndarray | None,
) -> TrainRow:
    return TrainRow(
        tokens=trajectory.tokens,
        policy_mask=mask,
        logprobs_old=np.asarray(old, np.float32),
        advantages=advantages.astype(np.float32, copy=False),
        weights=weights.astype(np.float32, copy=False),
        ratio_segments=ratio_segments(trajectory, level),
        logprobs_ref=np.zeros(trajectory.length, np.float32)
        if reference is None
        else np.asarray(reference, np.float32),
    )
