"""The queue: order, room, shards; and what is kept free for rows that go on."""

from dataclasses import replace

import numpy as np

from grpo_roc_jax.engine.scheduler import REMEMBERED, Admission, Lengths, expand
from grpo_roc_jax.engine.table import starting_point
from tests.helpers.rollout_fakes import one_rollout


def make(groups, *, shards=1, longest_first=False):
    """groups: list of (members, prompt length, budget)."""
    requests = [
        one_rollout(g, np.arange(length), budget, s)
        for g, (members, length, budget) in enumerate(groups)
        for s in range(members)
    ]
    rows, prompts = expand(requests, 0, 0, 1.0)
    queue = Admission(shards)
    queue.extend(range(len(rows)), rows, prompts, longest_first=longest_first)
    return queue


def always(ticket):
    return True


def drain(queue, shard=0, fits=always):
    tickets = []
    while (ticket := queue.take(shard, fits)) is not None:
        tickets.append(ticket)
    return tickets


def test_arrival_and_longest_first_keep_siblings_together():
    groups = [(2, 5, 10), (2, 5, 90), (2, 5, 50)]
    assert drain(make(groups)) == [0, 1, 2, 3, 4, 5]
    assert drain(make(groups, longest_first=True)) == [2, 3, 4, 5, 0, 1]


def test_rollouts_that_a_step_cut_are_the_first_ones():
    """Less is left of them than of new ones, but if they came last, new ones could keep them waiting forever."""
    requests = [one_rollout(g, np.arange(5), budget) for g, budget in enumerate((90, 10, 50))]
    cuts = [replace(starting_point(request), stop="cancelled") for request in requests[1:]]
    requests += [replace(one_rollout(3 + i, np.arange(5), 40), resume=cut) for i, cut in enumerate(cuts)]
    rows, prompts = expand(requests, 0, 0, 1.0)
    queue = Admission(1)
    queue.extend(range(5), rows, prompts, longest_first=True)
    assert drain(queue) == [3, 4, 0, 2, 1]


def test_a_row_that_does_not_fit_is_not_overtaken():
    queue = make([(1, 10, 10), (1, 50, 10), (1, 2, 10)])
    assert drain(queue, fits=lambda ticket: ticket != 1) == [0]
    assert queue.waiting == 2
    assert drain(queue) == [1, 2] and queue.waiting == 0


def test_rows_come_at_any_time():
    queue = make([(2, 5, 10)])
    assert queue.take(0, always) == 0 and queue.siblings(0) == 1
    row = one_rollout(0, np.arange(3), 5)
    queue.extend([7, 8], [row, row], [1, 1], longest_first=False)
    assert drain(queue) == [1, 7, 8] and queue.siblings(0) == queue.siblings(1) == 0


def test_each_shard_opens_its_own_group_and_helps_at_the_end():
    queue = make([(3, 5, 10), (3, 5, 10)], shards=2)
    assert [queue.take(shard, always) for shard in (0, 1, 0, 1)] == [0, 3, 1, 4]
    assert [queue.take(shard, always) for shard in (0, 0, 1)] == [2, 5, None]


def test_withdrawn_requests_are_never_taken():
    queue = make([(2, 5, 10), (2, 5, 10)])
    assert queue.take(0, always) == 0
    assert queue.withdraw(3) and queue.withdraw(1) and not queue.withdraw(0) and not queue.withdraw(3)
    assert queue.left() == [2] and queue.siblings(0) == 0
    assert drain(queue) == [2]


def test_a_share_of_the_expected_length_is_reserved():
    lengths = Lengths()
    assert lengths.reserved(np.array([10]), np.array([110])).tolist() == [10 + 35], "all that is left, so far"
    for length in (20, 40, 60):
        lengths.add(length)
    got = lengths.reserved(np.array([10, 30, 60, 50]), np.array([110, 110, 80, 52]))
    # Means of those that are longer: 40, 50, none (so its end), 60 (more than its end).
    assert got.tolist() == [10 + 11, 30 + 7, 60 + 7, 50 + 1]
    for _ in range(REMEMBERED):
        lengths.add(15)
    assert lengths.reserved(np.array([10]), np.array([110])).tolist() == [12], "old lengths are forgotten"


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
