"""From groups to training rows: the whole host side, held to the formulas and to the loss that reads it."""

import sys
import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_groups import make_group, method

from grpo_roc_jax.method.compose import (
    Scores,
    initial_state,
    needs_reference,
    needs_scores,
    next_state,
    renormalized,
    resample_group,
    scoring_rows,
    subset,
    supervised_rows,
    train_rows,
)
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import given
from tests.reference import OBJECTIVES

OBSERVED = {"observation": [2, 0, 1, 0]}


def batch():
    """Two problems, ragged, with observation tokens after the policy tokens."""
    return [
        make_group([1, 0, 0, 1], uid="a", lengths=[3, 2, 5, 1], logprobs=[-0.5, -1, -1.5, -2], **OBSERVED),
        make_group([1, 1, 0, 1], uid="b", lengths=[1, 2, 3, 4], logprobs=[-1, -0.2, -0.4, -3], **OBSERVED),
    ]


def loss_value(rows, logprobs, config):
    """The loss by a plain sum over rows, phi from the device side."""
    total, surrogate = 0.0, config.surrogate
    for row, now in zip(rows, logprobs, strict=True):
        mask = jnp.asarray(row.policy_mask)[None]
        now = jnp.where(mask, now[None], 0.0)
        d = now - jnp.where(mask, row.logprobs_old[None], 0.0)
        a = jnp.where(mask, row.advantages[None], 0.0)
        d = jnp.where(mask, surrogate.shared(d, a, mask, jnp.asarray(row.ratio_segments)[None]), 0.0)
        phi = surrogate.loss(d, a, now)
        total += jnp.sum(jnp.where(mask, row.weights[None] * phi, 0.0))
    return total


def trajectories(groups):
    return [t for group in groups for t in group.trajectories]


def test_rows_follow_the_trajectories():
    groups = batch()
    rows = train_rows(groups, method(), AlgoState())
    assert len(rows) == 8
    for row, trajectory in zip(rows, trajectories(groups), strict=True):
        assert row.tokens is trajectory.tokens
        assert (row.policy_mask == trajectory.policy_mask).all()
        np.testing.assert_allclose(row.logprobs_old, trajectory.logprobs)
        assert not row.weights[~row.policy_mask].any()
        assert row.weights.dtype == row.advantages.dtype == np.float32
    tokens = sum(t.policy_mask.sum() for t in trajectories(groups))
    assert tokens == 21
    np.testing.assert_allclose(sum(row.weights.sum() for row in rows), 1, atol=1e-6)
    np.testing.assert_allclose(rows[0].weights.max(), 1 / 21, atol=1e-7)


