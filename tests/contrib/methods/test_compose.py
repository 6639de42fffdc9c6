"""From groups to training rows: the whole host side, held to the formulas and to the loss that reads it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.config import read_config
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
from grpo_roc_jax.settings.cli import ConfigError
from tests.contrib.methods.objectives import OBJECTIVES
from tests.helpers.method_groups import make_group, method
from tests.method.test_compose import batch, loss_value, trajectories
from tests.method.test_reference import check_order


@pytest.mark.parametrize("normalizer", ["token_mean", "sequence_mean", "sequence_sum", "constant", "prompt_mean"])
def test_renormalized_parts(normalizer):
    """Each part of the rows carries the normalizer that it would have had alone."""
    groups = batch()
    config = method(weights={"normalizer": normalizer}, advantage={"scale": "none"})
    whole = train_rows(groups, config, AlgoState())
    parts = renormalized([whole[:4], whole[4:]], config.weights.normalizer, [[4], [4]])
    for group, part in zip(groups, parts, strict=True):
        for row, alone in zip(part, train_rows([group], config, AlgoState()), strict=True):
            np.testing.assert_allclose(row.weights, alone.weights, rtol=1e-6)


def test_pivot_is_left_out():
    """MC-GRPO: the median trajectory shapes the statistics and trains no token."""
    groups = [make_group([1, 0, 0.5, 0.2, 0.9])]
    config = method(
        5,
        advantage={"baseline": "median", "scale": "mad", "adjust": ["rescale_nonzero"]},
        weights={"masks": ["pivot"]},
        resample="none",
    )
    rows = train_rows(groups, config, AlgoState())
    assert [bool(row.policy_mask.any()) for row in rows] == [True, True, False, True, True]
    actual = [float(row.advantages[2]) for row in rows]
    np.testing.assert_allclose(np.delete(actual, 2), [1.558603, -1.558603, -0.935162, 1.246883], atol=1e-5)


def test_tree_advantages_reach_the_tokens():
    group = make_group([1, 0, 0], lengths=[2, 2, 2], tokens=[[1, 2], [1, 3], [4, 5]])
    rows = train_rows(
        [group],
        method(advantage={"scale": {"kind": "std", "eps": 0.0}, "adjust": [{"kind": "tree", "eps": 0.0}]}),
        AlgoState(),
    )
    expected = [[1.443376, 2.020726], [-0.288675, -1.443376], [-1.154701, -0.577350]]
    for row, values in zip(rows, expected, strict=True):
        np.testing.assert_allclose(row.advantages[row.policy_mask], values, atol=1e-5)
    flat = replace(group, verdicts=(group.verdicts[1],) * 3)
    for row in train_rows([flat], method(advantage={"adjust": ["tree"]}), AlgoState()):
        assert not row.advantages.any()


def test_length_preference_scales_rows():
    group = make_group([1, 0, 1], lengths=[2, 4, 6])
    config = method(weights={"factors": ["learned_length"]})
    rows = train_rows([group], config, AlgoState(memory={"length_exponent": np.array([1.0])}))
    factors = [float(row.weights.max()) * 12 for row in rows]
    np.testing.assert_allclose(factors, [0.867408, 0.993856, 1.138737], atol=1e-5)


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
    with pytest.raises(ValueError, match="scores has 1 arrays for 8"):
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


@pytest.mark.parametrize(
    ("score", "normalizer"),
    [
        ({"kind": "disco", "tau": 0.8, "kl_delta": 0.01, "kl_beta": 2.0}, "sequence_mean"),
        ({"kind": "drpo", "tau": 0.8, "max_length": 10, "kl_delta": 0.01, "kl_beta": 2.0}, "sequence_mean"),
        ("rebel", "sequence_sum"),
        ("reg", "sequence_sum"),
    ],
)
@pytest.mark.parametrize("push", [0.0, 1.0])
def test_score_based_gradient_is_the_gradient_of_the_objective(score, normalizer, push):
    """d loss / d log-probabilities equals finite differences of the published objective over the whole batch."""
    groups = batch()
    generator = np.random.default_rng(2)
    shift = 0.3 * push
    now = [(t.logprobs - shift * generator.random(t.length)).astype(np.float64) for t in trajectories(groups)]
    config = method(advantage=score, weights={"normalizer": normalizer}, surrogate="logp")
    kind = config.advantage.kind
    settings = {"disco": {"tau": 0.8}, "drpo": {"tau": 0.8, "max_length": 10}}.get(kind, {})
    rows = train_rows(groups, config, AlgoState(), scores=Scores(now))
    slopes = jax.grad(lambda values: loss_value(rows, values, config))([jnp.asarray(x) for x in now])

    def kl(values):
        pairs = list(zip(values, trajectories(groups), strict=True))
        return sum((t.logprobs - v)[t.policy_mask].sum() for v, t in pairs) / sum(t.policy_mask.sum() for _, t in pairs)

    factor = max(0.0, 2.0 * (kl(now) - 0.01))
    assert (factor > 0) == (push > 0)

    def objective(values):
        total, index = 0.0, 0
        for group in groups:
            part = list(zip(values[index : index + group.size], group.trajectories, strict=True))
            index += group.size
            lengths = np.array([t.policy_mask.sum() for _, t in part])
            if kind in ("disco", "drpo"):
                scores = np.array([v[t.policy_mask].mean() for v, t in part])
            else:
                scores = np.array([(v - t.logprobs)[t.policy_mask].sum() for v, t in part])
            total -= OBJECTIVES[kind](scores, group.rewards, lengths, **settings)
        penalty = factor * kl(values) if kind in ("disco", "drpo") else 0.0
        return total / len(groups) + penalty

    for i in range(len(now)):
        for t in np.flatnonzero(trajectories(groups)[i].policy_mask):
            up, down = ([v.copy() for v in now] for _ in range(2))
            up[i][t] += 1e-5
            down[i][t] -= 1e-5
            numeric = (objective(up) - objective(down)) / 2e-5
            assert float(slopes[i][t]) == pytest.approx(numeric, abs=2e-4)
        assert not np.asarray(slopes[i])[~trajectories(groups)[i].policy_mask].any()


def test_next_state():
    groups = batch()
    held = {"kind": "constraints", "channels": ["clean"], "targets": [0.95]}
    weights = {"factors": ["learned_length"]}
    config = method(advantage={"adjust": [held]}, weights=weights)
    kept = [make_group([1, 1, 0, 0], uid="a", lengths=[9, 9, 1, 1], channels={"clean": [1, 0, 1, 1]})]
    assert initial_state(config).memory["constraints"].tolist() == [0.0]
    state = next_state(groups, kept, config, initial_state(config))
    assert state.step == 1
    rows = state.table.get(["a", "b"])
    assert rows["accuracy"].tolist() == [0.5, 0.75]
    np.testing.assert_allclose(state.memory["constraints"], [0.02])
    assert state.recall("length_exponent", 0.0) > 0  # the long ones succeeded
    mine = method(advantage={"kind": "custom", "function": "mine", "adjust": [held]}, weights=weights)
    with given({"mine": lambda r, f, s: r.mean() - r}):
        backwards = next_state(groups, kept, mine, initial_state(mine))
    assert backwards.recall("length_exponent", 0.0) < 0  # the advantage that trained counts, also a function
    idle = next_state(groups, [], config, state)
    assert {name: idle.memory[name].tolist() for name in idle.memory} == {
        n: state.memory[n].tolist() for n in idle.memory
    }


def test_a_step_of_trajectories_cannot_follow_one_of_tokens():
    check_order("tree")


def test_a_learned_length_needs_the_divergence_by_tokens():
    with pytest.raises(ConfigError, match=r"use advantage\.adjust kl"):
        read_config("--shaping=kl", "--weights.factors=learned_length")
