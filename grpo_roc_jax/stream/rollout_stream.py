"""Rollouts that continue from one training step to the next (`rollout.step_limit stream`).

The engine works on the rollouts of this step and of the `lag` steps to come. A step takes the oldest complete groups;
the others continue under the next weights, and while the device computes an update. No row gets older than `lag`
versions of the weights: the step waits for such a row, or drops it.

With several processes all draw the same problems. Each rolls out and scores every `count`-th group, unless the first
process has samplers elsewhere roll out all of them (`stream.samplers`). They take the same groups: each process posts
which of its groups are complete and how old they are, and once these are enough all of them `gather` that list. The
update changes the weights of all processes at once.
"""

import json
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.protocol import RunOptions
from grpo_roc_jax.engine.publish import SamplerParams
from grpo_roc_jax.engine.table import from_prompt
from grpo_roc_jax.method.edit import joined
from grpo_roc_jax.method.planning import Wave
from grpo_roc_jax.pod.processes import ProcessFailed
from grpo_roc_jax.run.policy import PolicyModel
from grpo_roc_jax.run.run_state import RunState
from grpo_roc_jax.run.sample import (
    GroupSampler,
    PartialGroup,
    ScoredRollouts,
    StepSamples,
    draw_problems,
    edited,
    merge_stats,
    numbered,
    opening_requests,
    resumable,
)
from grpo_roc_jax.stream.open_groups import EngineGroups, GroupSource, OpenGroup, SamplerFailed
from grpo_roc_jax.types import Group, Metrics, RolloutRequest, Trajectory

ESS = "mismatch/token_effective_sample_size"
IDLE_S = 1e-3
"""Seconds that the host sleeps when rows wait for tools and the device is busy."""
ASK_S = 0.1
"""Seconds that a process works before it asks the others for their complete groups, unless one of its rows ends
earlier."""


