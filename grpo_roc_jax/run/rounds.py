"""The rollouts of a step: problems are drawn, rolled out in the waves that the plan asks for, and merged into groups.

A step has one round, or several under dynamic sampling. A plain method has one wave of equal requests, and its round is
a single call of the sampler.
"""

import functools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.method.planning import Wave, choose_problems, first_wave, gathered, next_wave, with_suffix
from grpo_roc_jax.method.roc import Selection
from grpo_roc_jax.method.shaping import prompt_suffix
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.record.metrics import aggregate
from grpo_roc_jax.rollout.collect import opening_ids
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.rollout.records import FailureCount, RunOptions
from grpo_roc_jax.run.demonstrate import with_demonstration
from grpo_roc_jax.run.sample import GroupSampler, PartialGroup, ScoredRollouts, merge_failures, sample_requests
from grpo_roc_jax.run.statistics import describe_unscored, rollout_metrics, selection_metrics
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.text.tokenizer import Tokenizer
from grpo_roc_jax.types import PLAIN, Group, Metrics, Problem, RolloutRequest, Trajectory, traits_of

THOUGHT_CLOSE = "</reason>"


@dataclass(frozen=True, eq=False)
class StepSamples:
    """What was sampled for a training step, or in one of its rounds."""

    groups: tuple[Group, ...] = ()
    """The groups that selection sees: merged, one for each problem, then completed groups of earlier steps, all after
    the user's edit and with demonstrations."""
    selections: tuple[Selection, ...] = ()
    """One for each group, after selection."""
    waves: tuple[ScoredRollouts, ...] = ()
    rolled: tuple[Group, ...] = ()
    """`groups` as they were sampled, before the edit and without demonstrations. Sampling metrics are computed from
    these."""
    outside: tuple[Group, ...] = ()
    """Scored trajectories that are in no group any more: replaced failures, drafts, written hints, explanations."""
    explanations: tuple[Group, ...] = ()
    """The successful rollouts among those that saw the answer; they train as supervised rows."""
    partial: tuple[PartialGroup, ...] = ()
    """Groups with rows that the step's deadline cut, for the next round or step; `groups` contains none of them."""
    skipped: int = 0
    """Number of requests left out because their extended prompt would not fit."""
    plan_s: float = 0.0
    """Seconds of a round without those of sampling and scoring."""
    select_s: float = 0.0

    @property
    def sampled(self) -> int:
        """Number of trajectories rolled out."""
        return sum(wave.stats.rollouts for wave in self.waves)

    @property
    def failures(self) -> Mapping[str, FailureCount]:
        """Number of rollouts that ended by failures of environments or agents, by kind of failure."""
        return merge_failures(wave.stats.failures for wave in self.waves)

    @property
    def counts(self) -> Counter[str]:
        """Number of trajectories by verdict status, including removed ones."""
        return sum((Counter(wave.counts) for wave in self.waves), Counter())

    @property
    def unscored(self) -> str:
        """Why no trajectory has a score, with the reward functions that caused it; empty if one has a score."""
        names = sum((Counter(wave.unscored) for wave in self.waves), Counter())
        return describe_unscored(self.counts, names, [fault for wave in self.waves for fault in wave.faults])

    def metrics(self) -> Metrics:
        """Metrics of sampling, planning and selection."""
        engine = aggregate([w.stats.metrics() for w in self.waves], [w.stats.rollouts for w in self.waves])
        sampled_and_selected = rollout_metrics(self.rolled, self.counts) | selection_metrics(
            self.groups, self.selections
        )
        plan = {
            "plan/waves": float(len(self.waves)),
            "plan/outside": float(sum(group.size for group in self.outside)),
            "plan/explained": float(sum(group.size for group in self.explanations)),
            "plan/skipped": float(self.skipped),
            "time/plan_s": self.plan_s,
            "time/select_s": self.select_s,
        }
        return engine | sampled_and_selected | plan


def merge_rounds(rounds: Sequence[StepSamples]) -> StepSamples:
    """Merges the rounds of a step. Only the last one can leave partial groups."""

    def every(name: str) -> tuple:
        return tuple(item for round_ in rounds for item in getattr(round_, name))

    return StepSamples(
        every("groups"),
        every("selections"),
        every("waves"),
        every("rolled"),
        every("outside"),
        every("explanations"),
        rounds[-1].partial,
        sum(round_.skipped for round_ in rounds),
        sum(round_.plan_s for round_ in rounds),
        sum(round_.select_s for round_ in rounds),
    )


