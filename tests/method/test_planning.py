"""Requests of each wave and what their results do to the groups."""

from dataclasses import replace

import numpy as np

from grpo_roc_jax.method.planning import Wave, best_text, first_wave, gathered, next_wave, with_suffix
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.types import Condition, Problem, RolloutRequest
from tests.helpers.method_groups import make_group, method, saying


def problems(*uids, **extra):
    return [Problem(uid, f"question {uid}", "1", "test", extra) for uid in uids]


def rng():
    return np.random.default_rng(0)


def planned(**sections):
    return method(plan=sections).plan


def first(batch, count, plan, state=None):
    """Requests of the first wave."""
    return first_wave(Wave(batch, count, state or AlgoState(), rng()), plan)


def later(batch, groups, number, plan, state=None, *, count=4, **more):
    """Requests of a later wave."""
    return next_wave(Wave(batch, count, state or AlgoState(), rng(), number, groups, **more), plan)


def asked(requests):
    """What requests say, but for their texts."""
    return [(r.place, r.count, str(r.condition)) for r in requests]


def failed(problem, n=4):
    return replace(make_group([0] * n, uid=problem.uid), problem=problem)


def test_plain_first_wave():
    batch = problems("a", "b")
    requests = first(batch, 8, planned())
    assert requests == [RolloutRequest(batch[0], 0, 8), RolloutRequest(batch[1], 1, 8)]
    assert later(problems("a"), [failed(problems("a")[0])], 1, planned()) == []


def test_reward_tokens():
    """From the first step, warm-up or not: the policy was fine-tuned on them."""
    plan = planned(condition={"kind": "reward_tokens", "draw": "fixed", "high_share": 0.25}, warmup_steps=2)
    requests = first(problems("a", "b"), 8, plan)
    each = [(2, "high_reward"), (6, "low_reward")]
    assert asked(requests) == [(index, *part) for index in (0, 1) for part in each]
    assert requests[0].suffix == "\n[Reward Goal: <|high_reward|>]"


def test_a_suffix_for_all_prompts():
    """The budget of `shaping budget` ends every prompt; a condition that was there stays."""
    a, b = problems("a", "b")
    requests = [RolloutRequest(a, 0, 4), RolloutRequest(b, 1, 2, condition=Condition("high_reward"), suffix="\ngoal")]
    named = with_suffix(requests, "\n256 tokens")
    assert [(str(r.condition), r.suffix) for r in named] == [
        ("budget", "\n256 tokens"),
        ("high_reward", "\ngoal\n256 tokens"),
    ]
    assert with_suffix(requests, "") == requests


def test_gathered():
    batch = problems("a", "b")
    requests = [RolloutRequest(batch[index], index, count) for index, count in ((0, 1), (1, 1), (0, 2))]
    results = [make_group([1], uid="a"), make_group([0], uid="b"), make_group([0, 1], uid="a")]
    group_a, group_b = gathered(batch, requests, results)
    assert group_a.rewards.tolist() == [1, 0, 1]
    assert group_b.rewards.tolist() == [0]
    assert group_a.problem is batch[0]


def test_the_best_text_is_the_first_of_the_best():
    assert best_text(saying(make_group([0, 1, 1, 0]), "0", "1", "2", "3")) == "1"