def test_grpo_loss_by_hand():
    """Fixture F of the family's specification: one success, one failure, three and two tokens."""
    group = make_group([1, 0], lengths=[3, 2], prompt=[0, 0])
    old = [np.array([-1, -2, -1], np.float32), np.array([-1, -1], np.float32)]
    group = replace(
        group, trajectories=tuple(replace(t, logprobs=l) for t, l in zip(group.trajectories, old, strict=True))
    )
    now = [jnp.array([-0.7, -2.1, -1]), jnp.array([-1.2, -0.5])]
    # A z-score of (1, 0) is +-0.707106; without a scale +-0.5; so multiply back to the fixture's +-1.
    for surrogate, normalizer, expected in [
        ({"clip_high": 0.2}, "sequence_mean", 0.099390),
        ({"clip_high": 0.2}, "token_mean", -0.127477),
        ({"clip_high": 0.2}, "sequence_sum", -0.318693),
        ({"clip_high": 0.2}, {"kind": "constant", "length": 3}, -0.106231),
        ({}, "token_mean", -0.143477),
        ({"level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}, "sequence_mean", 0.080717),
        ("cispo", "token_mean", 0.407645),
        ({"kind": "cispo", "low": 0.8, "high": 1.28}, "token_mean", 0.434736),
    ]:
        weights = {"normalizer": normalizer}
        config = method(2, advantage={"scale": "none"}, weights=weights, surrogate=surrogate)
        rows = train_rows([group], config, AlgoState())
        assert 2 * float(loss_value(rows, now, config)) == pytest.approx(expected, abs=1e-5)


def test_weights_do_not_depend_on_the_order_of_groups():
    groups = batch()
    rows, moved = (train_rows(g, method(), AlgoState()) for g in (groups, groups[::-1]))
    for row, other in zip(rows, moved[4:] + moved[:4], strict=True):
        np.testing.assert_array_equal(row.weights, other.weights)
        np.testing.assert_array_equal(row.advantages, other.advantages)


@pytest.mark.parametrize("normalizer", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_renormalized_parts(normalizer):
    """Each part of the rows carries the normalizer that it would have had alone."""
    groups = batch()
    config = method(weights={"normalizer": normalizer}, advantage={"scale": "none"})
    whole = train_rows(groups, config, AlgoState())
    parts = renormalized([whole[:4], whole[4:]], config.weights.normalizer)
    for group, part in zip(groups, parts, strict=True):
        for row, alone in zip(part, train_rows([group], config, AlgoState()), strict=True):
            np.testing.assert_allclose(row.weights, alone.weights, rtol=1e-6)


def test_masks_leave_the_count():
    groups = [make_group([1, 0, 0], lengths=[3, 2, 5], stop=["answer", "length", "eos"])]
    config = method(weights={"masks": ["truncated"]})
    rows = train_rows(groups, config, AlgoState())
    assert not rows[1].policy_mask.any()
    assert not rows[1].weights.any()
    np.testing.assert_allclose(rows[0].weights.max(), 1 / 8)


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


def test_scored_log_probabilities():
    groups = batch()
    scores = [t.logprobs + np.float32(0.5) * t.policy_mask for t in trajectories(groups)]
    scored = {"old_logprobs": "scored"}
    rows = train_rows(groups, method(surrogate=scored), AlgoState(), scores=Scores(scores))
    np.testing.assert_allclose(rows[2].logprobs_old, scores[2])
    corrects = method(surrogate=scored, weights={"factors": ["truncated_is"]})
    corrected = train_rows(groups, corrects, AlgoState(), scores=Scores(scores))
    ratio = corrected[2].weights[corrected[2].policy_mask] / rows[2].weights[rows[2].policy_mask]
    np.testing.assert_allclose(ratio, np.exp(0.5), rtol=1e-5)


def test_the_divergence_is_not_multiplied_by_importance_weights():
    """With a KL term the importance weights scale the advantages, and the weights hold the normalizer alone."""
    groups = batch()
    passes = [(t.logprobs - np.float32(0.5) * t.policy_mask).astype(np.float32) for t in trajectories(groups)]
    scores = Scores(passes, reference=[values + 1 for values in passes])
    surrogate = {"old_logprobs": "scored", "kl": {"kind": "k3", "coef": 0.3}}
    plain = train_rows(groups, method(surrogate=surrogate), AlgoState(), scores=scores)
    config = method(surrogate=surrogate, weights={"factors": ["truncated_is"]})
    for row, before in zip(train_rows(groups, config, AlgoState(), scores=scores), plain, strict=True):
        on = row.policy_mask
        np.testing.assert_array_equal(row.weights, before.weights)
        np.testing.assert_allclose(row.advantages[on], np.exp(-0.5) * before.advantages[on], rtol=1e-6)


def test_tokens_that_masked_importance_sampling_rejects_leave_the_count():
    groups = [make_group([1, 0], lengths=[3, 5])]
    first, second = ((t.logprobs.copy(), np.flatnonzero(t.policy_mask)) for t in trajectories(groups))
    first[0][first[1][:2]] += np.log(3)
    config = method(2, surrogate={"old_logprobs": "scored"}, weights={"factors": ["masked_is"]})
    one, two = train_rows(groups, config, AlgoState(), scores=Scores([first[0], second[0]]))
    assert np.flatnonzero(one.policy_mask).tolist() == first[1][2:].tolist()
    np.testing.assert_allclose(one.weights[one.policy_mask], 1 / 6, rtol=1e-6)
    np.testing.assert_allclose(two.weights[two.policy_mask], 1 / 6, rtol=1e-6)
    whole = method(
        2,
        surrogate={"old_logprobs": "scored"},
        weights={"factors": [{"kind": "masked_is", "level": "sequence"}], "normalizer": "sequence_mean"},
    )
    one, two = train_rows(groups, whole, AlgoState(), scores=Scores([first[0], second[0]]))
    assert not one.policy_mask.any() and two.weights.max() == pytest.approx(1 / 5)


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


def test_reference_is_carried():
    groups = batch()
    reference = [np.full(t.length, -3.0, np.float32) for t in trajectories(groups)]
    rows = train_rows(groups, method(surrogate={"kl": "k3"}), AlgoState(), scores=Scores(reference=reference))
    assert rows[0].logprobs_ref[0] == -3


def test_scoring_rows():
    groups = batch()
    for row, trajectory in zip(scoring_rows(groups), trajectories(groups), strict=True):
        assert (row.policy_mask == trajectory.policy_mask).all()
        assert not row.weights.any()


def test_supervised_rows():
    """Mean negative log-likelihood 1.5, weight 0.1: the term is 0.15, and its gradient -weight / n a token."""
    groups = [make_group([1, 1], lengths=[2, 4], logprobs=[-9.0, -9.0])]
    scores = [row.policy_mask * np.float32(-1.5) for row in scoring_rows(groups)]
    rows = supervised_rows(groups, Scores(scores), 0.1, method().surrogate)
    value = sum(float(-(row.weights * row.advantages * now).sum()) for row, now in zip(rows, scores, strict=True))
    assert value == pytest.approx(0.15, abs=1e-6)
    np.testing.assert_allclose(rows[1].weights[rows[1].policy_mask], 0.1 / (2 * 4), rtol=1e-6)
    np.testing.assert_allclose(rows[0].logprobs_old, scores[0])  # ratio 1: every surrogate has the gradient of -log p


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


def test_custom_parts_by_dotted_path(monkeypatch):
    module = types.ModuleType("my_parts")
    module.ones = lambda rewards, features, state: np.ones(len(rewards))
    module.double = lambda rewards, features, state: 2 * rewards
    module.number = 3
    monkeypatch.setitem(sys.modules, "my_parts", module)
    rows = train_rows(batch(), method(advantage={"kind": "custom", "function": "my_parts:ones"}), AlgoState())
    assert {float(row.advantages[0]) for row in rows} == {1.0}
    plain = train_rows(batch(), method(advantage={"scale": "none"}), AlgoState())
    double = [{"kind": "custom", "function": "my_parts:double"}]
    doubled = train_rows(batch(), method(advantage={"scale": "none"}, shaping=double), AlgoState())
    np.testing.assert_allclose(doubled[0].advantages, 2 * plain[0].advantages)
    for path in ("my_parts:missing", "no_such_module:f", "my_parts", "my_parts:number"):
        with pytest.raises(ValueError, match=r"advantage\.function"):
            train_rows(batch(), method(advantage={"kind": "custom", "function": path}), AlgoState())


def test_functions_handed_over_from_python():
    """Known by name within the block, before paths are looked up; an inner block adds to an outer one."""
    config = method(advantage={"kind": "custom", "function": "sevens"})
    with given({"sevens": lambda r, f, s: np.full(len(r), 7.0)}):
        with given({"others": len}):
            assert train_rows(batch(), config, AlgoState())[0].advantages[0] == 7
        with given({"sevens": lambda r, f, s: np.full(len(r), 8.0)}):
            assert train_rows(batch(), config, AlgoState())[0].advantages[0] == 8
        assert train_rows(batch(), config, AlgoState())[0].advantages[0] == 7
    with pytest.raises(ValueError, match=r"advantage\.function = 'sevens' .* pass the function"):
        train_rows(batch(), config, AlgoState())


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


def test_line_from_sampled_groups_to_rows():
    """Resample on correct in the line: sizes, signs, and the golden advantages of 16 kept."""
    generator = np.random.default_rng(0)
    group = make_group([1] * 2 + [0] * 30, calls=[2] * 32, errors=generator.integers(0, 3, 32))
    config = method(16)
    selection = resample_group(group, config, generator)
    rows = train_rows([subset(group, selection)], config, AlgoState())
    values = sorted({round(float(row.advantages[0]), 3) for row in rows})
    assert len(rows) == 16
    assert values == [-0.366, 2.562]
    np.testing.assert_allclose(sum(row.weights.sum() for row in rows), 1, rtol=1e-6)
