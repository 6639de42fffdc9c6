"""Advantage estimators against the vectors of the family's specification, and their compositions."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from method_groups import make_group, method
from test_advantage import close, values

from grpo_roc_jax.contrib.methods.bnpo import beta_weights
from grpo_roc_jax.contrib.methods.constraints import Constraints
from grpo_roc_jax.contrib.methods.microcoder import repeats
from grpo_roc_jax.contrib.methods.spo import tracked
from grpo_roc_jax.contrib.methods.tempo import tree_differences
from grpo_roc_jax.contrib.methods.xrpo import Novelty
from grpo_roc_jax.method.compose import next_state
from grpo_roc_jax.method.state import AlgoState, begun
from grpo_roc_jax.types import Problem


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
