"""Numbers of a study that must not flatter an arm."""

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import study
from benchmarks.studies import STUDIES
from tests.test_study import row


def test_equal_tokens_by_hand():
    """`a` samples 100 tokens a step, `b` 300: at 600 tokens `a` has taken six steps and `b` two. The measure is the
    mean of steps 2 to 6 of `a` and of 1 and 2 of `b`. Evaluated after steps 0, 3 and 6, `a` has 1.0. `b` has 0.5 after
    no token and 0.75 after 900, so two thirds of the way at 600."""
    a = row("a", 0, [0.6, 0.5, 0.4, 0.3, 0.2, 0.1], 100.0)
    b = row("b", 0, [0.8, 0.6, 0.4, 0.2, 0.0, 0.0], 300.0)
    table = study.measured(STUDIES["roc"], {"a": study.run_data(a), "b": study.run_data(b)})
    columns = [(metric, axis) for _, metric, axis in STUDIES["roc"].measures]
    errors, accuracy = columns.index((study.ERRORS, "tokens")), columns.index(("eval", "tokens"))
    assert table["a"][errors] == pytest.approx((0.5 + 0.4 + 0.3 + 0.2 + 0.1) / 5)
    assert table["b"][errors] == pytest.approx((0.8 + 0.6) / 2)
    assert (table["a"][accuracy], table["b"][accuracy]) == pytest.approx((1.0, 0.5 + 0.25 * 2 / 3))


def test_steps_without_a_call_in_a_correct_rollout_have_no_share():
    """Of a policy that solves nothing, or answers without a call, it would be the best, 0."""
    record = row("a", 0, [0.5, 0.0, 0.0, 0.25], 1.0)
    record["columns"] |= {study.TOOL_FREE: [None, 0.0, 1.0, 0.0, 0.5], study.REWARD: [None, 0.5, 0.5, 0.0, 0.5]}
    run_of = study.run_data(record)
    assert [metrics.get(study.ERRORS) for metrics in run_of.rows[1:]] == [0.5, None, None, 0.25]
    assert study.value_at(run_of, study.ERRORS, "step", math.inf) == pytest.approx(0.375)


def test_an_interval_of_two_values_by_hand():
    """Of 0 and 1: 0.5 ± 12.7062 x sqrt(1/2) / sqrt(2), with the 97.5% point of t with one degree of freedom."""
    np.testing.assert_allclose(study.interval(np.array([0.0, 1.0])), (0.5 - 6.3531, 0.5 + 6.3531), atol=1e-4)
    rows = [row(arm, seed, [value] * 5, 1.0) for seed in (0, 1) for arm, value in (("roc", 0.25), ("grpo", 0.5 + seed))]
    few = replace(STUDIES["roc"], arms={"roc": (), "grpo": ()}, worlds={"w": ()}, seeds=2)
    text = study.report(few, {(r["world"], r["arm"], r["seed"]): r for r in rows}, "w")
    assert "| grpo | 0.750 ± 0.707 [-5.603, 7.103] 2/2 |" in text
    assert study.difference(np.array([0.5, -0.125, 0.0])).endswith(" 1/3"), "the sign of the mean"


def test_p_over_signs_and_its_correction_by_hand():
    """Of 3, 2, 1 the sums over signs are +-6, +-4, +-2, 0, 0: two of eight reach 6. Holm: 3 x 0.01, 2 x 0.03, 1 x 0.04,
    none below the one before."""
    assert study.sign_flip(np.array([3.0, 2.0, 1.0])) == 2 / 8
    assert study.sign_flip(np.array([3.0, -2.0, 1.0])) == 6 / 8  # |2| or more: +-6, +-4, +-2
    np.testing.assert_allclose(study.holm([0.04, 0.01, 0.03]), [0.06, 0.03, 0.06])
    few, enough = np.linspace(0.9, 1.1, 5), np.linspace(0.9, 1.1, 8)
    assert study.sign_flip(few) == 2 / 32
    assert study.verdict(few, 0.0) == "undecided, 5 seeds of 8"
    assert study.verdict(enough, study.sign_flip(enough)) == "shown" and study.verdict(-enough, 1.0) == "refuted"
