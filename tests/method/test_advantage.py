"""Advantage estimators against the vectors of the family's specification, and their compositions."""

from types import SimpleNamespace

import numpy as np
import pytest
from method_groups import batch_of, make_group, method

from grpo_roc_jax.method.advantage import z_score
from grpo_roc_jax.method.compose import initial_state, next_state
from grpo_roc_jax.method.state import AlgoState, ProblemTable
from grpo_roc_jax.settings.callables import given
from grpo_roc_jax.settings.cli import ConfigError


def values(rewards, state=None, *, groups=None, rng=None, **settings):
    """Advantages of a batch given as a list of reward lists (or of ready groups)."""
    groups = groups or [make_group(row, uid=f"p{i}") for i, row in enumerate(rewards)]
    return method(advantage=settings).advantage.trajectories(batch_of(groups, state=state, rng=rng))


def one(rewards, **settings):
    return values([rewards], **settings)[0]


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(actual, expected, atol=atol)


def test_grpo():
    close(one([1, 0, 0, 0]), [1.499997, -0.499999, -0.499999, -0.499999])
    close(one([1, 0, 0, 0], scale={"kind": "std", "ddof": 0}), [1.732047, -0.577349, -0.577349, -0.577349])
    for rewards in ([1, 1, 1], [0, 0], [0.1] * 7, [1]):
        assert not one(rewards).any()


@pytest.mark.parametrize(
    ("positives", "plus", "minus"),
    [(1, 3.75, -0.25), (2, 2.562, -0.366), (8, 0.968, -0.968), (14, 0.366, -2.562), (15, 0.25, -3.75)],
)
def test_roc_golden_advantages(positives, plus, minus):
    """16 kept (spec of GRPO-RoC, 1.6)."""
    result = one([1] * positives + [0] * (16 - positives))
    close(result[0], plus, 5e-4)
    close(result[-1], minus, 5e-4)


def test_dr_grpo():
    close(one([1, 0, 0, 0], scale="none"), [0.75, -0.25, -0.25, -0.25])


def test_leave_one_out():
    close(one([1, 0, 0, 0], baseline="leave_one_out", scale="none"), [1, -1 / 3, -1 / 3, -1 / 3])
    assert one([1], baseline="leave_one_out", scale="none").tolist() == [0]
    close(one([1, 0, 0], baseline="leave_one_out", scale="none"), [1, -0.5, -0.5])


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
    channels = [[[0, 0], [0, 1]], [[0, 0], [1, 1]], [[1, 0], [0, 1]]]
    groups = [
        make_group(
            [sum(row) for row in group], uid=str(i), channels={"a": [r[0] for r in group], "b": [r[1] for r in group]}
        )
        for i, group in enumerate(channels)
    ]
    summed = values(None, groups=groups)
    close(summed[0], [-0.707106, 0.707106])
    close(summed[1], [-0.707106, 0.707106])
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


def test_gdpo_with_one_channel_is_grpo_up_to_a_scalar():
    groups = [make_group(row, uid=str(i), channels={"a": row}) for i, row in enumerate([[1, 0, 0, 1], [0, 1, 1, 0]])]
    ratio = np.concatenate(values(None, groups=groups, kind="channels", standardize=True)) / np.concatenate(
        values(None, groups=groups)
    )
    close(ratio, ratio[0])


def test_bnpo_maps_rewards_to_the_bounds_of_its_distribution():
    """Rewards that reach outside are refused, and those of other bounds have the weights of the mapped ones."""
    rewards = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    wide = [[4 * r - 1 for r in row] for row in rewards]
    with pytest.raises(ConfigError, match=r"reach from -1 to 3, .* set advantage\.scale\.low and"):
        values(wide, scale="beta")
    found = values(wide, scale={"kind": "beta", "low": -1.0, "high": 3.0})
    for got, plain in zip(found, values(rewards, scale="beta"), strict=True):
        close(got, plain)
    with pytest.raises(ConfigError, match=r"low = 1\.0; must be below"):
        values(rewards, scale={"kind": "beta", "low": 1.0})


def test_ngrpo():
    settings = {"baseline": "virtual_max", "scale": "virtual_std"}
    close(one([0, 0, 0, 0], **settings), [-0.447213] * 4)
    close(one([1, 0, 0, 0], **settings), [1.095443, -0.730295, -0.730295, -0.730295])
    close(one([1, 1, 1, 1], **settings), [0] * 4)


