"""Advantage estimators against the vectors of the family's specification, and their compositions."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.bnpo import beta_weights
from grpo_roc_jax.contrib.methods.constraints import Constraints
from grpo_roc_jax.contrib.methods.microcoder import repeats
from grpo_roc_jax.contrib.methods.spo import tracked
from grpo_roc_jax.contrib.methods.tempo import tree_differences
from grpo_roc_jax.contrib.methods.xrpo import Novelty
from grpo_roc_jax.method.advantage import z_score
from grpo_roc_jax.method.compose import initial_state, next_state
from grpo_roc_jax.method.state import AlgoState, ProblemTable, begun
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.types import Problem
from tests.helpers.method_groups import make_group, method
from tests.method import test_advantage as core
from tests.method.test_advantage import close, one, values

CENTERED = [
    {"baseline": "median", "scale": "mad"},
    {"baseline": "median", "scale": "mad_or_std"},
    {"scale": "beta"},
    *({"adjust": [step]} for step in ("strata", "focal", "novelty", "rescale_nonzero")),
]


def test_bnpo():
    rewards = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    close(1 / beta_weights(np.array([0.25, 0.5, 0.75])), [1.102658, 1.273240, 1.102658])
    result = values(rewards, scale="beta")
    close([row[0] for row in result], [0.680175, 0.392699, 0.226725])
    close([row[-1] for row in result], [-0.226725, -0.392699, -0.680175])
    close(values([[1, 0, 0, 0]], scale="beta")[0], [0.75, -0.25, -0.25, -0.25])
    extreme = values([[1, 1], [0, 0], [1, 0]], scale="beta")
    assert not extreme[0].any()
    assert not extreme[1].any()
    assert np.isfinite(extreme[2]).all()


def test_a_tracker_starts_from_the_samples_of_the_data():
    """S = 4 of 8 gives alpha = beta = 4, for problems that were not seen."""
    problem = Problem("p0", "?", "1", "t", {"success_rate": 0.5, "judged": 8})
    state = begun(AlgoState(), [problem, Problem("q", "?", "1", "t")])
    assert [state.table.get([uid])["alpha"].tolist() for uid in ("p0", "q")] == [[4.0], [0.5]]
    assert tracked(AlgoState(), [replace(problem, extra={"success_rate": 0.125, "judged": 8})]) == pytest.approx(
        1.5 / 9
    )
    group = replace(make_group([1], uid="p0"), problem=problem)
    assert values(None, AlgoState(), groups=[group], baseline="tracker", scale="none")[0] == [0.5]
    config = method(1, advantage={"baseline": {"kind": "tracker", "forget": "constant"}})
    after = next_state([group], [group], config, AlgoState())
    rows = after.table.get(["p0"])
    assert (rows["alpha"].tolist(), rows["beta"].tolist()) == ([4.5], [3.5])
    assert begun(after, [problem]).table is after.table and not after.memory


def test_sharpening():
    group = make_group([1, 1, 0, 0], logprobs=[-0.5, -1.5, -1, -1])
    result = values(None, groups=[group], adjust=["novelty"])[0]
    close(result, [0.866024, 1.259493, -0.866024, -0.866024])
    capped = values(None, groups=[group], adjust=[{"kind": "novelty", "cap": 0.1}])[0]
    close(capped[1], 0.866024 * 1.1)
    # A success whose advantage is negative keeps it: its cap is 0, not a negative bonus.
    found = SimpleNamespace(correct=np.array([True, True]), mean_logprobs=np.array([-1.5, -0.5]))
    close(Novelty().group(np.array([-0.5, 0.5]), np.ones(2), found), [-0.5, 0.5])


def test_constraints():
    group = make_group([1, 1, 0, 0], channels={"clean": [1, 0, 1, 1]})
    state = AlgoState(memory={"constraints": np.array([0.5])})

    def run(channel):
        return values(
            None, state, groups=[group], adjust=[{"kind": "constraints", "channels": [channel], "targets": [0.95]}]
        )

    (result,) = run("clean")
    close(result, [1.116023, 0.116025, -0.616024, -0.616024])
    with pytest.raises(ValueError, match="'tidy'"):
        run("tidy")
    with pytest.raises(ValueError, match="1 channels but 0 targets"):
        Constraints(channels=("clean",))


@pytest.mark.parametrize(
    ("dual", "channel", "target", "expected"),
    [(0.5, [1, 1, 1, 0], 0.95, 0.52), (0.0, [1, 1, 1, 1], 0.5, 0.0), (5.0, [0, 0, 0, 0], 1.0, 5.0)],
)
def test_dual_vector(dual, channel, target, expected):
    step = Constraints(channels=("clean",), targets=(target,))
    kept = [make_group([1, 1, 0, 0], channels={"clean": channel})]
    moved = step.next_memory(kept, kept, None, AlgoState(memory={"constraints": np.array([dual])}))
    close(moved["constraints"], [expected], 1e-9)


def test_repeats():
    loop = np.tile(np.arange(4), 100)
    assert repeats(loop)
    assert not repeats(np.arange(400))
    assert not repeats(loop[:100])


TREE = [np.array([1, 2]), np.array([1, 3]), np.array([4, 5])]


def test_tree():
    rewards = np.array([1.0, 0, 0])
    close(tree_differences(rewards, TREE), [[0.166667, 0.5], [0.166667, -0.5], [-0.333333, 0]])


def test_tree_against_the_definition():
    """V(prefix) by direct comparison of prefixes, over random responses of unequal length."""
    generator = np.random.default_rng(4)
    for _ in range(20):
        tokens = [generator.integers(0, 2, generator.integers(1, 6)) for _ in range(6)]
        rewards = generator.integers(0, 2, 6).astype(float)

        def value(prefix, tokens=tokens, rewards=rewards):
            return np.mean([r for r, row in zip(rewards, tokens, strict=True) if row[: len(prefix)].tolist() == prefix])

        for row, differences in zip(tokens, tree_differences(rewards, tokens), strict=True):
            expected = [value(row[: t + 1].tolist()) - value(row[:t].tolist()) for t in range(len(row))]
            close(differences, expected, 1e-9)


def test_tree_passes_over_what_all_share_at_once():
    """A collapsed policy's responses: thousands of shared tokens, then one that differs, then one that ends early."""
    shared = np.arange(8000)
    tokens = [np.append(shared, 1), np.append(shared, 2), np.append(shared, 1), shared]
    differences = tree_differences(np.array([1.0, 0, 0, 1]), tokens)
    assert not np.concatenate([row[:8000] for row in differences]).any()
    close([row[8000] for row in differences[:3]], [0, -0.5, 0])


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


def test_scaffold_vector():
    """Seven failures and one hinted success in the mixed group (Scaf-GRPO)."""
    close(one([1] + [0] * 7), [2.474867] + [-0.353552] * 7)


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


@pytest.mark.parametrize("settings", CENTERED)
def test_flat_groups_have_no_advantage(settings):
    core.test_flat_groups_have_no_advantage(settings)


@pytest.mark.parametrize("settings", [*CENTERED, {"baseline": "virtual_max", "scale": "virtual_std"}])
def test_permutation_and_group_order(settings):
    core.test_permutation_and_group_order(settings)


@pytest.mark.parametrize("settings", [s for s in CENTERED if s.get("scale") != "beta"])
def test_shift_and_scale_of_rewards(settings):
    core.test_shift_and_scale_of_rewards(settings, settings.get("adjust") in (["focal"], ["novelty"]))
