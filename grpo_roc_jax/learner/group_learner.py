"""The learner of a method: selected groups in, an updated policy out. A run makes one of these.

    batches = learner.batches(groups, explained, run)         # scores, rows, packed on the mesh
    train, batches, metrics = learner.update(run, batches)

`learner.learner` has the policy with its programs. This module adds what a method needs: scores under other policies,
advantages and weights, rows rebuilt between optimizer steps, and the reference policy.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import jax
import numpy as np

from grpo_roc_jax.learner.learner import Learner, UpdateBatch, move_moments
from grpo_roc_jax.learner.offload import to_device, to_host
from grpo_roc_jax.learner.pack import BatchConfig, TrainBatch
from grpo_roc_jax.learner.update import OptimConfig, TrainState, trained_shardings
from grpo_roc_jax.method.compose import (
    Method,
    Scores,
    follows_policy,
    method_metrics,
    method_parts,
    needs_reference,
    needs_scores,
    optional_fields,
    reference_sync,
    renormalized,
    scoring_rows,
    supervised_rows,
    teacher_of,
    train_rows,
)
from grpo_roc_jax.method.distillation import SelfTeacher
from grpo_roc_jax.method.edit import as_opened, with_plain_prompts, with_prompt
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.model.transformer import Params
from grpo_roc_jax.process.progress import Phase, phase
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.types import Group, Metrics, TrainRow, Trajectory


class LearningConfig(Method, Protocol):
    """The sections of a configuration that the learner reads besides those of the method."""

    batch: BatchConfig
    """Layout of packed rows."""
    optim: OptimConfig
    """The optimizer."""
    sampling: Any
    """Has the `temperature` of rollouts, unless the plan sets another."""
    rollout: Any
    """Has `max_prompt_tokens`, the limit for the prompts of a teacher."""
    seed: int
    """Seed of random draws."""


class LearningRun(Protocol):
    """The state of a run that the learner reads. `warmup` also replaces `train` and `reference`."""

    train: TrainState
    reference: Any
    """Parameters of the reference policy; an empty tuple where the method needs none."""
    method: AlgoState
    step: int


PromptIds = Callable[..., Sequence[int]]
"""(problem, end of its prompt = "") -> token ids of the prompt."""


@dataclass(frozen=True, eq=False)
class SecondPolicy:
    """Another model that a method distills from: its parameters in the compute dtype, and its scoring pass."""

    params: Params
    score_batch: Callable[[Any, TrainBatch], tuple[Any, Any]]


@dataclass(frozen=True, eq=False)
class Policy:
    """What `method.edit_rows` receives of the policy that is about to be trained."""

    learner: Learner
    trained: Any
    """Parameters of the training state; `learner.full` makes the parameters of the policy from them."""
    score: Callable[[Any, Sequence[Group]], Sequence[np.ndarray]]
    """(parameters like `trained`, groups) -> float32[T] of log-probabilities for each trajectory."""
    prompt_ids: PromptIds
    """Returns the token ids of a problem's prompt."""


def mixture(params: Any, reference: Any, alpha: Any) -> Any:
    """alpha params + (1 - alpha) reference (TR-DPO, arXiv:2404.09656)."""
    return jax.tree.map(lambda new, old: alpha * new + (1 - alpha) * old, params, reference)