def draw_problems(
    config: Config, stream: Iterator[list[Problem]], state: AlgoState, rng: np.random.Generator
) -> list[Problem]:
    """The problems of a round: the next ones of the stream, or a choice among a multiple of them, see
    `plan.problems`."""
    pool = [problem for _ in range(config.plan.problems.pool) for problem in next(stream)]
    return [pool[i] for i in choose_problems(pool, config.group.problems, config.plan, state, rng)]


def numbered(requests: Sequence[RolloutRequest], first_place: int, sampled: Counter[int]) -> list[RolloutRequest]:
    """Numbers the requests of a round: their places start at `first_place`, their samples after the `sampled` ones of
    each problem. `sampled` is updated."""
    numbered_requests = []
    for request in requests:
        numbered_requests.append(
            replace(request, place=first_place + request.place, first_sample=sampled[request.place])
        )
        sampled[request.place] += request.count
    return numbered_requests


def run_round(
    config: Config,
    sampling: GroupSampler,
    weights: SamplerParams,
    problems: Sequence[Problem],
    state: AlgoState,
    rng: np.random.Generator,
    *,
    step: int,
    first_place: int = 0,
    partial: Sequence[PartialGroup] = (),
) -> StepSamples:
    """Rolls the problems out, wave after wave, until the plan asks for no more.

    Completed groups of earlier steps are appended to those of the problems.

    Args:
        config: Configuration of the run.
        sampling: Group sampler of the run.
        weights: From `engine.publish`.
        problems: The problems of the round.
        state: State of the method.
        rng: Generator of the planner.
        step: Training step.
        first_place: Number of problems already sampled in this step.
        partial: Groups to continue with the first wave.
    """
    begun, sampling_s, chat = time.perf_counter(), 0.0, sampling.sampler.chat
    thought = functools.partial(thought_length, tokenizer=chat.tokenizer)
    wave = Wave(problems, config.resample.sampled(config.group.size), state, rng, thought=thought)
    groups: list[Group] = []
    explained: list[Group] = []
    notes: dict[int, str] = {}
    waves: list[ScoredRollouts] = []
    sampled: Counter[int] = Counter()
    skipped, requests = 0, opening_requests(config, chat, wave)
    while requests:
        started = time.perf_counter()
        sent, old = numbered(requests, first_place, sampled), () if waves else partial
        waves.append(sample_requests(sampling, weights, sent, RunOptions(step), old))
        sampling_s += time.perf_counter() - started
        results = waves[-1].groups
        if len(waves) == 1:
            groups = gathered(problems, requests, results)
        else:
            groups = config.plan.second.merge(groups, requests, results)
            notes = config.plan.second.notes(requests, results)
            explained += config.plan.second.supervised(requests, results)
        planned = next_wave(replace(wave, number=len(waves), groups=groups, notes=notes), config.plan)
        requests = [request for request in planned if fits(config, chat, request)]
        skipped += len(planned) - len(requests)
    groups += [group for wave in waves for group in wave.completed]
    samples = edited(config, sampling, groups, waves)
    return replace(
        samples,
        explanations=tuple(explained),
        partial=tuple(group for wave in waves for group in wave.partial),
        skipped=skipped,
        plan_s=time.perf_counter() - begun - sampling_s,
    )


def edited(
    config: Config, sampling: GroupSampler, groups: Sequence[Group], waves: Sequence[ScoredRollouts]
) -> StepSamples:
    """The groups of these waves as selection sees them: after the user's edit, with a demonstration where the plan asks
    for one."""
    rolled, edit = groups, resolve("method.edit_groups", config.method.edit_groups)
    if edit is not None:
        groups = [edit(group) for group in groups]
    if config.plan.second.demonstrates:
        chat, longest = sampling.sampler.chat, config.rollout.max_response_tokens
        groups = [with_demonstration(sampling.scorer, chat, longest, group) for group in groups]
    outside = left_out(waves, groups) if len(waves) > 1 or edit is not None else []
    return StepSamples(tuple(groups), waves=tuple(waves), rolled=tuple(rolled), outside=tuple(outside))


def opening_requests(config: Config, chat: ChatFormat, wave: Wave) -> list[RolloutRequest]:
    """The first wave, with the prompt suffixes of the shaping. Extended prompts that do not fit are replaced by plain
    ones."""
    text = prompt_suffix(config.shaping, wave.state.step)
    requests = with_suffix(first_wave(wave, config.plan), text)
    return plain_where_too_long(config, chat, requests, wave.problems)


def fits(config: Config, chat: ChatFormat, request: RolloutRequest) -> bool:
    """Whether an extended prompt fits, and after a prefix at least one more token. Prompts are never cut."""
    longer = request.suffix or request.condition
    prompt = chat.prompt_ids(request.problem, request.suffix) if longer else ()
    prefix = len(request.prefix) + len(opening_ids(chat, request.prefix_text))
    return len(prompt) <= config.rollout.max_prompt_tokens and prefix < config.rollout.max_response_tokens


