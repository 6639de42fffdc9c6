"""Which row takes a free slot: in order, whole reservations only, rows of one prompt together.

A row reserves prompt + budget when it is admitted and releases both when it ends, so no admitted row can run out of
room. The head of the queue is never skipped, so a long row waits for room but does not starve.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from grpo_roc_jax.types import RolloutRequest


def expand(
    requests: Sequence[RolloutRequest], step: int, budget: int, temperature: float
) -> tuple[list[RolloutRequest], list[int]]:
    """(a request for each single rollout, in order, with what it names not filled in; the number of its prompt).

    Rows of one problem in one step have the same number where their prompts are equal: the engine writes that prompt
    once and copies it to the others.

    Args:
        requests: Rendered.
        step: Of those that name none; see `RunOptions.key_step`.
        budget: Of those that name none.
        temperature: Of those that name none.
    """
    rows: list[RolloutRequest] = []
    prompts: list[int] = []
    numbers: dict[tuple[int, int, bytes], int] = {}
    for request in requests:
        known = step if request.step is None else request.step
        number = numbers.setdefault((known, request.place, request.prompt.tobytes()), len(numbers))
        limit = budget if request.budget is None else request.budget
        heat = temperature if request.temperature is None else request.temperature
        single = replace(request, count=1, step=known, budget=limit, temperature=heat)
        rows += [replace(single, first_sample=i) for i in request.samples]
        prompts += [number] * request.count
    return rows, prompts


class Admission:
    """The queue of one run and the ledger of reservations, per data shard."""

    def __init__(
        self,
        rows: Sequence[RolloutRequest],
        prompts: Sequence[int],
        *,
        shards: int,
        reservable: int,
        longest_first: bool,
    ):
        """
        Args:
            rows: One rollout each, in the order of the requests; see `expand`.
            prompts: Numbers of their prompts.
            shards: Data shards of the mesh, each with its own cache.
            reservable: Tokens that may be reserved per shard.
            longest_first: Order prompts by decreasing remaining length instead of by arrival.
        """
        self._rows = rows
        self._reservable = reservable
        siblings: dict[int, deque[int]] = {}
        for index, prompt in enumerate(prompts):
            siblings.setdefault(prompt, deque()).append(index)
        order = list(siblings.values())
        if longest_first:
            # What is left to sample at most: rows that continue a prefix or an earlier step have less to do.
            order.sort(key=lambda members: -max(rows[i].budget - rows[i].begun for i in members))
        self._unopened = deque(order)
        self._open: list[deque[int]] = [deque() for _ in range(shards)]
        self.reserved = [0] * shards
        self.waiting = len(rows)

    def reservation(self, index: int) -> int:
        """Most tokens that row `index` can have."""
        return len(self._rows[index].prompt) + self._rows[index].budget

    def take(self, shard: int) -> int | None:
        """The next row for a free slot of `shard`, now reserved; None if the queue is empty or there is no room.

        Rows of the prompt that the shard has opened come first, then those of a new prompt. When all prompts are open,
        the shard takes a row from the shard with most left, and its prompt is written once more.
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
        """Takes a row that was not admitted out of the queue; False if it is not in the queue."""
        for queue in (*self._open, *self._unopened):
            if index in queue:
                queue.remove(index)
                self.waiting -= 1
                return True
        return False

    def withdraw_all(self) -> list[int]:
        """Empties the queue and returns its rows."""
        left = [index for queue in (*self._open, *self._unopened) for index in queue]
        self._unopened.clear()
        for queue in self._open:
            queue.clear()
        self.waiting = 0
        return sorted(left)
