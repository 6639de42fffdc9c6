"""From groups to training rows: the whole host side, held to the formulas and to the loss that reads it."""

import re
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.method.compose import (
    Scores,
    initial_state,
    next_state,
    resample_group,
    scoring_rows,
    subset,
    supervised_rows,
    train_rows,
)
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.callables import given
from tests.helpers.method_groups import make_group, method, trajectories

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


def test_rows_follow_the_trajectories():
    groups = batch()
    reference = [np.full(t.length, -3.0, np.float32) for t in trajectories(groups)]
    rows = train_rows(groups, method(surrogate={"kl": "k3"}), AlgoState(), scores=Scores(reference=reference))
    for row, before, trajectory in zip(rows, scoring_rows(groups), trajectories(groups), strict=True):
        assert row.tokens is before.tokens is trajectory.tokens
        assert (row.policy_mask == trajectory.policy_mask).all() and (before.policy_mask == row.policy_mask).all()
        np.testing.assert_allclose(row.logprobs_old, trajectory.logprobs)
        assert (row.logprobs_ref == -3).all()
        assert not row.weights[~row.policy_mask].any() and not before.weights.any()
        assert row.weights.dtype == row.advantages.dtype == np.float32
    assert sum(row.policy_mask.sum() for row in rows) == 21
    np.testing.assert_allclose(sum(row.weights.sum() for row in rows), 1, atol=1e-6)
    np.testing.assert_allclose(rows[0].weights.max(), 1 / 21, atol=1e-7)


def test_groups_may_come_from_a_generator():
    groups, config, state = batch(), method(), AlgoState()
    rows, expected_rows = train_rows(iter(groups), config, state), train_rows(groups, config, state)
    np.testing.assert_array_equal([row.advantages[-1] for row in rows], [row.advantages[-1] for row in expected_rows])
    after, expected = next_state(iter(groups), iter(groups), config, state), next_state(groups, groups, config, state)
    np.testing.assert_array_equal(after.table.values, expected.table.values)


GROUP, METHOD, STATE, RNG = batch()[0], method(), AlgoState(), np.random.default_rng(0)


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: resample_group(GROUP, METHOD, 0), r"rng is 0 \(int\); must be a generator: np.random.default_rng"),
        (lambda: resample_group([GROUP], METHOD, RNG), "group is of type list; must be a Group"),
        (lambda: resample_group(GROUP, METHOD.resample, RNG), "without group, resample; must be a configuration"),
        (lambda: initial_state(METHOD.method), "of type MethodConfig without plan, .*; must be a configuration"),
        (lambda: subset(GROUP, [0, 1]), "selection is of type list; must be what resample"),
        (lambda: scoring_rows(GROUP), r"groups is of type Group; must be a list of Groups, such as \[group\]"),
        (lambda: train_rows(GROUP, METHOD, STATE), "groups is of type Group; must be a list"),
        (lambda: train_rows([GROUP, None], METHOD, STATE), "groups has None .*; must be a list"),
        (lambda: train_rows([GROUP], METHOD.surrogate, STATE), "of type Clip without plan"),
        (lambda: train_rows([GROUP], METHOD, None), r"state is None .*; must be an AlgoState: initial_state\(config\)"),
        (lambda: train_rows([GROUP], METHOD, STATE, scores=[]), "scores is of type list; must be Scores"),
        (lambda: next_state([GROUP], GROUP, METHOD, STATE), "groups is of type Group; must be a list"),
        (lambda: next_state([GROUP], METHOD, [GROUP], STATE), "without plan"),
        (lambda: next_state([GROUP], [GROUP], METHOD, STATE.table), "must be an AlgoState"),
    ],
)
def test_arguments_of_another_type_are_refused(refused, message):
    with pytest.raises(TypeError, match=message):
        refused()