def plain_where_too_long(
    config: Config, chat: ChatFormat, requests: Sequence[RolloutRequest], problems: Sequence[Problem]
) -> list[RolloutRequest]:
    """A first wave in which hints, budgets, skills and wordings that do not fit are left out."""
    return [
        replace(request, problem=problems[request.place], condition=PLAIN, suffix="")
        if traits_of(request.condition.kind).optional and not fits(config, chat, request)
        else request
        for request in requests
    ]


def left_out(waves: Sequence[ScoredRollouts], groups: Sequence[Group]) -> list[Group]:
    """The scored trajectories of these waves that are not in `groups`, as groups."""
    in_groups = {
        trajectory for group in groups for trajectory in group.trajectories
    }  # trajectories compare by identity
    out = []
    for result in (group for wave in waves for group in wave.groups):
        pairs = [pair for pair in result.pairs if pair[0] not in in_groups]
        if pairs:
            out.append(Group(result.problem, tuple(t for t, _ in pairs), tuple(v for _, v in pairs)))
    return out


def thought_length(trajectory: Trajectory, tokenizer: Tokenizer) -> int:
    """Number of tokens of the first turn before its thought closes; all of them if it never does."""
    if not trajectory.turns:
        return 0
    ids = trajectory.tokens[trajectory.turns[0].start : trajectory.turns[0].end]
    close_at = tokenizer.decode(ids).find(THOUGHT_CLOSE)
    if close_at < 0:
        return len(ids)
    low, high = 0, len(ids)
    while low < high:  # the largest number of tokens whose text ends before the tag begins
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(tokenizer.decode(ids[:middle])) <= close_at else (low, middle - 1)
    return low


class AccountsOpen(RuntimeError):
    """Problems, rollouts, groups or tokens were lost or counted twice."""


def check_accounts(
    samples: StepSamples,
    trained: Sequence[Group],
    batches: Sequence,
    before: tuple[int, int, int],
    after: tuple[int, int, int],
) -> None:
    """Checks that no problem, rollout, group or token of a step was lost or counted twice.

    Args:
        samples: What the step sampled.
        trained: Groups that came from the buffer.
        batches: `learner.learner.UpdateBatch`es of them, those of the first epoch first.
        before: `RolloutBuffer.counts` before the step.
        after: The same after the step.

    Raises:
        AccountsOpen: The message lists each pair of numbers that differ.
    """
    added, out, waiting = np.subtract(after, before).tolist()
    pairs = {
        "rollouts of the waves = scored + removed + partial": _rollouts(samples),
        "trajectories of the groups = kept + dropped with a reason": (
            sum(group.size for group in samples.groups),
            sum(len(selection.reasons) for selection in samples.selections),
        ),
        "groups with kept trajectories = added to the buffer": (
            sum(bool(selection.kept) for selection in samples.selections),
            added,
        ),
        "groups added = taken + those that wait now and did not before": (added, out + waiting),
        **_rows(trained, batches),
    }
    wrong = [f"{name}: {there} and {here}" for name, (there, here) in pairs.items() if there != here]
    if wrong:
        raise AccountsOpen("; ".join(["accounts of the step do not close", *wrong]))


def _rollouts(samples: StepSamples) -> tuple[int, int]:
    """(rows that the engine ended, sum of what became of them). An earlier part of a partial group counts again."""
    ended = sum(wave.stats.rollouts for wave in samples.waves)
    scored = sum(sum(wave.counts.values()) for wave in samples.waves)
    scored_count = sum(group.size for wave in samples.waves for group in (*wave.groups, *wave.completed))
    removed = sum(len(wave.removed) for wave in samples.waves)
    if any(wave.partial or wave.completed for wave in samples.waves):  # a rollout may have been scored in part
        return scored, scored_count + removed
    return ended, scored_count + removed


def _rows(trained: Sequence[Group], batches: Sequence) -> dict[str, tuple[int, int]]:
    """Trajectories and tokens of the groups, each paired with the count in the packed rows of the first epoch."""
    rows = sum(group.size for group in trained)
    seen = tokens = packed = 0
    for batch in batches:
        if seen >= rows:
            break
        seen += len(batch.rows)
        tokens += sum(row.length for row in batch.rows)
        packed += int(np.sum(batch.placement.length[: len(batch.rows)]))
    if not trained or not batches:
        return {}
    return {"trajectories taken = rows": (rows, seen), "tokens of the rows = packed": (tokens, packed)}
