"""Groups that are rolled out by samplers in processes of their own, which may come and go (`rollout.samplers`).

A sampler has devices, engine, tools and scorer of its own, made from the configuration of the run (`RemoteSampler`). It
takes versions of the weights and problems, and returns groups with their verdicts. In the trainer, `SamplerPool`
assigns groups to samplers, and a `Transport` carries `Orders` there and `Report`s back: `contrib.samplers` has the one
on Ray. If the trainer has several processes, its first one has the pool, and the others take the same groups from it
(`FollowedSamplers`): with a share of the samplers for each process, one without samplers would stop all others.

A sampler that is lost loses its rows and nothing else. Its groups start again on another one, with the same random keys
and the weights of that time. A group is with one sampler at a time, and of a report only groups that its sampler still
has are taken, so that nothing is lost or counted twice.
"""

import hashlib
import importlib
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import jax
import numpy as np

from grpo_roc_jax.config import Config
from grpo_roc_jax.engine.protocol import RolloutStats, RunOptions
from grpo_roc_jax.engine.publish import NonFiniteWeightsError, SamplerParams
from grpo_roc_jax.engine.scheduler import expand
from grpo_roc_jax.engine.table import starting_point
from grpo_roc_jax.model.sharding import ShardingConfig
from grpo_roc_jax.model.transformer import Params, compute_dtype
from grpo_roc_jax.pod.processes import Processes
from grpo_roc_jax.process.progress import phase
from grpo_roc_jax.rollout.sampler import render
from grpo_roc_jax.run.components import describe_device, make_parts
from grpo_roc_jax.run.policy import PolicyModel, parameter_count
from grpo_roc_jax.run.sample import GroupSampler, PartialGroup, ScoredRollouts, merge_stats
from grpo_roc_jax.settings.callables import all_passed, given
from grpo_roc_jax.settings.cli import ConfigError, config_errors
from grpo_roc_jax.stream.open_groups import EngineGroups, OpenGroup, SamplerFailed, score_together
from grpo_roc_jax.tools.registry import Registry
from grpo_roc_jax.types import Metrics, RolloutRequest, Trajectory

TRANSPORTS = {"ray": "grpo_roc_jax.contrib.samplers.ray_samplers:RayTransport"}
"""Kind of `rollout.samplers` -> module and class of its transport; imported when the kind is chosen."""
POLL_S = 0.5
"""Longest time in which a sampler answers that nothing has ended."""
ROUND_S = 0.05
"""Seconds that a sampler works before it looks for new orders."""
RESENT = 3
"""Times in a row that weights are sent to a sampler that received others."""
FAILED_STARTS = 3
"""Samplers in a row that end before they have started, after which the run ends."""


# What is sent.


@dataclass(frozen=True, eq=False)
class Weights:
    """A version of the trained parameters: those of the adapter where there is one, otherwise all in the compute dtype,
    which is what `Engine.publish` makes of them."""

    version: int
    params: Params
    """NumPy arrays."""
    digest: str
    """Hash of names, shapes, dtypes and bytes of all arrays, computed by the trainer."""

    @property
    def whole(self) -> bool:
        """Whether these are the parameters that the trainer sent."""
        return digest(self.params) == self.digest


def digest(params: Params) -> str:
    """Hash of names, shapes, dtypes and bytes of all arrays."""
    summed = hashlib.blake2b(digest_size=16)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(leaf)
        summed.update(f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}\n".encode())
        summed.update(array.reshape(-1).view(np.uint8))
    return summed.hexdigest()


@dataclass(frozen=True, eq=False)
class GroupTask:
    """A group that a sampler rolls out and scores."""

    number: int
    parts: tuple[PartialGroup, ...]
    rows: tuple[tuple[Trajectory | None, ...], ...]
    """The trajectories of each part; None for those to roll out."""
    requests: tuple[RolloutRequest, ...]
    """Requests for the missing rows, in order."""
    step: int
    """Step of the requests that name none."""
    version: int = -1
    """Oldest version of the weights that may sample it."""

    @property
    def size(self) -> int:
        """Number of rows to roll out."""
        return sum(row is None for row in chain.from_iterable(self.rows))

    @property
    def fresh(self) -> bool:
        """Whether no token of it has been sampled."""
        resumed = [request.resume for request in self.requests if request.resume is not None]
        ended = any(row is not None for row in chain.from_iterable(self.rows))
        return not ended and not any(cut.policy_mask.any() for cut in resumed)


