"""Resample on correct: golden values, the released code's rule as a slow reference, every edge of a group."""

import dataclasses
import itertools
import random
import re
import time
from collections import Counter

import numpy as np
import pytest

from grpo_roc_jax.method.advantage import z_score
from grpo_roc_jax.method.compose import resample_group, subset
from grpo_roc_jax.method.features import features, text_compat
from grpo_roc_jax.method.roc import (
    InverseDraw,
    MaxVariance,
    NoSelection,
    ResampleOnCorrect,
    Uniform,
    error_penalty,
    format_penalty,
    quota,
    select_group,
    select_roc,
    split_variances,
)
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.types import Group, Problem, ToolResult, Trajectory, Turn
from tests.helpers.method_groups import call, make_group, make_verdict, method, result


def rng(seed=0):
    return np.random.default_rng(seed)


def selector(**settings):
    return method(resample=settings).resample


def run(group, keep, **settings):
    return select_group(group, keep, selector(**settings), rng())


# --- quota -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("negatives", "expected"),
    [
        *((1, (1, 15)), (2, (2, 14)), (3, (2, 14)), (5, (2, 14)), (6, (3, 13)), (7, (4, 12))),
        *((15, (8, 8)), (16, (8, 8)), (27, (14, 2)), (29, (14, 2)), (30, (14, 2)), (31, (15, 1))),
    ],
)
def test_quota_of_the_recipe(negatives, expected):
    """32 sampled, 16 kept (spec of GRPO-RoC, 1.4)."""
    assert quota(negatives, 32 - negatives, 16) == expected


@pytest.mark.parametrize(("total", "keep"), [(8, 4), (12, 5), (32, 16)])
def test_quota_decided_means_that_no_outcome_of_the_rest_changes_the_places(total, keep):
    config, early = ResampleOnCorrect(), 0
    for left in range(1, total):
        for negatives in range(total - left + 1):
            positives = total - left - negatives
            if not config.quota_decided(negatives, positives, left, keep):
                continue
            early += 1
            found = run_counts(negatives, positives, keep)
            for more in range(left + 1):
                assert run_counts(negatives + more, positives + left - more, keep) == found
    assert early > total / 4
    assert not config.quota_decided(2, 2, 0, 4), "nothing is left to cut"


def run_counts(negatives, positives, keep):
    """(failures, successes) that `select_roc` keeps of so many."""
    correct = np.arange(negatives + positives) >= negatives
    chosen = select_roc(correct, np.zeros(len(correct)), keep, ResampleOnCorrect(), rng())
    return int((~correct[chosen]).sum()), int(correct[chosen].sum())


def test_the_quota_of_other_selectors_is_decided_with_enough_or_never():
    assert Uniform().quota_decided(3, 1, 4, 4)
    assert not Uniform().quota_decided(2, 1, 4, 4)
    assert not selector(kind="max_variance").quota_decided(16, 15, 1, 16)
    assert not NoSelection().quota_decided(16, 15, 1, 16)


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
    for keep in range(4, 33, 2):
        for total in range(keep, 2 * keep + 1):
            for negatives in range(1, total):
                expected = released_rule(negatives, total - negatives, keep)
                # Both proportional counts may round to odd halves; the released code then fails, this one adds up.
                if expected is not None and sum(expected) == keep:
                    assert quota(negatives, total - negatives, keep) == expected
                    checked += 1
    assert checked > 5000


def test_quota_invariants():
    for total in range(1, 20):
        for negatives, keep in itertools.product(range(total + 1), range(1, total + 1)):
            positives = total - negatives
            k_neg, k_pos = quota(negatives, positives, keep)
            assert k_neg + k_pos == keep
            assert 0 <= k_neg <= negatives
            assert 0 <= k_pos <= positives
            if keep >= 4:
                assert k_neg >= min(2, negatives)
                assert k_pos >= min(2, positives)
            elif keep >= 2:
                assert k_neg >= min(1, negatives)
                assert k_pos >= min(1, positives)


