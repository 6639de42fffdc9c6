"""Requests -> scored groups under one policy: the part of the line that training and evaluation share."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

from grpo_roc_jax.method.resample import settled
from grpo_roc_jax.method.waves import RolloutRequest
from grpo_roc_jax.rollout.collect import EVALUATION_STEP, Ask, collect
from grpo_roc_jax.rollout.engine import SamplerParams
from grpo_roc_jax.rollout.records import RolloutStats
from grpo_roc_jax.stages import Stages
from grpo_roc_jax.text.chat import ChatFormat
from grpo_roc_jax.types import Group, Problem, Trajectory


@dataclass(frozen=True, eq=False)
class Carried:
    """The rollouts of a group some of which the deadline of a step cut; these go on in the next one."""

    problem: Problem
    trajectories: tuple[Trajectory, ...]
    """Not judged yet."""
    step: int
    """Step that it was begun in; part of its random keys."""
    index: int
    """Position of the problem in that step."""
    temperature: float | None

    def asks(self) -> list[Ask]:
        """What is left to roll out."""
        return [
            Ask(self.problem, self.index, t.sample, "", t.condition, self.temperature, resume=t, step=self.step)
            for t in self.trajectories
            if resumable(t)
        ]

    def with_ends(self, ends: Sequence[Trajectory]) -> "Carried":
        """The same with what `asks` came to."""
        later = iter(ends)
        return replace(self, trajectories=tuple(next(later) if resumable(t) else t for t in self.trajectories))


def resumable(trajectory: Trajectory) -> bool:
    """Whether a rollout was cut and can go on: what a session held when it was closed is not kept."""
    return trajectory.stop == "cancelled" and not any(result.session_id for result in trajectory.results)


@dataclass(frozen=True, eq=False)
class Sampled:
    """Scored rollouts of a list of requests."""

    groups: tuple[Group, ...]
    """One a request, without what could not be judged."""
    removed: tuple[tuple[Problem, Trajectory], ...]
    """Trajectories that left their group: faults of ours, cancelled, or not scored."""
    counts: dict[str, int]
    """Trajectories by verdict status, removed ones included."""
    faults: tuple[str, ...]
    """What custom reward functions did wrong, in words."""
    stats: RolloutStats
    late: tuple[Group, ...] = ()
    """Groups of earlier steps that are whole now."""
    carried: tuple[Carried, ...] = ()
    """Groups to go on with in the next step; their places in `groups` are empty."""


def sample_requests(
    stages: Stages,
    sampler: SamplerParams,
    problems: Sequence[Problem],
    requests: Sequence[RolloutRequest],
    *,
    step: int,
    first_index: int = 0,
    taken: Sequence[int] = (),
    progress: Any = None,
    carried: Sequence[Carried] = (),
) -> Sampled:
    """Rolls the requests out and scores them; with several processes each does its share and all get everything.

    Args:
        stages: Engine, executor, chat, scorer.
        sampler: From `engine.publish`.
        problems: What the requests number; problem i has the random keys (step, first_index + i, sample).
        requests: At least one rollout in all.
        step: Training step, or `collect.EVALUATION_STEP` + step.
        first_index: Number of problems already sampled in this step.
        taken: Rollouts of each problem already sampled in this step, by number; empty for none.
        progress: Display handed to the engine, instead of that of the stages.
        carried: Groups of the step before, to go on with; for one process.
    """
    asks = make_asks(stages.chat, problems, requests, first_index, taken)
    mine = stages.processes.share([(problems[r.problem], group) for r, group in zip(requests, asks, strict=True)])
    sampled = roll_out_asks(stages, sampler, [pair for _, pair in mine], step=step, progress=progress, carried=carried)
    parts = stages.processes.gather(([place for place, _ in mine], sampled))
    if len(parts) == 1:
        return sampled
    # Each process numbered its own; problems that came over are put back as the values the caller holds.
    whole = {place: part.groups[i] for places, part in parts for i, place in enumerate(places)}
    groups = [replace(whole[i], problem=problems[request.problem]) for i, request in enumerate(requests)]
    return Sampled(
        tuple(groups),
        tuple(pair for _, part in parts for pair in part.removed),
        dict(sum((Counter(part.counts) for _, part in parts), Counter())),
        tuple(fault for _, part in parts for fault in part.faults),
        merge_stats([part.stats for _, part in parts]),
    )


def make_asks(
    chat: ChatFormat,
    problems: Sequence[Problem],
    requests: Sequence[RolloutRequest],
    first_index: int = 0,
    taken: Sequence[int] = (),
) -> list[list[Ask]]:
    """One list of rollouts to take a request, with their random keys; see `sample_requests`."""
    next_sample = list(taken) or [0] * len(problems)
    asks = []
    for request in requests:
        prefix = (*request.prefix, *opening_ids(chat, request.prefix_text))
        first = next_sample[request.problem]
        next_sample[request.problem] += request.count
        asks.append(
            [
                Ask(
                    problems[request.problem],
                    first_index + request.problem,
                    first + i,
                    request.suffix,
                    request.condition,
                    request.temperature,
                    prefix,
                )
                for i in range(request.count)
            ]
        )
    return asks


def roll_out_asks(
    stages: Stages,
    sampler: SamplerParams,
    grouped: Sequence[tuple[Problem, Sequence[Ask]]],
    *,
    step: int,
    progress: Any = None,
    carried: Sequence[Carried] = (),
) -> Sampled:
    """Rolls out and scores what falls to this process, which may be nothing: one group a problem with its asks.

    Under `rollout.carry_over` a training group with rows that the deadline cut is not judged but carried.
    """
    if not grouped and not carried:
        return Sampled((), (), {}, (), RolloutStats())
    begun = [(group.problem, group.asks()) for group in carried]
    asks = [ask for _, group in (*grouped, *begun) for ask in group]
    config, trains = stages.config.rollout, step < EVALUATION_STEP
    trajectories, stats = collect(
        stages.engine,
        sampler,
        stages.chat,
        stages.executor,
        asks,
        step=step,
        seed=stages.config.seed,
        max_turns=config.max_turns,
        budget=config.max_response_tokens,
        progress=progress or stages.progress,
        surplus=EarlyExit(stages, grouped) if config.early_exit and trains else None,
    )
    edges = accumulate((len(group) for _, group in (*grouped, *begun)), initial=0)
    rollouts = [trajectories[low:high] for low, high in pairwise(edges)]
    older = [group.with_ends(ends) for group, ends in zip(carried, rollouts[len(grouped) :], strict=True)]
    newer = [
        Carried(problem, tuple(rows), step, asked[0].index, asked[0].temperature)
        for (problem, asked), rows in zip(grouped, rollouts, strict=False)
    ]
    goes_on = lambda group: config.carry_over and trains and any(map(resumable, group.trajectories))  # noqa: E731
    judged = [() if goes_on(group) else group.trajectories for group in (*newer, *older)]
    scored = stages.scorer.score_all([group.problem for group in (*newer, *older)], judged)
    kept = {id(trajectory) for group in scored.groups for trajectory in group.trajectories}
    pairs = zip((*newer, *older), judged, strict=True)
    removed = [(group.problem, t) for group, rows in pairs for t in rows if id(t) not in kept]
    whole = [group for group, rows in zip(scored.groups[len(newer) :], judged[len(newer) :], strict=True) if rows]
    return Sampled(
        scored.groups[: len(newer)],
        tuple(removed),
        dict(scored.counts),
        scored.faults,
        stats,
        tuple(whole),
        tuple(group for group in (*newer, *older) if goes_on(group)),
    )


class EarlyExit:
    """Names the rest of a group once the places that selection gives to each kind of trajectory are settled.

    Each trajectory is scored as it ends, by itself, and once more with its group. Groups of another size than the
    plain wave's (pilots, second waves) run to their end.
    """

    def __init__(self, stages: Stages, grouped: Sequence[tuple[Problem, Sequence[Ask]]]):
        self._scorer, config = stages.scorer, stages.config
        self._resample, self._keep = config.resample, config.group.size
        self._whole = config.resample.sampled(self._keep)
        self._problems = [problem for problem, _ in grouped]
        self._group = [place for place, (_, asks) in enumerate(grouped) for _ in asks]
        ends = list(accumulate((len(asks) for _, asks in grouped), initial=0))
        self._left = [set(range(low, high)) for low, high in pairwise(ends)]
        self._plain = [len(left) == self._whole for left in self._left]
        self._ended = [[0, 0] for _ in grouped]
        """Failures and successes."""

    def __call__(self, index: int, trajectory: Trajectory) -> Sequence[int]:
        place = self._group[index]
        left, ended = self._left[place], self._ended[place]
        if index not in left or not self._plain[place]:
            return ()
        left.remove(index)
        for correct in self._scorer(self._problems[place], [trajectory]).correct:  # none where it cannot be judged
            ended[int(correct)] += 1
        if not settled(*ended, len(left), self._keep, self._resample):
            return ()
        rest, self._left[place] = sorted(left), set()
        return rest


def sample_groups(
    stages: Stages,
    sampler: SamplerParams,
    problems: Sequence[Problem],
    samples: int,
    *,
    step: int,
    first_index: int = 0,
    temperature: float | None = None,
    condition: str = "",
    suffix: str = "",
    progress: Any = None,
) -> Sampled:
    """`samples` rollouts of each problem, all alike: one group a problem.

    Args:
        stages: As in `sample_requests`, and so `sampler`, `problems`, `step`, `first_index` and `progress`.
        sampler: From `engine.publish`.
        problems: In order.
        samples: Rollouts a problem.
        step: Training step, or `collect.EVALUATION_STEP` + step.
        first_index: Number of problems already sampled in this step.
        temperature: Instead of `sampling.temperature`.
        condition: Name of the suffix in the trajectories.
        suffix: Appended to every prompt.
        progress: Display handed to the engine, instead of that of the stages.
    """
    requests = [RolloutRequest(i, samples, condition, suffix, temperature) for i in range(len(problems))]
    return sample_requests(stages, sampler, problems, requests, step=step, first_index=first_index, progress=progress)


def opening_ids(chat: ChatFormat, text: str) -> tuple[int, ...]:
    """Ids of a text that the policy goes on behind, tags included; a turn's end token stays away."""
    ids = chat.turn_ids(text) if text else []
    return tuple(ids[:-1] if ids and ids[-1] == chat.end_id else ids)


def merge_stats(parts: Sequence[RolloutStats]) -> RolloutStats:
    """The counts of several engines as those of one: they add up, times and sizes are those of the largest."""
    largest = {"capacity", "resizes", "compilations", "steps", "seconds"}
    merged: dict[str, Any] = {}
    for item in fields(RolloutStats):
        values = [getattr(part, item.name) for part in parts]
        if item.name == "stops":
            merged[item.name] = {name: sum(stops.get(name, 0) for stops in values) for name in values[0]}
        elif item.name == "shard_tokens":
            merged[item.name] = tuple(count for counts in values for count in counts)
        elif item.name in largest or item.name.endswith("_s"):
            merged[item.name] = max(values)
        else:
            merged[item.name] = sum(values)
    return RolloutStats(**merged)
