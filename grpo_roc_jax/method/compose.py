"""What the training loop calls: `resample_group`, `train_rows`, `method_metrics`, `next_state`.

Everything that a method does on the host meets here, in the order in which it happens: selection on raw rewards,
shaping, advantages, masks, token weights with the normalizer of the whole optimizer batch.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from grpo_roc_jax import checks
from grpo_roc_jax.method.advantage import Adjustment, Advantage
from grpo_roc_jax.method.config import MethodConfig
from grpo_roc_jax.method.edit import take_trajectories
from grpo_roc_jax.method.features import Features, features
from grpo_roc_jax.method.part import MethodBatch, Part, parts_of, reward_weights
from grpo_roc_jax.method.planning import PlanConfig, unaided
from grpo_roc_jax.method.roc import Selection, Selector, select_group
from grpo_roc_jax.method.shaping import Shaping, shape_rewards
from grpo_roc_jax.method.state import AlgoState, begun, visited
from grpo_roc_jax.method.surrogate import Surrogate
from grpo_roc_jax.method.weights import (
    Normalizer,
    WeightsConfig,
    importance_weights,
    ratio_segments,
    token_weights,
    trained_tokens,
)
from grpo_roc_jax.types import Group, Metrics, TrainRow, Trajectory


class Method(Protocol):
    """The sections of a configuration that make up its method."""

    group: Any
    """Has `size`, the number of trajectories of a problem that are trained on."""
    reward: Any
    """Has `weights`, the factor of each reward function; may be missing if rewards come from elsewhere."""
    plan: PlanConfig
    resample: Selector
    shaping: tuple[Shaping, ...]
    advantage: Advantage
    weights: WeightsConfig
    surrogate: Surrogate
    method: MethodConfig


SECTIONS = "plan resample shaping advantage weights surrogate"
GROUPS = "a list of Groups, such as [group]"
STATE = "an AlgoState: initial_state(config), or what next_state returned"
SCORES = "Scores(*learner.score(scoring_rows(groups)))"


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Results of scoring passes over the trajectories of an optimizer step: float32[T] each, groups in order.
    `Scores(*learner.score(scoring_rows(groups)))` are those of the policy about to be updated."""

    logprobs: Sequence[np.ndarray] | None = None
    """Log-probabilities under the parameters about to be updated, in nats."""
    entropies: Sequence[np.ndarray] | None = None
    """Entropies of the same policy, in nats."""
    reference: Sequence[np.ndarray] | None = None
    """Log-probabilities under the reference policy, in nats."""
    teacher: Sequence[np.ndarray | None] | None = None
    """Log-probabilities under the teacher, in nats; None for a trajectory that the teacher does not score."""
    first: Sequence[np.ndarray] | None = None
    """Log-probabilities before the first update of the rollout batch, in nats, if `logprobs` were computed later."""


def method_parts(method: Method) -> list[Part]:
    """Every part of a method, including parts inside other parts."""
    sections = (method.plan, method.resample, method.shaping, method.advantage, method.weights, method.surrogate)
    return list(parts_of(sections))


def needs_scores(method: Method) -> bool:
    """Whether the update must be preceded by a scoring pass over its trajectories."""
    return any(part.needs_scores for part in method_parts(method))


def follows_policy(method: Method) -> bool:
    """Whether the rows of later optimizer steps must be rebuilt with scores of the policy that these steps change."""
    return any(part.follows_policy for part in method_parts(method))


def needs_reference(method: Method) -> bool:
    """Whether log-probabilities under a reference policy are needed."""
    return any(part.needs_reference for part in method_parts(method))


def reference_sync(method: Method) -> tuple[int, float]:
    """(number of steps after which the reference moves to the policy, 0 for never; weight of the policy in that move).

    Raises:
        ValueError: Two parts of the method disagree; there is only one reference.
    """
    syncs = {(p.sync_every, p.sync_mix if p.sync_every else 1.0) for p in method_parts(method) if p.needs_reference}
    if len(syncs) > 1:
        raise ValueError(
            f"sync_every, sync_mix = {sorted(syncs)}: there is one reference, so set them alike everywhere"
        )
    return next(iter(syncs), (0, 1.0))


