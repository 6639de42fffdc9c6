"""From problems to scored groups: requests are rolled out and scored under one policy, in all processes of a run, which
training and evaluation share; the rollouts of a step are drawn, rolled out in the waves that the plan asks for, and
merged into groups.

A step has one round, or several under dynamic sampling. A plain method has one wave of equal requests, and its round is
a single call of the sampler.
"""

import functools
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.config import RolloutConfig
from grpo_roc_jax.engine.protocol import FailureCount, RolloutLines, RolloutProgress, RolloutStats, RunOptions
from grpo_roc_jax.engine.publish import SamplerParams
from grpo_roc_jax.method.edit import joined
from grpo_roc_jax.method.planning import Wave, choose_problems, first_wave, gathered, next_wave, with_suffix
from grpo_roc_jax.method.roc import Selection, Selector
from grpo_roc_jax.method.shaping import prompt_suffix
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.pod.preemption import Preempted
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.reward.score import Scorer
from grpo_roc_jax.rollout.sampler import Sampler, collect_while_free, opening_ids, split
from grpo_roc_jax.run.demonstrate import with_demonstration
from grpo_roc_jax.run.statistics import describe_unscored, rollout_metrics, selection_metrics
from grpo_roc_jax.settings.callables import resolve
from grpo_roc_jax.text.chat_format import ChatFormat
from grpo_roc_jax.text.tokenizer import Tokenizer
from grpo_roc_jax.types import PLAIN, Group, Metrics, Problem, RolloutRequest, Trajectory, traits_of


@dataclass(frozen=True, eq=False)
class GroupSampler:
    """Turns requests into scored groups, in all processes of a run together; made by `components.make_parts`."""

    sampler: Sampler
    scorer: Scorer
    processes: Processes
    """Processes that share the work of sampling."""
    resample: Selector
    """Selection of the run. Under `rollout.early_exit` the rest of a group is cancelled once its quota is decided."""
    size: int
    """Number of trajectories of a group that selection keeps."""
    progress: RolloutProgress | RolloutLines | None = None
    """Progress display of rollouts; None displays nothing."""

    @property
    def rollout(self) -> RolloutConfig:
        return self.sampler.engine.config

    def sample_requests(
        self,
        weights: SamplerParams,
        requests: Sequence[RolloutRequest],
        options: RunOptions,
        partial: Sequence["PartialGroup"] = (),
    ) -> "ScoredRollouts":
        """Rolls the requests out and scores them. With several processes each does a share, and all of them get every
        result. Requests that do not fit into the slots at once go, one by one, to the process that has a free slot
        first.

        Under `rollout.step_limit: partial` a training group with cut rows is not scored but returned as partial. Groups
        begun in earlier steps come first, so that each rollout ends after some steps.

        Args:
            weights: From `engine.publish`.
            requests: At least one rollout in all.
            options: Options of the submission; without a display, that of the run is used.
            partial: Groups of the step before, to be continued in any process.

        Raises:
            Preempted: One of the processes received a signal to stop.
        """
        processes, fixed = self.processes, divided_before(self, requests)
        numbers = [index for index, _ in processes.share(requests[:fixed])]
        options = replace(options, before_chunk=processes.check_stop)
        queue = None if fixed == len(requests) else processes.numbers(fixed, len(requests))
        try:
            with leading(self, weights) as leads:
                assigned, cut = [requests[index] for index in numbers], [group for _, group in processes.share(partial)]
                if not leads or not (assigned or cut or queue):
                    sampled = ScoredRollouts()
                elif queue is not None:
                    sampled = sample_while_free(self, weights, requests, numbers, queue, options)
                else:
                    submitted = [*chain.from_iterable(group.requests() for group in cut), *assigned]
                    rows, stats = self.sampler.roll_out(submitted, own_options(self, submitted, options), weights)
                    sampled = score_share(self, assigned, cut, rows, stats, options)
        except Preempted:
            if processes.count == 1:
                raise
            numbers, sampled = [], ScoredRollouts()  # discarded: the exchange stops all processes at the same point
        parts = processes.gather((numbers, sampled))
        sampled = sampled if len(parts) == 1 else merge_shares(requests, partial, parts)
        return replace(sampled, partial=tuple(sorted(sampled.partial, key=lambda group: (group.step, group.place))))


