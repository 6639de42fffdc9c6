"""Rewards are equal or not whatever their unit: rounding is no signal, a small difference of small rewards is one."""

import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.consistency_grpo import stability_rewards, word_entropy
from grpo_roc_jax.contrib.methods.tw_grpo import token_weights
from tests.method import test_equality as core


def test_texts_of_the_same_words_are_equally_informative():
    words = [f"w{i}" for i in range(7) for _ in range(i + 1)]
    rng = np.random.default_rng(0)
    values = np.array([word_entropy(" ".join(rng.permutation(words))) for _ in range(12)])
    assert np.ptp(values) > 0, "otherwise this shows nothing"
    paid = stability_rewards(values, np.arange(12) % 3, 0.5, 0.5)
    assert paid.tolist() == [0.5] * 12


def test_positions_that_differ_by_rounding_weigh_the_same():
    logprobs = np.log(np.full((3, 4, 5), 0.2)) + np.random.default_rng(0).normal(0, 1e-12, (3, 4, 5))
    far = np.log(np.array([[0.9, 0.1], [0.1, 0.9]]))[:, None]
    assert token_weights([np.repeat(far, 3, axis=1) + np.arange(3)[:, None] * 1e-12]).tolist() == [1, 1, 1]
    assert token_weights([logprobs]).tolist() == [1, 1, 1, 1]


CENTERED = [
    {"kind": "group", "baseline": "median"},
    *({"kind": "group", "scale": s} for s in ("mad", "mad_or_std")),
    *({"kind": "group", "adjust": [step]} for step in ("strata", "tree")),
    "grao",
    "anchored",
    "by_role",
    "positions",
]


@pytest.mark.parametrize("advantage", CENTERED, ids=str)
def test_rounding_gives_no_advantage(advantage):
    core.test_rounding_gives_no_advantage(advantage)