def teacher_of(method: Method) -> Any:
    """The part of the method that reads a teacher; None if there is none.

    Raises:
        ValueError: There are two.
    """
    teachers = [part for part in method_parts(method) if part.needs_teacher]
    if len(teachers) > 1:
        raise ValueError(
            f"{', '.join(part.prefix for part in teachers)}: a method has one teacher; leave out the others"
        )
    return teachers[0] if teachers else None


def initial_state(method: Method) -> AlgoState:
    """The state before the first step."""
    checks.expect_sections(method, SECTIONS)
    return AlgoState(memory={name: v for part in method_parts(method) for name, v in part.initial_memory().items()})


def resample_group(group: Group, method: Method, rng: np.random.Generator) -> Selection:
    """Which of a problem's scored trajectories train, with a reason for each.

    Raises:
        TypeError: `rng` is a seed, or something else that is no generator; or another argument is of another type.
    """
    checks.expect(group, Group, "group", "a Group, such as scorer(problem, trajectories) returns")
    checks.expect_sections(method, "group resample")
    checks.expect_generator(rng)
    return select_group(group, method.group.size, method.resample, rng)


def subset(group: Group, selection: Selection) -> Group:
    """The group of the selected trajectories."""
    checks.expect(selection, Selection, "selection", "what resample(group, config, rng) returned")
    return take_trajectories(group, selection.indices)


def scoring_rows(groups: Sequence[Group]) -> list[TrainRow]:
    """Rows for a scoring pass: weights and advantages 0, in the order of `train_rows`."""
    return [
        train_row(t, t.policy_mask, t.logprobs, np.zeros(t.length), np.zeros(t.length), "token", None)
        for group in checks.listed(groups, Group, "groups", GROUPS)
        for t in group.trajectories
    ]


def train_rows(
    groups: Sequence[Group],
    method: Method,
    state: AlgoState,
    *,
    rng: np.random.Generator | None = None,
    scores: Scores | None = None,
) -> list[TrainRow]:
    """One row for every trajectory of the optimizer batch, groups in order, with advantages and weights filled in.

    The weights contain the normalizer of exactly these groups: pass all groups of one optimizer step, and no others.

    Args:
        groups: After selection.
        method: Its shaping, advantage, weights and surrogate are read.
        state: Trackers, dual variables, learned scalars.
        rng: Needed only by adjustments that draw at random.
        scores: Results of scoring passes, where the method needs them.

    Raises:
        ValueError: A scoring pass that the method needs is missing.
        TypeError: An argument is of another type.
    """
    checks.expect_sections(method, SECTIONS)
    checks.expect(state, AlgoState, "state", STATE)
    checks.expect(scores, Scores | None, "scores", SCORES)
    groups, scores = checks.listed(groups, Group, "groups", GROUPS), scores or Scores()
    groups = [group for group in groups if group.size]
    if not groups:
        return []
    _check_passes(method, groups, scores)
    trajectories = [t for group in groups for t in group.trajectories]
    old = scores.logprobs if method.surrogate.scored_ratio else [t.logprobs for t in trajectories]
    passes = {"reference": scores.reference, "teacher": scores.teacher}
    feature_list = _with_gaps([features(group) for group in groups], groups, old, passes)
    rewards = shape_rewards(feature_list, method.shaping, state)
    masks = trained_tokens(groups, rewards, method.weights.masks)
    first = scores.logprobs if scores.first is None else scores.first
    weights = reward_weights(method)
    batch = MethodBatch(
        groups, feature_list, rewards, masks, state, rng, scores.logprobs, scores.entropies, first, weights
    )
    advantages = method.advantage.tokens(batch)
    for mask in method.weights.masks:
        masks = mask.tokens(masks, advantages, batch)
    batch = dataclasses.replace(batch, masks=masks)
    importance = importance_weights(batch, method.weights.factors)
    masks = [mask & (value != 0) for mask, value in zip(masks, importance, strict=True)]
    batch = dataclasses.replace(batch, masks=masks)
    weights = token_weights(batch, method.weights)
    marks = method.surrogate.marked(batch, advantages)
    bonus = entropy_coefficient(groups, method, state)
    # Divergence, entropy and penalties are weighted too, but not corrected; what is corrected is linear in A.
    if method.surrogate.kl.needs_reference or bonus is not None or not method.surrogate.linear:
        advantages = [a * value for a, value in zip(advantages, importance, strict=True)]
    else:
        weights = [w * value for w, value in zip(weights, importance, strict=True)]
    reference = [None] * len(masks) if scores.reference is None else scores.reference
    level = method.surrogate.shared_level
    parts = zip(trajectories, masks, old, advantages, weights, reference, strict=True)
    rows = [train_row(t, mask, before, a, w, level, ref) for t, mask, before, a, w, ref in parts]
    if marks is None and bonus is None:
        return rows
    pairs = zip(rows, marks or [None] * len(rows), strict=True)
    return [dataclasses.replace(row, marked=mark, entropy_coefficient=bonus) for row, mark in pairs]


