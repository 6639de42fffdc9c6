"""Which groups a step of a stream takes, and when: the rule of `rollout_stream`, which `simulate` plays too."""

from collections.abc import Sequence
from typing import Protocol, TypeVar


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
