"""Clip-Cov, KL-Cov and the adaptive entropy bonus, from groups to the gradient of the packed batch."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.learner.loss import batch_loss
from grpo_roc_jax.learner.pack import BatchConfig, pack, unpack
from grpo_roc_jax.method.compose import Scores, method_metrics, next_state, train_rows
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.settings.cli import ConfigError
from tests.helpers.loss_batch import micro_batches
from tests.helpers.method_groups import make_group, method

OLD, NOW = np.array([[-0.2, -1.9], [-0.2, -2.5]]), np.array([[-0.1, -2.0], [-0.2, -3.0]])
"""The vector of the specification: A = 1, 1, -1, -1, and covariances 1.225, -0.675, -1.125, 1.675."""


def group(old=OLD):
    return make_group([1, -1], lengths=[len(row) for row in old], logprobs=list(old))


def signed(**sections):
    """A method whose advantages are the rewards: +1 for success and -1 for failure."""
    return method(2, advantage={"baseline": "none", "scale": "none"}, **sections)


def rows_of(config, now=NOW, seed=0):
    some = group()
    masks = [t.policy_mask for t in some.trajectories]
    scores = [np.zeros(len(mask), np.float32) for mask in masks]
    for score, mask, values in zip(scores, masks, now, strict=True):
        score[mask] = values
    return train_rows([some], config, AlgoState(), rng=np.random.default_rng(seed), scores=Scores(scores)), scores


def on_device(rows, scores, surrogate, entropy=0.0):
    """(loss, its gradients by the log-probabilities and by the entropies)."""
    batch, placement = pack(rows, BatchConfig(row_length=16, rows=1), 1)
    (part,) = micro_batches(batch)
    moved = [replace(row, logprobs_old=score) for row, score in zip(rows, scores, strict=True)]
    now = jnp.asarray(pack(moved, BatchConfig(row_length=16, rows=1), 1)[0].logprobs_old[0])

    def value(now, entropy):
        value, sums = batch_loss(now, entropy, part, surrogate)
        assert ("marked" in sums) == (part.marked is not None)
        return value

    loss, slopes = jax.value_and_grad(value, argnums=(0, 1))(now, jnp.full(now.shape, entropy))
    return float(loss), *(unpack(np.asarray(slope)[None], placement) for slope in slopes)


def marked(rows):
    return [row.marked[row.policy_mask].tolist() for row in rows]


def test_clip_cov_draws_among_high_covariances():
    config = signed(surrogate={"kind": "clip_cov"})
    places = [np.flatnonzero(np.concatenate(marked(rows_of(config, seed=seed)[0]))).tolist() for seed in range(8)]
    assert sorted({index for (index,) in places}) == [0, 3], "a random one of the two candidates"
    rows, scores = rows_of(config)
    value, slopes, _ = on_device(rows, scores, config.surrogate)
    ratio, a, mask = np.exp(NOW - OLD).ravel(), np.array([1, 1, -1, -1]), np.arange(4) != places[0][0]
    assert value == pytest.approx(-(ratio * a)[mask].sum() / 4, abs=1e-5), "the dropped token stays in the count"
    gradient = np.concatenate([s[row.policy_mask] for s, row in zip(slopes, rows, strict=True)])
    np.testing.assert_allclose(gradient, np.where(mask, -ratio * a / 4, 0), atol=1e-5)


def test_clip_cov_leaves_clipped_tokens_to_the_clip():
    tight = signed(surrogate={"kind": "clip_cov", "clip_low": 0.2, "clip_high": 0.05, "share": 1.0})
    assert not np.concatenate(marked(rows_of(tight)[0])).any(), "ratios 1.105 and 0.607 of both candidates are clipped"
    wide = signed(surrogate={"kind": "clip_cov", "clip_low": 0.4, "clip_high": 0.05, "share": 1.0})
    assert marked(rows_of(wide)[0]) == [[False, False], [False, True]]
    assert marked(rows_of(signed(surrogate={"kind": "clip_cov", "bounds": [1.0, 1.5], "share": 1.0}))[0]) == [
        [True, False],
        [False, False],
    ]


def test_kl_cov_fixture():
    config = signed(surrogate="kl_cov")
    rows, scores = rows_of(config)
    assert marked(rows) == [[False, False], [False, True]]
    value, slopes, _ = on_device(rows, scores, config.surrogate)
    losses = np.array([-1.105171, -0.904837, 1, 1.106531])
    assert value == pytest.approx(losses.mean(), abs=1e-5)
    gradient = np.concatenate([s[row.policy_mask] for s, row in zip(slopes, rows, strict=True)])
    np.testing.assert_allclose(gradient, np.array([-1.105171, -0.904837, 1, 0.606531 - 1]) / 4, atol=1e-5)
    rows, scores = rows_of(config, now=OLD)
    assert on_device(rows, scores, config.surrogate)[1][1][-1] == pytest.approx(0.25), "no penalty before a change"
    assert np.concatenate(marked(rows_of(signed(surrogate={"kind": "kl_cov", "share": 0.5}))[0])).sum() == 2


def test_masked_tokens_have_no_part_in_covariances():
    config = signed(surrogate="kl_cov", weights={"masks": ["truncated"]})
    cut = make_group([1, -1], lengths=[2, 2], logprobs=list(OLD), stop=["answer", "length"])
    rows = train_rows([cut], config, AlgoState(), scores=Scores([t.logprobs for t in cut.trajectories]))
    assert rows[0].marked.any() and not rows[1].marked.any()
    none = make_group([-1, -1], lengths=[2, 2], logprobs=list(OLD), stop=["length", "length"])
    rows = train_rows([none], config, AlgoState(), scores=Scores([t.logprobs for t in none.trajectories]))
    assert not any(row.marked.any() for row in rows)


@pytest.mark.parametrize("wrong", [{"clip_low": 1.1}, {"bounds": [2.0, 1.0]}, {"share": 0.0}, {"clip_high": -1.0}])
def test_impossible_settings(wrong):
    with pytest.raises(ConfigError, match="surrogate"):
        signed(surrogate={"kind": "clip_cov", **wrong})


def bonus(**settings):
    return method(2, advantage={"adjust": [{"kind": "entropy_bonus", **settings}]})


def test_the_coefficient_follows_the_target():
    """The vector of the specification: H = 0.1, 0.15, 0.25, 0.3, 0.1 about a target of 0.2."""
    config, state, coefficients = bonus(), AlgoState(), []
    for entropy in (0.1, 0.15, 0.25, 0.3, 0.1):
        groups = [group(np.full((2, 2), -entropy))]
        (applied,) = {row.entropy_coefficient for row in train_rows(groups, config, state)}
        metrics = method_metrics(groups, config, state, Scores())
        assert metrics == {"entropy/coefficient": applied, "entropy/sampled": pytest.approx(entropy)}
        state = next_state(groups, groups, config, state)
        coefficients.append((state.recall("entropy_coefficient", -1), applied > 0))
        assert applied in (0, state.recall("entropy_coefficient", -1))
    np.testing.assert_allclose([a for a, _ in coefficients], [1e-4, 2e-4, 1e-4, 0, 1e-4], atol=1e-12)
    assert [on for _, on in coefficients] == [True, True, False, False, True]
    restored = AlgoState.from_tree(state.to_tree())
    assert restored.recall("entropy_coefficient", -1) == state.recall("entropy_coefficient", -1)
    assert next_state(groups, [], config, state).memory == state.memory, "a step that trains nothing changes nothing"


def test_the_coefficient_has_a_range():
    groups = [group(np.full((2, 2), -0.1))]
    high = bonus(start=0.5, most=5e-3)
    assert train_rows(groups, high, AlgoState())[0].entropy_coefficient == 5e-3
    constant = bonus(start=1e-3, step=0.0, target=1e9)
    assert train_rows(groups, constant, AlgoState())[0].entropy_coefficient == 1e-3
    assert train_rows(groups, method(2), AlgoState())[0].entropy_coefficient is None


def test_the_loss_rewards_entropy():
    """Its gradient by the entropy of a token is -a times the token's weight, with and without importance weights."""
    for importance in ([], [{"kind": "truncated_is", "high": 9}]):
        config = method(
            2,
            advantage={"adjust": [{"kind": "entropy_bonus", "start": 0.01, "step": 0, "most": 1, "target": 9}]},
            weights={"factors": importance},
            surrogate={"old_logprobs": "scored"},
        )
        rows, scores = rows_of(config)
        with_bonus, slopes, by_entropy = on_device(rows, scores, config.surrogate, entropy=2.0)
        for row, slope in zip(rows, by_entropy, strict=True):
            np.testing.assert_allclose(slope, np.where(row.policy_mask, -0.01 / 4, 0), atol=1e-8)
        plain = [replace(row, entropy_coefficient=None) for row in rows]
        without, same, nothing = on_device(plain, scores, config.surrogate, entropy=2.0)
        assert without - with_bonus == pytest.approx(0.01 * 2.0, abs=1e-6)
        np.testing.assert_array_equal(np.concatenate(slopes), np.concatenate(same))
        assert not np.concatenate(nothing).any()