@pytest.mark.parametrize(("negatives", "keep"), [(7, 7), (3, 3), (4, 5)])
def test_quota_odd_sizes_add_up(negatives, keep):
    """Sizes at which rounding both counts gives keep + 1 or keep - 1."""
    k_neg, k_pos = quota(negatives, negatives, keep)
    assert k_neg + k_pos == keep


def test_quota_without_minima_follows_the_shares():
    assert quota(1, 31, 16, 0, 0) == (0, 16)
    assert quota(7, 25, 16, 0, 0) == (4, 12)


def test_quota_refuses_more_than_there_is():
    with pytest.raises(ValueError, match="cannot keep 5 of 4 trajectories"):
        quota(2, 2, 5)


# --- penalties -------------------------------------------------------------------------------------------------------

FIXTURE = {
    "rewards": [1, 1, 1, 1, 1, 0, 0, 0],
    "calls": [2, 4, 0, 1, 3, 2, 0, 5],
    "errors": [0, 2, 0, 1, 1, 2, 0, 1],
    "answers": [1, 1, 1, 1, 3, 0, 1, 1],
    "turns": [3, 5, 1, 2, 4, 3, 1, 6],
}


def test_penalties_vector():
    found = features(make_group(**FIXTURE))
    np.testing.assert_allclose(
        error_penalty(found.tool_calls, found.tool_errors), [0, 0.5, 0.5, 1, 1 / 3, 1, 0.5, 0.2], atol=1e-6
    )
    np.testing.assert_allclose(
        format_penalty(found.answers, found.well_formed, found.turns), [0, 0, 0, 0, 0.5, 1, 0, 0], atol=1e-6
    )


def test_format_penalty_faults():
    ones = np.ones(3, int)
    assert format_penalty(ones, np.array([True, False, True]), np.array([1, 1, 0])).tolist() == [0, 1, 1]
    assert format_penalty(np.array([9]), np.array([True]), np.array([2])).tolist() == [1]


def test_selection_vector():
    group = make_group(**FIXTURE)
    selection = run(group, 4, negative_select="first")
    assert selection.indices.tolist() == [0, 1, 5, 6]
    np.testing.assert_allclose(
        z_score(group.rewards[selection.indices]), [0.866024, 0.866024, -0.866024, -0.866024], atol=1e-5
    )
    assert selection.reasons == ("kept", "kept", "penalty", "penalty", "penalty", "kept", "kept", "quota")


def test_one_positive_among_eight():
    selection = run(make_group([0, 0, 0, 1, 0, 0, 0, 0]), 4)
    assert 3 in selection.indices
    assert len(selection.indices) == 4


def test_penalty_switches():
    found = features(make_group(**FIXTURE))
    full, error, format_, none, free = (
        selector(**settings).select(found, 4, rng())
        for settings in (
            {},
            {"format_penalty": False},
            {"error_penalty": False},
            {"error_penalty": False, "format_penalty": False},
            {"no_tool_penalty": 0.0},
        )
    )
    np.testing.assert_allclose(full.penalties, full.error_penalties + full.format_penalties)
    np.testing.assert_allclose(error.penalties, full.error_penalties)
    np.testing.assert_allclose(format_.penalties, full.format_penalties)
    assert none.penalties.tolist() == [0] * 8
    np.testing.assert_allclose(none.error_penalties, full.error_penalties)  # still there for the log
    assert free.error_penalties[2] == 0.0


def compat_case(texts_results, answers=1, stop="answer"):
    """Penalties of one trajectory under the released scorer: a list of turns, each the observations that follow it."""
    said = ["t"] * (len(texts_results) - 1) + ["<answer>1</answer>" * answers]
    turns = tuple(
        Turn(i, i + 1, said[i], (call(),) * len(obs), tuple(result(kind, text) for kind, text in obs))
        for i, obs in enumerate(texts_results)
    )
    n = len(turns)
    trajectory = Trajectory(
        np.zeros(n, np.int32), np.ones(n, bool), np.zeros(n, np.float32), np.zeros(n, np.int32), 0, turns, stop, 0
    )
    group = Group(Problem("p", "", "", ""), (trajectory,), (make_verdict(1, answers=answers),))
    found = text_compat(group, features(group))
    return (
        float(error_penalty(found.tool_calls, found.tool_errors)[0]),
        float(format_penalty(found.answers, found.well_formed, found.turns)[0]),
    )


