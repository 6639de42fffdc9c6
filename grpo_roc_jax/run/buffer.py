"""`RolloutBuffer`: groups in, groups out. The one mutable container of the line."""

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
        self.added = self.taken = 0
        """Groups ever added, and ever taken out."""

    def __len__(self) -> int:
        return len(self._groups)

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
            raise ValueError(f"cannot take {count} groups; must be at least 0")
        groups = [self._groups.popleft() for _ in range(min(count, len(self._groups)))]
        self.taken += len(groups)
        return groups

    def discard(self, unwanted: Callable[[Group], bool]) -> list[Group]:
        """Removes groups that wait; returns them."""
        found = [group for group in self._groups if unwanted(group)]
        self._groups = deque(group for group in self._groups if group not in found)
        return found

    def state(self) -> dict:
        """What a checkpoint needs: the waiting groups, oldest first, and the counts."""
        return {"groups": tuple(self._groups), "added": self.added, "taken": self.taken}

    def load(self, state: dict) -> None:
        """Replaces everything by what `state()` returned."""
        self._groups = deque(state["groups"])
        self.added, self.taken = int(state["added"]), int(state["taken"])
