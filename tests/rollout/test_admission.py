"""The queue: order, reservations, shards."""

from dataclasses import replace

import numpy as np
from rollout_fakes import one_rollout

from grpo_roc_jax.rollout.admission import Admission, expand


def make(groups, *, shards=1, reservable=10**9, longest_first=False):
    """groups: list of (members, prompt length, budget)."""
    requests = [
        one_rollout(g, np.arange(length), budget, s)
        for g, (members, length, budget) in enumerate(groups)
        for s in range(members)
    ]
    return Admission(*expand(requests, 0, 0, 1.0), shards=shards, reservable=reservable, longest_first=longest_first)


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
    queue = make([(1, 10, 10), (1, 50, 10), (1, 2, 10)], reservable=70)
    assert drain(queue) == [0]
    assert queue.reserved == [20] and queue.waiting == 2
    queue.release(0, 0)
    assert drain(queue) == [1]
    queue.release(1, 0)
    assert drain(queue) == [2] and queue.waiting == 0


def test_each_shard_opens_its_own_group_and_helps_at_the_end():
    queue = make([(3, 5, 10), (3, 5, 10)], shards=2)
    assert [queue.take(0), queue.take(1), queue.take(0), queue.take(1)] == [0, 3, 1, 4]
    assert [queue.take(0), queue.take(0), queue.take(1)] == [2, 5, None]


def test_withdrawn_requests_are_never_taken():
    queue = make([(2, 5, 10), (2, 5, 10)])
    assert queue.take(0) == 0
    assert queue.withdraw(3) and queue.withdraw(1) and not queue.withdraw(0) and not queue.withdraw(3)
    assert queue.waiting == 1
    assert queue.withdraw_all() == [2]
    assert queue.take(0) is None


def test_a_request_becomes_a_row_for_each_sample_and_equal_prompts_of_a_problem_are_shared():
    prompt, cut = np.arange(4, dtype=np.int32), (7, 8)
    requests = [
        replace(one_rollout(0, prompt, None, 3), count=2),
        one_rollout(0, prompt.copy(), 5, 5, prefix=cut),
        one_rollout(1, prompt, 5, temperature=0.0),
        one_rollout(0, prompt, 5, step=1),
    ]
    rows, prompts = expand(requests, 2, 9, 0.7)
    assert [(r.count, r.first_sample, r.step, r.budget, r.temperature) for r in rows] == [
        (1, 3, 2, 9, 0.7),
        (1, 4, 2, 9, 0.7),
        (1, 5, 2, 5, 0.7),
        (1, 0, 2, 5, 0.0),
        (1, 0, 1, 5, 0.7),
    ]
    assert prompts == [0, 0, 0, 1, 2]