@dataclass(frozen=True, eq=False)
class PartialGroup:
    """The rollouts of a group of which the deadline of a step cut some; these are continued in the next step."""

    problem: Problem
    trajectories: tuple[Trajectory, ...]
    """Trajectories so far; not scored yet."""
    step: int
    """Step in which the group was begun; part of its random keys."""
    place: int
    """Index of the problem in that step."""
    temperature: float | None
    born: int = -1
    """Version of the weights when the group was begun; -1 where its age is not limited."""

    @property
    def resumable(self) -> bool:
        return any(map(resumable, self.trajectories))

    def requests(self) -> list[RolloutRequest]:
        """One request for each rollout that is to be continued."""
        return [self.continuation(trajectory) for trajectory in self.trajectories if resumable(trajectory)]

    def continuation(self, trajectory: Trajectory) -> RolloutRequest:
        """The request that continues a rollout of the group."""
        return RolloutRequest(
            self.problem,
            self.place,
            first_sample=trajectory.sample,
            condition=trajectory.condition,
            temperature=self.temperature,
            resume=trajectory,
            step=self.step,
        )

    def continued(self, trajectories: Iterable[Trajectory]) -> "PartialGroup":
        """The group with the trajectories that its `requests` led to."""
        later = iter(trajectories)
        return replace(self, trajectories=tuple(next(later) if resumable(t) else t for t in self.trajectories))


def resumable(trajectory: Trajectory) -> bool:
    """Whether a rollout was cut and can be continued. It cannot if it used a tool session, whose state is lost."""
    return trajectory.stop == "cancelled" and not any(result.session_id for result in trajectory.results)


@dataclass(frozen=True, eq=False)
class ScoredRollouts:
    """The scored rollouts of a list of requests, for example of one wave."""

    groups: tuple[Group, ...] = ()
    """One for each request, without trajectories that could not be scored."""
    removed: tuple[tuple[Problem, Trajectory], ...] = ()
    """Trajectories removed from their group: infrastructure failures, cancelled ones, or ones without a score."""
    counts: dict[str, int] = field(default_factory=dict)
    """Number of trajectories by verdict status, including removed ones."""
    faults: tuple[str, ...] = ()
    """Messages of custom reward functions that failed."""
    stats: RolloutStats = field(default_factory=RolloutStats)
    completed: tuple[Group, ...] = ()
    """Groups of earlier steps that are complete now."""
    partial: tuple[PartialGroup, ...] = ()
    """Groups to continue in the next step, oldest first; their entries in `groups` are empty."""
    unscored: dict[str, int] = field(default_factory=dict)
    """Number of trajectories that a reward function left without a score, by name of the function."""


def merge_shares(
    requests: Sequence[RolloutRequest],
    partial: Sequence[PartialGroup],
    parts: Sequence[tuple[Sequence[int], ScoredRollouts]],
) -> ScoredRollouts:
    """The scored rollouts of all processes in the order of the requests.

    Args:
        requests: The requests that were divided.
        partial: The groups of the step before that were divided.
        parts: For each process the indices of its requests, and what it scored.
    """
    problems = [*(request.problem for request in requests), *(group.problem for group in partial)]
    order = {problem.uid: i for i, problem in reversed([*enumerate(problems)])}
    removed = [pair for _, part in parts for pair in part.removed]
    # Problems that came from other processes are replaced by the objects of the caller.
    groups = {index: group for indices, part in parts for index, group in zip(indices, part.groups, strict=True)}
    return ScoredRollouts(
        tuple(replace(groups[i], problem=request.problem) for i, request in enumerate(requests)),
        tuple(sorted(removed, key=lambda pair: (order[pair[0].uid], pair[1].sample))),
        dict(sum((Counter(part.counts) for _, part in parts), Counter())),
        tuple(fault for _, part in parts for fault in part.faults),
        merge_stats([part.stats for _, part in parts]),
        tuple(group for _, part in parts for group in part.completed),
        tuple(group for _, part in parts for group in part.partial),
        dict(sum((Counter(part.unscored) for _, part in parts), Counter())),
    )


@contextmanager
def leading(sampling: GroupSampler, weights: SamplerParams) -> Iterator[bool]:
    """Whether this process rolls requests out within the block. A process that follows another one in a team first
    repeats the programs of its leader, until the leader has sampled."""
    team = sampling.processes.team
    if team is None:
        yield True
        return
    programs = sampling.sampler.engine.programs
    _ = programs.attention  # if attention is measured, all processes must measure together
    if not team.leads:
        programs.repeat(weights.params, team.calls())
        yield False
        return
    try:
        with team.leading() as programs.send:
            yield True
    finally:
        programs.send = None