def adjustments(method: Method) -> Sequence[Adjustment]:
    """The adjustments that follow the estimator, in order."""
    return getattr(method.advantage, "adjust", ())


def entropy_coefficient(groups: Sequence[Group], method: Method, state: AlgoState) -> float | None:
    """Weight of the policy's entropy in the loss; None in a method without such a bonus."""
    coefficients = [step.entropy_coefficient(groups, state) for step in adjustments(method)]
    coefficients = [value for value in coefficients if value is not None]
    return sum(coefficients) if coefficients else None


def optional_fields(method: Method) -> tuple[str, ...]:
    """The optional fields of a `TrainRow` that this method fills."""
    names = ["marked"] if type(method.surrogate).marked is not Surrogate.marked else []
    unset = Adjustment.entropy_coefficient
    bonus = any(type(step).entropy_coefficient is not unset for step in adjustments(method))
    return (*names, "entropy_coefficient") if bonus else tuple(names)


def _with_gaps(
    feature_list: list[Features],
    groups: Sequence[Group],
    old: Sequence[np.ndarray],
    passes: Mapping[str, Sequence[np.ndarray | None] | None],
) -> list[Features]:
    """The features with `gaps` to the policies of these passes."""
    for name, scored in passes.items():
        if scored is None:
            continue
        pairs = zip(old, scored, strict=True)
        each = iter([np.asarray(before, np.float64) - (before if now is None else now) for before, now in pairs])
        gaps = [tuple(next(each)[t.policy_mask] for t in group.trajectories) for group in groups]
        feature_list = [
            dataclasses.replace(f, gaps=f.gaps | {name: token_gaps})
            for f, token_gaps in zip(feature_list, gaps, strict=True)
        ]
    return feature_list


