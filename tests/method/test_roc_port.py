"""Selection equals that of RLinf's port of rStar2 (rlinf/utils/down_sampling.py of commit a3816b5, with minima of 2):
the indices below are what its code keeps of these groups."""

import random

import pytest

from grpo_roc_jax.method.roc import select_group
from grpo_roc_jax.types import Group, Problem
from tests.helpers.method_groups import make_verdict, method
from tests.method.test_roc import random_rollout, rng

KEPT = {
    (0, 32, 16): [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 22],
    (1, 32, 16): [2, 3, 4, 5, 6, 10, 11, 13, 14, 15, 17, 18, 23, 24, 27, 30],
    (2, 32, 16): [1, 4, 7, 8, 11, 13, 14, 16, 18, 19, 20, 21, 22, 23, 24, 27],
    (3, 32, 16): [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    (4, 32, 16): [0, 2, 4, 5, 6, 7, 8, 9, 10, 13, 17, 19, 21, 22, 26, 27],
    (5, 32, 16): [0, 1, 2, 3, 4, 5, 6, 8, 12, 13, 14, 16, 17, 18, 19, 21],
    (6, 16, 8): [1, 2, 4, 5, 7, 8, 9, 10],
    (7, 16, 8): [0, 1, 2, 3, 6, 7, 9, 12],
    (8, 16, 8): [0, 1, 2, 3, 5, 8, 11, 15],
    (9, 8, 4): [0, 1, 2, 3],
    (10, 8, 4): [0, 1, 2, 4],
}
"""(seed of the group, sampled, kept) -> the indices that the port keeps."""


def groups(seed, total):
    """Rollouts with their texts, and rewards whose share of successes differs from group to group."""
    draw = random.Random(seed)
    rollouts, share = [random_rollout(draw) for _ in range(total)], draw.random()
    return rollouts, [int(draw.random() < share) for _ in range(total)]


@pytest.mark.parametrize(("seed", "total", "keep"), KEPT)
def test_the_same_trajectories_are_kept(seed, total, keep):
    rollouts, rewards = groups(seed, total)
    group = Group(Problem("p", "", "", ""), tuple(t for t, _ in rollouts), tuple(map(make_verdict, rewards)))
    selector = method(resample={"penalty_source": "text_compat", "negative_select": "first"}).resample
    assert select_group(group, keep, selector, rng()).indices.tolist() == KEPT[seed, total, keep]