def divided_before(sampling: GroupSampler, requests: Sequence[RolloutRequest]) -> int:
    """Number of requests that are divided among the processes in advance: as many as all slots hold. It is all of them
    if a time limit counts from the beginning, if rollouts of training continue meanwhile, or if an environment
    answers."""
    processes, rollout, sampler = sampling.processes, sampling.rollout, sampling.sampler
    limit = rollout.step_limit
    alone = sampler.agents is None and sampler.episodes is None and not (limit.seconds or limit.streams)
    if processes.samplers == 1 or not alone:
        return len(requests)
    before = accumulate((request.count for request in requests), initial=0)
    return sum(rows < processes.samplers * rollout.slots for rows in [*before][:-1])


def score_share(
    sampling: GroupSampler,
    requests: Sequence[RolloutRequest],
    partial: Sequence[PartialGroup],
    rows: Sequence[Sequence[Trajectory]],
    stats: RolloutStats,
    options: RunOptions,
) -> ScoredRollouts:
    """Scores what this process rolled out: a trajectory for each request of the partial groups, then those of its
    requests."""
    first = len(rows) - len(requests)
    resumed = split([row for (row,) in rows[:first]], [len(group.requests()) for group in partial])
    begun = [
        PartialGroup(request.problem, tuple(new), options.step, request.place, request.temperature)
        for request, new in zip(requests, rows[first:], strict=True)
    ]
    continued = [group.continued(later) for group, later in zip(partial, resumed, strict=True)]
    keeps = sampling.rollout.step_limit.partial and options.purpose == "train"
    return score(sampling.scorer, begun, continued, stats, keeps_partial=keeps)


def own_options(sampling: GroupSampler, requests: Sequence[RolloutRequest], options: RunOptions) -> RunOptions:
    """The options for submitting these requests."""
    exits = sampling.rollout.early_exit and options.purpose == "train"
    policy = EarlyExit(sampling.scorer, sampling.resample, sampling.size, requests) if exits else None
    return replace(options, progress=options.progress or sampling.progress, cancel_policy=policy)


def sample_while_free(
    sampling: GroupSampler,
    weights: SamplerParams,
    requests: Sequence[RolloutRequest],
    indices: list[int],
    queue: Iterator[int],
    options: RunOptions,
) -> ScoredRollouts:
    """The scored rollouts of the requests with the indices `indices`, and of those that `queue` gives whenever a slot
    is free; the indices of these are appended to `indices`."""
    sampler = sampling.sampler

    def submit(some: Sequence[RolloutRequest]) -> range:
        return sampler.engine.submit(weights, *sampler.submission(some, own_options(sampling, some, options)))

    def take() -> RolloutRequest | None:
        number = next(queue, None)
        if number is None:
            return None
        indices.append(number)
        return requests[number]

    rows, stats = collect_while_free(sampler.engine, submit, [requests[i] for i in indices], take)
    begun = [
        PartialGroup(requests[i].problem, tuple(trajectories), options.step, requests[i].place, requests[i].temperature)
        for i, trajectories in zip(indices, rows, strict=True)
    ]
    return score(sampling.scorer, begun, (), stats, keeps_partial=False)


def score(
    scorer: Scorer,
    begun: Sequence[PartialGroup],
    continued: Sequence[PartialGroup],
    stats: RolloutStats,
    *,
    keeps_partial: bool,
) -> ScoredRollouts:
    """Scores the groups begun in this wave and those continued in it, except groups with a rollout left to resume.

    With `keeps_partial` a group with resumable rollouts stays unscored.
    """
    every = (*begun, *continued)
    waits = [keeps_partial and group.resumable for group in every]
    judged = [() if waiting else group.trajectories for group, waiting in zip(every, waits, strict=True)]
    scored = scorer.score_all([group.problem for group in every], judged)
    removed = []
    for group, trajectories in zip(scored.groups, judged, strict=True):
        scored_samples = {trajectory.sample for trajectory in group.trajectories}
        removed += [
            (group.problem, trajectory) for trajectory in trajectories if trajectory.sample not in scored_samples
        ]
    ended = zip(scored.groups[len(begun) :], waits[len(begun) :], strict=True)
    return ScoredRollouts(
        scored.groups[: len(begun)],
        tuple(removed),
        dict(scored.counts),
        scored.faults,
        stats,
        completed=tuple(group for group, waiting in ended if not waiting),
        partial=tuple(group for group, waiting in zip(every, waits, strict=True) if waiting),
        unscored=dict(getattr(scored, "unscored", {})),
    )