def supervised_rows(groups: Sequence[Group], scores: Scores, weight: float, surrogate: Surrogate) -> list[TrainRow]:
    """Rows whose gradient is that of weight * mean over trajectories of the mean negative log-likelihood.

    The ratio is taken against the current log-probabilities, so it is 1 and every surrogate has the gradient of -log p
    at advantage 1. Append these rows to those of `train_rows`; they have their own normalizer.

    Args:
        groups: Correct explanations under the plain prompt (ExPO, arXiv:2507.02834); others would teach errors.
        scores: Passes over these trajectories; with `reference` if the surrogate has a divergence term.
        weight: Weight of the term in the loss.
        surrogate: Determines which tokens share an importance ratio.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    reference = [None] * len(trajectories) if scores.reference is None else scores.reference
    rows = []
    for trajectory, now, ref in zip(trajectories, scores.logprobs, reference, strict=True):
        each = weight / (len(trajectories) * max(int(trajectory.policy_mask.sum()), 1))
        weights = np.where(trajectory.policy_mask, each, 0.0)
        ones, mask = np.ones(trajectory.length), trajectory.policy_mask
        rows.append(train_row(trajectory, mask, now, ones, weights, surrogate.shared_level, ref))
    return rows


def renormalized(
    parts: Sequence[Sequence[TrainRow]], normalizer: Normalizer, sizes: Sequence[Sequence[int]]
) -> list[list[TrainRow]]:
    """Divides an optimizer batch into parts, each with a normalizer of its own, for several updates per rollout batch.

    Args:
        parts: Together the rows that `train_rows` returned, in order.
        normalizer: Normalizer of the configuration.
        sizes: Number of trajectories of each group of each part.
    """
    overall = normalizer(_counts([row for part in parts for row in part]), [n for part in sizes for n in part])
    out, first = [], 0
    for part, group_sizes in zip(parts, sizes, strict=True):
        before, after = overall[first : first + len(part)], normalizer(_counts(part), group_sizes)
        scale = [new / old if old else 0.0 for new, old in zip(after, before, strict=True)]
        rescaled = [(row.weights * factor).astype(np.float32) for row, factor in zip(part, scale, strict=True)]
        out.append([dataclasses.replace(row, weights=w) for row, w in zip(part, rescaled, strict=True)])
        first += len(part)
    return out


def _counts(rows: Sequence[TrainRow]) -> np.ndarray:
    return np.array([row.policy_mask.sum() for row in rows])


def next_state(
    sampled: Sequence[Group],
    trained: Sequence[Group],
    method: Method,
    state: AlgoState,
    drift: Mapping[str, float] | None = None,
) -> AlgoState:
    """The state after a step: the success table from everything sampled, and what the parts of the method remember.

    Args:
        sampled: All scored groups of the step, before selection.
        trained: The groups that were trained on.
        method: Its plan and the parts with a memory are read.
        state: State before the step.
        drift: By uid, how far the policy has moved from remembered samples; see `Part.earlier`.
    """
    checks.expect_sections(method, SECTIONS)
    checks.expect(state, AlgoState, "state", STATE)
    sampled, trained = (checks.listed(groups, Group, "groups", GROUPS) for groups in (sampled, trained))
    feature_list, parts = [features(group).attempts() for group in sampled], method_parts(method)
    uids, decay = [f.uid for f in feature_list], method.method.tracker_decay
    for part in parts:
        decay = part.forgetting(decay, uids, drift or {})
    state = visited(
        begun(state, [group.problem for group in sampled]),
        uids,
        np.array([unaided(f, method.plan).sum() for f in feature_list], np.float64),
        np.array([f.size for f in feature_list], np.float64),
        decay,
    )
    state = method.plan.condition.next_table(uids, state)
    memory = dict(state.memory)
    for part in parts:
        memory |= part.next_memory(sampled, trained, method, state)
    return dataclasses.replace(state, step=state.step + 1, memory=memory)


def method_metrics(groups: Sequence[Group], method: Method, state: AlgoState, scores: Scores) -> Metrics:
    """Metrics that the parts of a method compute from the trajectories that a step trains on."""
    masks = [t.policy_mask for group in groups for t in group.trajectories]
    first = scores.logprobs if scores.first is None else scores.first
    batch = MethodBatch(groups, (), (), masks, state, None, scores.logprobs, scores.entropies, first)
    parts = method_parts(method)
    common = {part.common_metrics: None for part in parts if part.common_metrics}  # each function once, in order
    measured = [*(measure(batch) for measure in common), *(part.metrics(batch) for part in parts)]
    return {name: value for values in measured for name, value in values.items()}


def _check_passes(method: Method, groups: Sequence[Group], scores: Scores) -> None:
    teacher_of(method)  # raises if there are two
    for name, needs, message in (
        ("logprobs", "needs_scores", f": a scoring pass must come first; pass scores={SCORES}"),
        ("reference", "needs_reference", " needs log-probabilities under a reference; pass Scores(reference=...)"),
        ("teacher", "needs_teacher", " needs log-probabilities under a teacher; pass Scores(teacher=...)"),
    ):
        asking = [part.prefix for part in method_parts(method) if getattr(part, needs)]
        if asking and getattr(scores, name) is None:
            raise ValueError(f"{', '.join(asking)}{message}")
    lengths = [trajectory.length for group in groups for trajectory in group.trajectories]
    for name, arrays in vars(scores).items():
        checks.check_scores(name, arrays, lengths)


def train_row(
    trajectory: Trajectory,
    mask: np.ndarray,
    old: np.ndarray,
    advantages: np.ndarray,
    weights: np.ndarray,
    level: str,
    reference: np.ndarray | None,
) -> TrainRow:
    """A trajectory with what training needs of each token; `level` is the one at which a surrogate takes ratios."""
    zeros = np.zeros(trajectory.length, np.float32)
    return TrainRow(
        tokens=trajectory.tokens,
        policy_mask=mask,
        logprobs_old=np.asarray(old, np.float32),
        advantages=advantages.astype(np.float32, copy=False),
        weights=weights.astype(np.float32, copy=False),
        ratio_segments=ratio_segments(trajectory, level),
        logprobs_ref=zeros if reference is None else np.asarray(reference, np.float32),
        temperature=trajectory.temperature,
        routes=trajectory.routes,
        parts=trajectory.parts,
    )