def test_mc_grpo():
    result = one([1, 0, 0.5, 0.2, 0.9], baseline="median", scale="mad", adjust=["rescale_nonzero"])
    close(result, [1.558603, -1.558603, 0, -0.935162, 1.246883])
    binary = [1, 0, 0, 0, 1]
    close(one(binary, baseline="median", scale="mad", adjust=["rescale_nonzero"]), [2500, 0, 0, 0, 2500])
    guarded = {"baseline": "median", "scale": "mad_or_std", "adjust": ["rescale_nonzero"]}
    close(one([1, 0, 0.5, 0.2, 0.9], **guarded), result)
    close(one(binary, **guarded), np.array([1, 0, 0, 0, 1]) / np.std([1, 0, 0, 0, 1], ddof=1) * 2.5)


def test_stratified():
    calls = [0, 0, 1, 1, 1, 2]
    group = make_group([1, 0, 1, 1, 0, 0], calls=calls)
    within = [0.707106, -0.707106, 0.577349, 0.577349, -1.154699, 0]
    plain = [0.912869, -0.912869, 0.912869, 0.912869, -0.912869, -0.912869]

    def run(**rest):
        return values(None, groups=[group], adjust=[{"kind": "strata", **rest}])[0]

    close(run(), within)
    close(run(blend=0.0), plain)
    close(run(blend=0.5), [0.809988, -0.809988, 0.745109, 0.745109, -1.033784, -0.456435])
    # With the cap at 1, five calls and one call are one stratum.
    close(run(cap=1)[2:], z_score(np.array([1.0, 1, 0, 0])))


def test_single_stream():
    table = ProblemTable().put(
        ["p0", "p1", "p2", "p3"], {"alpha": np.array([5.0, 5, 9, 2]), "beta": np.array([5.0, 5, 1, 8])}
    )
    whiten = [{"kind": "whiten", "over": "row"}]
    result = values([[1], [0], [1], [1]], AlgoState(table=table), baseline="tracker", scale="none", adjust=whiten)
    close(np.concatenate(result), [0.489332, -1.290057, -0.222424, 1.023149])


def test_a_tracker_forgets_as_the_policy_moves():
    """Factors 2^(-D / 0.06) within 0.875 .. 0.96; the last sample of each problem is remembered and scored."""
    config = method(1, advantage={"baseline": "tracker", "scale": "none"})
    tracker = config.advantage.baseline
    factors = tracker.forgetting(0.5, ["a", "b", "c"], {"a": 0.06, "b": 0.006})
    close(factors, [0.875, 0.933033, 0.96])
    first, second = make_group([1], uid="a", lengths=[2]), make_group([0], uid="b", lengths=[4])
    assert tracker.earlier([first], AlgoState()) == []
    state = next_state([first, second], [first, second], config, initial_state(config))
    state = AlgoState.from_tree(state.to_tree())
    (held,) = tracker.earlier([second, make_group([1], uid="c")], state)
    (then,), (now,) = held.trajectories, second.trajectories
    for name in ("tokens", "policy_mask", "logprobs", "temperature"):
        np.testing.assert_array_equal(getattr(then, name), getattr(now, name))
    moved = next_state([first], [first], config, state, {"a": 0.006}).table.get(["a"])
    close(moved["alpha"], 0.933033 * state.table.get(["a"])["alpha"] + 1)
    again = next_state([make_group([1], uid="b", lengths=[6])], [make_group([1], uid="b", lengths=[6])], config, state)
    assert tracker.earlier([second], again)[0].trajectories[0].length == 8
    assert tracker.earlier([first], again)[0].trajectories[0].length == 4


def test_opo():
    group = make_group([1, 0], lengths=[3, 1])
    close(values(None, groups=[group], baseline="length_weighted", scale="none")[0], [0.25, -0.75])


def test_batch_scale():
    """Lite-PPO: group mean, deviation of all rewards of the batch."""
    result = values([[1, 0], [1, 1]], scale="batch_std")
    close(result[0], np.array([0.5, -0.5]) / np.std([1, 0, 1, 1], ddof=1))
    assert not result[1].any()


def test_pass_at_k():
    """Against all k-subsets by hand: a subset is worth its best member, a trajectory the mean over its subsets."""
    from itertools import combinations

    rewards, k = np.array([1.0, 0, 0, 0, 1]), 2
    worth = {s: max(rewards[list(s)]) for s in combinations(range(5), k)}
    mean, spread = np.mean(list(worth.values())), np.std(list(worth.values()))
    expected = [np.mean([(w - mean) / spread for s, w in worth.items() if i in s]) for i in range(5)]
    close(one([1, 0, 0, 0, 1], kind="pass_at_k", k=2), expected)
    assert not one([1, 1, 1], kind="pass_at_k").any()


def test_scaffold_vector():
    """Seven failures and one hinted success in the mixed group (Scaf-GRPO)."""
    close(one([1] + [0] * 7), [2.474867] + [-0.353552] * 7)


