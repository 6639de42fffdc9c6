"""Samplers, budgets, reward tokens and schedules of the plan: their formulas against vectors and brute force."""

import numpy as np
import pytest

from grpo_roc_jax.method.planning import HIGH, LOW, check_separation, reward_conditions, reward_goal
from grpo_roc_jax.method.state import AlgoState, ProblemTable
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.types import PLAIN, Problem
from tests.helpers.method_groups import method


def test_hard_and_easy():
    """Solved at most half of the time, lowest first, by turns with those failed once or twice in eight."""
    solved = np.array([0, 4, 35, 40, 24, 12, 32, 0])
    seen = np.array([40, 40, 40, 40, 40, 40, 40, 0])
    uids = list("abcdefgh")
    state = AlgoState(table=ProblemTable().put(uids, {"successes": solved, "visits": seen}))
    pool, sampler = [Problem(uid, "?", "1", "t") for uid in uids], method(plan={"problems": "pairs"}).plan.problems
    assert sampler.choose(pool, 2, state, None) == [1, 2]
    assert sampler.choose(pool, 4, state, None) == [1, 2, 5, 6]


def test_reward_conditions():
    rng = np.random.default_rng(0)
    fixed = reward_conditions(4, 0.5, "fixed", rng)
    assert sorted(fixed, key=str) == [HIGH, HIGH, LOW, LOW]
    assert reward_conditions(8, 0.01, "fixed", rng).count(HIGH) == 1
    assert reward_conditions(8, 0.99, "fixed", rng).count(LOW) == 1
    iid = [reward_conditions(5, 0.3, "iid", rng).count(HIGH) for _ in range(2000)]
    assert np.mean(iid) == pytest.approx(1.5, abs=0.1)
    assert {0, 5} & set(iid)  # no fixed split


def test_reward_goal():
    assert reward_goal(HIGH) == "\n[Reward Goal: <|high_reward|>]"
    assert reward_goal(LOW).endswith("<|low_reward|>]")
    assert reward_goal(PLAIN) == ""
    assert reward_goal(HIGH, "text") == "\n[Reward Goal: high reward]"


def test_separation_check():
    check_separation(0.6, 0.2)
    with pytest.raises(ValueError, match=r"0\.300 under the high.*0\.290 under the low"):
        check_separation(0.3, 0.29)


@pytest.mark.parametrize(
    "settings",
    [
        {"condition": {"kind": "reward_tokens", "high_share": 1.0}},
        {"condition": {"kind": "reward_tokens", "separation": -0.1}},
        {"condition": {"kind": "hint_level", "levels": 0}},
        {"problems": {"kind": "uncertainty", "pool": 0}},
        {"budget": {"kind": "knapsack", "least": 0}},
        {"budget": {"kind": "knapsack", "least": 9, "most": 8}},
        {"budget": {"kind": "half_width", "pilot": 1}},
        {"budget": {"kind": "half_width", "alpha": 1.0}},
        {"budget": {"kind": "half_width", "bonus": -1.0}},
        {"warmup_steps": -1},
        {"second": {"kind": "scaffold", "replace": 0}},
        {"second": {"kind": "examples", "count": 0}},
        {"second": {"kind": "explain", "steps": 0}},
        {"second": {"kind": "explain", "weight": -0.1}},
        {"second": {"kind": "serial", "cuts": 0}},
        {"temperature": {"kind": "rising", "temperatures": [1.0, 0.9]}},
        {"temperature": {"kind": "rising", "temperatures": [0.0, 0.9]}},
        {"temperature": {"kind": "rising", "temperatures": []}},
    ],
)
def test_impossible_settings(settings):
    with pytest.raises(ConfigError, match=r"plan\."):
        method(plan=settings)