@pytest.mark.parametrize("sections", [{"weights": {"normalizer": "constant"}}, {"surrogate": "kl_cov"}, {}])
def test_groups_without_trajectories_have_no_rows(sections):
    groups, config = [make_group([]), make_group([], uid="q")], method(**sections)
    assert train_rows(groups, config, STATE, rng=RNG, scores=Scores([], [])) == []
    scored = Scores(*([t.logprobs for t in GROUP.trajectories] for _ in range(2)))
    rows, alone = (train_rows(some, config, STATE, rng=RNG, scores=scored) for some in ([*groups, GROUP], [GROUP]))
    for row, other in zip(rows, alone, strict=True):
        np.testing.assert_array_equal(row.weights, other.weights)


def test_rows_of_a_policy_that_diverged_are_left_to_the_guard_of_the_update():
    config = method(surrogate={"old_logprobs": "scored"}, weights={"factors": ["truncated_is"]})
    group = make_group([1, 0, 1, 0], lengths=[4] * 4)
    passes = np.full((4, group.trajectories[0].length), np.nan, np.float32)  # an array is as good as a list of arrays
    for scores in (Scores(passes), Scores(jnp.asarray(passes), first=passes)):
        rows = train_rows([group], config, STATE, scores=scores)
        assert all(np.isnan(row.weights[row.policy_mask]).all() for row in rows)


def test_the_message_on_a_missing_pass_says_how_to_make_it():
    config = method(surrogate={"old_logprobs": "scored"})
    with pytest.raises(ValueError, match=re.escape("pass scores=Scores(*learner.score(scoring_rows(groups)))")):
        train_rows([GROUP], config, STATE)

    def score(rows):
        return [row.logprobs_old - 1 for row in rows], [np.zeros(row.length) for row in rows]

    rows = train_rows([GROUP], config, STATE, scores=Scores(*score(scoring_rows([GROUP]))))
    np.testing.assert_array_equal(rows[0].logprobs_old, GROUP.trajectories[0].logprobs - 1)
    for name in ("logprobs", "entropies", "reference", "first"):
        with pytest.raises(ValueError, match=rf"scores.{name} of trajectory 1 is of shape \(2,\); must be \(4,\)"):
            train_rows([GROUP], METHOD, STATE, scores=Scores(**{name: [np.zeros(n) for n in (7, 2, 8, 3)]}))
        with pytest.raises(ValueError, match=rf"scores.{name} has 1 arrays for 4 trajectories"):
            train_rows([GROUP], METHOD, STATE, scores=Scores(**{name: [np.zeros(7)]}))
        with pytest.raises(ValueError, match=rf"scores.{name} of trajectory 0 is of shape \(\); must be \(7,\)"):
            train_rows([GROUP], METHOD, STATE, scores=Scores(**{name: [None] * 4}))


def test_grpo_loss_by_hand():
    """Fixture F of the family's specification: one success, one failure, three and two tokens after one of a prompt."""
    old = [[-1, -2, -1], [-1, -1]]
    group = make_group([1, 0], lengths=[3, 2], prompt=[1, 1], logprobs=old)
    now = [jnp.array([0, -0.7, -2.1, -1]), jnp.array([0, -1.2, -0.5])]
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


def test_masks_leave_the_count():
    groups = [make_group([1, 0, 0], lengths=[3, 2, 5], stop=["answer", "length", "eos"])]
    config = method(weights={"masks": ["truncated"]})
    rows = train_rows(groups, config, AlgoState())
    assert not rows[1].policy_mask.any()
    assert not rows[1].weights.any()
    np.testing.assert_allclose(rows[0].weights.max(), 1 / 8)