class EarlyExit:
    """A cancel policy: it cancels the rest of a group once the number of successes and failures that selection keeps is
    decided.

    Each trajectory is scored alone as it ends, and once more with its group. Groups of another size than the plain
    wave's (pilots, second waves) run to their end.
    """

    def __init__(self, scorer: Scorer, resample: Selector, size: int, requests: Sequence[RolloutRequest]):
        """
        Args:
            scorer: Scorer of the run.
            resample: Selection of the run.
            size: Number of trajectories of a group that are kept.
            requests: The requests of the submission, in order.
        """
        self._scorer, self._resample, self._keep = scorer, resample, size
        plain = resample.sampled(size)
        self._problems = [request.problem for request in requests]
        self._group = [group for group, request in enumerate(requests) for _ in request.samples]
        edges = accumulate((request.count for request in requests), initial=0)
        self._left = [set(range(low, high)) for low, high in pairwise(edges)]
        self._plain = [request.count == plain for request in requests]
        self._ended = [[0, 0] for _ in requests]
        """Numbers of failures and successes that have ended, for each request."""

    def __call__(self, row: int, trajectory: Trajectory) -> Sequence[int]:
        group = self._group[row]
        left, ended = self._left[group], self._ended[group]
        if row not in left or not self._plain[group]:
            return ()
        left.remove(row)
        for correct in self._scorer(self._problems[group], [trajectory]).correct:  # empty if it cannot be scored
            ended[int(correct)] += 1
        if not self._resample.quota_decided(*ended, len(left), self._keep):
            return ()
        rest, self._left[group] = sorted(left), set()
        return rest


def sample_groups(
    sampling: GroupSampler,
    weights: SamplerParams,
    problems: Sequence[Problem],
    samples: int,
    options: RunOptions | None = None,
    **extras: Any,
) -> ScoredRollouts:
    """`samples` rollouts of each problem under equal requests: one group for each problem.

    `extras` are further fields of every `RolloutRequest`: `condition`, `suffix`, `temperature`.
    """
    requests = [RolloutRequest(problem, index, samples, **extras) for index, problem in enumerate(problems)]
    return sampling.sample_requests(weights, requests, options or RunOptions())


def merge_failures(parts: Iterable[Mapping[str, FailureCount]]) -> dict[str, FailureCount]:
    """Adds up counts by kind of failure."""
    merged: dict[str, FailureCount] = {}
    for part in parts:
        for kind, count in part.items():
            merged[kind] = merged[kind] + count if kind in merged else count
    return merged


def merge_stats(parts: Sequence[RolloutStats]) -> RolloutStats:
    """Merges the statistics of several engines: counts add up; times and sizes are those of the largest."""
    largest = {"cache_tokens", "compilations", "steps", "seconds"}
    merged: dict[str, Any] = {}
    for item in fields(RolloutStats):
        values = [getattr(part, item.name) for part in parts]
        if item.name == "stops":
            merged[item.name] = {name: sum(stops.get(name, 0) for stops in values) for name in values[0]}
        elif item.name == "failures":
            merged[item.name] = merge_failures(values)
        elif item.name == "shard_tokens":
            merged[item.name] = tuple(count for counts in values for count in counts)
        elif item.name in largest or item.name.endswith("_s"):
            merged[item.name] = max(values)
        else:
            merged[item.name] = sum(values)
    return RolloutStats(**merged)


THOUGHT_CLOSE = "</reason>"


@dataclass(frozen=True, eq=False)
class StepSamples:
    """What was sampled for a training step, or in one of its rounds."""

    groups: tuple[Group, ...] = ()
    """The groups that selection sees: merged, one for each problem whose rollouts were not cut, then completed groups
    of earlier steps, all after the user's edit and with demonstrations."""
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
        engine = functools.reduce(RolloutStats.followed_by, [wave.stats for wave in self.waves], RolloutStats())
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
        return engine.metrics() | sampled_and_selected | plan


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
    while requests or not waves:  # the first wave continues partial groups also where it has no requests
        started = time.perf_counter()
        sent, old = numbered(requests, first_place, sampled), () if waves else partial
        waves.append(sampling.sample_requests(weights, sent, RunOptions(step), old))
        sampling_s += time.perf_counter() - started
        results = waves[-1].groups
        if len(waves) == 1:
            groups = gathered(problems, requests, results)
        elif len(waves) <= 1 + config.plan.budget.waves:
            more = gathered(problems, requests, results)
            groups = [joined(*pair) for pair in zip(groups, more, strict=True)]
        else:
            groups = config.plan.second.merge(groups, requests, results)
            notes = config.plan.second.notes(requests, results)
            explained += config.plan.second.supervised(requests, results)
        planned = next_wave(replace(wave, number=len(waves), groups=groups, notes=notes), config.plan)
        requests = [request for request in planned if fits(config, chat, request)]
        skipped += len(planned) - len(requests)
    cut = {group.place - first_place for wave in waves for group in wave.partial if group.step == step}
    groups = [group for index, group in enumerate(groups) if index not in cut]
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
