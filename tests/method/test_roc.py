"""Resample on correct: golden values, the released code's rule as a slow reference, every edge of a group."""

import itertools
import random
import re
from collections import Counter

import numpy as np
import pytest

from grpo_roc_jax.method import roc
from grpo_roc_jax.method.advantage import z_score
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


# --- quota -----------------------------------------------------------------------------------------------------------


RECIPE = {1: 1, 2: 2, 3: 2, 5: 2, 6: 3, 7: 4, 15: 8, 16: 8, 27: 14, 29: 14, 30: 14, 31: 15}
"""Failures of 32 rollouts -> failures of the 16 that are kept (spec of GRPO-RoC, 1.4)."""


@pytest.mark.parametrize(("total", "keep"), [(8, 4), (12, 5), (32, 16)])
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
            if not config.quota_decided(negatives, positives, left, keep):
                continue
            early += 1
            counts = counts_of(negatives, positives)
            assert all(counts_of(negatives + more, positives + left - more) == counts for more in range(left + 1))
    assert early > total / 4
    assert not config.quota_decided(2, 2, 0, 4), "nothing is left to cut"
    uniform = selector(kind="uniform")
    assert uniform.quota_decided(3, 1, 4, 4) and not uniform.quota_decided(2, 1, 4, 4), "with enough"
    assert not any(selector(kind=kind).quota_decided(16, 15, 1, 16) for kind in ("max_variance", "none"))


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
    for negatives, failures in RECIPE.items():
        assert quota(negatives, 32 - negatives, 16) == (failures, 16 - failures)
    assert quota(1, 31, 16, 0, 0) == (0, 16) and quota(7, 25, 16, 0, 0) == (4, 12), "without minima by the shares"
    with pytest.raises(ValueError, match="cannot keep 5 of 4 trajectories"):
        quota(2, 2, 5)
    # The share of the failures, rounded, wherever there are enough of both kinds.
    for total in range(1, 20):
        for negatives, keep in itertools.product(range(total + 1), range(1, total + 1)):
            failures, successes = quota(negatives, total - negatives, keep)
            minima = [min(2, keep // 2, available) for available in (negatives, total - negatives)]
            share = np.clip(negatives * keep / total, minima[0], keep - minima[1])
            assert failures + successes == keep and abs(failures - share) <= 0.5
            assert 0 <= failures <= negatives and 0 <= successes <= total - negatives


# --- penalties -------------------------------------------------------------------------------------------------------

FIXTURE = {
    "rewards": [1, 1, 1, 1, 1, 0, 0, 0],
    "calls": [2, 4, 0, 1, 3, 2, 0, 5],
    "errors": [0, 2, 0, 1, 1, 2, 0, 1],
    "answers": [1, 1, 1, 1, 3, 0, 1, 1],
    "turns": [3, 5, 1, 2, 4, 3, 1, 6],
}


def test_penalties_by_hand():
    """Each part, and the sum of those that are switched on; parts that are off are still there for the log."""
    arrays = features(make_group(**FIXTURE))
    errors, formats = [0, 0.5, 0.5, 1, 1 / 3, 1, 0.5, 0.2], [0, 0, 0, 0, 0.5, 1, 0, 0]
    close(error_penalty(arrays.tool_calls, arrays.tool_errors), errors, 1e-6)
    close(format_penalty(arrays.answers, arrays.well_formed, arrays.turns), formats, 1e-6)
    faulty = np.array([1, 1, 1, 9]), np.array([True, False, True, True]), np.array([1, 1, 0, 2])
    assert format_penalty(*faulty).tolist() == [0, 1, 1, 1]
    for has_error, has_format in itertools.product((True, False), repeat=2):
        selection = run(make_group(**FIXTURE), 4, error_penalty=has_error, format_penalty=has_format)
        close(selection.penalties, has_error * np.array(errors) + has_format * np.array(formats), 1e-6)
        close(selection.error_penalties, errors, 1e-6)
        close(selection.format_penalties, formats, 1e-6)
    assert run(make_group(**FIXTURE), 4, no_tool_penalty=0.0).error_penalties[2] == 0.0
    group = make_group(**FIXTURE)
    selection = resample_group(group, method(4, resample={"negative_select": "first"}), rng())
    selected = subset(group, selection)
    assert selection.indices.tolist() == [t.sample for t in selected.trajectories] == [0, 1, 5, 6]
    assert selected.rewards.tolist() == [1, 1, 0, 0]
    assert selection.reasons == ("kept", "kept", "penalty", "penalty", "penalty", "kept", "kept", "quota")
    for changed, message in (
        ({"correct": [1, 0.5, 0, 1]}, r"correct has 0\.5; must be True or False, or 1 and 0"),
        ({"penalties": np.zeros(3)}, r"penalties is of shape \(3,\); must be \(4,\)"),
        ({"correct": [[1, 0], [0, 1]]}, r"correct is of shape \(2, 2\); must be \(4,\)"),
        ({"config": ResampleOnCorrect}, r"config is the class ResampleOnCorrect; must be .* ResampleOnCorrect\(\)"),
        ({"rng": 0}, r"rng is 0 \(int\); must be a generator: np.random.default_rng"),
    ):
        given = {
            "correct": [1, 1, 0, 1],
            "penalties": np.zeros(4),
            "keep": 2,
            "config": ResampleOnCorrect(),
            "rng": rng(),
        }
        with pytest.raises((ValueError, TypeError), match=message):
            select_roc(**given | changed)


@pytest.mark.parametrize("form", [list, tuple, np.int64, np.float32], ids=lambda form: form.__name__)
def test_lists_and_0_and_1_are_read_like_arrays_of_bool(form):
    calls, errors = np.array([1, 2, 3, 1, 1, 0, 2, 2]), np.array([0, 1, 2, 0, 1, 0, 0, 1])
    correct, ones = np.array([1, 1, 1, 1, 0, 0, 1, 1], bool), np.ones(8, int)
    penalties = error_penalty(calls, errors)
    assert select_roc(form(correct), list(penalties), 4, ResampleOnCorrect(), rng()).tolist() == [0, 3, 4, 5]
    close(error_penalty(form(calls), form(errors)), penalties)
    close(format_penalty(form(errors), form(correct), form(ones)), format_penalty(errors, correct, ones))
    close(z_score(form(errors)), z_score(errors))


# --- the released scorer ---------------------------------------------------------------------------------------------

SNIPPETS = (
    *("<answer>", "</answer>", "\\boxed{1}", "an error", "ERROR", "so", "\n", "&lt;answer>", "<answer", "answer>"),
    *("<tool_response>", "</tool_response>", "<|im_end|>", "<|im_start|>assistant", "<|im_start|>user"),
)
ENDS = ("answer", "eos", "turns", "length", "unfit", "deadline")
STATUSES = ("ok", "timeout", "malformed_call", "exception")
"""Of results; the released scorer reads none of them."""


def random_rollout(draw):
    """(trajectory, the text of its response as the released loop writes it) of a dialogue of random pieces.

    The released loop closes every turn that ends by itself, shows every observation but one that does not fit, and
    leaves a turn open that a limit of tokens cut (spec of GRPO-RoC, 2.1 and 1.4, edge cases 8 and 11).
    """

    def text(most):
        return "".join(draw.choices(SNIPPETS[:2] if draw.random() < 0.5 else SNIPPETS, k=draw.randrange(most)))

    def observation():
        full = text(5)
        cut = full
        if draw.random() < 0.3:
            full = full.replace("&lt;", "")
            head, tail = sorted(draw.choices(range(len(full) + 1), k=2))
            cut = full[:head] + "[... cut ...]" + full[tail:]
        escaped = cut.replace("<", "&lt;")
        status = STATUSES[len(full) % 4]
        return ToolResult(status, observation=full, shown="" if escaped == full else escaped), cut

    end, count = draw.choice(ENDS), draw.randint(1, 4)
    turns, written, at = [], "", 0
    for number in range(1, count + 1):
        content, last = text(6), number == count
        results, seen = [], []
        if not last or end in ("unfit", "deadline"):
            results, seen = zip(*(observation() for _ in range(draw.randint(1, 2))), strict=True)
        turns.append(Turn(at, at + 1, content, (call(),) * max(len(results), end == "turns"), tuple(results)))
        written += content + ("" if last and end == "length" else "<|im_end|>")
        at += 1
        if not last:
            blocks = "".join(f"<tool_response>\n{output}\n</tool_response>\n" for output in seen)
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
    faults = min((pairs - 1) / turns, 1.0) if pairs and balanced and turns else 1.0
    return len(failed) / len(blocks) if blocks else 0.5, faults


def group_of(trajectories, rewards):
    return Group(Problem("p", "", "", ""), tuple(trajectories), tuple(map(make_verdict, rewards)))


def test_text_compat_equals_the_released_scorer_on_random_groups():
    draw, compat, seen = random.Random(7), selector(penalty_source="text_compat"), set()
    for _ in range(2000):
        rollouts = [random_rollout(draw) for _ in range(3)]
        expected = [released_penalties(text) for _, text in rollouts]
        _, errors, formats = compat.penalties(compat.seen(group_of([t for t, _ in rollouts], [1, 1, 1])))
        assert list(zip(errors.tolist(), formats.tolist(), strict=True)) == expected
        seen.update(expected)
    assert len(seen) > 20, "the groups are too much alike"


PORT = {
    (0, 32, 16): [0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 22],
    (1, 32, 16): [2, 3, 4, 5, 6, 10, 11, 13, 14, 15, 17, 18, 23, 24, 27, 30],
    (5, 32, 16): [0, 1, 2, 3, 4, 5, 6, 8, 12, 13, 14, 16, 17, 18, 19, 21],
    (6, 16, 8): [1, 2, 4, 5, 7, 8, 9, 10],
    (10, 8, 4): [0, 1, 2, 4],
}
"""(seed of the group, sampled, kept) -> what RLinf's port of rStar2 keeps of these groups (rlinf/utils/down_sampling.py
of commit a3816b5, with minima of 2)."""


@pytest.mark.parametrize(("seed", "total", "keep"), PORT)
def test_the_trajectories_of_a_port_of_the_released_code_are_kept(seed, total, keep):
    """The share of successes differs from group to group."""
    draw = random.Random(seed)
    trajectories, share = [random_rollout(draw)[0] for _ in range(total)], draw.random()
    group = group_of(trajectories, [int(draw.random() < share) for _ in range(total)])
    selection = run(group, keep, penalty_source="text_compat", negative_select="first")
    assert selection.indices.tolist() == PORT[seed, total, keep]


# --- selection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "settings", "reason"),
    [
        ([0] * 4, {}, "equal_rewards"),
        ([1] * 4, {}, "equal_rewards"),
        ([1, 1 + 1e-9, 1, 1], {}, "equal_rewards"),
        ([1] * 4, {"drop": "all_correct"}, "all_correct"),
        ([0] * 4, {"drop": "all_correct"}, ""),
        ([1] * 4, {"drop": "none"}, ""),
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
@pytest.mark.parametrize("size", [7, 8, 13, 32])
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
            assert len(selection.indices) == len(set(selection.indices)) == keep
            assert (np.diff(selection.indices) > 0).all()
            if keep >= 4:
                assert (selected > 0).sum() >= min(2, positives)
                assert (selected <= 0).sum() >= min(2, size - positives)
            assert 0 < (selected > 0).sum() < keep
            if select_mode == "sort":
                clean = selection.penalties[selection.indices[selected > 0]]
                left = np.setdiff1d(np.flatnonzero(rewards), selection.indices)
                assert clean.max() <= selection.penalties[left].min(initial=np.inf)


@pytest.mark.parametrize(("kind", "keep", "sets"), [("roc", 6, 70), ("uniform", 2, 66)])
def test_every_set_is_as_likely(kind, keep, sets):
    """`roc` keeps four of eight failures, whatever their calls were, and `uniform` two of twelve trajectories."""
    arrays = features(make_group([1] * 4 + [0] * 8, calls=[4] * 12, errors=[0] * 8 + [4] * 4))
    config, generator, drawn = selector(kind=kind), rng(11), Counter()
    for _ in range(100 * sets):
        indices = config.select(arrays, keep, generator).indices.tolist()
        drawn[tuple(index for index in indices if index >= 4 or kind == "uniform")] += 1
    assert len(drawn) == sets
    assert min(drawn.values()) > 60 and max(drawn.values()) < 145  # 100 +- 10


def test_odds_of_successes():
    """Of the first two places: `inverse` gives each success odds of 1 / (penalty + epsilon), without replacement."""
    for select_mode, odds in (({"kind": "inverse", "epsilon": 0.5}, [4, 2, 1]), ("uniform", [1, 1, 1])):
        positive_select, generator = selector(positive_select=select_mode).positive_select, rng(5)
        penalties, share = np.array([0.0, 0.5, 1.5]), np.array(odds) / sum(odds)
        drawn = Counter(tuple(positive_select.order(penalties, generator)[:2].tolist()) for _ in range(20_000))
        for first, second in itertools.permutations(range(3), 2):
            expected = share[first] * share[second] / (1 - share[first])
            assert drawn[first, second] / 20_000 == pytest.approx(expected, abs=0.015)


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
    assert selector(kind="uniform", oversample=1).sampled(5) == 5
    inverse = {"kind": "inverse", "epsilon": 0.0}
    for settings in ({"oversample": 0.5}, {"positive_select": inverse}, {"kind": "none", "oversample": 2.0}):
        with pytest.raises(ConfigError, match="resample"):
            selector(**settings)


# --- PODS ------------------------------------------------------------------------------------------------------------


def select_max_variance(rewards, keep):
    return MaxVariance().choose(features(make_group(rewards)), None, keep, None).tolist()


def test_max_variance():
    """By hand, and against all subsets; rounding hides no difference of small rewards."""
    rewards = np.array([0.1, 0.9, 0.5, 0, 1, 0.4])
    close(roc.split_variances(np.sort(rewards), 4), [0.0425, 0.151875, 0.205, 0.155, 0.065], 1e-9)
    assert all(select_max_variance(unit * rewards, 4) == [0, 1, 3, 4] for unit in (1e-9, 1e-4, 1.0, 1e5))
    generator = rng(9)
    for _ in range(20):
        rewards = generator.choice([0, 0.2, 0.5, 1.0], 7)
        for keep in (1, 2, 4, 7):
            best = max(np.var(rewards[list(some)]) for some in itertools.combinations(range(7), keep))
            indices = select_max_variance(rewards, keep)
            assert len(set(indices)) == keep and np.var(rewards[indices]) == pytest.approx(best)