@dataclass(frozen=True, eq=False)
class Orders:
    """What a sampler is sent, in this order: weights, groups to drop the rows of or to give up, and new groups."""

    drop: tuple[int, ...] = ()
    """Groups that have become too old: their unfinished rows end."""
    forget: tuple[int, ...] = ()
    tasks: tuple[GroupTask, ...] = ()


@dataclass(frozen=True, eq=False)
class CompletedGroup:
    """A group that a sampler has rolled out and scored."""

    number: int
    rows: tuple[tuple[Trajectory, ...], ...]
    scored: ScoredRollouts


@dataclass(frozen=True, eq=False)
class Report:
    """What a sampler answers."""

    ready: bool = True
    """Whether it has started."""
    host: str = ""
    """Its devices and their host."""
    version: int = -1
    """Version of its weights."""
    groups: tuple[CompletedGroup, ...] = ()
    """Groups that were completed since the last report."""
    unfinished: Mapping[int, int] = field(default_factory=dict)
    """Number of rows in flight of the other groups that it has begun, by the number of the group."""
    stats: tuple[RolloutStats, ...] = ()
    refused: int = -1
    """Version of weights that arrived with another hash since the last report, and were not used."""
    failure: str = ""
    """Traceback of an exception that ended the sampler."""


# The sampler's side.


class HostedGroups:
    """Rolls out and scores the groups of a run elsewhere, on the engine of this process."""

    def __init__(self, policy: PolicyModel, sampling: GroupSampler, *, warm_up: bool = True):
        """`warm_up`: whether all programs are compiled before the first rows begin."""
        self._policy, self._sampling, self._warm_up = policy, sampling, warm_up
        self._source = EngineGroups(sampling)
        self._weights: SamplerParams | None = None
        self._version = self._refused = -1
        self._waiting: list[GroupTask] = []
        """Groups whose weights have not come yet."""
        self.open_groups: dict[int, OpenGroup] = {}
        """Groups that have begun here and were not reported, by their numbers."""

    @property
    def working(self) -> bool:
        return self._source.working

    def take(self, orders: Orders, weights: Weights | None = None) -> None:
        """Follows orders. Groups begin once weights of their version are here."""
        if weights is not None:
            self._publish(weights)
        given_up = [self.open_groups.pop(number) for number in orders.forget if number in self.open_groups]
        self._source.forget(given_up)
        self._waiting = [task for task in (*self._waiting, *orders.tasks) if task.number not in orders.forget]
        ready = [task for task in self._waiting if task.version <= self._version]
        self._waiting = [task for task in self._waiting if task.version > self._version]
        for task in ready:
            group = OpenGroup(task.number, list(task.parts), [list(rows) for rows in task.rows])
            self.open_groups[task.number] = group
            self._source.submit([group], task.requests, RunOptions(task.step), self._weights)
        self._source.drop_rows([group for number, group in self.open_groups.items() if number in orders.drop])

    def _publish(self, weights: Weights) -> None:
        if weights.version < self._version:
            return
        if not weights.whole:
            self._refused = weights.version
            return
        policy, engine = self._policy, self._sampling.sampler.engine
        self._weights = None  # a second copy would take memory
        self._weights = engine.publish(policy.full(policy.placed(weights.params)), weights.version)
        self._version, self._refused = weights.version, -1
        if self._warm_up:
            engine.warmup(self._weights)
            self._warm_up = False

    def advance(self, timeout_s: float) -> None:
        """Works until rows have ended, or for so long."""
        self._source.advance(timeout_s)

    def report(self) -> Report:
        """What has happened since the last report."""
        complete = [group for group in self.open_groups.values() if group.complete]
        self._source.score(complete)
        stats = (self._source.take_stats(),) if complete else ()
        for group in complete:
            del self.open_groups[group.number]
        if complete and not self.open_groups:
            self._source.release()
        groups = (CompletedGroup(group.number, tuple(map(tuple, group.rows)), group.scored) for group in complete)
        refused, self._refused = self._refused, -1
        return Report(
            version=self._version,
            groups=tuple(groups),
            unfinished=self._source.unfinished,
            stats=stats,
            refused=refused,
        )