@pytest.mark.parametrize(
    ("sections", "scaled"),
    [
        ({}, "weights"),
        ({"surrogate": {"kl": {"kind": "k3", "coef": 0.3}}}, "advantages"),
        ({"shaping": ["kl"]}, "weights"),
    ],
)
def test_importance_weights_scale_the_surrogate_alone(sections, scaled):
    """The weights of tokens; or the advantages where the loss has a divergence, which these weights multiply too. A
    divergence in the reward is no such term."""
    passes = [(t.logprobs - np.float32(0.5) * t.policy_mask).astype(np.float32) for t in trajectories(batch())]
    scores = Scores(passes, reference=[values + 1 for values in passes])
    sections = sections | {"surrogate": {"old_logprobs": "scored"} | sections.get("surrogate", {})}
    plain = train_rows(batch(), method(**sections), AlgoState(), scores=scores)
    config = method(**sections, weights={"factors": ["truncated_is"]})
    (other,) = {"weights", "advantages"} - {scaled}
    for row, before, now in zip(train_rows(batch(), config, AlgoState(), scores=scores), plain, passes, strict=True):
        on = row.policy_mask
        np.testing.assert_allclose(row.logprobs_old, now)
        np.testing.assert_array_equal(getattr(row, other), getattr(before, other))
        np.testing.assert_allclose(getattr(row, scaled)[on], np.exp(-0.5) * getattr(before, scaled)[on], rtol=1e-6)


def test_tokens_that_masked_importance_sampling_rejects_leave_the_count():
    groups = [make_group([1, 0], lengths=[3, 5])]
    first, second = ((t.logprobs.copy(), np.flatnonzero(t.policy_mask)) for t in trajectories(groups))
    first[0][first[1][:2]] += np.log(3)
    config = method(2, surrogate={"old_logprobs": "scored"}, weights={"factors": ["masked_is"]})
    short, long = train_rows(groups, config, AlgoState(), scores=Scores([first[0], second[0]]))
    assert np.flatnonzero(short.policy_mask).tolist() == first[1][2:].tolist()
    np.testing.assert_allclose(short.weights[short.policy_mask], 1 / 6, rtol=1e-6)
    np.testing.assert_allclose(long.weights[long.policy_mask], 1 / 6, rtol=1e-6)
    geometric = method(
        2,
        surrogate={"old_logprobs": "scored"},
        weights={"factors": [{"kind": "masked_is", "level": "geometric"}], "normalizer": "sequence_mean"},
    )
    short, long = train_rows(groups, geometric, AlgoState(), scores=Scores([first[0], second[0]]))
    assert not short.policy_mask.any() and long.weights.max() == pytest.approx(1 / 5)


def test_supervised_rows():
    """Mean negative log-likelihood 1.5, weight 0.1: the term is 0.15, and its gradient -weight / n a token."""
    groups = [make_group([1, 1], lengths=[2, 4], logprobs=[-9.0, -9.0])]
    scores = [row.policy_mask * np.float32(-1.5) for row in scoring_rows(groups)]
    rows = supervised_rows(groups, Scores(scores), 0.1, method().surrogate)
    value = sum(float(-(row.weights * row.advantages * now).sum()) for row, now in zip(rows, scores, strict=True))
    assert value == pytest.approx(0.15, abs=1e-6)
    np.testing.assert_allclose(rows[1].weights[rows[1].policy_mask], 0.1 / (2 * 4), rtol=1e-6)
    np.testing.assert_allclose(rows[0].logprobs_old, scores[0])  # ratio 1: every surrogate has the gradient of -log p


def test_functions_by_path_or_handed_over(monkeypatch):
    """Names that are known within a block come before paths; an inner block adds to an outer one."""
    module = types.ModuleType("my_parts")
    module.ones, module.number = lambda rewards, features, state: np.ones(len(rewards)), 3
    monkeypatch.setitem(sys.modules, "my_parts", module)

    def advantage(function):
        config = method(advantage={"kind": "custom", "function": function})
        return train_rows(batch(), config, AlgoState())[0].advantages[0]

    assert advantage("my_parts:ones") == 1
    for path in ("my_parts:missing", "no_such_module:f", "my_parts", "my_parts:number"):
        with pytest.raises(ValueError, match=r"advantage\.function"):
            advantage(path)
    with given({"mine": lambda rewards, features, state: np.full(len(rewards), 7.0)}):
        with given({"others": len}):
            assert advantage("mine") == 7
        with given({"mine": lambda rewards, features, state: np.full(len(rewards), 8.0)}):
            assert advantage("mine") == 8
        assert advantage("mine") == 7
    with pytest.raises(ValueError, match=r"advantage\.function = 'mine' .* pass the function"):
        advantage("mine")
