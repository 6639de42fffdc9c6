"""The queue: order, reservations, shards."""

import numpy as np

from grpo_roc_jax.rollout.admission import Admission
from grpo_roc_jax.rollout.engine import Request


def make(groups, *, shards=1, reservable=10**9, longest_first=False, budget=10):
    """groups: list of (members, prompt length, expected)."""
    requests = [
        Request(key=(0, g, s), prompt=np.arange(length), group=g, budget=budget, expected=expected)
        for g, (members, length, expected) in enumerate(groups)
        for s in range(members)
    ]
    return Admission(requests, shards=shards, reservable=reservable, longest_first=longest_first)


def drain(queue, shard=0):
    taken = []
    while (index := queue.take(shard)) is not None:
        taken.append(index)
    return taken


def test_arrival_and_longest_first_keep_siblings_together():
    groups = [(2, 5, 10), (2, 5, 90), (2, 5, 50)]
    assert drain(make(groups)) == [0, 1, 2, 3, 4, 5]
    assert drain(make(groups, longest_first=True)) == [2, 3, 4, 5, 0, 1]


def test_a_row_waits_for_its_whole_reservation_and_is_not_overtaken():
    queue = make([(1, 10, 0), (1, 50, 0), (1, 2, 0)], reservable=70)
    assert drain(queue) == [0]
    assert queue.reserved == [20] and queue.waiting == 2
    queue.release(0, 0)
    assert drain(queue) == [1]
    queue.release(1, 0)
    assert drain(queue) == [2] and queue.waiting == 0


def test_each_shard_opens_its_own_group_and_helps_at_the_end():
    queue = make([(3, 5, 0), (3, 5, 0)], shards=2)
    assert [queue.take(0), queue.take(1), queue.take(0), queue.take(1)] == [0, 3, 1, 4]
    assert [queue.take(0), queue.take(0), queue.take(1)] == [2, 5, None]


def test_withdrawn_requests_are_never_taken():
    queue = make([(2, 5, 0), (2, 5, 0)])
    assert queue.take(0) == 0
    assert queue.withdraw(3) and queue.withdraw(1) and not queue.withdraw(0) and not queue.withdraw(3)
    assert queue.waiting == 1
    assert queue.withdraw_all() == [2]
    assert queue.take(0) is None
