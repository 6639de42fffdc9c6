"""`RolloutBuffer`: groups in, groups out. The one mutable container of the line."""

from collections import deque
from collections.abc import Iterable, Sequence

from grpo_roc_jax.types import Group


class RolloutBuffer:
    """Selected groups that wait for the update, oldest first.

    Refill and carry-over let groups of several rollout batches meet here; a checkpoint holds what `state()` returns, so
    that a resumed run trains on the same groups in the same order.
    """

    def __init__(self, groups: Iterable[Group] = ()) -> None:
        self._groups: deque[Group] = deque(groups)
        self.added = len(self._groups)
        """Groups ever added."""
        self.taken = 0
        """Groups ever taken out."""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def trajectories(self) -> int:
        """Trajectories that wait."""
        return sum(group.size for group in self._groups)

    def add(self, groups: Iterable[Group]) -> None:
        """Appends groups; one without trajectories is refused, since nothing could train on it."""
        for group in groups:
            if not group.size:
                raise ValueError(f"group {group.problem.uid!r} is empty; leave dropped groups out of the buffer")
            self._groups.append(group)
            self.added += 1

    def take(self, count: int) -> list[Group]:
        """The `count` oldest groups, fewer when there are not so many."""
        if count < 0:
            raise ValueError(f"{count} groups wanted; at least 0")
        groups = [self._groups.popleft() for _ in range(min(count, len(self._groups)))]
        self.taken += len(groups)
        return groups

    def drop_older_than(self, policy_step: int) -> int:
        """Removes groups with a token drawn before that training step; returns how many left."""
        fresh = [group for group in self._groups if oldest_version(group) >= policy_step]
        removed = len(self._groups) - len(fresh)
        self._groups = deque(fresh)
        return removed

    def state(self) -> dict:
        """What a checkpoint needs: the waiting groups, oldest first, and the counts."""
        return {"groups": tuple(self._groups), "added": self.added, "taken": self.taken}

    def load(self, state: dict) -> None:
        """Replaces everything by what `state()` returned."""
        groups: Sequence[Group] = state["groups"]
        self._groups = deque(groups)
        self.added, self.taken = int(state["added"]), int(state["taken"])


def oldest_version(group: Group) -> int:
    """Smallest training step among the sampled tokens of a group."""
    return min(int(t.versions[t.policy_mask].min()) for t in group.trajectories if t.policy_mask.any())