@pytest.mark.parametrize(
    ("turns", "extra", "penalties"),
    [
        ([[]], {}, (0.5, 1.0)),  # no tool, single turn
        ([[("ok", "42")], []], {}, (0, 0)),  # clean, two turns
        ([[("ok", "42")], []], {"answers": 2}, (0, 1)),
        ([[("ok", "42")], []], {"stop": "length"}, (0, 1)),  # last turn unclosed
        ([[("timeout", "Suicide from timeout.")], []], {}, (0, 0)),
        ([[("malformed_call", "Expecting value: line 1 column 1")], []], {}, (0, 0)),
        ([[("ok", "mean squared error = 0")], []], {}, (1, 0)),
        ([[("exception", "AssertionError at line 1")], []], {}, (1, 0)),
    ],
)
def test_text_compat_golden_values(turns, extra, penalties):
    assert compat_case(turns, **extra) == penalties


SNIPPETS = (
    *("<answer>", "</answer>", "\\boxed{1}", "an error", "ERROR", "so", "\n", "&lt;answer>", "<answer", "answer>"),
    *("<tool_response>", "</tool_response>", "<|im_end|>", "<|im_start|>assistant", "<|im_start|>user"),
)
ENDS = ("answer", "eos", "turns", "length", "unfit", "deadline")


def random_rollout(draw):
    """(trajectory, the text of its response as the released loop writes it) of a dialogue of random pieces.

    The released loop closes every turn that ends by itself, shows every observation but one that does not fit, and
    leaves a turn open that a limit of tokens cut (spec of GRPO-RoC, 2.1 and 1.4, edge cases 8 and 11).
    """

    def text(most):
        return "".join(draw.choices(SNIPPETS[:2] if draw.random() < 0.5 else SNIPPETS, k=draw.randrange(most)))

    def observation():
        whole = text(5)
        cut = whole
        if draw.random() < 0.3:
            whole = whole.replace("&lt;", "")
            head, tail = sorted(draw.choices(range(len(whole) + 1), k=2))
            cut = whole[:head] + "[... cut ...]" + whole[tail:]
        escaped = cut.replace("<", "&lt;")
        return ToolResult("ok", observation=whole, shown="" if escaped == whole else escaped), cut

    end, count = draw.choice(ENDS), draw.randint(1, 4)
    turns, written, at = [], "", 0
    for number in range(1, count + 1):
        said, last = text(6), number == count
        results, seen = [], []
        if not last or end in ("unfit", "deadline"):
            results, seen = zip(*(observation() for _ in range(draw.randint(1, 2))), strict=True)
        turns.append(Turn(at, at + 1, said, (call(),) * max(len(results), end == "turns"), tuple(results)))
        written += said + ("" if last and end == "length" else "<|im_end|>")
        at += 1
        if not last:
            blocks = "".join(f"<tool_response>\n{one}\n</tool_response>\n" for one in seen)
            written += f"\n<|im_start|>user\n{blocks}<|im_end|>\n<|im_start|>assistant\n<reason>"
            at += 1
    mask = np.zeros(at, bool)
    mask[[turn.start for turn in turns]] = True
    numbers = np.zeros(at, np.int32)
    stop = "length" if end == "unfit" else end
    return Trajectory(numbers, mask, numbers * np.float32(0), numbers, 0, tuple(turns), stop, 0), written