class RemoteSampler:
    """A sampler in a process of its own: a thread that makes the parts and runs the engine, and the two calls that a
    transport passes on. It makes everything from the configuration of the run, on the devices of its process."""

    def __init__(
        self,
        config: Config,
        registry: Registry | None = None,
        functions: Mapping | None = None,
        *,
        open_parts: Callable[..., AbstractContextManager[tuple[PolicyModel, GroupSampler]]] = make_parts,
    ):
        """
        Args:
            config: Configuration of the run.
            registry: Tools that were passed to `train`.
            functions: Functions that were passed to `train`.
            open_parts: Opens the policy and its group sampler.
        """
        self._open_parts = open_parts
        self._changed = threading.Condition()
        self._inbox: deque[tuple[Orders, Weights | None]] = deque()
        self._report = Report(ready=False)
        self._closed = False
        arguments = (own_config(config), registry, functions)
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True, name="sampler")
        self._thread.start()

    def deliver(self, orders: Orders, weights: Weights | None = None) -> None:
        """Passes orders to the engine, which follows them between two chunks."""
        with self._changed:
            self._inbox.append((orders, weights))
            self._changed.notify_all()

    def poll(self, wait_s: float = POLL_S) -> Report:
        """The report; waits so long for something to report."""
        with self._changed:
            self._changed.wait_for(lambda: self._report.groups or self._report.failure or self._closed, wait_s)
            report = self._report
            self._report = replace(report, groups=(), stats=(), refused=-1)  # each is handed out once
            return report

    def close(self) -> None:
        """Ends the engine and the tools."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self, config: Config, registry: Registry | None, functions: Mapping | None) -> None:
        try:
            with given(functions), self._open_parts(config, registry=registry) as (policy, sampling):
                here = f"{socket.gethostname()}, process {os.getpid()}, {describe_device()}"
                self._work(HostedGroups(policy, sampling), here)
        except Exception as error:
            failure = str(error) if isinstance(error, ConfigError) else traceback.format_exc()
            with self._changed:
                self._report = replace(self._report, failure=failure)
                self._changed.notify_all()

    def _work(self, groups: HostedGroups, host: str) -> None:
        with self._changed:
            self._report = replace(self._report, ready=True, host=host)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._inbox or groups.working or self._closed)
                orders = [self._inbox.popleft() for _ in range(len(self._inbox))]
                if self._closed:
                    return
            for order in orders:
                groups.take(*order)
            if groups.working:
                groups.advance(ROUND_S)
            new = groups.report()
            with self._changed:
                before = self._report
                merged = {"groups": before.groups + new.groups, "stats": before.stats + new.stats}
                merged |= {"refused": max(before.refused, new.refused)}
                self._report = replace(new, host=host, **merged)
                self._changed.notify_all()


def own_config(config: Config) -> Config:
    """The configuration of a sampler: that of the run, on the devices of its process alone."""
    samplers = config.rollout.remote
    rollout = replace(config.rollout, samplers=None)
    return replace(config, rollout=rollout, sharding=ShardingConfig(tensor=samplers.tensor), stages=None)


# The trainer's side.


class Transport(Protocol):
    """Starts samplers, and carries orders to them and reports back. Samplers and calls are values of its own."""

    lost: tuple[type[Exception], ...]
    """What `result` raises for a sampler whose process or host is gone."""

    def start(self) -> Any:
        """A new sampler. Orders to it wait until it has started."""

    def put(self, weights: Weights) -> Any:
        """The weights where samplers can take them; they stay there as long as what is returned is referenced."""

    def deliver(self, sampler: Any, orders: Orders, weights: Any = None) -> None:
        """Sends orders, in the order of these calls, with what `put` returned. Never raises for a lost sampler."""

    def poll(self, sampler: Any) -> Any:
        """Asks for a report, which comes at the latest `POLL_S` after the sampler has started."""

    def wait(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """The calls of `poll` that have a result; waits so long for the first."""

    def result(self, call: Any) -> Report:
        """The report; raises one of `lost` for a sampler that is gone."""

    def stop(self, sampler: Any) -> None:
        """Ends a sampler, which may be gone."""

    def close(self) -> None:
        """Ends all samplers."""


@dataclass(eq=False)
class Member:
    """A sampler of the pool."""

    name: str
    link: Any
    call: Any = None
    called_s: float = 0.0
    ready: bool = False
    version: int = -1
    tasks: dict[int, GroupTask] = field(default_factory=dict)
    """Groups that it was given and has not returned."""
    unfinished: dict[int, int] = field(default_factory=dict)
    """Number of rows of each, as last reported."""
    refusals: int = 0
    host: str = ""

    @property
    def rows(self) -> int:
        """Rows that it has to roll out."""
        return sum(self.unfinished.get(number, task.size) for number, task in self.tasks.items())


class SamplerPool:
    """Groups on samplers in other processes (`open_groups.GroupSource`)."""

    always_works = first_process_only = True

    def __init__(
        self,
        transport: Transport,
        sampling: GroupSampler,
        count: int,
        timeout_s: float,
        temperature: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
            transport: What starts and reaches the samplers.
            sampling: Group sampler of the trainer: its prompts, and its scorer for groups of a checkpoint that were
                complete but not scored.
            count: Number of samplers.
            timeout_s: Seconds without an answer after which a sampler that has started counts as lost.
            temperature: Of requests that name none.
            clock: Seconds that pass.
        """
        self._transport, self._sampling, self._timeout_s, self._clock = transport, sampling, timeout_s, clock
        self._slots, self._temperature = sampling.rollout.slots, temperature
        self._groups: dict[int, OpenGroup] = {}
        """Groups that are not complete, by their numbers."""
        self._cuts: dict[int, list[tuple[Trajectory, ...]]] = {}
        """Their rows as they are before anything is sampled."""
        self._queue: dict[int, GroupTask] = {}
        """Groups that no sampler has."""
        self._dropping: set[int] = set()
        """Groups whose samplers have been sent the order to end their rows."""
        self._weights: Any = None
        self._sent: Weights | None = None
        self._stats: dict[str, RolloutStats] = {}
        """What the engine of each sampler counted, by the name of the sampler."""
        self._notes: list[str] = []
        self._dropped = self._started = self._failed_starts = 0
        self._counts = dict.fromkeys(("joined", "lost", "rows_lost", "groups_again", "weights_refused"), 0)
        self.members = [self._start() for _ in range(count)]
        """The samplers; another one is put in the place of one that is lost."""

    @property
    def working(self) -> bool:
        return bool(self._groups)

    @property
    def version(self) -> int:
        """Version of the weights that were published last."""
        return -1 if self._sent is None else self._sent.version

    def publish(self, policy: PolicyModel, trained: Any, version: int) -> None:
        """Sends the trained parameters to all samplers.

        Raises:
            NonFiniteWeightsError: They are not finite; raised in all processes.
        """
        params = policy.portable(trained)
        finite = all(np.isfinite(leaf.astype(np.float32)).all() for leaf in jax.tree.leaves(params))
        refuse_non_finite(self._sampling.processes.gather(finite), version)
        self._sent = Weights(version, params, digest(params))
        self._weights = self._transport.put(self._sent)
        for member in self.members:
            self._transport.deliver(member.link, Orders(), self._weights)

    def submit(
        self,
        groups: Sequence[OpenGroup],
        requests: Sequence[RolloutRequest],
        options: RunOptions,
        weights: SamplerParams | None,
    ) -> None:
        left = iter(requests)
        for group in groups:
            missing = len(group.missing)
            if not missing:
                continue
            batch: list[RolloutRequest] = []
            while sum(request.count for request in batch) < missing:
                batch.append(next(left))
            task = GroupTask(
                group.number, tuple(group.parts), tuple(map(tuple, group.rows)), tuple(batch), options.step
            )
            self._groups[group.number], self._queue[group.number] = group, task
            self._cuts[group.number] = self._before(task)
        self._assign()

    def _before(self, task: GroupTask) -> list[tuple[Trajectory, ...]]:
        """The rows of a group before anything is sampled, for a checkpoint."""
        rendered = render(task.requests, self._sampling.sampler.chat)
        longest = self._sampling.rollout.max_response_tokens
        cuts = map(starting_point, expand(rendered, task.step, longest, self._temperature)[0])
        return [tuple(next(cuts) if row is None else row for row in rows) for rows in task.rows]

    def advance(self, timeout_s: float) -> None:
        """Takes reports until groups are complete or begin again, or for so long from when a sampler has started."""
        if timeout_s > 0 and not any(member.ready for member in self.members):
            processes = self._sampling.processes
            with phase("starting samplers"):  # until then there is no news for other processes
                self._advance(np.inf, lambda: any(member.ready for member in self.members) or processes.stopping)
        self._advance(timeout_s, lambda: False)

    def _advance(self, timeout_s: float, enough: Callable[[], bool]) -> None:
        """Takes reports until groups are complete or begin again, for so long, or until it is enough."""
        ends, changed = self._clock() + timeout_s, False
        while not (changed or enough()):
            for member in self.members:
                if member.call is None:
                    member.call, member.called_s = self._transport.poll(member.link), self._clock()
            left = ends - self._clock()
            over = self._transport.wait([m.call for m in self.members], min(max(left, 0.0), POLL_S))
            for member in list(self.members):
                if member.call in over:
                    changed |= self._take(member)
                elif member.ready and self._clock() - member.called_s > self._timeout_s + POLL_S:
                    changed |= self._lose(member, f"no answer for {self._timeout_s:g} s")
            changed |= self._assign()
            if left <= 0:
                return

    def _take(self, member: Member) -> bool:
        """Takes the report of a sampler; whether groups are complete or begin again."""
        try:
            report = self._transport.result(member.call)
        except self._transport.lost as error:
            reason = str(error).strip() or type(error).__name__
            return self._lose(member, reason.splitlines()[0])
        member.call = None
        if report.failure:
            raise SamplerFailed(f"{member.name} ({report.host or 'not started'}): {report.failure}")
        if report.ready and not member.ready:
            member.ready, member.host, self._failed_starts = True, report.host, 0
            self._counts["joined"] += 1
            self._notes.append(f"{member.name} has joined: {report.host}")
        member.version, member.unfinished = report.version, dict(report.unfinished)
        for stats in report.stats:
            before = self._stats.get(member.name)
            self._stats[member.name] = stats if before is None else before.followed_by(stats)
        if report.refused >= 0 and report.refused == self.version:
            self._send_again(member)
        elif report.version == self.version:
            member.refusals = 0
        returned = [task for task in report.groups if member.tasks.pop(task.number, None) is not None]
        for task in returned:
            group = self._groups.pop(task.number)
            del self._cuts[task.number]
            self._dropping.discard(task.number)
            group.rows, group.scored = [list(rows) for rows in task.rows], task.scored
            self._dropped += sum(row.stop == "cancelled" for row in chain.from_iterable(task.rows))
        return bool(returned)

    def _send_again(self, member: Member) -> None:
        """Sends weights once more that arrived with another hash."""
        member.refusals += 1
        self._counts["weights_refused"] += 1
        if member.refusals > RESENT:
            raise SamplerFailed(
                f"{member.name} ({member.host}) received weights of version {self.version} with another hash "
                f"{member.refusals} times in a row; check the memory and the network of that host"
            )
        self._weights = self._transport.put(self._sent)
        self._transport.deliver(member.link, Orders(), self._weights)

    def _assign(self) -> bool:
        """Gives queued groups to samplers with free slots, those with fewest rows first; whether there were any."""
        if self._sent is None:
            return False
        assigned: dict[Member, list[GroupTask]] = {}
        for number in sorted(self._queue):
            member = min((m for m in self.members if m.ready), key=lambda m: m.rows, default=None)
            if member is None or member.rows >= self._slots:
                break
            task, group = self._queue.pop(number), self._groups[number]
            if task.fresh:  # its first tokens will be of this version or a later one
                group.parts = [replace(part, born=self.version) for part in group.parts]
                task = replace(task, parts=tuple(group.parts))
            task = replace(task, version=self.version)
            member.tasks[number] = task
            assigned.setdefault(member, []).append(task)
        for member, tasks in assigned.items():
            self._transport.deliver(member.link, Orders(tasks=tuple(tasks)))
        return bool(assigned)

    def _start(self) -> Member:
        self._started += 1
        member = Member(f"sampler {self._started}", self._transport.start())
        if self._weights is not None:
            self._transport.deliver(member.link, Orders(), self._weights)
        return member

    def _lose(self, member: Member, why: str) -> bool:
        """Queues the groups of a lost sampler, and starts another one in its place."""
        rows = sum(task.size for task in member.tasks.values())
        if member.ready:
            self._counts["lost"] += 1
            self._counts["rows_lost"] += rows
            self._counts["groups_again"] += len(member.tasks)
            self._notes.append(
                f"{member.name} ({member.host}) is lost with {rows} rows of {len(member.tasks)} groups, which begin "
                f"again: {why}"
            )
        else:
            self._failed_starts += 1
            if self._failed_starts >= FAILED_STARTS:
                raise SamplerFailed(f"{self._failed_starts} samplers in a row ended before they had started: {why}")
        self._queue |= member.tasks
        self._dropping -= member.tasks.keys()
        self._transport.stop(member.link)
        self.members[self.members.index(member)] = self._start()
        return bool(member.tasks)

    def drop_rows(self, groups: Sequence[OpenGroup]) -> None:
        # A group that no sampler has begun is as young as the weights that it will begin with.
        late = [group for group in groups if group.number not in self._dropping]
        self._dropping |= {group.number for group in late if group.number not in self._queue}
        self._tell(late, "drop")

    def forget(self, groups: Sequence[OpenGroup]) -> None:
        self._tell(groups, "forget")
        for number in [group.number for group in groups if group.number in self._groups]:
            del self._groups[number], self._cuts[number]
            self._queue.pop(number, None)
            self._dropping.discard(number)
            for member in self.members:
                member.tasks.pop(number, None)

    def _tell(self, groups: Sequence[OpenGroup], what: str) -> None:
        for member in self.members:
            numbers = tuple(group.number for group in groups if group.number in member.tasks)
            if numbers:
                self._transport.deliver(member.link, Orders(**{what: numbers}))

    def score(self, groups: Sequence[OpenGroup]) -> None:
        score_together(self._sampling.scorer, [group for group in groups if group.scored is None])

    def cut(self, group: OpenGroup) -> list[tuple[Trajectory, ...]]:
        """The rows of a group; those of one that is not complete as they were at its beginning."""
        return self._cuts.get(group.number) or [tuple(rows) for rows in group.rows]

    def take_dropped(self) -> int:
        dropped, self._dropped = self._dropped, 0
        return dropped

    def take_stats(self) -> RolloutStats:
        stats, self._stats = [*self._stats.values()], {}
        return merge_stats(stats) if stats else RolloutStats()

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def metrics(self) -> Metrics:
        """Samplers that work, what has happened to samplers since the last step, groups that wait for one, and the
        versions that they sample with."""
        ready = [member for member in self.members if member.ready]
        lags = [self.version - member.version for member in ready]
        counts = {f"samplers/{name}": float(count) for name, count in self._counts.items()}
        self._counts = dict.fromkeys(self._counts, 0)
        return counts | {
            "samplers/alive": float(len(ready)),
            "samplers/queued_groups": float(len(self._queue)),
            "samplers/versions_behind": float(max(lags, default=0)),
        }

    def release(self) -> None:
        """Samplers free the memory of their rollouts by themselves."""

    def close(self) -> None:
        self._transport.close()


