"""From groups to training rows: the whole host side, held to the formulas and to the loss that reads it."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_roc_jax.method.compose import (
    Scores,
    initial_state,
    needs_reference,
    needs_scores,
    next_state,
    renormalized,
    train_rows,
)
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import given
from tests.helpers.method_groups import close, make_group, method
from tests.method.test_compose import batch


@pytest.mark.parametrize("normalizer", ["token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean"])
def test_renormalized_parts(normalizer):
    """Each part of the rows carries the normalizer that it would have had alone."""
    groups = batch()
    config = method(weights={"normalizer": normalizer}, advantage={"scale": "none"})
    rows = train_rows(groups, config, AlgoState())
    parts = renormalized([rows[:4], rows[4:]], config.weights.normalizer, [[4], [4]])
    for group, part in zip(groups, parts, strict=True):
        for row, alone in zip(part, train_rows([group], config, AlgoState()), strict=True):
            np.testing.assert_allclose(row.weights, alone.weights, rtol=1e-6)


def test_pivot_is_left_out():
    """MC-GRPO: the median trajectory shapes the statistics and trains no token."""
    advantage = {"baseline": "median", "scale": "mad", "adjust": ["rescale_nonzero"]}
    config = method(5, advantage=advantage, weights={"masks": ["pivot"]}, resample="none")
    rows = train_rows([make_group([1, 0, 0.5, 0.2, 0.9])], config, AlgoState())
    assert [bool(row.policy_mask.any()) for row in rows] == [True, True, False, True, True]
    close([rows[i].advantages[2] for i in (0, 1, 3, 4)], [1.558603, -1.558603, -0.935162, 1.246883])


def test_tree_advantages_reach_the_tokens():
    group = make_group([1, 0, 0], lengths=[2, 2, 2], tokens=[[1, 2], [1, 3], [4, 5]])
    exact = {"scale": {"kind": "std", "eps": 0.0}, "adjust": [{"kind": "tree", "eps": 0.0}]}
    rows = train_rows([group], method(advantage=exact), AlgoState())
    expected = [[1.443376, 2.020726], [-0.288675, -1.443376], [-1.154701, -0.577350]]
    close([row.advantages[row.policy_mask] for row in rows], expected)
    flat = replace(group, verdicts=(group.verdicts[1],) * 3)
    for row in train_rows([flat], method(advantage={"adjust": ["tree"]}), AlgoState()):
        assert not row.advantages.any()


@pytest.mark.parametrize(
    ("exponent", "expected"),
    [(0.0, [1, 1, 1]), (1.0, [0.867408, 0.993856, 1.138737]), (-1.0, [1.148507, 0.981125, 0.870369])],
)
def test_length_preference_scales_rows(exponent, expected):
    group = make_group([1, 0, 1], lengths=[2, 4, 6])
    config = method(weights={"factors": ["learned_length"]})
    rows = train_rows([group], config, AlgoState(memory={"length_exponent": np.array([exponent])}))
    close([row.weights.max() * 12 for row in rows], expected)


def test_missing_passes_are_named():
    groups = batch()
    for config, message in [
        (method(advantage="disco"), "advantage disco: a scoring pass"),
        (method(surrogate={"old_logprobs": "scored"}), "surrogate clip: a scoring pass"),
        (method(weights={"masks": ["drift"]}), "weights.masks drift: a scoring pass"),
        (method(surrogate={"kl": "k3"}), "surrogate.kl k3 needs .* reference"),
        (method(shaping=["kl"], advantage={"adjust": ["kl"]}), "shaping kl, advantage.adjust kl needs .* reference"),
    ]:
        with pytest.raises(ValueError, match=message):
            train_rows(groups, config, AlgoState())
    with pytest.raises(ValueError, match=r"scores\.logprobs has 1 arrays for 8"):
        train_rows(groups, method(), AlgoState(), scores=Scores([np.zeros(3)]))


@pytest.mark.parametrize(
    ("sections", "scores", "reference"),
    [
        ({}, False, False),
        ({"advantage": "rebel"}, True, False),
        ({"weights": {"masks": ["top_entropy"]}}, True, False),
        ({"weights": {"factors": ["masked_is"]}}, True, False),
        ({"surrogate": {"kl": {"kind": "k2", "coef": 0.0}}}, False, False),
        ({"surrogate": {"old_logprobs": "scored", "kl": "k1"}}, True, True),
    ],
)
def test_passes_that_a_method_needs(sections, scores, reference):
    config = method(**sections)
    assert (needs_scores(config), needs_reference(config)) == (scores, reference)


def test_next_state():
    groups = batch()
    constraint = {"kind": "constraints", "channels": ["clean"], "targets": [0.95]}
    weights = {"factors": ["learned_length"]}
    config = method(advantage={"adjust": [constraint]}, weights=weights)
    kept_groups = [make_group([1, 1, 0, 0], uid="a", lengths=[9, 9, 1, 1], channels={"clean": [1, 0, 1, 1]})]
    start = initial_state(config)
    assert start.memory["constraints"].tolist() == [0.0]
    state = next_state(groups, kept_groups, config, start)
    assert state.step == 1
    assert state.table.get(["a", "b"])["accuracy"].tolist() == [0.5, 0.75]
    close(state.memory["constraints"], [0.02])
    assert state.recall("length_exponent", 0.0) > 0  # the long ones succeeded
    mine = method(advantage={"kind": "custom", "function": "mine", "adjust": [constraint]}, weights=weights)
    with given({"mine": lambda r, f, s: r.mean() - r}):
        backwards = next_state(groups, kept_groups, mine, start)
    assert backwards.recall("length_exponent", 0.0) < 0  # the advantage that trained counts, also a function
    idle, tree = next_state(groups, [], config, state), state.to_tree()
    for same in (idle.memory, AlgoState.from_tree(tree).memory):
        assert {name: same[name].tolist() for name in same} == {n: state.memory[n].tolist() for n in state.memory}
    assert AlgoState.from_tree({name: tree[name] for name in ("step", "keys", "values")}).memory == {}
