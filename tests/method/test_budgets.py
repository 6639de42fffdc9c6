"""Reward tokens of the plan: shares, texts, and the check before training."""

import numpy as np
import pytest

from grpo_roc_jax.method.planning import HIGH, LOW, check_separation, reward_conditions, reward_goal
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.types import PLAIN
from tests.helpers.method_groups import method


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
        {"warmup_steps": -1},
    ],
)
def test_impossible_settings(settings):
    with pytest.raises(ConfigError, match=r"plan\."):
        method(plan=settings)