def released_penalties(text):
    """(error part, format part) by the rules of the released scorer (spec of GRPO-RoC, 1.4, column "repo")."""
    blocks = re.findall("<tool_response>.*?</tool_response>", text, re.DOTALL)
    failed = [block for block in blocks if "error" in block.lower()]
    pairs = len(re.findall("<answer>.*?</answer>", text, re.DOTALL))
    turns = len(re.findall(r"<\|im_start\|>assistant.*?<\|im_end\|>", text, re.DOTALL))
    balanced = text.count("<answer>") == pairs == text.count("</answer>")
    return (
        len(failed) / len(blocks) if blocks else 0.5,
        min((pairs - 1) / turns, 1.0) if pairs and balanced and turns else 1.0,
    )


def test_text_compat_equals_the_released_scorer_on_random_groups():
    draw, compat, seen = random.Random(7), selector(penalty_source="text_compat"), set()
    for _ in range(2000):
        rollouts = [random_rollout(draw) for _ in range(3)]
        group = Group(Problem("p", "", "", ""), tuple(t for t, _ in rollouts), (make_verdict(1),) * 3)
        expected = [released_penalties(text) for _, text in rollouts]
        _, errors, formats = compat.penalties(compat.seen(group))
        assert list(zip(errors.tolist(), formats.tolist(), strict=True)) == expected
        seen.update(expected)
    assert len(seen) > 20, "the groups are too much alike"