@dataclass(frozen=True, eq=False)
class GroupLearner:
    """Trains on the groups of a method; made by `run.components.make_learner`, or by hand for a method of your own."""

    config: LearningConfig
    learner: Learner
    """The policy: its programs, and the mesh that rows are placed on."""
    prompt_ids: PromptIds
    mixed: Callable[[Any, Any, Any], Any] = mixture
    """Computes the next reference; donates the previous one."""
    teacher: SecondPolicy | None = None
    """Another model that a method distills from."""

    def score(self, params: Any, groups: Sequence[Group], temperature: float) -> Scores:
        """Log-probabilities and entropies of every trajectory under these parameters, by the forward pass
        of training."""
        return self._passes(self.learner.full(params), None, groups, temperature)

    def _passes(self, policy: Any, score_batch: Any, groups: Sequence[Group], temperature: float) -> Scores:
        scores = Scores([], [])
        for part in split_rows(scoring_rows(groups), groups, self.config.batch.updates.parts):
            with phase("log-probabilities of the rollouts", routine=True):
                logprobs, entropies = self.learner.score_rows(policy, part, temperature, score_batch)
            scores = Scores([*scores.logprobs, *logprobs], [*scores.entropies, *entropies])
        return scores

    def drift(self, groups: Sequence[Group], run: LearningRun) -> dict[str, float]:
        """Mean absolute change of the log-probability of a token in nats, by uid, over the samples that the method
        remembers of these problems (SPO); empty for methods that remember none."""
        remembered = [part.earlier(groups, run.method) for part in method_parts(self.config)]
        if all(part is None for part in remembered):
            return {}
        earlier, temperature = [g for part in remembered for g in part or ()], temperature_of(self.config, run)
        if not earlier:  # compiles in the first step what later steps need
            self.learner.score_batch(self.learner.full(run.train.params), self.on_mesh([], temperature).packed)
        scores = self.score(run.train.params, earlier, temperature).logprobs
        moved = {}
        for group, now in zip(earlier, scores, strict=True):
            (then,) = group.trajectories
            moved[group.problem.uid] = float(np.abs(now - then.logprobs)[then.policy_mask].mean())
        return moved

    def rows(
        self, groups: Sequence[Group], run: LearningRun, before: Sequence[TrainRow] = ()
    ) -> tuple[list[TrainRow], Metrics]:
        """Returns (the rows of these groups with the scores that the method needs, metrics of them). `before` are the
        same rows as of the first update."""
        if not groups:
            return [], {"time/rows_s": 0.0}
        config, temperature = self.config, temperature_of(self.config, run)
        scores = Scores()
        if needs_scores(config):
            scores = self.score(run.train.params, groups, temperature)
        if scored := [row.scored[0] for row in before if row.scored is not None]:
            scores = replace(scores, first=scored)
        elif before and config.surrogate.scored_ratio:
            scores = replace(scores, first=[row.logprobs_old for row in before])
        scores = self.with_teacher(self._with_reference(scores, groups, run), groups, run)
        begun = time.perf_counter()
        rng = np.random.default_rng([config.seed, run.step, 1])
        rows = train_rows(groups, config, run.method, rng=rng, scores=scores)
        edit = resolve("method.edit_rows", config.method.edit_rows)
        if edit is not None:

            def score(params: Any, some: Sequence[Group]) -> Sequence[np.ndarray]:
                return self.score(params, some, temperature).logprobs

            policy = Policy(self.learner, run.train.params, score, self.prompt_ids)
            rows = checked_rows(edit(rows, groups, policy), rows)
        if scores.logprobs is not None and scores.entropies is not None:
            scored_rows = zip(rows, scores.logprobs, scores.entropies, strict=True)
            rows = [replace(row, scored=(logprobs, entropies)) for row, logprobs, entropies in scored_rows]
        measured = {"time/rows_s": time.perf_counter() - begun}
        if scores.logprobs is not None and config.surrogate.scored_ratio and not before:
            measured |= sampler_gap(rows, groups, scores.logprobs)
        for name in ("reference", "teacher"):
            if (other := getattr(scores, name)) is not None:
                measured[f"update/kl_{name}"] = mean_gap(rows, other)
        if scores.teacher is not None:
            measured["update/teacher_rows"] = float(np.mean([now is not None for now in scores.teacher]))
        return rows, measured | method_metrics(groups, config, run.method, scores)

    def batches(self, groups: Sequence[Group], explained: Sequence[Group], run: LearningRun) -> list[UpdateBatch]:
        """One packed batch on the mesh for each optimizer step of this rollout batch; empty if nothing trains.

        Rows can differ from what was sampled: Guide-GRPO trains hinted responses under the plain prompt, and ExPO adds
        explanations as supervised rows. These all belong to the first optimizer step, whose policy has scored them.
        """
        config, temperature = self.config, temperature_of(self.config, run)
        updates = config.batch.updates
        extra = self.explanation_rows(explained, run) if explained else []
        if not groups:
            return [self.on_mesh([], temperature, extra)] if extra else []
        groups = self._as_trained(groups)
        rows, measured = self.rows(groups, run)
        begun = time.perf_counter()
        parts = split_rows(rows, groups, updates.parts)
        if len(parts) > 1:
            sizes = [[group.size for group in some] for some in parts_of(groups, updates.parts)]
            parts = renormalized(parts, config.weights.normalizer, sizes)
            if follows_policy(config):  # coefficients depend on what they are computed with, as in later updates
                parts[0] = self.rows(parts_of(groups, updates.parts)[0], run)[0]
        measured["time/rows_s"] += time.perf_counter() - begun
        batches = [self.on_mesh(part, temperature) for part in parts]
        first = replace(self.on_mesh(parts[0], temperature, extra) if extra else batches[0], measured=measured)
        if follows_policy(config):
            group_parts = parts_of(groups, updates.parts)
            batches = [replace(batch, groups=some) for batch, some in zip(batches, group_parts, strict=True)]
        return [first, *(batches * updates.epochs)[1:]]

    def on_mesh(self, rows: Sequence[TrainRow], temperature: float, extra: Sequence[TrainRow] = ()) -> UpdateBatch:
        """See `Learner.on_mesh`."""
        return self.learner.on_mesh(rows, temperature, extra)

    def update(self, run: LearningRun, batches: Sequence[UpdateBatch]) -> tuple[TrainState, list[UpdateBatch], Metrics]:
        """(training state after the optimizer steps, the batches as they were trained, metrics).

        Metrics are means over the steps; the log-probability gap is that of the first, since later steps differ from
        the sampler by design. The buffers of `run.train` are donated.
        """
        with phase("update", steps=len(batches), routine=True, unit="optimizer step") as under_way:
            return self._update(run, batches, under_way)

    def _update(
        self, run: LearningRun, batches: Sequence[UpdateBatch], under_way: Phase
    ) -> tuple[TrainState, list[UpdateBatch], Metrics]:
        """`update` within its phase."""
        started = time.perf_counter()
        if not batches:
            return run.train, [], {"update/skipped": 1.0, "time/update_s": 0.0}
        train, moved = run.train, {}
        if self.config.optim.offload:
            train, moved = move_moments(train, to_device, "to_device")
        trained: list[UpdateBatch] = []
        collected: list[Metrics] = []
        for number, batch in enumerate(batches):
            under_way.at(number)
            if batch.groups:  # its rows depend on the optimizer steps before it
                rows, measured = self.rows(batch.groups, replace(run, train=train), batch.rows)
                rows = [self._rebuilt(row, before) for row, before in zip(rows, batch.rows, strict=True)]
                batch = replace(self.on_mesh(rows, batch.temperature), measured={**batch.measured, **measured})
            train, metrics = self.learner.optimizer_step(train, batch.packed)
            numbers = {name: float(value) for name, value in self.learner.fetched(metrics).items()}
            collected.append(numbers | {"update/fill": batch.placement.fill, "update/signal": batch.signal})
            trained.append(batch)
        if self.config.optim.offload:
            train, back = move_moments(train, to_host, "to_host")
            moved |= back
        merged = {name: float(np.mean([metrics[name] for metrics in collected])) for name in collected[0]}
        merged |= {name: value for name, value in collected[0].items() if name.startswith("loss/logprob_gap")}
        for name in {name: None for batch in trained for name in batch.measured}:
            merged[name] = float(np.mean([batch.measured[name] for batch in trained if name in batch.measured]))
        spent = sum(batch.measured.get("time/rows_s", 0.0) for batch in trained)
        times = {"time/update_s": time.perf_counter() - started, "time/rows_s": spent}
        return train, trained, merged | moved | times

    def warmup(self, run: LearningRun) -> None:
        """Compiles the programs of training by running them in a way that changes nothing."""
        with phase("compiling the update", once=True):
            run.train, _, _ = self._update(run, [self.on_mesh([], temperature_of(self.config, run))], Phase("update"))
        if reference_sync(self.config)[0]:
            run.reference = self.mixed(run.train.params, run.reference, np.float32(0.0))

    def next_reference(self, run: LearningRun) -> Any:
        """The reference after a step; it moves to the policy as `sync_every` says."""
        every, mix = reference_sync(self.config)
        if not every or run.step % every:
            return run.reference
        return self.mixed(run.train.params, run.reference, np.float32(mix))

    def _rebuilt(self, row: TrainRow, before: TrainRow) -> TrainRow:
        """A row with new scores. Its importance ratio remains relative to the policy of the first optimizer step.
        Advantages that do not depend on scores and the entropy bonus also stay, since their statistics are over the
        whole rollout batch."""
        scored = self.config.advantage.follows_policy
        advantages = row.advantages if scored else before.advantages
        bonus = before.entropy_coefficient
        return replace(row, logprobs_old=before.logprobs_old, advantages=advantages, entropy_coefficient=bonus)

    def _with_reference(self, scores: Scores, groups: Sequence[Group], run: LearningRun) -> Scores:
        if not needs_reference(self.config):
            return scores
        reference_scores = self.score(run.reference, groups, temperature_of(self.config, run))
        return replace(scores, reference=reference_scores.logprobs)

    def with_teacher(self, scores: Scores, groups: Sequence[Group], run: LearningRun) -> Scores:
        """The scores with those of another model, or with those of this model under prompts that show more."""
        part, temperature = teacher_of(self.config), temperature_of(self.config, run)
        if part is None:
            return scores
        if self.teacher is not None:
            teacher_scores = self._passes(self.teacher.params, self.teacher.score_batch, groups, temperature)
            return replace(scores, teacher=teacher_scores.logprobs)
        limits = self.config.rollout.max_prompt_tokens, self.config.batch.row_length
        shown = rows_shown_more(part, groups, self.prompt_ids, *limits)
        rest = iter(shown)
        moved = [replace(g, trajectories=tuple(next(rest) or t for t in g.trajectories)) for g in groups]
        params = run.reference if part.needs_reference else run.train.params
        teacher_scores = self.score(params, moved, temperature).logprobs
        prompt_lengths = [t.prompt_length for g in groups for t in g.trajectories]
        rows = zip(teacher_scores, shown, prompt_lengths, strict=True)
        after = [np.append(np.zeros(n, np.float32), x[new.prompt_length :]) if new else None for x, new, n in rows]
        return replace(scores, teacher=after)

    def _as_trained(self, groups: Sequence[Group]) -> Sequence[Group]:
        """The groups under the prompts that the loss reads: for Guide-GRPO, hinted responses under the plain prompt."""
        if not self.config.plan.second.trains_plain:
            return groups
        return with_plain_prompts(groups, self.prompt_ids)

    def explanation_rows(self, explained: Sequence[Group], run: LearningRun) -> list[TrainRow]:
        """Supervised rows of successful explanations under the plain prompt (ExPO)."""
        groups = with_plain_prompts(explained, self.prompt_ids)
        scores = self.score(run.train.params, groups, temperature_of(self.config, run))
        weight = self.config.plan.second.supervised_weight(run.method.step)
        rows = supervised_rows(groups, self._with_reference(scores, groups, run), weight, self.config.surrogate)
        # All rows have the leaves of this method, so that a step with explanations alone runs the same program.
        filled = optional_fields(self.config)
        bonus = 0.0 if "entropy_coefficient" in filled else None
        marked = [np.zeros(row.length, bool) if "marked" in filled else None for row in rows]
        return [replace(row, marked=m, entropy_coefficient=bonus) for row, m in zip(rows, marked, strict=True)]


