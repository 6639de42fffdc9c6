"""`RolloutBuffer`: selected groups that wait for an update. It is the only mutable container between sampling and
training."""

from collections import deque
from collections.abc import Callable, Iterable

from grpo_roc_jax.types import Group


class RolloutBuffer:
    """Selected groups that wait for the update, oldest first.

    Dynamic sampling and carry-over leave groups of several rollout batches here. A checkpoint holds what `state()`
    returns, so a resumed run trains on the same groups in the same order.
    """

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()
        self.added = self.removed = 0
        """Number of groups ever added, and number ever taken out."""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Returns (groups ever added, groups ever taken out, groups waiting)."""
        return self.added, self.removed, len(self)

    def add(self, groups: Iterable[Group]) -> None:
        """Appends groups.

        Raises:
            ValueError: A group has no trajectories, so nothing could train on it.
        """
        for group in groups:
            if not group.size:
                raise ValueError(f"group {group.problem.uid!r} is empty; leave dropped groups out of the buffer")
            self._groups.append(group)
            self.added += 1

    def take(self, count: int) -> list[Group]:
        """Takes out the `count` oldest groups, or all of them if fewer are waiting."""
        if count < 0:
            raise ValueError(f"cannot take {count} groups; must be at least 0")
        groups = [self._groups.popleft() for _ in range(min(count, len(self._groups)))]
        self.removed += len(groups)
        return groups

    def discard(self, unwanted: Callable[[Group], bool]) -> list[Group]:
        """Takes out and returns the waiting groups for which `unwanted` is true."""
        discarded = [group for group in self._groups if unwanted(group)]
        self._groups = deque(group for group in self._groups if group not in discarded)
        self.removed += len(discarded)
        return discarded

    def state(self) -> dict:
        """The content of the buffer for a checkpoint: the waiting groups, oldest first, and the counts."""
        return {"groups": tuple(self._groups), "added": self.added, "taken": self.removed}

    def load(self, state: dict) -> None:
        """Replaces the content of the buffer by what `state()` returned."""
        self._groups = deque(state["groups"])
        self.added, self.removed = int(state["added"]), int(state["taken"])