def test_text_compat_takes_linear_time():
    def seconds(chars):
        turns = (Turn(0, 1, "<answer>" * (chars // 8)), Turn(1, 2, "<|im_start|>assistant" * (chars // 21)))
        group = make_group([1])
        group = dataclasses.replace(group, trajectories=(dataclasses.replace(group.trajectories[0], turns=turns),))
        found, times = features(group), []
        for _ in range(3):
            started = time.thread_time()
            text_compat(group, found)
            times.append(time.thread_time() - started)
        return min(times)

    assert seconds(400_000) < 24 * seconds(50_000) + 0.02


def test_structured_penalties_read_the_status():
    """What the released scorer misses or invents: a time-out counts, the word "error" does not."""
    group = make_group([1, 1, 0, 0], calls=[1, 1, 1, 1], errors=[1, 0, 0, 0])
    assert run(group, 2).error_penalties.tolist() == [1, 0, 0, 0]


def test_text_compat_setting():
    group = make_group([1, 1, 0, 0])  # one turn each and no result: the released scorer sees no call and no turn
    assert run(group, 2, penalty_source="text_compat").penalties.tolist() == [1.5] * 4
    assert run(group, 2).penalties.tolist() == [0.0] * 4


# --- selection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewards", [[0] * 8, [1] * 8, [0.5] * 8, [1, 1 + 1e-9, 1, 1]])
def test_equal_rewards_leave(rewards):
    selection = run(make_group(rewards), 4)
    assert not selection.kept
    assert selection.indices.size == 0
    assert set(selection.reasons) == {"equal_rewards"}


def test_drop_settings():
    solved, failed = make_group([1] * 4), make_group([0] * 4)
    assert not run(solved, 2, drop="all_correct").kept
    assert run(failed, 2, drop="all_correct").kept
    assert run(solved, 2, drop="none").indices.size == 2
    assert set(run(solved, 2, drop="all_correct").reasons) == {"all_correct"}


@pytest.mark.parametrize("select_mode", ["sort", "inverse", "uniform"])
@pytest.mark.parametrize("size", [7, 8, 13, 32])
def test_exact_size_and_minima(select_mode, size):
    generator = rng(size)
    for keep in range(2, size + 1, max(1, size // 10)):
        for positives in range(1, size):
            rewards = np.zeros(size)
            rewards[generator.permutation(size)[:positives]] = 1
            group = make_group(rewards, errors=generator.integers(0, 2, size))
            selection = select_group(group, keep, selector(positive_select=select_mode), generator)
            kept = rewards[selection.indices]
            assert len(selection.indices) == len(set(selection.indices)) == keep
            assert (np.diff(selection.indices) > 0).all()
            if keep >= 4:
                assert (kept > 0).sum() >= min(2, positives)
                assert (kept <= 0).sum() >= min(2, size - positives)
            assert 0 < (kept > 0).sum() < keep


def test_sort_never_drops_a_cleaner_success():
    generator = rng(3)
    for _ in range(50):
        errors = generator.integers(0, 5, 16)
        rewards = generator.integers(0, 2, 16)
        selection = run(make_group(rewards, calls=[4] * 16, errors=errors), 8)
        if not selection.kept:
            continue
        positive = np.flatnonzero(rewards > 0)
        kept = np.intersect1d(positive, selection.indices)
        left = np.setdiff1d(positive, selection.indices)
        if len(kept) and len(left):
            assert selection.penalties[kept].max() <= selection.penalties[left].min()


def test_failures_are_never_ranked():
    """A failure full of errors is as likely to stay as a clean one."""
    group = make_group([1] * 4 + [0] * 8, calls=[4] * 12, errors=[0] * 8 + [4] * 4)
    counts = np.zeros(12)
    generator = rng(1)
    for _ in range(2000):
        counts[select_group(group, 6, ResampleOnCorrect(), generator).indices] += 1
    share = counts[4:] / 2000
    assert abs(share[:4].mean() - share[4:].mean()) < 0.03


def test_every_set_of_failures_is_as_likely():
    """Four of eight failures are kept: each of the 70 sets in one group of 70, whatever was drawn before."""
    group, generator = make_group([1] * 4 + [0] * 8), rng(11)
    sets = Counter()
    for _ in range(7000):
        indices = select_group(group, 6, ResampleOnCorrect(), generator).indices
        sets[tuple(index for index in indices.tolist() if index >= 4)] += 1
    assert len(sets) == 70
    assert min(sets.values()) > 60 and max(sets.values()) < 145  # 100 +- 10


def selection_pressure(mode, epsilon=0.05):
    """Mean penalty of the kept successes: 16 to 8, half of them clean, mean penalty 0.30."""
    generator = rng(7)
    errors = np.array([0] * 8 + [1, 1, 2, 2, 3, 3, 4, 8])
    penalties = errors / 5
    penalties *= 0.3 / penalties.mean()
    values = []
    config = ResampleOnCorrect(
        positive_select={"kind": mode} | ({"epsilon": epsilon} if mode == "inverse" else {}), min_negative=0
    )
    correct = np.ones(16, bool)
    for _ in range(400):
        values.append(penalties[select_roc(correct, penalties, 8, config, generator)].mean())
    return np.mean(values)


def test_selection_pressure_is_ordered():
    pressures = [
        selection_pressure("sort"),
        selection_pressure("inverse", 1e-6),
        selection_pressure("inverse", 0.01),
        selection_pressure("inverse", 0.1),
        selection_pressure("inverse", 0.5),
        selection_pressure("uniform"),
    ]
    assert pressures == sorted(pressures)
    assert pressures[0] == 0.0
    assert abs(pressures[-1] - 0.3) < 0.03


def test_inverse_draw_has_the_right_odds():
    """First place: probability proportional to 1 / (penalty + epsilon)."""
    config = ResampleOnCorrect(positive_select=InverseDraw(0.5), min_negative=0)
    penalties, generator = np.array([0.0, 0.5, 1.5]), rng(5)
    counts = np.zeros(3)
    for _ in range(20_000):
        counts[select_roc(np.ones(3, bool), penalties, 1, config, generator)] += 1
    odds = 1 / (penalties + 0.5)
    np.testing.assert_allclose(counts / 20_000, odds / odds.sum(), atol=0.015)


def test_same_generator_same_choice():
    group = make_group([1, 0] * 8)
    for mode in ("sort", "inverse", "uniform"):
        first, second = (run(group, 8, positive_select=mode).indices for _ in range(2))
        assert first.tolist() == second.tolist()


@pytest.mark.parametrize("kind", ["roc", "uniform", "max_variance"])
def test_short_and_full_groups(kind):
    full = run(make_group([1, 0, 1, 0]), 4, kind=kind)
    assert full.indices.tolist() == [0, 1, 2, 3]
    short = run(make_group([1, 0, 1]), 4, kind=kind)
    assert short.indices.tolist() == [0, 1, 2]
    dropped = run(make_group([1, 0, 1]), 4, kind=kind, short_groups="drop")
    assert not dropped.kept
    assert set(dropped.reasons) == {"short_group"}


def test_empty_and_single_groups():
    assert not run(make_group([]), 4).kept
    assert not run(make_group([1]), 4).kept
    assert run(make_group([1]), 4, drop="none").indices.tolist() == [0]


def test_none_keeps_everything():
    selection = run(make_group([1, 0, 1, 0, 0, 0]), 4, kind="none")
    assert selection.indices.tolist() == [0, 1, 2, 3, 4, 5]
    assert set(selection.reasons) == {"kept"}


def test_oversampling():
    assert ResampleOnCorrect().sampled(16) == 32
    assert NoSelection().sampled(16) == 16
    assert ResampleOnCorrect(oversample=1.5).sampled(5) == 8
    assert Uniform(oversample=1.0).sampled(5) == 5


def test_uniform_control():
    counts = np.zeros(6)
    generator = rng(2)
    group = make_group([1, 0, 1, 0, 0, 0], errors=[1, 0, 0, 0, 1, 0])
    for _ in range(3000):
        counts[select_group(group, 3, Uniform(), generator).indices] += 1
    np.testing.assert_allclose(counts / 3000, 0.5, atol=0.04)


def test_resample_group_and_subset():
    group = make_group(**FIXTURE)
    selection = resample_group(group, method(4, resample={"negative_select": "first"}), rng())
    kept = subset(group, selection)
    assert [t.sample for t in kept.trajectories] == [0, 1, 5, 6]
    assert kept.rewards.tolist() == [1, 1, 0, 0]


# --- PODS, conditions ------------------------------------------------------------------------------------------------


def select_max_variance(rewards, keep):
    return MaxVariance().choose(features(make_group(rewards)), None, keep, None)


def test_max_variance_vector():
    rewards = np.array([0.1, 0.9, 0.5, 0, 1, 0.4])
    np.testing.assert_allclose(split_variances(np.sort(rewards), 4), [0.0425, 0.151875, 0.205, 0.155, 0.065], atol=1e-9)
    kept = select_max_variance(rewards, 4)
    assert kept.tolist() == [0, 1, 3, 4]
    np.testing.assert_allclose(z_score(rewards[kept]), [-0.765091, 0.765091, -0.956363, 0.956363], atol=1e-5)


def test_max_variance_binary():
    rewards = np.array([1, 1, 1, 0, 0, 1, 1, 1.0])
    kept = select_max_variance(rewards, 4)
    assert {3, 4} <= set(kept.tolist())
    assert rewards[kept].sum() == 2


def test_max_variance_is_the_best_subset():
    generator = rng(9)
    for _ in range(20):
        rewards = generator.choice([0, 0.2, 0.5, 1.0], 7)
        for keep in (1, 2, 4, 7):
            best = max(np.var(rewards[list(some)]) for some in itertools.combinations(range(7), keep))
            kept = select_max_variance(rewards, keep)
            assert len(set(kept.tolist())) == keep
            assert np.var(rewards[kept]) == pytest.approx(best)


@pytest.mark.parametrize(
    "settings",
    [
        {"oversample": 0.5},
        {"min_positive": -1},
        {"min_negative": -1},
        {"positive_select": {"kind": "inverse", "epsilon": 0.0}},
        {"no_tool_penalty": -0.1},
        {"kind": "uniform", "conditions": "low_last"},
        {"kind": "none", "oversample": 2.0},
    ],
)
def test_impossible_settings(settings):
    with pytest.raises(ConfigError, match=r"resample"):
        selector(**settings)