def refuse_non_finite(finite: Sequence[bool], version: int) -> None:
    if not all(finite):
        raise NonFiniteWeightsError(f"the parameters after step {version} hold NaN or infinity")


class FollowedSamplers:
    """The samplers of the first process of a run, in its other processes (`open_groups.GroupSource`). No group is
    rolled out from here; the stream learns from the first process which are complete."""

    always_works = first_process_only = True
    working = False

    def __init__(self, processes: Processes):
        self._processes = processes

    def publish(self, policy: PolicyModel, trained: Any, version: int) -> None:
        """Takes part in gathering the parameters for the first process.

        Raises:
            NonFiniteWeightsError: They are not finite; raised in all processes.
        """
        policy.portable(trained, here=False)
        refuse_non_finite(self._processes.gather(True), version)

    def advance(self, timeout_s: float) -> None:
        """Waits, since the stream asks the first process after each call."""
        time.sleep(timeout_s)

    def submit(self, groups: Sequence[OpenGroup], requests: Any, options: RunOptions, weights: Any) -> None:
        """Is called in the first process only, as are the other methods that take groups."""

    def drop_rows(self, groups: Sequence[OpenGroup]) -> None:
        """See `submit`."""

    def forget(self, groups: Sequence[OpenGroup]) -> None:
        """See `submit`."""

    def score(self, groups: Sequence[OpenGroup]) -> None:
        """See `submit`."""

    def cut(self, group: OpenGroup) -> list[tuple[Trajectory, ...]]:
        return []

    def take_dropped(self) -> int:
        return 0

    def take_stats(self) -> RolloutStats:
        return RolloutStats()

    def take_notes(self) -> list[str]:
        return []

    def metrics(self) -> Metrics:
        return {}

    def release(self) -> None:
        """There is no memory of rollouts."""