def test_rc_grpo_vector():
    close(one([1, 1, 0, 0]), [0.866024, 0.866024, -0.866024, -0.866024])


def test_pairing_vectors():
    """An affine map of the rewards cancels under a group z-score; the factor acts after scaling, or without it."""
    easy, hard = [1] + [-1] * 7, [1] + [-2] * 7
    close(one(easy), one(hard))
    close([one(easy)[0], one(easy)[1]], [2.474871, -0.353553], 1e-4)
    close(one([1] * 7 + [-1])[[0, -1]], [0.353553, -2.474871], 1e-4)
    close(one(hard, scale="none")[[0, 1]], [2.625, -0.375])
    close(one(easy, scale="none")[[0, 1]], [1.75, -0.25])
    close(one(easy, adjust=[{"kind": "sign_weights", "negative": 2.0}])[[0, 1]], [2.474867, -0.707104], 1e-4)
    close(one([1] + [-1] * 7 + [1] * 7 + [-1])[[0, 1]], [0.968245, -0.968245])


def test_focal():
    close(one([1, 1, 1, 0], adjust=[{"kind": "focal", "exponent": 2.0}]), one([1, 1, 1, 0]) / 16)


def test_anchor():
    group = make_group([0.2, 0.5, 0.4, 1.0], condition=["", "", "", "demonstration"])
    result = values(None, groups=[group], kind="anchored")[0]
    close(result, [-1.091082, 0.872866, 0.218216, 1.047439])
    close(values(None, groups=[group])[0], z_score(np.array([0.2, 0.5, 0.4, 1.0])))


def test_truncation_mask():
    """A truncated success loses its advantage where it draws below the probability; failures and loops keep it."""
    pair = make_group([1, 1], stop=["length"] * 2)
    drawn = SimpleNamespace(random=lambda n: np.array([0.1, 0.9]))
    kept = values(None, groups=[pair], rng=drawn, baseline="none", scale="none", adjust=["truncation_mask"])[0]
    assert kept.tolist() == [0, 1]
    group = make_group([1, 1, 0], stop=["length", "answer", "length"])
    generator = np.random.default_rng(0)
    always = [{"kind": "truncation_mask", "probability": 1.0}]
    masked = values(None, groups=[group], rng=generator, adjust=always)[0]
    assert masked[0] == 0
    assert masked[1] > 0 > masked[2]
    with pytest.raises(ValueError, match="rng"):
        one([1, 0], adjust=["truncation_mask"])
    loop = make_group([1, 0], stop=["length"] * 2, lengths=[512, 3], tokens=[np.arange(512) % 4, range(3)])
    assert values(None, groups=[loop], rng=generator, adjust=always)[0][0] > 0, "a loop keeps its advantage"


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
    {"baseline": "median", "scale": "mad"},
    {"baseline": "median", "scale": "mad_or_std"},
    {"baseline": "length_weighted"},
    {"scale": "batch_std"},
    {"scale": "beta"},
    {"adjust": ["strata"]},
    {"adjust": [{"kind": "whiten", "over": "row"}]},
    {"adjust": [{"kind": "whiten", "over": "token"}]},
    {"kind": "pass_at_k"},
    {"adjust": ["focal"]},
    {"adjust": [{"kind": "sign_weights", "negative": 0.5}]},
    {"adjust": ["novelty"]},
    {"adjust": ["rescale_nonzero"]},
]


@pytest.mark.parametrize("settings", CENTERED)
def test_flat_groups_have_no_advantage(settings):
    for row in values([[1, 1, 1], [0, 0, 0], [0.3] * 3], **settings):
        assert not row.any()


@pytest.mark.parametrize("settings", [*CENTERED, {"baseline": "virtual_max", "scale": "virtual_std"}])
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


@pytest.mark.parametrize("settings", [s for s in CENTERED if s.get("scale") != "beta" and "kind" not in s])
def test_shift_and_scale_of_rewards(settings):
    rewards = [[1.0, 0, 0, 1, 0], [0.0, 1, 1, 1, 0]]
    base = values(rewards, **settings)
    shifted = values([[r + 5 for r in row] for row in rewards], **settings)
    if settings.get("adjust") not in (["focal"], ["novelty"]):  # both read the sign of the reward
        for left, right in zip(base, shifted, strict=True):
            close(left, right, 1e-6)
    scaled = values([[3 * r for r in row] for row in rewards], **settings)
    exact = settings.get("scale") is None
    for left, right in zip(base, scaled, strict=True):
        close(np.sign(left), np.sign(right))
        if exact:
            close(left, right, 1e-4)
