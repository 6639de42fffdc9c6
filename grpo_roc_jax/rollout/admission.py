"""Which row takes a free slot: in order, if the cache has room for what is expected of it, rows of one prompt together.

The head of the queue is never skipped, so a long row waits for room but does not starve.
"""

from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

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


RESERVE = 0.35
"""Share of a row's expected further tokens that is kept free for it. In simulated hours with the lengths of GRPO-RoC
this holds twice the rows of whole reservations, and 1 % of the tokens are written again; without any, half are."""
REMEMBERED = 1024
"""Finished rows whose lengths are remembered."""


class Lengths:
    """What the finished rows say about the length of a row that has reached some length."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def add(self, length: int) -> None:
        self._recent.append(length)
        insort(self._sorted, length)
        if len(self._recent) > REMEMBERED:
            del self._sorted[bisect_right(self._sorted, self._recent.popleft()) - 1]

    def reserved(self, length: np.ndarray, total: np.ndarray) -> np.ndarray:
        """Tokens to keep room for, of rows with these lengths that end at `total` at the latest: the length and a share
        of what is expected to follow. Rows longer than all others are expected to reach their end."""
        known = np.asarray(self._sorted, np.float64)
        longer = np.append(np.cumsum(known[::-1])[::-1], 0.0)
        first = np.searchsorted(known, length, side="right")
        count = len(known) - first
        expected = np.where(count > 0, longer[first] / np.maximum(count, 1), total)
        return length + np.ceil(RESERVE * np.maximum(np.minimum(expected, total) - length, 0)).astype(np.int64)


class Admission:
    """The queue of rows that have no slot yet. Every data shard has a group of its own to take rows from."""

    def __init__(self, shards: int):
        self._unopened: deque[deque[int]] = deque()
        self._open: list[deque[int]] = [deque() for _ in range(shards)]
        self._prompt_of: dict[int, int] = {}
        self._siblings: Counter[int] = Counter()

    @property
    def waiting(self) -> int:
        return len(self._prompt_of)

    def extend(
        self, tickets: Sequence[int], rows: Sequence[RolloutRequest], prompts: Sequence[int], *, longest_first: bool
    ) -> None:
        """Appends rows.

        Args:
            tickets: Of the rows.
            rows: One rollout each; see `expand`.
            prompts: Numbers of their prompts, which no earlier row has.
            longest_first: Order the new prompts by decreasing remaining length instead of by arrival.
        """
        siblings: dict[int, deque[int]] = {}
        for ticket, prompt in zip(tickets, prompts, strict=True):
            siblings.setdefault(prompt, deque()).append(ticket)
        order = list(siblings.values())
        if longest_first:
            # What is left to sample at most: rows that continue a prefix or an earlier step have less to do.
            left = {ticket: row.budget - row.begun for ticket, row in zip(tickets, rows, strict=True)}
            order.sort(key=lambda members: -max(left[ticket] for ticket in members))
        self._unopened.extend(order)
        self._prompt_of |= zip(tickets, prompts, strict=True)
        self._siblings.update(prompts)

    def siblings(self, prompt: int) -> int:
        """Rows of a prompt that are still in the queue."""
        return self._siblings[prompt]

    def take(self, shard: int, fits: Callable[[int], bool]) -> int | None:
        """The next row for a free slot of `shard`; None if the queue is empty or the row does not fit.

        Rows of the prompt that the shard has opened come first, then those of a new prompt. When all prompts are open,
        the shard takes a row from the shard with most left, and its prompt is written once more.
        """
        queue = self._open[shard]
        while not queue and self._unopened:  # one whose rows were all withdrawn is empty
            queue = self._open[shard] = self._unopened.popleft()
        queue = queue or max(self._open, key=len)
        if not queue or not fits(queue[0]):
            return None
        ticket = queue.popleft()
        self._leave(ticket)
        return ticket

    def withdraw(self, ticket: int) -> bool:
        """Takes a row that was not admitted out of the queue; False if it is not in the queue."""
        if ticket not in self._prompt_of:
            return False
        next(queue for queue in (*self._open, *self._unopened) if ticket in queue).remove(ticket)
        self._leave(ticket)
        return True

    def _leave(self, ticket: int) -> None:
        prompt = self._prompt_of.pop(ticket)
        self._siblings[prompt] -= 1
        if not self._siblings[prompt]:
            del self._siblings[prompt]

    def left(self) -> list[int]:
        """The rows of the queue by ticket."""
        return sorted(self._prompt_of)
