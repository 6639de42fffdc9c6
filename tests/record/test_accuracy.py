"""Estimators against enumeration of all subsets; the table against numbers counted by hand."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import hypergeom

from grpo_roc_jax.record import accuracy
from grpo_roc_jax.record.accuracy import all_at_k, bootstrap, compare, intervals, maj_at_k, pass_at_k, summarize
from grpo_roc_jax.types import Group, Problem, Verdict
from tests.helpers.samples import make_trajectory


@pytest.mark.parametrize("n", [1, 2, 6])
def test_pass_and_all_at_k_are_means_over_all_subsets(n):
    for c in range(n + 1):
        correct = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(correct, k))
            assert pass_at_k(n, c, k) == pytest.approx(np.mean([any(s) for s in subsets]), abs=1e-12)
            assert all_at_k(n, c, k) == pytest.approx(np.mean([all(s) for s in subsets]), abs=1e-12)


def test_pass_at_k_stays_exact_where_binomials_overflow_and_refuses_impossible_counts():
    assert pass_at_k(100_000, 1, 1) == pytest.approx(1e-5, rel=1e-9)
    assert pass_at_k(5000, 10, 2500) == pytest.approx(1 - math.prod((2500 - i) / (5000 - i) for i in range(10)))
    for n, c, k in ((4, 5, 1), (4, 1, 5), (4, 1, 0)):
        with pytest.raises(ValueError, match="must have 1 <= k"):
            pass_at_k(n, c, k)
    assert [accuracy.reported_ks(n) for n in (1, 4, 12)] == [[1], [1, 2, 4], [1, 2, 4, 8, 12]]


def vote(answers) -> dict:
    """Answer -> probability to win the vote of a subset; a slow reference."""
    counts = Counter(a for a in answers if a is not None)
    tied = [a for a, count in counts.items() if count == max(counts.values())]
    return {a: 1 / len(tied) for a in tied}


@pytest.mark.parametrize("seed", range(8))
def test_maj_at_k_is_the_mean_over_all_subsets(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 8))
    answers = [None if a == 4 else a for a in rng.integers(0, 5, n).tolist()]
    correct = [a == 0 for a in answers]
    for k in range(1, n + 1):
        expected = np.mean([vote(subset).get(0, 0.0) for subset in itertools.combinations(answers, k)])
        assert maj_at_k(answers, correct, k) == pytest.approx(expected, abs=1e-12)


def test_votes_by_hand():
    assert maj_at_k(["1/2", "0.5", "b", "b"], [True, True, False, False], 4) == 0.5  # one answer, two spellings
    assert maj_at_k([None, None], [False, False], 2) == 0.0
    won = hypergeom(100, 60, 51).sf(25)  # 26 of 51 votes
    assert maj_at_k(["a"] * 60 + ["b"] * 40, [True] * 60 + [False] * 40, 51) == pytest.approx(won, rel=1e-9)


def group_of(source, uid, statuses, answers=None, calls=(2, 1), stops=()) -> Group:
    rng = np.random.default_rng(0)
    rows = [make_trajectory(rng, i) for i in range(len(statuses))]
    rows[: len(stops)] = [replace(row, stop=stop) for row, stop in zip(rows, stops, strict=False)]
    said = zip(statuses, answers or ["x"] * len(statuses), strict=True)
    verdicts = tuple(Verdict(float(s == "correct"), s, a, *calls, 1, True, 3) for s, a in said)
    return Group(Problem(uid, "p", "a", source), tuple(rows), verdicts)


def test_the_table_by_source():
    groups = [
        group_of("gsm8k", "1", ["correct", "correct", "wrong", "wrong"], ["7", "7.0", "3", "4"], stops=["length"]),
        group_of("gsm8k", "2", ["wrong", "no_answer", "wrong", "wrong"], ["5", None, "5", "5"], calls=(1, 0)),
        group_of("aime/24", "3", ["correct", "correct"], calls=(0, 0)),
    ]
    problems = [groups[2].problem, groups[2].problem, Problem("4", "p", "a", "amc")]
    table = summarize(groups, 4, [(problem, groups[2].trajectories[0]) for problem in problems])
    assert list(table) == ["aime/24", "amc", "gsm8k", "all"]
    gsm = table["gsm8k"]
    assert gsm["avg@4"] == 0.25 and gsm["pass@1"] == 0.25 and gsm["pass@4"] == 0.5 and gsm["pass^4"] == 0.0
    assert gsm["pass@2"] == pytest.approx((1 - 1 / 6) / 2) and gsm["maj@4"] == 0.5
    assert gsm["tool_error_rate"] == 4 / 12 and gsm["tool_error_in_correct"] == 2 / 4
    assert gsm["no_answer"] == gsm["truncated"] == 1 / 8 and gsm["infrastructure"] == gsm["unjudged"] == 0
    aime = table["aime/24"]
    assert aime["avg@4"] == 1.0 and aime["pass@2"] == 1.0 and math.isnan(aime["pass@4"]) and math.isnan(aime["maj@4"])
    assert aime["infrastructure"] == 0.5 and aime["unjudged"] == 0
    assert math.isnan(aime["tool_error_rate"]) and math.isnan(aime["tool_error_in_correct"]), "nothing was called"
    assert table["amc"]["problems"] == 0 and table["amc"]["unjudged"] == 1 and math.isnan(table["amc"]["avg@4"])
    overall = table["all"]
    assert overall["avg@4"] == pytest.approx((0.5 + 0 + 1) / 3)  # problems count equally, not samples
    assert overall["problems"] == 3 and overall["samples"] == 10 and overall["infrastructure"] == 3 / 13
    assert gsm["length"] == pytest.approx(np.mean([t.length - 20 for g in groups[:2] for t in g.trajectories]))
    names = accuracy.eval_metrics(table)
    assert names["eval/aime:24/avg@4"] == 1.0 and "eval/all/maj@4" in names


def test_the_interval_of_a_mean_is_that_of_the_normal_approximation_and_seeded():
    values = np.array([0.0, 1.0] * 200)
    low, high = bootstrap(values)
    assert (low, high) == bootstrap(values)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006) and high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)
    assert bootstrap(np.array([0.25, 0.25, np.nan])) == (0.25, 0.25), "problems without a score are left out"


@pytest.mark.parametrize("n", [1, 900])
def test_scores_that_are_all_equal_are_no_certainty(n):
    """Every draw of a bootstrap is the same there; Wilson's interval at 0 of n is 1.96^2 / (n + 1.96^2) wide."""
    groups = [group_of("x", f"p{i}", ["wrong"]) for i in range(n)]
    assert intervals(groups, 1)["x"]["avg@1"] == pytest.approx((0, 3.8416 / (n + 3.8416)))


def test_a_comparison_pairs_the_problems_that_both_have():
    rates, right, wrong = [0.0, 1.0] * 50, ["correct"] * 4, ["wrong"] * 4
    better = [group_of("x", f"p{i}", right if rate else wrong) for i, rate in enumerate(rates)]
    worse = [group_of("x", f"p{i}", wrong) if i % 10 == 1 else group for i, group in enumerate(better[:80])]
    worse += [group_of("x", "another", wrong), Group(better[90].problem, (), ())]
    gap = compare(better, worse, 4)["avg@4"]
    assert gap.problems == 80 and (gap.first, gap.second) == (0.5, 0.4) and gap.value == pytest.approx(0.1)
    assert 0 < gap.low < 0.1 < gap.high
    assert gap.high - gap.low < 0.7 * np.subtract(*bootstrap(np.array(rates[:80]))[::-1]), "an unpaired one is wider"