def sent_bytes(policy: PolicyModel) -> int:
    """Bytes of a version of the weights."""
    if policy.lora.rank:
        return 4 * parameter_count(policy.model, policy.lora)
    return compute_dtype(policy.model).itemsize * parameter_count(policy.model)


@contextmanager
def remote_samplers(
    config: Config, policy: PolicyModel, sampling: GroupSampler, transports: Mapping[str, str] = TRANSPORTS
) -> Iterator[SamplerPool | FollowedSamplers | None]:
    """The samplers that the configuration asks for, until the end of the block; None where the trainer samples. If the
    trainer has several processes, the first one starts and drives them.

    Args:
        config: Configuration of the run.
        policy: The model on its mesh.
        sampling: Group sampler of the run.
        transports: Kind of `rollout.samplers` -> module and class of its transport.

    Raises:
        ConfigError: The transport's package is missing, or its cluster is not there; raised in all processes.
    """
    samplers, processes = config.rollout.remote, sampling.processes
    if samplers is None:
        yield None
        return
    transport: Any = None

    def connect() -> None:
        nonlocal transport
        module, _, name = transports[samplers.kind].partition(":")
        kind = getattr(importlib.import_module(module), name)
        make = partial(RemoteSampler, config, sampling.sampler.executor.registry, all_passed())
        with config_errors():
            transport = kind(samplers, make, config.method.files, sent_bytes(policy))

    processes.once(connect)
    if not processes.first:
        yield FollowedSamplers(processes)
        return
    try:
        yield SamplerPool(transport, sampling, samplers.count, samplers.timeout_s, config.sampling.temperature)
    finally:
        transport.close()
