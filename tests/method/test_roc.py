"""Resample on correct: golden values, the released code's rule as a slow reference, every edge of a group."""

import itertools

import numpy as np
import pytest

from grpo_roc_jax.method import roc
from grpo_roc_jax.method.compose import resample_group, subset
from grpo_roc_jax.method.features import features
from grpo_roc_jax.method.roc import MaxVariance, ResampleOnCorrect, error_penalty, format_penalty, quota, select_roc
from grpo_roc_jax.run.statistics import selection_metrics
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.types import Group, Problem, ToolResult, Trajectory, Turn
from tests.helpers.method_groups import call, close, make_group, make_verdict, method


def rng(seed=0):
    return np.random.default_rng(seed)


def selector(**settings):
    return method(resample=settings).resample


def run(group, keep, **settings):
    return roc.select_group(group, keep, selector(**settings), rng())


@pytest.mark.parametrize(("total", "keep"), [(8, 4), (12, 5)])
def test_quota_decided_means_that_no_outcome_of_the_rest_changes_the_places(total, keep):
    config, early = ResampleOnCorrect(), 0

    def counts_of(negatives, positives):
        """(failures, successes) that are kept of so many."""
        correct = np.arange(negatives + positives) >= negatives
        chosen = select_roc(correct, np.zeros(len(correct)), keep, config, rng())
        return int((~correct[chosen]).sum()), int(correct[chosen].sum())

    for left in range(1, total):
        for negatives in range(total - left + 1):
            positives = total - left - negatives
            if config.quota_decided(negatives, positives, left, keep):
                early += 1
                counts = counts_of(negatives, positives)
                assert all(counts_of(negatives + more, positives + left - more) == counts for more in range(left + 1))
    assert early > total / 4
    uniform = selector(kind="uniform")
    assert uniform.quota_decided(3, 1, 4, 4) and not uniform.quota_decided(2, 1, 4, 4), "with enough"


def released_rule(negatives, positives, keep, minimum=2):
    """The order of steps of the released code, for even sizes; None where it keeps the whole group."""
    total = negatives + positives
    k_neg, k_pos = round(negatives * keep / total), round(positives * keep / total)
    low_neg, low_pos = min(minimum, negatives), min(minimum, positives)
    if k_neg <= low_neg and k_pos <= low_pos and k_neg + k_pos < keep:
        return None
    if k_neg <= low_neg:
        k_neg, k_pos = low_neg, keep - low_neg
    elif k_pos <= low_pos:
        k_pos, k_neg = low_pos, keep - low_pos
    return k_neg, k_pos