def reference_mixer(learner: Learner) -> Callable[[Any, Any, Any], Any]:
    """`mixture` as a program on the mesh of a learner; it donates the previous reference."""
    shardings = trained_shardings(learner.model, learner.mesh, learner.lora)
    return jax.jit(mixture, donate_argnums=1, out_shardings=shardings)


def temperature_of(config: LearningConfig, run: LearningRun) -> float:
    """Sampling temperature of this step's rollouts."""
    planned = config.plan.temperature.now(run.method)
    return config.sampling.temperature if planned is None else planned


def checked_rows(rows: Sequence[TrainRow], like: Sequence[TrainRow]) -> list[TrainRow]:
    """Checks the rows that the user's function `method.edit_rows` returned.

    Raises:
        ValueError: Their number or lengths differ from those of `like`, or a value is not finite.
    """
    if [row.length for row in rows] != [row.length for row in like]:
        raise ValueError(
            f"method.edit_rows returned {len(rows)} rows; it must return {len(like)} of the same lengths, in order"
        )
    if not all(np.isfinite(row.weights).all() and np.isfinite(row.advantages).all() for row in rows):
        raise ValueError("method.edit_rows returned weights or advantages that are not finite")
    return list(rows)


def mean_gap(rows: Sequence[TrainRow], other: Sequence[np.ndarray | None]) -> float:
    """Mean of log p_old - log p_other in nats, over the trained tokens of the rows that were scored."""
    pairs = [(row, now) for row, now in zip(rows, other, strict=True) if now is not None]
    gaps = [np.sum(row.logprobs_old - now, where=row.policy_mask, dtype=np.float64) for row, now in pairs]
    return float(sum(gaps) / max(sum(np.count_nonzero(row.policy_mask) for row, _ in pairs), 1))


