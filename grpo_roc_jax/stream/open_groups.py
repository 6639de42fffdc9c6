"""The groups that no step has taken yet, and where they are rolled out: on the engine of this process (`EngineGroups`),
or by samplers in other processes (`stream.samplers`)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np

from grpo_roc_jax.engine.protocol import RolloutStats, RunOptions
from grpo_roc_jax.engine.publish import SamplerParams
from grpo_roc_jax.reward.score import Scorer
from grpo_roc_jax.rollout.sampler import split
from grpo_roc_jax.run.policy import PolicyModel
from grpo_roc_jax.run.sample import GroupSampler, PartialGroup, ScoredRollouts, score
from grpo_roc_jax.types import Metrics, RolloutRequest, Trajectory


@dataclass(eq=False)
class OpenGroup:
    """The rollouts of a problem that no step has taken yet."""

    number: int
    """Number of the group in the order of submission; determines which process rolls it out."""
    parts: list[PartialGroup]
    """One for each request, without trajectories."""
    rows: list[list[Trajectory | None]]
    """The trajectories of each part; None while they run, and for rollouts of another process."""
    elsewhere: bool = False
    """Whether the group is complete in another process."""
    scored: ScoredRollouts | None = None
    first_born: int = field(init=False)
    """Its birth when it was opened, which all processes know."""

    def __post_init__(self) -> None:
        self.first_born = self.born

    @property
    def born(self) -> int:
        return self.parts[0].born

    @property
    def complete(self) -> bool:
        return self.elsewhere or all(row is not None for row in chain.from_iterable(self.rows))

    @property
    def missing(self) -> list[tuple[int, int]]:
        """(part, index in that part) of each row that has not ended."""
        return [(i, j) for i, rows in enumerate(self.rows) for j, row in enumerate(rows) if row is None]

    def ended(self) -> list[PartialGroup]:
        return [replace(part, trajectories=tuple(rows)) for part, rows in zip(self.parts, self.rows, strict=True)]


class SamplerFailed(RuntimeError):
    """A sampler raised an exception, which another one would raise too, or none starts."""


class GroupSource(Protocol):
    """Rolls out and scores the groups of a stream. Groups are passed in the order of their numbers."""

    always_works: bool
    """Whether `advance` may be called while the devices compute an update, whatever they are."""
    first_process_only: bool
    """Whether the first process of the run has all groups rolled out; otherwise each process does its share."""

    @property
    def working(self) -> bool:
        """Whether rows are in flight."""

    def publish(self, policy: PolicyModel, trained: Any, version: int) -> SamplerParams | None:
        """Samples with these parameters from now on, and goes on with them where rollouts are in flight. All processes
        must call this."""

    def submit(
        self,
        groups: Sequence[OpenGroup],
        requests: Sequence[RolloutRequest],
        options: RunOptions,
        weights: SamplerParams | None,
    ) -> None:
        """Begins the missing rows of these groups.

        Args:
            groups: At least one.
            requests: As many rollouts, in the same order; the rollouts of one request belong to one part of a group.
            options: Options of the submission.
            weights: What `publish` returned.
        """

    def advance(self, timeout_s: float) -> None:
        """Works until rows have ended, or for so long; adds them to their groups."""

    def drop_rows(self, groups: Sequence[OpenGroup]) -> None:
        """Ends the rows of groups that have become too old. They are added as cancelled ones."""

    def forget(self, groups: Sequence[OpenGroup]) -> None:
        """Gives up the rows of groups that nobody needs any more."""

    def score(self, groups: Sequence[OpenGroup]) -> None:
        """Scores complete groups that have no verdicts."""

    def cut(self, group: OpenGroup) -> list[tuple[Trajectory, ...]]:
        """The rows of each part, unfinished ones as they are now, to be continued from a checkpoint."""

    def take_dropped(self) -> int:
        """Number of rows that `drop_rows` ended since the last call."""

    def take_stats(self) -> RolloutStats:
        """What the engines counted since the last call."""

    def take_notes(self) -> list[str]:
        """What happened to samplers since the last call, for the events of the run."""

    def metrics(self) -> Metrics:
        """Metrics of the samplers of a step."""

    def release(self) -> None:
        """Frees the memory of rollouts, of which there are none."""


class EngineGroups:
    """Groups on the engine of this process. Only this object and evaluations use it."""

    always_works = first_process_only = False

    def __init__(self, sampling: GroupSampler, *, shows: bool = False):
        """`shows`: whether a display of the run follows the rollouts."""
        self._sampling, self._engine, self._shows = sampling, sampling.sampler.engine, shows
        self._running: dict[int, tuple[OpenGroup, int, int]] = {}
        """Group, part, and index in that part of each running row, by the ticket that the engine gave it."""
        self._dropped = 0

    @property
    def working(self) -> bool:
        return bool(self._running)

    @property
    def unfinished(self) -> dict[int, int]:
        """Number of running rows of each group, by the number of the group."""
        return dict(Counter(group.number for group, _, _ in self._running.values()))

    def publish(self, policy: PolicyModel, trained: Any, version: int) -> SamplerParams:
        return self._engine.publish(policy.full(trained), version)

    def submit(
        self,
        groups: Sequence[OpenGroup],
        requests: Sequence[RolloutRequest],
        options: RunOptions,
        weights: SamplerParams | None,
    ) -> None:
        rows = [(group, i, j) for group in groups for i, j in group.missing]
        if not rows:
            return
        shown = self._sampling.progress if self._shows else None
        arguments = self._sampling.sampler.submission(requests, replace(options, progress=shown))
        self._running |= zip(self._engine.submit(weights, *arguments), rows, strict=True)

    def advance(self, timeout_s: float) -> None:
        ended = self._engine.advance(timeout_s) if self._running else []
        if not ended and timeout_s == np.inf:
            raise RuntimeError(f"the engine has lost {len(self._running)} rollouts that a step waits for")
        for ticket, trajectory in ended:
            if ticket in self._running:
                group, part, index = self._running.pop(ticket)
                group.rows[part][index] = trajectory
                self._dropped += trajectory.stop == "cancelled"

    def drop_rows(self, groups: Sequence[OpenGroup]) -> None:
        for ticket in self._tickets(groups):
            self._engine.cancel(ticket)

    def forget(self, groups: Sequence[OpenGroup]) -> None:
        for ticket in self._tickets(groups):
            del self._running[ticket]
            self._engine.cancel(ticket)

    def _tickets(self, groups: Sequence[OpenGroup]) -> list[int]:
        return [ticket for ticket, (group, _, _) in self._running.items() if group in groups]

    def score(self, groups: Sequence[OpenGroup]) -> None:
        score_together(self._sampling.scorer, [group for group in groups if group.scored is None])

    def cut(self, group: OpenGroup) -> list[tuple[Trajectory, ...]]:
        cuts = {(i, j): self._engine.cut(t) for t, (other, i, j) in self._running.items() if other is group}
        return [
            tuple(cuts[i, j] if row is None else row for j, row in enumerate(rows)) for i, rows in enumerate(group.rows)
        ]

    def take_dropped(self) -> int:
        dropped, self._dropped = self._dropped, 0
        return dropped

    def take_stats(self) -> RolloutStats:
        return self._engine.take_stats()

    def take_notes(self) -> list[str]:
        return []

    def metrics(self) -> Metrics:
        return {}

    def release(self) -> None:
        self._engine.release()


def score_together(scorer: Scorer, groups: Sequence[OpenGroup]) -> None:
    """Scores complete groups. Counts and faults concern all of them and are stored with the first one."""
    if not groups:
        return
    parts = [group.ended() for group in groups]
    scored = score(scorer, list(chain.from_iterable(parts)), (), RolloutStats(), keeps_partial=False)
    shares = split(scored.groups, map(len, parts))
    for group, share in zip(groups, shares, strict=True):
        group.scored = ScoredRollouts(tuple(share))
    groups[0].scored = replace(scored, groups=tuple(shares[0]))