def test_quota_equals_the_released_rule():
    checked = 0
    for keep, total in [(size, n) for size in range(4, 33, 2) for n in range(size, 2 * size + 1)]:
        for negatives in range(1, total):
            expected = released_rule(negatives, total - negatives, keep)
            # Both proportional counts may round to odd halves; the released code then fails, this one adds up.
            if expected is not None and sum(expected) == keep:
                assert quota(negatives, total - negatives, keep) == expected
                checked += 1
    assert checked > 5000
    # The share of the failures, rounded, wherever there are enough of both kinds.
    for total in range(1, 20):
        for negatives, keep in itertools.product(range(total + 1), range(1, total + 1)):
            failures, successes = quota(negatives, total - negatives, keep)
            minima = [min(2, keep // 2, available) for available in (negatives, total - negatives)]
            share = np.clip(negatives * keep / total, minima[0], keep - minima[1])
            assert failures + successes == keep and abs(failures - share) <= 0.5
            assert 0 <= failures <= negatives and 0 <= successes <= total - negatives


def test_penalties_by_hand():
    """Each part, and the sum of those that are switched on; parts that are off are still there for the log."""
    counts = {"calls": [2, 4, 0, 1, 3, 2, 0, 5], "errors": [0, 2, 0, 1, 1, 2, 0, 1]}
    group = make_group([1] * 5 + [0] * 3, **counts, answers=[1, 1, 1, 1, 3, 0, 1, 1], turns=[3, 5, 1, 2, 4, 3, 1, 6])
    arrays = features(group)
    errors, formats = [0, 0.5, 0.5, 1, 1 / 3, 1, 0.5, 0.2], [0, 0, 0, 0, 0.5, 1, 0, 0]
    close(error_penalty(arrays.tool_calls, arrays.tool_errors), errors, 1e-6)
    close(format_penalty(arrays.answers, arrays.well_formed, arrays.turns), formats, 1e-6)
    faulty = np.array([1, 1, 1, 9]), np.array([True, False, True, True]), np.array([1, 1, 0, 2])
    assert format_penalty(*faulty).tolist() == [0, 1, 1, 1]
    for has_error, has_format in itertools.product((True, False), repeat=2):
        selection = run(group, 4, error_penalty=has_error, format_penalty=has_format)
        close(selection.penalties, has_error * np.array(errors) + has_format * np.array(formats), 1e-6)
        close([selection.error_penalties, selection.format_penalties], [errors, formats], 1e-6)
    selection = resample_group(group, method(4, resample={"negative_select": "first"}), rng())
    selected = subset(group, selection)
    assert selection.indices.tolist() == [t.sample for t in selected.trajectories] == [0, 1, 5, 6]
    assert selected.rewards.tolist() == [1, 1, 0, 0]
    assert selection.reasons == ("kept", "kept", "penalty", "penalty", "penalty", "kept", "kept", "quota")


def spoken(*turns, stop="answer"):
    """A trajectory of (text, (observation, as shown)...) in turns of a token, each but the last with one behind it."""
    made = []
    for at, (text, *seen) in enumerate(turns):
        results = tuple(ToolResult("ok", observation=observation, shown=shown) for observation, shown in seen)
        made.append(Turn(2 * at, 2 * at + 1, text, (call(),) * len(seen), results))
    numbers = np.zeros(2 * len(turns) - 1, np.int32)
    mask = np.arange(len(numbers)) % 2 == 0
    return Trajectory(numbers, mask, numbers * np.float32(0), numbers, 0, tuple(made), stop, 0)


ANSWER = "<answer>1</answer>"


@pytest.mark.parametrize(
    ("trajectory", "errors", "formats"),
    [
        (spoken((ANSWER,)), 0.5, 1),  # no call, and the header of the first turn is in the prompt
        (spoken(("so", ("An ERROR", "")), (ANSWER,)), 1, 0),
        (spoken(("a", ("1", ""), ("error", "")), ("b", ("2", "")), (ANSWER * 2,)), 1 / 3, 0.5),
        (spoken(("a", ("an error", "an [... cut ...]")), (ANSWER,)), 0, 0),
        (spoken(("a", ("<b> error", "&lt;b> error")), (ANSWER,)), 1, 0),  # escaped, not cut
        (spoken(("a", ("1", "")), (ANSWER,), stop="length"), 0, 1),  # the last turn stays open
        (spoken(("a", ("1", "")), (ANSWER, ("error", "")), stop="length"), 0, 0),  # the observation does not fit
    ],
)
def test_text_compat_reads_what_the_released_scorer_reads(trajectory, errors, formats):
    """By the rules of the released scorer (spec of GRPO-RoC, 1.4, column "repo")."""
    compat = selector(penalty_source="text_compat")
    group = Group(Problem("p", "", "", ""), (trajectory,), (make_verdict(1),))
    close(compat.penalties(compat.seen(group))[1:], [[errors], [formats]])


@pytest.mark.parametrize(
    ("rewards", "settings", "reason"),
    [
        ([0] * 4, {}, "equal_rewards"),
        ([1, 1 + 1e-9, 1, 1], {}, "equal_rewards"),
        ([1] * 4, {"drop": "all_correct"}, "all_correct"),
        ([0] * 4, {"drop": "all_correct"}, ""),
    ],
)
def test_equal_rewards_leave(rewards, settings, reason):
    """All trajectories of the group for this reason, or two of them stay."""
    selection = run(make_group(rewards), 2, **settings)
    assert selection.kept == (not reason) and selection.indices.size == (0 if reason else 2)
    assert not reason or set(selection.reasons) == {reason}
    counted = selection_metrics([make_group(rewards)], [selection])
    assert counted["roc/all_correct"] + counted["roc/all_wrong"] == 1


@pytest.mark.parametrize("select_mode", ["sort", "inverse", "uniform"])
@pytest.mark.parametrize("size", [7, 32])
def test_exact_size_and_minima(select_mode, size):
    """`sort` never drops a cleaner success, and the generator decides every draw."""
    generator, config = rng(size), selector(positive_select=select_mode)
    for keep in range(2, size + 1, max(1, size // 10)):
        for positives in range(1, size):
            rewards = np.zeros(size)
            rewards[generator.permutation(size)[:positives]] = 1
            group = make_group(rewards, calls=[4] * size, errors=generator.integers(0, 5, size))
            selection, again = (roc.select_group(group, keep, config, rng(keep)) for _ in range(2))
            assert selection.indices.tolist() == again.indices.tolist()
            selected = rewards[selection.indices]
            assert len(selection.indices) == keep and (np.diff(selection.indices) > 0).all()
            minima = [min(2, kind) if keep >= 4 else 1 for kind in (positives, size - positives)]
            assert minima[0] <= (selected > 0).sum() <= keep - minima[1]
            if select_mode == "sort":
                clean = selection.penalties[selection.indices[selected > 0]]
                left = np.setdiff1d(np.flatnonzero(rewards), selection.indices)
                assert clean.max() <= selection.penalties[left].min(initial=np.inf)


@pytest.mark.parametrize("kind", ["roc", "uniform", "max_variance"])
def test_short_and_full_groups(kind):
    assert run(make_group([1, 0, 1, 0]), 4, kind=kind).indices.tolist() == [0, 1, 2, 3]
    assert run(make_group([1, 0, 1]), 4, kind=kind).indices.tolist() == [0, 1, 2]
    dropped = run(make_group([1, 0, 1]), 4, kind=kind, short_groups="drop")
    assert not dropped.kept and set(dropped.reasons) == {"short_group"}


def test_empty_and_single_groups():
    """And `none`, which keeps everything."""
    assert not run(make_group([]), 4).kept and not run(make_group([1]), 4).kept
    assert run(make_group([1]), 4, drop="none").indices.tolist() == [0]
    selection = run(make_group([1, 0, 1, 0, 0, 0]), 4, kind="none")
    assert selection.indices.tolist() == [0, 1, 2, 3, 4, 5] and set(selection.reasons) == {"kept"}
    for settings, size, sampled in (({}, 16, 32), ({"kind": "none"}, 16, 16), ({"oversample": 1.5}, 5, 8)):
        assert selector(**settings).sampled(size) == sampled
    with pytest.raises(ConfigError, match="resample"):
        selector(oversample=0.5)


def test_max_variance():
    """By hand, and against all subsets; rounding hides no difference of small rewards."""
    rewards = np.array([0.1, 0.9, 0.5, 0, 1, 0.4])
    close(roc.split_variances(np.sort(rewards), 4), [0.0425, 0.151875, 0.205, 0.155, 0.065], 1e-9)
    generator = rng(9)
    for _ in range(9):
        rewards = generator.choice([0, 0.2, 0.5, 1.0], 7)
        for keep in (1, 2, 4, 7):
            best = max(np.var(rewards[list(some)]) for some in itertools.combinations(range(7), keep))
            indices = MaxVariance().choose(features(make_group(rewards)), None, keep, None).tolist()
            assert len(set(indices)) == keep and np.var(rewards[indices]) == pytest.approx(best)