def sampler_gap(rows: Sequence[TrainRow], groups: Sequence[Group], scored: Sequence[np.ndarray]) -> Metrics:
    """The gap of the log-probabilities that the sampler recorded to those of a scoring pass, over the trained tokens.
    The loss measures it to the log-probabilities that ratios are taken against, which may be those of the pass."""
    recorded = [trajectory.logprobs for group in groups for trajectory in group.trajectories]
    gaps = [np.abs(now - then)[row.policy_mask] for row, now, then in zip(rows, scored, recorded, strict=True)]
    every = np.concatenate([np.zeros(0, np.float32), *gaps]).astype(np.float64)
    if not len(every):
        return {}
    return {"loss/logprob_gap_mean": float(every.mean()), "loss/logprob_gap_max": float(every.max())}


def split_rows(rows: Sequence[TrainRow], groups: Sequence[Group], parts: int) -> list[list[TrainRow]]:
    """Splits the rows into `parts` parts of consecutive whole groups, or fewer if there are fewer groups."""
    edges = np.cumsum([0, *(sum(group.size for group in some) for some in parts_of(groups, parts))])
    return [list(rows[low:high]) for low, high in pairwise(edges)]


def parts_of(groups: Sequence[Group], parts: int) -> list[Sequence[Group]]:
    """Splits the groups into at most `parts` consecutive parts, each with at least one row."""
    cuts = [len(groups) * i // parts for i in range(parts + 1)]
    pieces = [groups[low:high] for low, high in pairwise(cuts)]
    return [piece for piece in pieces if any(group.size for group in piece)]


def rows_shown_more(
    part: SelfTeacher, groups: Sequence[Group], prompt_ids: PromptIds, longest_prompt: int, longest_row: int
) -> list[Trajectory | None]:
    """Each trajectory after the prompt of its teacher; None where that shows no more, or where the prompt or the row
    would be too long."""
    shown: list[Trajectory | None] = []
    for group in groups:
        ends = [(t.opening, part.suffix(group, i)) for i, t in enumerate(group.trajectories)]
        prompts = {end: prompt_ids(as_opened(group.problem, end[0]), end[1]) for end in set(ends) if end[1]}
        for trajectory, end in zip(group.trajectories, ends, strict=True):
            prompt = prompts.get(end, ())
            row = trajectory.length - trajectory.prompt_length + len(prompt)
            fits = 0 < len(prompt) <= longest_prompt and row <= longest_row
            shown.append(with_prompt(trajectory, np.asarray(prompt, np.int32)) if fits else None)
    return shown
