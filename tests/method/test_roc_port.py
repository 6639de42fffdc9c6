"""Selection equals that of RLinf's port of rStar2 (rlinf/utils/down_sampling.py of commit a3816b5, with minima of 2):
the indices below are what its code keeps of these groups."""

import random

import pytest
from method_groups import make_verdict, method
from test_roc import random_rollout, rng

from grpo_roc_jax.method.roc import select_group
from grpo_roc_jax.types import Group, Problem

KEPT = {}
CASES = [(seed, total, keep) for seed, (total, keep) in enumerate([(32, 16)] * 6 + [(16, 8)] * 3 + [(8, 4)] * 2)]


def groups(seed, total):
    """Rollouts with their texts, and rewards whose share of successes differs from group to group."""
    draw = random.Random(seed)
    rollouts, share = [random_rollout(draw) for _ in range(total)], draw.random()
    return rollouts, [int(draw.random() < share) for _ in range(total)]


@pytest.mark.parametrize(("seed", "total", "keep"), CASES)
def test_the_same_trajectories_are_kept(seed, total, keep):
    rollouts, rewards = groups(seed, total)
    group = Group(Problem("p", "", "", ""), tuple(t for t, _ in rollouts), tuple(map(make_verdict, rewards)))
    selector = method(resample={"penalty_source": "text_compat", "negative_select": "first"}).resample
    assert select_group(group, keep, selector, rng()).indices.tolist() == KEPT[seed, total, keep]
