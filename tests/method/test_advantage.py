"""Advantage estimators against the vectors of the family's specification, and their compositions."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from grpo_roc_jax.settings.callables import given
from tests.helpers.method_groups import batch_of, close, make_group, method


def values(rewards, state=None, *, groups=None, rng=None, **settings):
    """Advantages of a batch given as a list of reward lists (or of ready groups)."""
    groups = groups or [make_group(row, uid=f"p{i}") for i, row in enumerate(rewards)]
    return method(advantage=settings).advantage.trajectories(batch_of(groups, state=state, rng=rng))


def one(rewards, **settings):
    return values([rewards], **settings)[0]


@pytest.mark.parametrize(
    ("rewards", "settings", "expected"),
    [
        ([1, 0, 0, 0], {}, [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1, 0, 0, 0], {"scale": {"kind": "std", "ddof": 0}}, [1.732047, -0.577349, -0.577349, -0.577349]),
        ([1, 1, 0, 0], {}, [0.866024, 0.866024, -0.866024, -0.866024]),  # RC-GRPO
        ([1], {}, [0]),
        ([1, 0, 0, 0], {"scale": "none"}, [0.75, -0.25, -0.25, -0.25]),  # Dr. GRPO
        ([1, 0, 0, 0], {"baseline": "leave_one_out", "scale": "none"}, [1, -1 / 3, -1 / 3, -1 / 3]),
        ([1, 0, 0], {"baseline": "leave_one_out", "scale": "none"}, [1, -0.5, -0.5]),
        ([1], {"baseline": "leave_one_out", "scale": "none"}, [0]),
    ],
)
def test_one_group_by_hand(rewards, settings, expected):
    close(one(rewards, **settings), expected)


@pytest.mark.parametrize("scale", ["std", "batch_std"])
@pytest.mark.parametrize("rewards", [[1, 1, 1], [0.1], [0.1] * 10])
def test_equal_rewards_give_zero_also_without_eps(rewards, scale):
    assert not one(rewards, scale={"kind": scale, "eps": 0}).any()


def test_without_eps_pass_at_k_is_zero_where_every_subset_has_a_success():
    assert not one([1, 1, 1, 0], kind="pass_at_k", k=2, eps=0).any()


def test_a_custom_advantage_may_work_in_place_and_its_faults_name_the_setting():
    def in_place(rewards, features, state):
        rewards -= rewards.mean()
        return rewards

    group = make_group([1, 0, 0, 3])
    with given({"own": in_place}):
        close(values(None, groups=[group], kind="custom", function="own")[0], [0, -1, -1, 2])
        batch = batch_of([group])
        method(advantage={"kind": "custom", "function": "own"}).advantage.trajectories(batch)
        close(batch.rewards[0], [1, 0, 0, 3])
    with (
        given({"own": lambda rewards, features, state: ["a"] * 4}),
        pytest.raises(ValueError, match=r"advantage.*could not"),
    ):
        values(None, groups=[group], kind="custom", function="own")


def test_roc_golden_advantages():
    """16 kept, with 1 to 15 successes (spec of GRPO-RoC, 1.6)."""
    golden = {1: (3.75, -0.25), 2: (2.562, -0.366), 8: (0.968, -0.968), 14: (0.366, -2.562), 15: (0.25, -3.75)}
    for positives, expected in golden.items():
        close(one([1] * positives + [0] * (16 - positives))[[0, -1]], expected, 5e-4)


def test_opo():
    group = make_group([1, 0], lengths=[3, 1])
    close(values(None, groups=[group], baseline="length_weighted", scale="none")[0], [0.25, -0.75])


def test_batch_scale():
    """Lite-PPO: group mean, deviation of all rewards of the batch."""
    result = values([[1, 0], [1, 1]], scale="batch_std")
    close(result[0], np.array([0.5, -0.5]) / np.std([1, 0, 1, 1], ddof=1))
    assert not result[1].any()


def test_reinforce_plus_plus():
    rewards = [[1, 0], [1, 1], [0, 0]]
    groups = [make_group(row, uid=str(i), lengths=[1, 1]) for i, row in enumerate(rewards)]
    for over in ("token", "row"):
        whiten = {"scale": "none", "adjust": [{"kind": "whiten", "over": over}]}
        plain = np.concatenate(values(None, groups=groups, baseline="none", **whiten))
        close(plain, [0.912871, -0.912871, 0.912871, 0.912871, -0.912871, -0.912871])
        centered = np.concatenate(values(None, groups=groups, **whiten))
        close(centered, [1.581139, -1.581139, 0, 0, 0, 0])


def test_whitening_weights_by_tokens():
    groups = [make_group([1, 0], lengths=[1, 3])]
    whiten = [{"kind": "whiten", "over": "token", "ddof": 0}]
    (result,) = values(None, groups=groups, baseline="none", scale="none", adjust=whiten)
    tokens = np.array([1.0, 0, 0, 0])
    close(result, [(1 - 0.25) / tokens.std(), (0 - 0.25) / tokens.std()])


def test_multi_reward():
    channels = [([0, 0], [0, 1]), ([0, 1], [0, 1]), ([1, 0], [0, 1])]
    groups = [make_group(np.add(a, b), uid=str(i), channels={"a": a, "b": b}) for i, (a, b) in enumerate(channels)]
    close(values(None, groups=groups)[:2], [[-0.707106, 0.707106]] * 2)
    each = {"kind": "channels", "of": {"scale": {"kind": "std", "eps": 1e-4}}}
    mo = values(None, groups=groups, **each)
    close(np.concatenate(mo), [-0.707007, 0.707007, -1.414014, 1.414014, 0, 0])
    gdpo = values(None, groups=groups, **each, standardize=True, eps=1e-4)
    close(np.concatenate(gdpo), [-0.707036, 0.707036, -1.414072, 1.414072, 0, 0])


def test_multi_reward_missing_channels():
    nan = float("nan")
    group = make_group([1, 0, 0, 0], channels={"a": [1, 0, nan, nan], "b": [nan, nan, 1, nan]})
    (result,) = values(None, groups=[group], kind="channels", weights=[2.0, 1.0])
    close(result, [2 * 0.707106, -2 * 0.707106, 0, 0])
    with pytest.raises(ValueError, match=r"\['a', 'b'\] and 1 weights; .* give a weight each"):
        values(None, groups=[group], kind="channels", weights=[1.0])
    with pytest.raises(ValueError, match="reward channels none"):
        one([1, 0], kind="channels")


def test_pass_at_k():
    """Against all k-subsets by hand: a subset is worth its best member, a trajectory the mean over its subsets. What
    was paid does not count."""
    right, k = np.array([1.0, 0, 0, 0, 1]), 2
    group = make_group(right)
    group = replace(group, verdicts=tuple(replace(v, reward=1 - v.reward) for v in group.verdicts))
    worth = {s: max(right[list(s)]) for s in combinations(range(5), k)}
    mean, spread = np.mean(list(worth.values())), np.std(list(worth.values()))
    expected = [np.mean([(w - mean) / spread for s, w in worth.items() if i in s]) for i in range(5)]
    close(values(None, groups=[group], kind="pass_at_k", k=k)[0], expected)


def test_custom_function():
    def run(function):
        with given({"mine": function}):
            return values([[1, 0, 0]], kind="custom", function="mine")

    close(run(lambda rewards, features, state: rewards * features.lengths)[0], [3, 0, 0])
    with pytest.raises(ValueError, match=r"advantage custom returned shape \(2,\)"):
        run(lambda rewards, features, state: rewards[:2])
    with pytest.raises(ValueError, match="3 non-finite"):
        run(lambda rewards, features, state: rewards * np.nan)


CENTERED = [
    {},
    {"scale": "none"},
    {"baseline": "leave_one_out", "scale": "none"},
    {"baseline": "length_weighted"},
    {"scale": "batch_std"},
    {"adjust": [{"kind": "whiten", "over": "row"}]},
    {"adjust": [{"kind": "whiten", "over": "token"}]},
    {"kind": "pass_at_k"},
    {"adjust": [{"kind": "sign_weights", "negative": 0.5}]},
]


@pytest.mark.parametrize("settings", CENTERED)
def test_flat_groups_have_no_advantage(settings):
    for row in values([[1, 1, 1], [0, 0, 0], [0.3] * 3], **settings):
        assert not row.any()


@pytest.mark.parametrize("settings", CENTERED)
def test_permutation_and_group_order(settings):
    generator = np.random.default_rng(8)
    rewards = [generator.integers(0, 2, 6).astype(float) for _ in range(3)]
    lengths = [generator.integers(1, 9, 6) for _ in range(3)]
    logprobs = [-generator.random(6) for _ in range(3)]
    calls = [generator.integers(0, 4, 6) for _ in range(3)]

    def build(g, order):
        parts = {"lengths": lengths[g], "logprobs": logprobs[g], "calls": calls[g]}
        return make_group(rewards[g][order], uid=str(g), **{name: part[order] for name, part in parts.items()})

    base = values(None, groups=[build(g, np.arange(6)) for g in range(3)], **settings)
    order = generator.permutation(6)
    moved = values(None, groups=[build(g, order) for g in (2, 0, 1)], **settings)
    for g, row in zip((2, 0, 1), moved, strict=True):
        close(row, base[g][order], 1e-9)


@pytest.mark.parametrize("settings", [s for s in CENTERED if "kind" not in s])
def test_shift_and_scale_of_rewards(settings, by_verdict=False):
    """`by_verdict`: the kind knows successes, which a shift makes of all rollouts here."""
    rewards = [[1.0, 0, 0, 1, 0], [0.0, 1, 1, 1, 0]]
    base = values(rewards, **settings)
    shifted = values([[r + 5 for r in row] for row in rewards], **settings)
    if not by_verdict:
        for left, right in zip(base, shifted, strict=True):
            close(left, right, 1e-6)
    scaled = values([[3 * r for r in row] for row in rewards], **settings)
    exact = settings.get("scale") is None
    for left, right in zip(base, scaled, strict=True):
        close(np.sign(left), np.sign(right))
        if exact:
            close(left, right, 1e-4)
