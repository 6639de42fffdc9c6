"""The rule of which groups a step takes: worked out by hand, and played over random arrivals."""

from dataclasses import dataclass

import numpy as np
import pytest

from grpo_roc_jax.stream.rollout_stream import late_groups, may_take, oldest_whole


@dataclass(eq=False)
class Open:
    born: int
    complete: bool = True


def groups(*born, running=()):
    return [Open(age, place not in running) for place, age in enumerate(born)]


def test_a_step_needs_as_many_whole_groups_as_it_takes():
    found = groups(3, 3, 3, running=(0,))
    assert oldest_whole(found, 2) == found[1:] and may_take(found, 2, 3, 1)
    assert not may_take(found, 3, 3, 1)


def test_a_group_that_would_become_too_old_is_waited_for():
    found = groups(2, 3, 3, running=(0,))
    assert late_groups(found, 3, 1) == found[:1] and not may_take(found, 2, 3, 1)
    assert not late_groups(found, 3, 2) and may_take(found, 2, 3, 2)
    assert not may_take(found, 2, 3, 1, drops=True), "what is cancelled has not ended yet"


def test_no_more_old_groups_are_left_than_the_next_step_takes():
    """Two a step, lag 2: three of version 1 are due at step 3, and step 2 would leave all of them."""
    found = groups(1, 1, 1, 2, 2, 2, running=(0, 1, 2))
    assert not may_take(found, 2, 2, 2) and may_take(found, 2, 2, 2, drops=True)
    found[0].complete = True
    assert may_take(found, 2, 2, 2), "it takes one of them, and leaves two"


def test_a_step_of_old_groups_alone_goes_on():
    """As after a resume with fewer groups a step: more are due than can be taken, and waiting would not help."""
    assert may_take(groups(1, 1, 1, 1, 1, 1, running=(5,)), 2, 2, 2)


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_whatever_ends_first_no_group_is_taken_too_old(lag):
    rng, count, steps = np.random.default_rng(lag), 3, 40
    for _ in range(20):
        pending, begun = [], 0
        for trained in range(steps):
            while begun < (trained + lag + 1) * count:
                pending.append(Open(trained, complete=False))
                begun += 1
            while not may_take(pending, count, trained, lag):
                running = [group for group in pending if not group.complete]
                running[rng.integers(len(running))].complete = True
            taken = oldest_whole(pending, count)
            assert len(taken) == count and all(trained - group.born <= lag for group in taken)
            pending = [group for group in pending if group not in taken]
