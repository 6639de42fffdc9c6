"""Advantage estimators against the vectors of the family's specification, and their compositions."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.constraints import Constraints
from grpo_roc_jax.contrib.methods.spo import tracked
from grpo_roc_jax.contrib.methods.tempo import tree_differences
from grpo_roc_jax.contrib.methods.xrpo import Novelty
from grpo_roc_jax.method.compose import initial_state, next_state
from grpo_roc_jax.method.state import AlgoState, ProblemTable, begun
from grpo_roc_jax.settings.cli import ConfigError
from grpo_roc_jax.types import Problem
from tests.helpers.method_groups import make_group, method
from tests.method import test_advantage as core
from tests.method.test_advantage import close, one, values
from tests.method.test_equality import test_rounding_gives_no_advantage as rounding_gives_no_advantage

VIRTUAL = {"baseline": "virtual_max", "scale": "virtual_std"}
PIVOTED = {"baseline": "median", "adjust": ["rescale_nonzero"]}
GRADED = {"rewards": [1, 0, 0.5, 0.2, 0.9]}
CALLS = {"rewards": [1, 0, 1, 1, 0, 0], "calls": [0, 0, 1, 1, 1, 2]}
UNLIKELY = {"rewards": [1, 1, 0, 0], "logprobs": [-0.5, -1.5, -1, -1]}
SHOWN = {"rewards": [0.2, 0.5, 0.4, 1.0], "condition": ["", "", "", "demonstration"]}


def adjusted(kind, **settings):
    return {"adjust": [{"kind": kind, **settings}]}


@pytest.mark.parametrize(
    ("group", "settings", "expected"),
    [
        ({"rewards": [0] * 4}, VIRTUAL, [-0.447213] * 4),
        ({"rewards": [1, 0, 0, 0]}, VIRTUAL, [1.095443, -0.730295, -0.730295, -0.730295]),
        ({"rewards": [1] * 4}, VIRTUAL, [0] * 4),
        (GRADED, PIVOTED | {"scale": "mad"}, [1.558603, -1.558603, 0, -0.935162, 1.246883]),
        (GRADED, PIVOTED | {"scale": "mad_or_std"}, [1.558603, -1.558603, 0, -0.935162, 1.246883]),
        ({"rewards": [1, 0, 0, 0, 1]}, PIVOTED | {"scale": "mad"}, [2500, 0, 0, 0, 2500]),
        ({"rewards": [1, 0, 0, 0, 1]}, PIVOTED | {"scale": "mad_or_std"}, [4.564355, 0, 0, 0, 4.564355]),
        ({"rewards": [1, 0, 0, 0]}, {"scale": "beta"}, [0.75, -0.25, -0.25, -0.25]),
        ({"rewards": [1, 1, 1, 0]}, adjusted("focal", exponent=2.0), [0.03125, 0.03125, 0.03125, -0.09375]),
        (CALLS, adjusted("strata"), [0.707106, -0.707106, 0.577349, 0.577349, -1.154699, 0]),
        (CALLS, adjusted("strata", blend=0.5), [0.809988, -0.809988, 0.745109, 0.745109, -1.033784, -0.456435]),
        (CALLS, adjusted("strata", cap=1), [0.707106, -0.707106, 0.866024, 0.866024, -0.866024, -0.866024]),
        (UNLIKELY, adjusted("novelty"), [0.866024, 1.259493, -0.866024, -0.866024]),
        (UNLIKELY, adjusted("novelty", cap=0.1), [0.866024, 0.952626, -0.866024, -0.866024]),
        (SHOWN, {"kind": "anchored"}, [-1.091082, 0.872866, 0.218216, 1.047439]),
        ({"rewards": [1, 0, 0, 0]}, adjusted("sign_weights", negative=2.0), [1.499997] + [-0.999999] * 3),
    ],
)
def test_vectors(group, settings, expected):
    close(values(None, groups=[make_group(**group)], **settings)[0], expected)


def test_a_success_with_a_negative_advantage_keeps_it():
    """The cap of its bonus is 0 then, not a negative bonus."""
    group = SimpleNamespace(correct=np.array([True, True]), mean_logprobs=np.array([-1.5, -0.5]))
    close(Novelty().group(np.array([-0.5, 0.5]), np.ones(2), group), [-0.5, 0.5])


def test_bnpo():
    """Rewards are mapped to the bounds of the distribution, and those that reach outside are refused."""
    rewards = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    result = values(rewards, scale="beta")
    close([row[0] for row in result], [0.680175, 0.392699, 0.226725])
    close([row[-1] for row in result], [-0.226725, -0.392699, -0.680175])
    all_right, all_wrong, mixed = values([[1, 1], [0, 0], [1, 0]], scale="beta")
    assert not all_right.any() and not all_wrong.any() and np.isfinite(mixed).all()
    wide = [[4 * r - 1 for r in row] for row in rewards]
    close(values(wide, scale={"kind": "beta", "low": -1.0, "high": 3.0}), result)
    with pytest.raises(ConfigError, match=r"reach from -1 to 3, .* set advantage\.scale\.low and"):
        values(wide, scale="beta")


def test_constraints():
    group = make_group([1, 1, 0, 0], channels={"clean": [1, 0, 1, 1]})
    state = AlgoState(memory={"constraints": np.array([0.5])})

    def run(channel):
        step = {"kind": "constraints", "channels": [channel], "targets": [0.95]}
        return values(None, state, groups=[group], adjust=[step])[0]

    close(run("clean"), [1.116023, 0.116025, -0.616024, -0.616024])
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
    groups = [make_group([1, 1, 0, 0], channels={"clean": channel})]
    moved = step.next_memory(groups, groups, None, AlgoState(memory={"constraints": np.array([dual])}))
    close(moved["constraints"], [expected], 1e-9)


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


def test_single_stream():
    counts = {"alpha": np.array([5.0, 5, 9, 2]), "beta": np.array([5.0, 5, 1, 8])}
    state = AlgoState(table=ProblemTable().put(["p0", "p1", "p2", "p3"], counts))
    whiten = [{"kind": "whiten", "over": "row"}]
    result = values([[1], [0], [1], [1]], state, baseline="tracker", scale="none", adjust=whiten)
    close(np.concatenate(result), [0.489332, -1.290057, -0.222424, 1.023149])


def test_a_tracker_starts_from_the_samples_of_the_data():
    """S = 4 of 8 gives alpha = beta = 4, for problems that were not seen."""
    problem = Problem("p0", "?", "1", "t", {"success_rate": 0.5, "judged": 8})
    state = begun(AlgoState(), [problem, Problem("q", "?", "1", "t")])
    assert [state.table.get([uid])["alpha"].tolist() for uid in ("p0", "q")] == [[4.0], [0.5]]
    rarely = replace(problem, extra={"success_rate": 0.125, "judged": 8})
    assert tracked(AlgoState(), [rarely]) == pytest.approx(1.5 / 9)
    group = replace(make_group([1], uid="p0"), problem=problem)
    config = method(1, advantage={"baseline": {"kind": "tracker", "forget": "constant"}})
    after = next_state([group], [group], config, AlgoState())
    rows = after.table.get(["p0"])
    assert (rows["alpha"].tolist(), rows["beta"].tolist()) == ([4.5], [3.5])
    assert begun(after, [problem]).table is after.table and not after.memory


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
    (remembered,) = tracker.earlier([second, make_group([1], uid="c")], state)
    (then,), (now,) = remembered.trajectories, second.trajectories
    for name in ("tokens", "policy_mask", "logprobs", "temperature"):
        np.testing.assert_array_equal(getattr(then, name), getattr(now, name))
    moved = next_state([first], [first], config, state, {"a": 0.006}).table.get(["a"])
    close(moved["alpha"], 0.933033 * state.table.get(["a"])["alpha"] + 1)
    longer = [make_group([1], uid="b", lengths=[6])]
    again = next_state(longer, longer, config, state)
    assert [tracker.earlier([group], again)[0].trajectories[0].length for group in (first, second)] == [4, 8]


def test_truncation_mask():
    """A truncated success loses its advantage where it draws below the probability; failures and loops keep it."""
    pair = make_group([1, 1], stop=["length"] * 2)
    drawn = SimpleNamespace(random=lambda n: np.array([0.1, 0.9]))
    advantages = values(None, groups=[pair], rng=drawn, baseline="none", scale="none", adjust=["truncation_mask"])[0]
    assert advantages.tolist() == [0, 1]
    always = {"rng": np.random.default_rng(0)} | adjusted("truncation_mask", probability=1.0)
    group = make_group([1, 1, 0], stop=["length", "answer", "length"])
    masked = values(None, groups=[group], **always)[0]
    assert masked[0] == 0 and masked[1] > 0 > masked[2]
    with pytest.raises(ValueError, match="rng"):
        one([1, 0], adjust=["truncation_mask"])
    for length, tokens, loops in (
        (512, np.arange(512) % 4, True),
        (512, np.arange(512), False),
        (100, [1] * 100, False),
    ):
        group = make_group([1, 0], stop=["length"] * 2, lengths=[length, 3], tokens=[tokens, range(3)])
        assert (values(None, groups=[group], **always)[0][0] > 0) == loops, "a loop keeps its advantage"


CENTERED = [
    *({"kind": "group", "baseline": "median", "scale": scale} for scale in ("mad", "mad_or_std")),
    *({"kind": "group", "adjust": [step]} for step in ("strata", "novelty", "rescale_nonzero")),
]
FOCAL = {"adjust": ["focal"]}


ROUNDED = [*CENTERED, {"adjust": ["tree"]}, "grao", "anchored", "by_role", "positions"]


@pytest.mark.parametrize("advantage", ROUNDED, ids=str)
def test_rounding_gives_no_advantage(advantage):
    rounding_gives_no_advantage(advantage)


@pytest.mark.parametrize("settings", [*CENTERED, FOCAL, {"scale": "beta"}, VIRTUAL], ids=str)
def test_permutation_and_group_order(settings):
    core.test_permutation_and_group_order(settings)


@pytest.mark.parametrize("settings", [*CENTERED, FOCAL], ids=str)
def test_shift_and_scale_of_rewards(settings):
    core.test_shift_and_scale_of_rewards(settings, settings.get("adjust") in (["focal"], ["novelty"]))
