"""Which request takes a free slot: in order, whole reservations only, siblings beside their prompt.

A row reserves prompt + budget when it is admitted and gives that back when it ends, so no admitted row can run out of
room. The head of the queue is never skipped: a long row waits for room, it does not starve.
"""

from collections import deque
from collections.abc import Sequence

from grpo_roc_jax.rollout.records import Request


class Admission:
    """The queue of one run and the ledger of reservations, per data shard."""

    def __init__(self, requests: Sequence[Request], *, shards: int, reservable: int, longest_first: bool):
        """
        Args:
            requests: In the order asked.
            shards: Data shards of the mesh, each with its own cache.
            reservable: Tokens that may be reserved per shard.
            longest_first: Groups by falling expected length instead of by arrival.
        """
        self._requests = requests
        self._reservable = reservable
        groups: dict[int, deque[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.group, deque()).append(index)
        order = list(groups.values())
        if longest_first:
            order.sort(key=lambda members: -max(requests[i].expected for i in members))
        self._unopened = deque(order)
        self._open: list[deque[int]] = [deque() for _ in range(shards)]
        self.reserved = [0] * shards
        self.waiting = len(requests)

    def reservation(self, index: int) -> int:
        """Tokens that request `index` needs at most."""
        return len(self._requests[index].prompt) + self._requests[index].budget

    def take(self, shard: int) -> int | None:
        """The next request for a free slot of `shard`, now reserved; None when there is none or no room.

        The rest of the group that the shard has opened comes first, then a new group, then, when all groups are open,
        a sibling from the shard with most left (its prompt is then written once more).
        """
        queue = self._open[shard]
        if not queue:
            if self._unopened:
                queue = self._open[shard] = self._unopened.popleft()
            else:
                queue = max(self._open, key=len)
        if not queue:
            return None
        need = self.reservation(queue[0])
        if self.reserved[shard] + need > self._reservable:
            return None
        self.reserved[shard] += need
        self.waiting -= 1
        return queue.popleft()

    def release(self, index: int, shard: int) -> None:
        """Gives back what `take` reserved."""
        self.reserved[shard] -= self.reservation(index)

    def withdraw(self, index: int) -> bool:
        """Takes a request that was not admitted out of the queue; False when it is not there."""
        for queue in (*self._open, *self._unopened):
            if index in queue:
                queue.remove(index)
                self.waiting -= 1
                return True
        return False

    def withdraw_all(self) -> list[int]:
        """Empties the queue and returns what was in it."""
        left = [index for queue in (*self._open, *self._unopened) for index in queue]
        self._unopened.clear()
        for queue in self._open:
            queue.clear()
        self.waiting = 0
        return sorted(left)
