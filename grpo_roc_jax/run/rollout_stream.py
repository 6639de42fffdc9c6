"""Rollouts that run on from step to step (`rollout.step_limit stream`).

The engine holds the rollouts of this step and of `lag` steps to come. A step takes the oldest whole groups; the others
go on under the next weights, and while the device computes an update. No row gets older than `lag` versions: the step
waits for it, or drops it.

With several processes all draw the same problems, and each rolls out and scores every `count`-th group. They take the
same groups: each posts which of its groups are whole, and once these are enough all of them `gather` that
list. Weights change in all of them at once, by the update.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from grpo_roc_jax.config import Config
from grpo_roc_jax.method.edit import joined
from grpo_roc_jax.method.planning import Wave
from grpo_roc_jax.rollout.publish import SamplerParams
from grpo_roc_jax.rollout.records import RolloutStats, RunOptions
from grpo_roc_jax.rollout.sampler import split
from grpo_roc_jax.rollout.table import from_prompt
from grpo_roc_jax.run.rounds import StepSamples, draw_problems, edited, numbered, opening_requests
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.run.sample import GroupSampler, PartialGroup, ScoredRollouts, merge_stats, resumable, score
from grpo_roc_jax.types import Group, Metrics, RolloutRequest, Trajectory

ESS = "mismatch/token_effective_sample_size"
IDLE_S = 1e-3
"""Pause of the host when rows wait for tools and the device is busy."""
ASK_S = 0.1
"""Seconds that a process works before it asks the others for their whole groups, unless one of its rows ends before."""


@dataclass(eq=False)
class OpenGroup:
    """The rollouts of a problem that a step has not taken yet."""

    number: int
    """Of groups in the order in which they began; decides whose it is."""
    parts: list[PartialGroup]
    """One for each request, without trajectories."""
    rows: list[list[Trajectory | None]]
    """The trajectories of each part; None while they run, or where they are another process's."""
    elsewhere: bool = False
    """Whether it is whole in another process."""
    scored: ScoredRollouts | None = None

    @property
    def born(self) -> int:
        return self.parts[0].born

    @property
    def whole(self) -> bool:
        return self.elsewhere or all(row is not None for row in chain.from_iterable(self.rows))

    def ended(self) -> list[PartialGroup]:
        return [replace(part, trajectories=tuple(rows)) for part, rows in zip(self.parts, self.rows, strict=True)]


Place = tuple[OpenGroup, int, int]
"""Where the trajectory of a row goes: its group, part, and index there."""


