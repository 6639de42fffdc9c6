"""Surrogates against the vectors of the family's specification and on policy; what holds the entropy of a policy."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.method.compose import Scores, method_metrics, next_state, train_rows
from grpo_roc_jax.method.state import AlgoState
from grpo_roc_jax.method.surrogate import segment_logratio
from grpo_roc_jax.settings.cli import ConfigError
from tests.helpers.loss_batch import packed_loss
from tests.helpers.method_groups import close, make_group, method

MASK = np.array([[1, 1, 1], [1, 1, 0]], bool)
OLD = np.array([[-1, -2, -1], [-1, -1, 0]], np.float32)
NOW = np.array([[-0.7, -2.1, -1], [-1.2, -0.5, 0]], np.float32)
D = NOW - OLD
A = np.array([[1, 1, 1], [-1, -1, -1]], np.float32)


def made(kind="clip", **settings):
    return method(surrogate={"kind": kind, **settings}).surrogate


def shared_logratio(d, a, mask, segments, surrogate):
    """The log-ratio as the loss of the update gets it."""
    return surrogate.shared(jnp.asarray(d), jnp.asarray(a), jnp.asarray(mask), segments)


WHOLE = jnp.zeros((2, 3), jnp.int32)  # one segment a row


def test_single_tokens_by_hand():
    """Caps at a ratio of 6; the gate of SAPO, which saturates far away."""
    for kind, settings, d, advantage, expected in (
        ("capped_clip", {}, np.log(6.0), -1.0, 6.0),
        ("capped_clip", {"delta": 4.0}, np.log(6.0), -1.0, 4.0),
        ("capped_clip", {"dual": 3.0}, np.log(6.0), 1.0, -1.28),
        ("sapo", {"positive": 1.0}, 5.0, 1.0, -4.0),
    ):
        arrays = jnp.full((1, 1), d), jnp.full((1, 1), advantage), jnp.zeros((1, 1))
        close(made(kind, **settings).loss(*arrays)[0, 0], expected)
    ratios = jnp.array([[0.79, 0.81, 1.0, 1.27, 1.29]])
    for advantage, expected in ((-1.0, [[0], []]), (1.0, [[], [4]])):
        counted = made("cispo").clipped(jnp.log(ratios), jnp.full((1, 5), advantage), jnp.log(ratios))
        assert [np.flatnonzero(side).tolist() for side in counted] == expected


def test_tokens_that_drifted_most_are_pulled_back_by_the_linear_tail_alone():
    """By hand e^m - 1 for a token that the reference gives e^m times as much, to an estimate of 10: m = 2.61."""
    drifts = jnp.array([[1.0, 2.0, 2.6, 3.0, 4.0, 6.0]])
    for tail, beyond in (("flat", [0, 0, 0]), ("linear", [12.611, 12.611, 12.611])):
        kl = made(kl={"kind": "k3", "tail": tail}).kl
        slope = jax.grad(lambda p, kl=kl: kl.estimate(p, drifts, jnp.zeros_like(drifts)).sum())(jnp.zeros((1, 6)))
        np.testing.assert_allclose(-slope[0], [1.718, 6.389, 12.464, *beyond], atol=1e-3)


def test_segment_gradient_is_the_gradient_of_the_mean():
    """Per-token weights 1/n with the detached form equal d/dl of exp(mean d) A, computed directly."""
    mask, seg = jnp.asarray(MASK), jnp.array([[0, 0, 1], [0, 0, 0]])
    counts = np.array([[2, 2, 1], [2, 2, 1]], np.float32)

    def detached(d):
        return jnp.sum(jnp.where(mask, jnp.exp(segment_logratio(d, mask, seg)) / counts, 0.0))

    def direct(d):
        return jnp.exp((d[0, 0] + d[0, 1]) / 2) + jnp.exp(d[0, 2]) + jnp.exp((d[1, 0] + d[1, 1]) / 2)

    (value, slope), (expected, expected_slope) = (jax.value_and_grad(f)(jnp.asarray(D)) for f in (detached, direct))
    close(value, expected)
    close(slope, expected_slope, 1e-6)
    # GMPO by the slow route: clip each log-ratio on the side of its advantage only, average, exponentiate.
    surrogate = made("geometric", clip_low=0.15, clip_high=0.1)
    d = np.float32([[-0.5, 0.3, 0.05], [0.5, -0.2, 0.0]])

    def total(d):
        return jnp.sum(surrogate.loss(shared_logratio(d, A, MASK, WHOLE, surrogate), jnp.asarray(A), d) * MASK)

    first, second = np.exp(np.mean([-0.5, 0.1, 0.05])), np.exp(np.mean([0.5, -0.15]))
    value, slope = jax.value_and_grad(total)(jnp.asarray(d))
    close(value, -3 * first + 2 * second)
    close(slope, [[-first, 0, -first], [second, 0, 0]])


def test_settings_under_which_a_first_update_has_no_or_another_gradient_are_refused():
    refused = {"sapo": {"positive": 0}, "geometric": {"level": "token"}, "capped_clip": {"delta": 0.5}}
    refused |= {"cispo": {"high": 0.5}, "clip": {"clip_low": 1.0}, "clip_cov": {"bounds": [2.0, 1.0]}}
    for kind, settings in refused.items():
        with pytest.raises(ConfigError, match="surrogate"):
            made(kind, **settings)


TOKENS = [(kind, "token") for kind in ("clip", "cispo", "sapo", "ratio", "logp", "nll", "capped_clip", "dppo")]
OTHERS = [("clip", "turn"), ("clip", "sequence"), ("geometric", "sequence"), ("ratio", "sequence")]


@pytest.mark.parametrize(("kind", "level"), TOKENS + OTHERS)
def test_what_holds_for_every_surrogate(kind, level):
    """At ratio 1 a token has the gradient -A; none where A is 0; a factor of A is one of the loss."""
    surrogate = made(kind, **({} if kind in ("logp", "nll", "dppo") else {"level": level}))

    def losses(now, old, a, seg=WHOLE):
        return surrogate.loss(shared_logratio(now - old, a, MASK, seg, surrogate), a, now)

    a, turns = jnp.asarray(A) * jnp.asarray([[0.5, 2.0, 1.0]]), jnp.array([[0, 0, 1], [0, 1, 1]])
    slope = jax.grad(lambda now: jnp.sum(jnp.where(MASK, losses(now, NOW, a, turns), 0.0)))(jnp.asarray(NOW))
    np.testing.assert_allclose(slope, np.where(MASK, -a, 0), atol=1e-6)
    assert not np.asarray(jax.grad(lambda now: losses(now, OLD, jnp.zeros((2, 3))).sum())(jnp.asarray(NOW))).any()
    once, scaled = (losses(jnp.asarray(NOW), OLD, scale * jnp.asarray(A)) for scale in (1.0, 2.5))
    np.testing.assert_allclose(scaled, 2.5 * once, rtol=1e-6)
    assert surrogate.linear


P_OLD, P_NOW = np.array([[0.5, 0.5, 0.05, 0.9]]), np.array([[0.75, 0.25, 0.2, 0.65]])
SIGNS = np.array([[1.0, -1, 1, 1]], np.float32)


def dppo(now=None, a=SIGNS, **settings):
    now = jnp.asarray(np.log(P_NOW), jnp.float32) if now is None else now
    return made("dppo", **settings).loss(now - jnp.asarray(np.log(P_OLD), jnp.float32), jnp.asarray(a), now)


def inside(a=SIGNS, **settings):
    return (np.asarray(dppo(a=a, **settings)) != 0).tolist()[0]


def test_dppo_fixture():
    close(dppo(penalty=1e-3)[0], [0.000164, 0.000480, -3.998078, -0.722116])
    assert inside() == [False, False, True, True]
    for settings in {"low": 0.26, "high": 0.24}, {"divergence": "two_sided", "low": 0.3, "high": 0.2}:
        assert inside(**settings) == [False, True, True, True], "each side has its bound"
    assert inside(a=-SIGNS) == [True] * 3 + [False], "a token that returns against its advantage is never out of bounds"
    slope = jax.grad(lambda now: dppo(now).sum())(jnp.asarray(np.log(P_NOW), jnp.float32))
    close(slope[0], [0, 0, -4, -0.722222])
    # The divergences of the specification, each found between two bounds.
    assert inside(divergence="kl", low=0.05, high=0.05) == [False, False, False, True]
    for token, (sign, size) in enumerate(zip([1, -1, 1, -1], [0.143841, 0.143841, 0.093943, 0.167604], strict=True)):
        a = np.full((1, 4), sign, np.float32)
        for bound, expected in [(size + 2e-6, True), (size - 2e-6, False)]:
            assert inside(a, divergence="kl", low=bound, high=bound)[token] == expected


SAMPLED, CURRENT = np.array([[-0.2, -1.9], [-0.2, -2.5]]), np.array([[-0.1, -2.0], [-0.2, -3.0]])
"""The vector of the specification: A = 1, 1, -1, -1, and covariances 1.225, -0.675, -1.125, 1.675."""
RATIOS, SIGNED = np.exp(CURRENT - SAMPLED).ravel(), np.array([1, 1, -1, -1])


def group(rewards=(1, -1), old=SAMPLED, **more):
    return make_group(rewards, lengths=[2, 2], logprobs=list(old), **more)


def signed(**surrogate):
    """A method whose advantages are the rewards: +1 for success and -1 for failure."""
    return method(2, advantage={"baseline": "none", "scale": "none"}, surrogate=surrogate)


def rows_of(config, seed=0):
    """(rows, log-probabilities of the policy about to be updated)."""
    some = group()
    scores = [
        np.pad(np.float32(values), (t.prompt_length, 0)) for t, values in zip(some.trajectories, CURRENT, strict=True)
    ]
    return train_rows([some], config, AlgoState(), rng=np.random.default_rng(seed), scores=Scores(scores)), scores


def on_mask(arrays, rows):
    return np.concatenate([np.asarray(array)[row.policy_mask] for array, row in zip(arrays, rows, strict=True)])


def marked(seed=0, **surrogate):
    """The places of the tokens that the surrogate treats differently."""
    rows, _ = rows_of(signed(**surrogate), seed=seed)
    return np.flatnonzero(on_mask([row.marked for row in rows], rows)).tolist()


def test_clip_cov_draws_among_high_covariances():
    config = signed(kind="clip_cov")
    places = [marked(seed, kind="clip_cov") for seed in range(8)]
    assert sorted({index for (index,) in places}) == [0, 3], "a random one of the two candidates"
    rows, scores = rows_of(config)
    packed, mask = packed_loss(rows, config.surrogate, scores), np.arange(4) != places[0][0]
    assert packed.loss == pytest.approx(-(RATIOS * SIGNED)[mask].sum() / 4, abs=1e-5), "the dropped token counts"
    np.testing.assert_allclose(on_mask(packed.slopes, rows), np.where(mask, -RATIOS * SIGNED / 4, 0), atol=1e-5)
    assert "marked" in packed.sums
    assert marked(kind="clip_cov", share=1.0, clip_low=0.4, clip_high=0.05) == [3], "clipped ones are no candidates"


def test_kl_cov_fixture():
    config = signed(kind="kl_cov")
    assert marked(kind="kl_cov") == [3] and len(marked(kind="kl_cov", share=0.5)) == 2
    rows, scores = rows_of(config)
    packed = packed_loss(rows, config.surrogate, scores)
    assert packed.loss == pytest.approx(np.mean([-1.105171, -0.904837, 1, 1.106531]), abs=1e-5)


def test_the_entropy_bonus():
    """The vector of the specification: H = 0.1, 0.15, 0.25, 0.3, 0.1 about a target of 0.2."""

    def bonus(**settings):
        return method(2, advantage={"adjust": [{"kind": "entropy_bonus", **settings}]})

    config, state, coefficients = bonus(), AlgoState(), []
    for entropy in (0.1, 0.15, 0.25, 0.3, 0.1):
        groups = [group(old=np.full((2, 2), -entropy))]
        (applied,) = {row.entropy_coefficient for row in train_rows(groups, config, state)}
        metrics = method_metrics(groups, config, state, Scores())
        assert metrics == {"entropy/coefficient": applied, "entropy/sampled": pytest.approx(entropy)}
        state = next_state(groups, groups, config, state)
        coefficients.append((state.recall("entropy_coefficient", -1), applied > 0))
        assert applied in (0, state.recall("entropy_coefficient", -1))
    np.testing.assert_allclose([a for a, _ in coefficients], [1e-4, 2e-4, 1e-4, 0, 1e-4], atol=1e-12)
    assert [on for _, on in coefficients] == [True, True, False, False, True]
    assert train_rows(groups, bonus(start=0.5, most=5e-3), AlgoState())[0].entropy_coefficient == 5e-3
    # Its gradient by the entropy of a token is -a times the token's weight.
    config = bonus(start=0.01, step=0, most=1, target=9)
    rows, scores = rows_of(config)
    plain = [replace(row, entropy_coefficient=None) for row in rows]
    rewarded, without = (packed_loss(some, config.surrogate, scores, entropy=2.0) for some in (rows, plain))
    for row, slope in zip(rows, rewarded.by_entropy, strict=True):
        np.testing.assert_allclose(slope, np.where(row.policy_mask, -0.01 / 4, 0), atol=1e-8)
    assert without.loss - rewarded.loss == pytest.approx(0.01 * 2.0, abs=1e-6) and "marked" not in without.sums
    assert not np.concatenate(without.by_entropy).any()


@pytest.mark.parametrize("kind", ["clip", "capped_clip", "cispo"])
def test_what_the_ratio_is_taken_against(kind):
    """Whether that is a scoring pass, and whether it is the log-probabilities of the update itself."""
    for choice, expected in {"recorded": (False, False), "scored": (True, False), "current": (False, True)}.items():
        surrogate = made(kind, old_logprobs=choice)
        assert (surrogate.scored_ratio, surrogate.own_ratio) == expected