class RolloutStream:
    """Keeps the engine filled and returns complete groups, oldest first. A run has one of these."""

    def __init__(
        self,
        config: Config,
        sampling: GroupSampler,
        mesh: Mesh,
        source: GroupSource | None = None,
        *,
        open_wave: Callable[[Config, Any, Wave], list[RolloutRequest]] = opening_requests,
    ):
        """
        Args:
            config: Configuration of the run.
            sampling: Group sampler of the run. Only this stream and evaluations use its engine.
            mesh: Mesh of the update, during which the rollouts continue.
            source: What rolls the groups out; by default the engine of `sampling`.
            open_wave: Returns the requests that open the groups of a wave, given the configuration and the chat format.
        """
        self._open_wave = open_wave
        self._config, self._sampling = config, sampling
        self._source = source or EngineGroups(sampling, shows=not config.rollout.step_limit.lag)
        self._mesh, self._limit, self._count = mesh, config.rollout.step_limit, config.group.problems
        self._processes, self._begun = sampling.processes, 0
        """Processes of the run; number of groups submitted so far."""
        self.open_groups: list[OpenGroup] = []
        """Open groups in the order of their births."""
        self._label = (-1, 0)
        """Step and number of the newest round, as random keys use them."""
        self._rng = np.random.default_rng()
        self._failure: Exception | None = None
        """Why this process cannot roll out any more."""
        self._failed_elsewhere = False
        """Whether that has happened to another process."""
        self._notes: list[str] = []
        self._dropped, self._worked_s, self._alarmed = 0, 0.0, False
        """Rows of groups that were dropped before they ended; seconds of work during updates; whether the last step
        raised an alarm."""

    @property
    def meanwhile(self) -> Callable[[], None] | None:
        """What the host does while the device computes an update. None on several CPU devices, since programs with
        collectives would share their threads."""
        several = jax.default_backend() == "cpu" and self._mesh.size > 1
        idle = several and not self._source.always_works
        return None if idle or not self._limit.lag else self._work

    def publish(self, policy: PolicyModel, run: RunState) -> SamplerParams | None:
        """The rollouts go on with the parameters of this step. Returns the weights for `next_round`."""
        return self._source.publish(policy, run.train.params, run.step)

    def take_notes(self) -> list[str]:
        """What had happened to samplers when `after_update` was called, for the events of the run."""
        notes, self._notes = self._notes, []
        return notes

    def next_round(self, run: RunState, weights: SamplerParams | None) -> StepSamples:
        """Returns the oldest complete groups, scored, as many as a step has problems, and submits others in their
        place.

        Raises:
            Exception: The failure of a round of the engine, maybe during the last update, of the only process.
            ProcessFailed: One of several processes had such a failure; raised in all of them.
        """
        if self._failure is not None and self._processes.count == 1:
            raise self._failure
        begun = time.perf_counter()
        self._restore(run, weights)
        self._drop_stale(run)
        self._fill(run, weights)
        sampled = time.perf_counter()
        groups_of_step = self._take(run.step)
        wave = self._scored(groups_of_step)
        sampled = time.perf_counter() - sampled
        parts = iter(wave.groups)
        groups = [joined(Group(g.parts[0].problem, (), ()), *(next(parts) for _ in g.parts)) for g in groups_of_step]
        samples = edited(self._config, self._sampling, groups, [wave])
        return replace(samples, plan_s=time.perf_counter() - begun - sampled)

    def after_update(self, run: RunState, groups: Sequence[Group], metrics: Metrics) -> tuple[Metrics, str]:
        """Returns (metrics of the groups that were trained on, text of an alarm that was not raised before, or "").
        Leaves the rows that continue in `run.partial`, for a checkpoint."""
        dropped = self._dropped + self._source.take_dropped()
        report = (self._news(), self._cut(), dropped, self._worked_s, self._source.metrics(), self._source.take_notes())
        reports = self._processes.gather(report, uninterrupted=True)
        news, cuts, dropped, worked, of_samplers, notes = zip(*reports, strict=True)
        self._learn(news)
        run.partial = self._with_rows(cuts)
        effective, low = metrics.get(ESS, 1.0), self._limit.min_effective
        text = (
            f"the effective sample size of the importance weights is {effective:.2f} of the tokens, below "
            f"rollout.step_limit.min_effective = {low:g}; lower rollout.step_limit.lag or optim.lr"
        )
        alarm, self._alarmed = text if effective < low and not self._alarmed else "", effective < low
        age = age_metrics(groups, run.step) | {
            "rollout/dropped_stale": float(sum(dropped)),
            "time/overlapped_s": max(worked),
        }
        for metrics_of_samplers in of_samplers:
            age |= metrics_of_samplers
        self._notes += chain.from_iterable(notes)
        self._dropped, self._worked_s = 0, 0.0
        return age, alarm

    # Submitting groups.

    def _fill(self, run: RunState, weights: SamplerParams | None) -> None:
        """Begins rounds until there is one for this step and for each of the `lag` steps to come."""
        config, chat = self._config, self._sampling.sampler.chat
        while len(self.open_groups) <= self._limit.lag * self._count:
            step = run.step + len(self.open_groups) // self._count
            if step >= config.steps and len(self.open_groups) >= self._count:
                return
            # After groups were dropped it may be a step that an earlier round was labeled with.
            step = max(step, self._label[0])
            index = self._label[1] + 1 if step == self._label[0] else 0
            if not index:
                self._rng = np.random.default_rng([config.seed, step, 2])
            self._label = (step, index)
            problems = draw_problems(config, run.stream, run.method, self._rng)
            wave = Wave(problems, config.resample.sampled(config.group.size), run.method, self._rng)
            opening = self._open_wave(config, chat, wave)
            requests = numbered(opening, index * self._count, Counter())
            parts = [PartialGroup(r.problem, (), step, r.place, r.temperature, run.step) for r in requests]
            mine, groups = self._add(parts, [[None] * request.count for request in requests])
            requests = [request for request, is_mine in zip(requests, mine, strict=True) if is_mine]
            self._submit(groups, requests, RunOptions(step), weights)

    def _add(
        self, parts: Sequence[PartialGroup], rows: Sequence[list[Trajectory | None]]
    ) -> tuple[list[bool], list[OpenGroup]]:
        """Opens groups; parts of the same problem must be adjacent. Returns for each part whether this process rolls it
        out, and the groups that it does."""
        mine, groups = [], []
        for _, some in groupby(zip(parts, rows, strict=True), key=lambda pair: (pair[0].step, pair[0].place)):
            group = OpenGroup(self._begun, *map(list, zip(*some, strict=True)))
            self._begun += 1
            self.open_groups.append(group)
            mine += [self._is_mine(group)] * len(group.parts)
            groups += [group] if self._is_mine(group) else []
        return mine, groups

    def _owner(self, group: OpenGroup) -> int:
        """The process that rolls the group out, or has it rolled out."""
        return 0 if self._source.first_process_only else group.number % self._processes.count

    def _is_mine(self, group: OpenGroup) -> bool:
        return self._owner(group) == self._processes.index

    def _submit(
        self,
        groups: Sequence[OpenGroup],
        requests: Sequence[RolloutRequest],
        options: RunOptions,
        weights: SamplerParams | None,
    ) -> None:
        """Begins the rows of this process's groups, unless it has failed, which `_take` tells the others."""
        if requests and self._failure is None:
            self._source.submit(groups, requests, options, weights)

    def _restore(self, run: RunState, weights: SamplerParams | None) -> None:
        """Continues with the rows of a checkpoint. Keys and values of the cache are computed with the current weights.
        A row whose tool session is lost starts again."""
        cuts, run.partial = run.partial, ()
        if not cuts or self.open_groups:
            return
        ended = [[None if t.stop == "cancelled" else t for t in part.trajectories] for part in cuts]
        mine, groups = self._add([replace(part, trajectories=()) for part in cuts], ended)
        requests = [
            part.continuation(cut if resumable(cut) else from_prompt(cut))
            for part, is_mine in zip(cuts, mine, strict=True)
            for cut in part.trajectories
            if is_mine and cut.stop == "cancelled"
        ]
        last = max((part.step, part.place) for part in cuts)
        self._label = (last[0], last[1] // self._count)
        self._rng = np.random.default_rng([self._config.seed, last[0], 2])
        self._submit(groups, requests, RunOptions(run.step), weights)

    # Taking complete groups.

    def _take(self, trained: int) -> list[OpenGroup]:
        """The oldest complete groups, once no unfinished group would become too old."""
        self._ask()  # also tells the others about groups that were completed during the update
        try:
            self._work_until_complete(trained)
        except Exception as error:
            if self._processes.count == 1:
                raise
            self._failure = error
            self._ask()  # the others stop waiting for groups of this process
        news, failures = zip(*self._processes.gather((self._news(), described(self._failure))), strict=True)
        for index, failure in enumerate(failures):
            if failure:
                raise ProcessFailed(f"process {index} failed while it sampled: {failure}") from self._failure
        self._learn(news)
        complete = oldest_whole(self.open_groups, self._count)
        self.open_groups = [group for group in self.open_groups if group not in complete]
        return complete

    def _work_until_complete(self, trained: int) -> None:
        """Works until the groups of a step may be taken, or until one of several processes fails or is to stop."""
        lag, processes = self._limit.lag, self._processes
        drops = lag > 0 and self._limit.late == "drop"
        while processes.count == 1 or not (self._failed_elsewhere or self._failure or processes.stopping):
            if drops:
                self._source.drop_rows([*filter(self._is_mine, late_groups(self.open_groups, trained, lag))])
            if may_take(self.open_groups, self._count, trained, lag, drops=drops):
                return
            self._work_on()

    def _work_on(self) -> None:
        """Works until a row ends, or for `ASK_S` if other processes may complete groups meanwhile."""
        several = self._processes.count > 1
        self._source.advance(ASK_S if several else np.inf)
        self._sort()
        if several:
            if not self._source.working:
                time.sleep(ASK_S / 5)
            self._ask()

    def _sort(self) -> None:
        """Restores the order of births, since groups of a lost sampler are younger after they have begun again."""
        self.open_groups.sort(key=lambda group: (group.born, group.number))

    def _ask(self) -> None:
        """Exchanges with the other processes which groups are complete, and how old they are. A process decides only on
        what it has sent the others; otherwise it would wait in `gather` while the others wait for its groups. What it
        has sent stays true, or the others may decide even sooner: a complete group remains so, and one that begins
        again becomes younger."""
        if self._processes.count > 1:
            self._learn(self._processes.post(self._news()))

    def _news(self) -> str:
        """What the others do not know of this process's groups: those that are complete, the births of those that have
        begun again, and whether it has failed; as text."""
        mine = [group for group in self.open_groups if self._is_mine(group)]
        changed = [g for g in mine if g.complete or g.born != g.first_born]
        return json.dumps([self._failure is not None, [(g.number, g.born, g.complete) for g in changed]])

    def _learn(self, news: Sequence[str]) -> None:
        """Takes over what the processes tell about their groups; `open_groups` is in the same order in all of them once
        they have gathered it."""
        read = [json.loads(text) for text in news]
        self._failed_elsewhere = any(failed for failed, _ in read)
        told = {number: (born, complete) for _, groups in read for number, born, complete in groups}
        for group in self.open_groups:
            if self._is_mine(group):
                continue
            born, group.elsewhere = told.get(group.number, (group.born, False))
            if born != group.born:
                group.parts = [replace(part, born=born) for part in group.parts]
        self._sort()

    def _scored(self, complete: Sequence[OpenGroup]) -> ScoredRollouts:
        """The scored groups, with the statistics of the engine since the last call."""
        local = [*filter(self._is_mine, complete)]
        self._source.score(local)
        stats = self._source.take_stats()
        if not self.open_groups:
            self._source.release()
        gathered = self._processes.gather(([group.scored for group in local], stats))
        parts = [iter(scored) for scored, _ in gathered]
        each = [with_problems(next(parts[self._owner(g)]), g.parts) for g in complete]
        stats = merge_stats([share for _, share in gathered]) if len(gathered) > 1 else stats
        rows = sum(len(rows) for group in complete for rows in group.rows)
        return ScoredRollouts(
            tuple(part for share in each for part in share.groups),
            tuple(pair for share in each for pair in share.removed),
            dict(sum((Counter(share.counts) for share in each), Counter())),
            tuple(fault for share in each for fault in share.faults),
            replace(stats, rollouts=rows),
            unscored=dict(sum((Counter(share.unscored) for share in each), Counter())),
        )

    def _drop_stale(self, run: RunState) -> None:
        """Drops groups that no update may train on any more: those left in the buffer by dynamic sampling,
        or restored."""
        lag = self._limit.lag
        if not lag:
            return
        stale = [group for group in self.open_groups if group.born + lag < run.step]
        mine = [*filter(self._is_mine, stale)]
        self._source.forget(mine)
        self.open_groups = [group for group in self.open_groups if group not in stale]
        old = run.buffer.discard(lambda group: oldest(group) + lag < run.step)
        rows = chain.from_iterable(chain.from_iterable(group.rows for group in mine))
        self._dropped += sum(row is None or row.stop != "cancelled" for row in rows)
        self._dropped += sum(g.size for g in old) if self._processes.first else 0

    # During the update.

    def _work(self) -> None:
        """Runs one round of the engine and scores one complete group. A failure is raised only after the update."""
        begun = time.perf_counter()
        try:
            if self._failure is None:
                self._source.advance(0.0)
                local = filter(self._is_mine, self.open_groups)
                self._source.score([group for group in local if group.complete and group.scored is None][:1])
        except Exception as error:
            self._failure = error
        spent = time.perf_counter() - begun
        self._worked_s += spent
        if spent < IDLE_S:
            time.sleep(IDLE_S)

    def _cut(self) -> list[tuple[Trajectory, ...]]:
        """The rows of each part that is open here; unfinished rows are copied in their present state and continue."""
        self._sort()
        return [rows for group in filter(self._is_mine, self.open_groups) for rows in self._source.cut(group)]

    def _with_rows(self, cuts: Sequence[Sequence[tuple[Trajectory, ...]]]) -> tuple[PartialGroup, ...]:
        """All open groups, with the rows that each process has of them."""
        rows = [*map(iter, cuts)]
        pairs = ((rows[self._owner(group)], part) for group in self.open_groups for part in group.parts)
        return tuple(replace(part, trajectories=next(source)) for source, part in pairs)


def described(failure: Exception | None) -> str:
    """A failure for the other processes: with its traceback, unless its message has that of a sampler already."""
    if failure is None or isinstance(failure, SamplerFailed):
        return str(failure or "")
    return "".join(traceback.format_exception(failure)).strip()


def with_problems(rollouts: ScoredRollouts, parts: Sequence[PartialGroup]) -> ScoredRollouts:
    """The rollouts of these parts, with the problem objects of the caller instead of copies from another process."""
    pairs = zip(rollouts.groups, parts, strict=True)
    return replace(rollouts, groups=tuple(replace(group, problem=part.problem) for group, part in pairs))


def oldest(group: Group) -> int:
    """Version of the weights that sampled the oldest policy token of the group."""
    versions = [trajectory.versions[trajectory.policy_mask] for trajectory in group.trajectories]
    return min((int(each.min()) for each in versions if each.size), default=0)


def age_metrics(groups: Sequence[Group], trained: int) -> Metrics:
    """Metrics of how many versions the tokens of these groups lag behind the policy that trains on them, and of the
    share of trajectories with tokens of several versions."""
    each = [trained - t.versions[t.policy_mask] for group in groups for t in group.trajectories if t.policy_mask.any()]
    ages = np.concatenate(each) if each else np.zeros(1)
    return {
        "rollout/lag_mean": float(ages.mean()),
        "rollout/lag_max": float(ages.max()),
        "rollout/partial_share": float(np.mean([np.ptp(versions) > 0 for versions in each])) if each else 0.0,
    }


class Begun(Protocol):
    """The rollouts of a problem that have begun and that no step has taken."""

    @property
    def born(self) -> int:
        """Version of the weights that sampled their first tokens."""

    @property
    def complete(self) -> bool:
        """Whether all of them have ended."""


G = TypeVar("G", bound=Begun)


def oldest_whole(groups: Sequence[G], count: int) -> list[G]:
    """The oldest complete groups, as many as a step takes or fewer; `groups` must be in the order of their births."""
    return [group for group in groups if group.complete][:count]


def late_groups(groups: Sequence[G], trained: int, lag: int) -> list[G]:
    """Unfinished groups that would be more than `lag` versions old at the next step."""
    return [group for group in groups if not group.complete and group.born + lag <= trained]


def may_take(groups: Sequence[Begun], count: int, trained: int, lag: int, *, drops: bool = False) -> bool:
    """Whether a step takes its `oldest_whole` groups now.

    Args:
        groups: All open groups, in the order of their births.
        count: Number of groups that a step takes.
        trained: Version of the weights that the step trains.
        lag: Most versions that a group may be older than that.
        drops: Whether groups that become too old are dropped. If not, no more old groups are left over than the steps
            to come can take in time, unless the step takes only old ones.
    """
    complete = oldest_whole(groups, count)
    if len(complete) < count or late_groups(groups, trained, lag):
        return False
    for ahead in range(1, 0 if drops else lag + 1):
        due, of_these = (sum(g.born + lag <= trained + ahead for g in some) for some in (groups, complete))
        if due - of_these > ahead * count and of_these < count:
            return False
    return True