class RolloutStream:
    """Keeps the engine filled, and hands out whole groups, oldest first. One for a run."""

    def __init__(self, config: Config, sampling: GroupSampler, mesh: Mesh):
        """
        Args:
            config: Of the run.
            sampling: Of the run; its engine is this stream's alone, but for evaluations.
            mesh: Of the update, during which the rollouts go on.
        """
        self._config, self._sampling, self._engine = config, sampling, sampling.sampler.engine
        self._mesh, self._limit, self._count = mesh, config.rollout.step_limit, config.group.problems
        self._processes, self._begun = sampling.processes, 0
        """Of the run; groups that have begun."""
        self._open: list[OpenGroup] = []
        """In the order in which they began."""
        self._running: dict[int, Place] = {}
        """By ticket."""
        self._label = (-1, 0)
        """Step and number of the round that began last, as random keys hold them."""
        self._rng = np.random.default_rng()
        self._failure: Exception | None = None
        self._dropped, self._worked_s, self._alarmed = 0, 0.0, False

    @property
    def meanwhile(self) -> Callable[[], None] | None:
        """What the host does while the device computes an update. On several CPU devices nothing, since programs with
        collectives would share their threads."""
        several = jax.default_backend() == "cpu" and self._mesh.size > 1
        return None if several or not self._limit.lag else self._work

    def next_round(self, run: RunState, weights: SamplerParams) -> StepSamples:
        """The oldest whole groups, scored, as many as a step has problems; others begin in their place.

        Raises:
            Exception: What failed while the device computed the update before.
        """
        if self._failure is not None:
            raise self._failure
        begun = time.perf_counter()
        self._restore(run, weights)
        self._drop_stale(run)
        self._fill(run, weights)
        sampled = time.perf_counter()
        taken = self._take(run.step)
        wave = self._scored(taken)
        sampled = time.perf_counter() - sampled
        parts = iter(wave.groups)
        groups = [joined(Group(g.parts[0].problem, (), ()), *(next(parts) for _ in g.parts)) for g in taken]
        found = edited(self._config, self._sampling, groups, [wave])
        return replace(found, plan_s=time.perf_counter() - begun - sampled)

    def after_update(self, run: RunState, groups: Sequence[Group], metrics: Metrics) -> tuple[Metrics, str]:
        """(metrics of the groups that were trained on, text of an alarm that was not raised before or ""); leaves what
        goes on in `run.partial`, for a checkpoint."""
        said = self._processes.gather((self._cut(), self._dropped, self._worked_s), uninterrupted=True)
        cuts, dropped, worked = zip(*said, strict=True)
        run.partial = self._with_rows(cuts)
        effective, low = metrics.get(ESS, 1.0), self._limit.min_effective
        text = (
            f"the effective sample size of the importance weights is {effective:.2f} of the tokens, below "
            f"rollout.step_limit.min_effective = {low:g}; lower rollout.step_limit.lag or optim.lr"
        )
        alarm, self._alarmed = text if effective < low and not self._alarmed else "", effective < low
        found = age_metrics(groups, run.step) | {
            "rollout/dropped_stale": float(sum(dropped)),
            "time/overlapped_s": max(worked),
        }
        self._dropped, self._worked_s = 0, 0.0
        return found, alarm

    # Beginning.

    def _fill(self, run: RunState, weights: SamplerParams) -> None:
        """Begins rounds until there is one for this step and for each of `lag` steps to come."""
        config, chat = self._config, self._sampling.sampler.chat
        while len(self._open) <= self._limit.lag * self._count:
            step = run.step + len(self._open) // self._count
            if step >= config.steps and len(self._open) >= self._count:
                return
            index = self._label[1] + 1 if step == self._label[0] else 0
            if not index:
                self._rng = np.random.default_rng([config.seed, step, 2])
            self._label = (step, index)
            problems = draw_problems(config, run.stream, run.method, self._rng)
            wave = Wave(problems, config.resample.sampled(config.group.size), run.method, self._rng)
            opening = opening_requests(config, chat, wave)
            requests = numbered(opening, index * self._count, Counter())
            parts = [PartialGroup(r.problem, (), step, r.place, r.temperature, run.step) for r in requests]
            mine = self._add(parts, [[None] * request.count for request in requests])
            self._submit([r for r, own in zip(requests, mine, strict=True) if own], RunOptions(step), weights)

    def _add(self, parts: Sequence[PartialGroup], rows: Sequence[list[Trajectory | None]]) -> list[bool]:
        """Opens groups: parts of one problem follow each other. Whether each part is this process's."""
        mine = []
        for _, some in groupby(zip(parts, rows, strict=True), key=lambda pair: (pair[0].step, pair[0].place)):
            group = OpenGroup(self._begun, *map(list, zip(*some, strict=True)))
            self._begun += 1
            self._open.append(group)
            mine += [self._own(group)] * len(group.parts)
        return mine

    def _own(self, group: OpenGroup) -> bool:
        """Whether this process rolls it out."""
        return group.number % self._processes.count == self._processes.index

    def _submit(self, requests: Sequence[RolloutRequest], options: RunOptions, weights: SamplerParams) -> None:
        """Queues the rows of this process that are open and not running."""
        if not requests:
            return
        running = set(self._running.values())
        empty = [
            (group, i, j)
            for group in filter(self._own, self._open)
            for i, rows in enumerate(group.rows)
            for j, row in enumerate(rows)
            if row is None and (group, i, j) not in running
        ]
        shown = None if self._limit.lag else self._sampling.progress
        arguments = self._sampling.sampler.submission(requests, replace(options, progress=shown))
        self._running |= zip(self._engine.submit(weights, *arguments), empty, strict=True)

    def _restore(self, run: RunState, weights: SamplerParams) -> None:
        """Goes on with what a checkpoint holds. Keys and values of the cache are computed with the weights of now; a
        row whose tool session is lost begins again."""
        cuts, run.partial = run.partial, ()
        if not cuts or self._open:
            return
        ended = [[None if t.stop == "cancelled" else t for t in part.trajectories] for part in cuts]
        mine = self._add([replace(part, trajectories=()) for part in cuts], ended)
        requests = [
            part.continuation(cut if resumable(cut) else from_prompt(cut))
            for part, own in zip(cuts, mine, strict=True)
            for cut in part.trajectories
            if own and cut.stop == "cancelled"
        ]
        last = max((part.step, part.place) for part in cuts)
        self._label = (last[0], last[1] // self._count)
        self._rng = np.random.default_rng([self._config.seed, last[0], 2])
        self._submit(requests, RunOptions(run.step), weights)

    # Taking.

    def _take(self, trained: int) -> list[OpenGroup]:
        """The oldest whole groups, once no unfinished one would become too old."""
        engine, lag, processes = self._engine, self._limit.lag, self._processes
        drops = lag > 0 and self._limit.late == "drop"
        self._ask()  # also tells of groups that became whole during the update
        while processes.count == 1 or not processes.stopping:
            late = late_groups(self._open, trained, lag) if drops else []
            for ticket in [ticket for ticket, place in self._running.items() if place[0] in late]:
                self._dropped += 1
                engine.cancel(ticket)
            if may_take(self._open, self._count, trained, lag, drops=drops):
                break
            self._work_on()
        self._mark_whole(processes.gather(self._whole()))
        taken = oldest_whole(self._open, self._count)
        self._open = [group for group in self._open if group not in taken]
        return taken

    def _work_on(self) -> None:
        """Until a row ends, or for a moment where groups of other processes may become whole meanwhile."""
        engine, several = self._engine, self._processes.count > 1
        found = engine.advance(ASK_S if several else np.inf) if self._running else []
        if not (found or several):
            raise RuntimeError(f"the engine has lost {len(self._running)} rollouts that a step waits for")
        self._accept(found)
        if several:
            if not self._running:
                time.sleep(ASK_S / 5)
            self._ask()

    def _ask(self) -> None:
        """Tells the other processes which groups are whole here, and hears which are there. A process decides on what
        it has told alone, else it would wait in `gather` for others that wait for its groups."""
        if self._processes.count > 1:
            self._mark_whole(self._processes.post(self._whole()))

    def _whole(self) -> str:
        """The numbers of this process's whole groups."""
        return ",".join(str(group.number) for group in self._open if self._own(group) and group.whole)

    def _mark_whole(self, lists: Sequence[str]) -> None:
        """Marks the groups that other processes list as whole."""
        numbers = {int(number) for text in lists for number in text.split(",") if number}
        for group in self._open:
            group.elsewhere = not self._own(group) and group.number in numbers

    def _accept(self, finished: Sequence[tuple[int, Trajectory]]) -> None:
        for ticket, trajectory in finished:
            if ticket in self._running:
                group, part, index = self._running.pop(ticket)
                group.rows[part][index] = trajectory

    def _scored(self, taken: Sequence[OpenGroup]) -> ScoredRollouts:
        """The groups scored, with the statistics of the engine since the last call."""
        own = [*filter(self._own, taken)]
        self._score([group for group in own if group.scored is None])
        stats = self._engine.take_stats()
        if not self._open:
            self._engine.release()
        found = self._processes.gather(([group.scored for group in own], stats))
        parts = [iter(scored) for scored, _ in found]
        each = [with_problems(next(parts[g.number % len(parts)]), g.parts) for g in taken]
        stats = merge_stats([one for _, one in found]) if len(found) > 1 else stats
        rows = sum(len(rows) for group in taken for rows in group.rows)
        return ScoredRollouts(
            tuple(part for one in each for part in one.groups),
            tuple(pair for one in each for pair in one.removed),
            dict(sum((Counter(one.counts) for one in each), Counter())),
            tuple(fault for one in each for fault in one.faults),
            replace(stats, rollouts=rows),
            unscored=dict(sum((Counter(one.unscored) for one in each), Counter())),
        )

    def _score(self, groups: Sequence[OpenGroup]) -> None:
        """Scores groups together. What is found belongs to all of them; the first one holds counts and faults."""
        if not groups:
            return
        parts = [group.ended() for group in groups]
        found = score(self._sampling.scorer, list(chain.from_iterable(parts)), (), RolloutStats(), keeps_partial=False)
        shares = split(found.groups, map(len, parts))
        for group, share in zip(groups, shares, strict=True):
            group.scored = ScoredRollouts(tuple(share))
        groups[0].scored = replace(found, groups=tuple(shares[0]))

    def _drop_stale(self, run: RunState) -> None:
        """Drops groups that no update may train on any more: left in the buffer by dynamic sampling, or restored."""
        lag = self._limit.lag
        if not lag:
            return
        stale = [group for group in self._open if group.born + lag < run.step]
        mine = [*filter(self._own, stale)]
        for ticket in [ticket for ticket, place in self._running.items() if place[0] in mine]:
            del self._running[ticket]
            self._engine.cancel(ticket)
        self._open = [group for group in self._open if group not in stale]
        old = run.buffer.discard(lambda group: oldest(group) + lag < run.step)
        rows = chain.from_iterable(chain.from_iterable(group.rows for group in mine))
        self._dropped += sum(row is None or row.stop != "cancelled" for row in rows)
        self._dropped += sum(g.size for g in old) if self._processes.first else 0

    # Between.

    def _work(self) -> None:
        """A round of the engine, and the scores of a whole group. A failure waits until the update is complete."""
        begun = time.perf_counter()
        try:
            if self._failure is None:
                self._accept(self._engine.advance(0.0))
                own = filter(self._own, self._open)
                self._score([group for group in own if group.whole and group.scored is None][:1])
        except Exception as error:
            self._failure = error
        spent = time.perf_counter() - begun
        self._worked_s += spent
        if spent < IDLE_S:
            time.sleep(IDLE_S)

    def _cut(self) -> list[tuple[Trajectory, ...]]:
        """The rows of each part that is open here, unfinished ones as they are now; they go on."""
        cuts = {place: self._engine.cut(ticket) for ticket, place in self._running.items()}
        return [
            tuple(cuts[group, i, j] if row is None else row for j, row in enumerate(rows))
            for group in filter(self._own, self._open)
            for i, rows in enumerate(group.rows)
        ]

    def _with_rows(self, cuts: Sequence[Sequence[tuple[Trajectory, ...]]]) -> tuple[PartialGroup, ...]:
        """Everything that is open, with the rows that each process has of it."""
        rows = [*map(iter, cuts)]
        own = ((rows[group.number % len(rows)], part) for group in self._open for part in group.parts)
        return tuple(replace(part, trajectories=next(source)) for source, part in own)


def with_problems(found: ScoredRollouts, parts: Sequence[PartialGroup]) -> ScoredRollouts:
    """The rollouts of these parts, with the problems that the caller holds in place of those of another process."""
    pairs = zip(found.groups, parts, strict=True)
    return replace(found, groups=tuple(replace(group, problem=part.problem) for group, part in pairs))


def oldest(group: Group) -> int:
    """Version of the oldest token that the policy drew."""
    versions = [trajectory.versions[trajectory.policy_mask] for trajectory in group.trajectories]
    return min((int(each.min()) for each in versions if each.size), default=0)


def age_metrics(groups: Sequence[Group], trained: int) -> Metrics:
    """How many versions the tokens of these groups are behind the policy that trains on them, and how many of the
    trajectories have tokens of several."""
    each = [trained - t.versions[t.policy_mask] for group in groups for t in group.trajectories if t.policy_mask.any()]
    ages = np.concatenate(each) if each else np.zeros(1)
    return {
        "rollout/lag_mean": float(ages.mean()),
        "rollout/lag_max": float(ages.max()),
        "rollout/partial_share": float(np.mean([np.ptp(own) > 0 for own in each])) if each else 0.0,
    }


class Begun(Protocol):
    """The rollouts of a problem, begun and not taken."""

    @property
    def born(self) -> int:
        """Version of the weights that they began with."""

    @property
    def whole(self) -> bool:
        """Whether all of them have ended."""


G = TypeVar("G", bound=Begun)


def oldest_whole(groups: Sequence[G], count: int) -> list[G]:
    """As many whole groups as a step takes, if there are so many; `groups` are in the order of their births."""
    return [group for group in groups if group.whole][:count]


def late_groups(groups: Sequence[G], trained: int, lag: int) -> list[G]:
    """Unfinished groups that would be older than `lag` versions at the next step."""
    return [group for group in groups if not group.whole and group.born + lag <= trained]


def may_take(groups: Sequence[Begun], count: int, trained: int, lag: int, *, drops: bool = False) -> bool:
    """Whether a step takes its `oldest_whole` now.

    Args:
        groups: All that are open, in the order of their births.
        count: Groups that a step takes.
        trained: Version of the weights that the step trains.
        lag: Versions that a group may be older than that.
        drops: Whether those that become too old are dropped. If not, no more old ones are left over than the steps to
            come can take in time, unless the step takes old ones alone.
    """
    taken = oldest_whole(groups, count)
    if len(taken) < count or late_groups(groups, trained, lag):
        return False
    for ahead in range(1, 0 if drops else lag + 1):
        due, of_these = (sum(g.born + lag <= trained + ahead for g in some) for some in (groups, taken))
        if due - of_these > ahead * count and of_these < count:
            return False
    return True
