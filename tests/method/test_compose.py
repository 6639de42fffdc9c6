"""From groups to training rows: the whole host side, held to the formulas and to the loss that reads it."""

import sys
import types
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.method.compose import (
    Scores,
    resample_group,
    scoring_rows,
    subset,
    supervised_rows,
    train_rows,
)
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import given
from tests.helpers.method_groups import make_group, method

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


def test_masks_leave_the_count():
    groups = [make_group([1, 0, 0], lengths=[3, 2, 5], stop=["answer", "length", "eos"])]
    config = method(weights={"masks": ["truncated"]})
    rows = train_rows(groups, config, AlgoState())
    assert not rows[1].policy_mask.any()
    assert not rows[1].weights.any()
    np.testing.assert_allclose(rows[0].weights.max(), 1 / 8)


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
        weights={"factors": [{"kind": "masked_is", "level": "geometric"}], "normalizer": "sequence_mean"},
    )
    one, two = train_rows(groups, whole, AlgoState(), scores=Scores([first[0], second[0]]))
    assert not one.policy_mask.any() and two.weights.max() == pytest.approx(1 / 5)


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
