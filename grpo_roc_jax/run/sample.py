"""From requests to scored groups under one policy: the part of the pipeline that training and evaluation share."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any

from grpo_roc_jax.method.roc import Selector
from grpo_roc_jax.pod.preemption import Preempted
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.reward.score import Scorer
from grpo_roc_jax.rollout.collect import collect_while_free
from grpo_roc_jax.rollout.config import RolloutConfig
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.rollout.records import FailureCount, RolloutLines, RolloutProgress, RolloutStats, RunOptions
from grpo_roc_jax.rollout.sampler import Sampler, split
from grpo_roc_jax.types import Group, Problem, RolloutRequest, Trajectory


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
    """Groups to continue in the next step; their entries in `groups` are empty."""
    unscored: dict[str, int] = field(default_factory=dict)
    """Number of trajectories that a reward function left without a score, by name of the function."""


def sample_requests(
    sampling: GroupSampler,
    weights: SamplerParams,
    requests: Sequence[RolloutRequest],
    options: RunOptions,
    partial: Sequence[PartialGroup] = (),
) -> ScoredRollouts:
    """Rolls the requests out and scores them. With several processes each does a share, and all of them get every
    result. Requests that do not fit into the slots at once go, one by one, to the process that has a free slot
    first.

    Under `rollout.step_limit: partial` a training group with cut rows is not scored but returned as partial. Groups
    begun in earlier steps come first, so that each rollout ends after some steps.

    Args:
        sampling: Group sampler of the run.
        weights: From `engine.publish`.
        requests: At least one rollout in all.
        options: Options of the submission; without a display, that of the run is used.
        partial: Groups of the step before, to be continued in any process.

    Raises:
        Preempted: One of the processes received a signal to stop.
    """
    processes, fixed = sampling.processes, divided_before(sampling, requests)
    numbers = [index for index, _ in processes.share(requests[:fixed])]
    options = replace(options, before_chunk=processes.check_stop)
    queue = None if fixed == len(requests) else processes.numbers(fixed, len(requests))
    try:
        with leading(sampling, weights) as leads:
            own, cut = [requests[index] for index in numbers], [group for _, group in processes.share(partial)]
            if not leads or not (own or cut or queue):
                sampled = ScoredRollouts()
            elif queue is not None:
                sampled = sample_while_free(sampling, weights, requests, numbers, queue, options)
            else:
                submitted = [*chain.from_iterable(group.requests() for group in cut), *own]
                rows, stats = sampling.sampler.roll_out(submitted, own_options(sampling, submitted, options), weights)
                sampled = score_share(sampling, own, cut, rows, stats, options)
    except Preempted:
        if processes.count == 1:
            raise
        numbers, sampled = [], ScoredRollouts()  # discarded: the exchange stops all processes at the same point
    parts = processes.gather((numbers, sampled))
    return sampled if len(parts) == 1 else merge_shares(requests, partial, parts)


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
    return sample_requests(sampling, weights, requests, options or RunOptions())


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
