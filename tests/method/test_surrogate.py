"""Surrogates against the fixture F of the family's specification, finite differences and their limits on policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.method.divergence import kl_estimate
from grpo_roc_jax.method.surrogate import clipped_surrogate, segment_logratio
from grpo_roc_jax.settings.cli import ConfigError
from tests.helpers.method_groups import method

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


def token_mean(loss):
    return float((np.asarray(loss) * MASK).sum() / MASK.sum())


def sequence_mean(loss):
    return float(((np.asarray(loss) * MASK).sum(1) / MASK.sum(1)).mean())


def clip(low=0.2, high=0.2, d=D, a=A, **rest):
    return np.asarray(clipped_surrogate(jnp.asarray(d), jnp.asarray(a), clip_low=low, clip_high=high, **rest))


def test_clip_fixture():
    loss = clip()
    np.testing.assert_allclose(loss[0], [-1.2, -0.904837, -1], atol=1e-5)
    np.testing.assert_allclose(loss[1, :2], [0.818731, 1.648721], atol=1e-5)
    assert sequence_mean(loss) == pytest.approx(0.099390, abs=1e-5)
    assert token_mean(loss) == pytest.approx(-0.127477, abs=1e-5)
    assert float((loss * MASK).sum() / 2) == pytest.approx(-0.318693, abs=1e-5)
    assert float((loss * MASK).sum() / 6) == pytest.approx(-0.106231, abs=1e-5)


def test_clip_higher_fixture():
    loss = clip(high=0.28)
    assert loss[0, 0] == pytest.approx(-1.28, abs=1e-5)
    assert token_mean(loss) == pytest.approx(-0.143477, abs=1e-5)
    assert sequence_mean(loss) == pytest.approx(0.086057, abs=1e-5)


def test_dual_clip_and_delta():
    def one(ratio, **rest):
        return clip(d=np.log([[ratio]]).astype(np.float32), a=np.array([[-1.0]], np.float32), **rest)

    assert one(4.0)[0, 0] == pytest.approx(4.0, abs=1e-5)
    assert one(4.0, clip_dual=3.0)[0, 0] == pytest.approx(3.0, abs=1e-5)
    assert one(6.0, clip_delta=4.0)[0, 0] == pytest.approx(4.0, abs=1e-5)
    positive = clip(clip_dual=3.0)
    np.testing.assert_allclose(positive, clip(), atol=1e-6)  # neither ratio is above 3
    arrays = jnp.log(jnp.array([[6.0]])), jnp.array([[-1.0]]), jnp.zeros((1, 1))
    for settings, expected in [({"dual": 3.0}, 3.0), ({"delta": 4.0}, 4.0), ({"dual": 3.0, "delta": 2.0}, 2.0)]:
        assert float(made("capped_clip", **settings).loss(*arrays)[0, 0]) == pytest.approx(expected, abs=1e-5)


def test_bounds_that_metrics_count_as_clipped():
    assert made(clip_low=0.1, clip_high=0.3).clip_bounds == (0.1, 0.3, 0.0)
    assert made("capped_clip", dual=3.0).clip_bounds == (0.2, 0.28, 3.0)
    assert made("cispo").clip_bounds == (0.2, 0.28, 0.0)
    ratios = jnp.array([[0.79, 0.81, 1.0, 1.27, 1.29]])
    for advantage, expected in ((-1.0, [[0], []]), (1.0, [[], [4]])):
        counted = made("cispo").clipped(jnp.log(ratios), jnp.full((1, 5), advantage), jnp.log(ratios))
        assert [np.flatnonzero(side).tolist() for side in counted] == expected


def test_kl_fixture():
    ref = np.array([[-1, -2, -1.1], [-1, -0.8, 0]], np.float32)
    k3 = np.asarray(kl_estimate("k3", jnp.asarray(NOW - ref), xp=jnp))
    np.testing.assert_allclose(k3[0], [0.040818, 0.005171, 0.004837], atol=1e-5)
    np.testing.assert_allclose(k3[1, :2], [0.021403, 0.040818], atol=1e-5)
    assert token_mean(k3) == pytest.approx(0.022610, abs=1e-5)
    np.testing.assert_allclose(kl_estimate("k1", jnp.asarray(NOW - ref)), NOW - ref, atol=1e-6)
    np.testing.assert_allclose(kl_estimate("k2", jnp.asarray(NOW - ref)), (NOW - ref) ** 2 / 2, atol=1e-6)
    with pytest.raises(ValueError, match="k4"):
        kl_estimate("k4", jnp.asarray(NOW - ref))


def pull(tail):
    """m -> what the divergence adds to the gradient of a token's log-probability, for a token that the reference gives
    e^m times the probability: `none` for k3 without a bound, as in TRL."""
    if tail == "none":
        return lambda m: jnp.expm1(m)
    kl = made(kl={"kind": "k3", "tail": tail}).kl

    def estimate(logprobs, m):
        return kl.estimate(logprobs, m, jnp.zeros_like(m)).sum()

    return lambda m: -jax.grad(estimate)(jnp.zeros((1, len(m))), m[None])[0]


def test_tokens_that_drifted_most_are_pulled_back_by_the_linear_tail_alone():
    """By hand e^m - 1 up to an estimate of 10, where m = 2.61; beyond, nothing or the slope there."""
    drifts = jnp.array([1.0, 2.0, 2.6, 3.0, 4.0, 6.0])
    np.testing.assert_allclose(pull("flat")(drifts), [1.718, 6.389, 12.464, 0, 0, 0], atol=1e-3)
    np.testing.assert_allclose(pull("linear")(drifts), [1.718, 6.389, 12.464, 12.611, 12.611, 12.611], atol=1e-3)
    np.testing.assert_allclose(pull("none")(drifts), [1.718, 6.389, 12.464, 19.086, 53.598, 402.429], atol=1e-3)


def recovery(drift, tail, *, coef=0.04, reached=0.5, most=3000):
    """Steps of gradient descent on the expected divergence alone, at a rate of 1 for the logits of 8 tokens, until a
    token of reference probability 1/2 that lost `drift` nats is within `reached` of it."""
    reference = jnp.log(jnp.array([0.5] + [0.5 / 7] * 7, jnp.float32))
    slope = pull(tail)

    def step(state):
        logits, steps = state
        p = jax.nn.softmax(logits)
        gradient = -p * slope(reference - jnp.log(p))
        return logits - coef * (gradient - p * gradient.sum()), steps + 1

    def away(state):
        logits, steps = state
        return (reference[0] - jax.nn.log_softmax(logits)[0] > reached) & (steps < most)

    return int(jax.lax.while_loop(away, step, (reference.at[0].add(-drift), 0))[1])


def test_how_long_a_token_that_drifted_takes_to_come_back():
    """The figures of docs/methods.md: 4 nats take 187, 203 and 1,495 steps."""
    assert [recovery(2.0, tail) for tail in ("none", "linear", "flat")] == [89, 89, 89]
    steps = np.array([recovery(4.0, tail) for tail in ("none", "linear", "flat")])
    np.testing.assert_allclose(steps, [187, 203, 1495], rtol=0.01)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimates_the_divergence(kind):
    """Expectation over the policy's own tokens: k1 and k3 are exact, k2 to second order."""
    p, q = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.45, 0.33, 0.22])
    expected = float(jnp.sum(p * jnp.log(p / q)))
    estimate = float(jnp.sum(p * kl_estimate(kind, jnp.log(p) - jnp.log(q), xp=jnp)))
    assert estimate == pytest.approx(expected, abs=1e-6 if kind != "k2" else 2e-4)


def segments(rows):
    return jnp.asarray(rows, jnp.int32)


def test_segment_fixture():
    shared = segment_logratio(jnp.asarray(D), jnp.asarray(MASK), segments([[0, 0, 1], [0, 1, 0]]))
    np.testing.assert_allclose(np.exp(shared[0]), [1.105171, 1.105171, 1], atol=1e-5)
    np.testing.assert_allclose(np.exp(shared[1, :2]), [0.818731, 1.648721], atol=1e-5)


def test_gspo_fixture():
    surrogate = made(level="sequence", clip_low=3e-4, clip_high=4e-4)
    shared = shared_logratio(D, A, MASK, segments(np.zeros((2, 3), int)), surrogate)
    np.testing.assert_allclose(np.exp(shared)[:, 0], [1.068939, 1.161834], atol=1e-5)
    loss = surrogate.loss(shared, jnp.asarray(A), jnp.asarray(NOW))
    np.testing.assert_allclose(loss[:, 0], [-1.0004, 1.161834], atol=1e-5)
    assert sequence_mean(loss) == pytest.approx(0.080717, abs=1e-5)


def test_every_token_its_own_segment_is_the_token_ratio():
    shared = segment_logratio(jnp.asarray(D), jnp.asarray(MASK), segments([[0, 1, 2], [2, 1, 0]]))
    np.testing.assert_allclose(np.where(MASK, shared, 0), np.where(MASK, D, 0), atol=1e-6)


def test_masked_tokens_stay_out_of_segments():
    d = D.copy()
    d[1, 2] = 100.0
    shared = segment_logratio(jnp.asarray(d), jnp.asarray(MASK), segments(np.zeros((2, 3), int)))
    assert float(shared[1, 0]) == pytest.approx(0.15, abs=1e-6)


def test_segment_gradient_is_the_gradient_of_the_mean():
    """Per-token weights 1/n with the detached form equal d/dl of exp(mean d) A, computed directly."""
    mask, seg = jnp.asarray(MASK), segments([[0, 0, 1], [0, 0, 0]])
    counts = np.array([[2, 2, 1], [2, 2, 1]], np.float32)

    def detached(d):
        return jnp.sum(jnp.where(mask, jnp.exp(segment_logratio(d, mask, seg)) / counts, 0.0))

    def direct(d):
        return jnp.exp((d[0, 0] + d[0, 1]) / 2) + jnp.exp(d[0, 2]) + jnp.exp((d[1, 0] + d[1, 1]) / 2)

    np.testing.assert_allclose(jax.grad(detached)(jnp.asarray(D)), jax.grad(direct)(jnp.asarray(D)), atol=1e-6)
    assert float(detached(jnp.asarray(D))) == pytest.approx(float(direct(jnp.asarray(D))), abs=1e-5)


def cispo(*arrays, **settings):
    return made("cispo", **settings).loss(*arrays)


def sapo(d, a, **settings):
    return made("sapo", **settings).loss(d, a, jnp.zeros_like(d))


def test_cispo_fixture():
    arrays = jnp.asarray(D), jnp.asarray(A), jnp.asarray(NOW)
    loss = np.asarray(cispo(*arrays, low=0.0, high=5.0))
    np.testing.assert_allclose(loss[0], [0.944901, 1.900159, 1], atol=1e-5)
    np.testing.assert_allclose(loss[1, :2], [-0.982477, -0.824361], atol=1e-5)
    assert token_mean(loss) == pytest.approx(0.407645, abs=1e-5)
    assert token_mean(cispo(*arrays, low=0.8, high=1.28)) == pytest.approx(0.434736, abs=1e-5)


def test_cispo_keeps_a_gradient_beyond_the_cap():
    slope = jax.grad(lambda now: cispo(now - OLD, jnp.asarray(A), now, low=0.0, high=1.1).sum())(jnp.asarray(NOW))
    assert float(slope[0, 0]) == pytest.approx(-1.1, abs=1e-5)
    clipped = jax.grad(lambda now: clipped_surrogate(now - OLD, jnp.asarray(A), clip_low=0.1, clip_high=0.1).sum())(
        jnp.asarray(NOW)
    )
    assert float(clipped[0, 0]) == 0.0


def test_geometric():
    """GMPO by the slow route: clip each log-ratio on the side of its advantage, average, exponentiate."""
    surrogate = made("geometric", clip_low=0.15, clip_high=0.1)
    shared = shared_logratio(D, A, MASK, segments(np.zeros((2, 3), int)), surrogate)
    loss = np.asarray(surrogate.loss(shared, jnp.asarray(A), jnp.asarray(NOW)))
    first = np.exp(np.mean([min(0.3, 0.1), min(-0.1, 0.1), 0.0]))
    second = np.exp(np.mean([max(-0.2, -0.15), max(0.5, -0.15)]))
    np.testing.assert_allclose([loss[0, 0], loss[1, 0]], [-first, second], atol=1e-5)

    def total(now):
        shared = shared_logratio(now - OLD, A, MASK, segments(np.zeros((2, 3), int)), surrogate)
        return jnp.sum(surrogate.loss(shared, jnp.asarray(A), now) * MASK)

    slope = jax.grad(total)(jnp.asarray(NOW))
    assert float(slope[0, 0]) == 0.0  # clipped token
    assert float(slope[0, 1]) == pytest.approx(-first, abs=1e-5)


def test_geometric_cuts_no_token_on_the_other_side():
    """Far below the bounds with a positive advantage, far above them with a negative one."""
    surrogate = made("geometric", clip_low=0.15, clip_high=0.1)
    d = np.float32([[-0.5, 0.05, 0.0], [0.5, -0.05, 0.0]])
    shared = shared_logratio(d, A, MASK, segments(np.zeros((2, 3), int)), surrogate)
    loss = np.asarray(surrogate.loss(shared, jnp.asarray(A), jnp.asarray(NOW)))
    np.testing.assert_allclose([loss[0, 0], loss[1, 0]], [-np.exp(-0.15), np.exp(0.225)], atol=1e-5)


def test_sapo_gate():
    """Slope 1 at ratio 1, saturating far away."""
    slope = jax.grad(lambda d: sapo(d, jnp.asarray(A), positive=1.0, negative=1.05).sum())(jnp.zeros((2, 3)))
    np.testing.assert_allclose(slope, -A, atol=1e-6)
    value = sapo(jnp.full((1, 1), 5.0), jnp.ones((1, 1)), positive=1.0, negative=1.0)
    assert float(value[0, 0]) == pytest.approx(-4.0, abs=1e-5)
    assert float(sapo(jnp.zeros((1, 1)), jnp.ones((1, 1)), positive=2.0, negative=1.0)[0, 0]) == pytest.approx(-1.0)


KINDS = [
    ("clip", "token"),
    ("clip", "turn"),
    ("clip", "sequence"),
    ("cispo", "token"),
    ("sapo", "token"),
    ("geometric", "sequence"),
    ("ratio", "token"),
    ("ratio", "sequence"),
    ("logp", "token"),
    ("nll", "token"),
    ("capped_clip", "token"),
    ("dppo", "token"),
]


def at_level(kind, level):
    """A surrogate of a kind; some know no level."""
    return made(kind, **({} if kind in ("logp", "nll", "dppo") else {"level": level}))


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_on_policy_gradient_is_the_policy_gradient(kind, level):
    """At ratio 1 the per-token gradient is -A, whatever the surrogate."""
    surrogate = at_level(kind, level)
    a = jnp.asarray(A) * jnp.asarray([[0.5, 2.0, 1.0]])

    def total(now):
        d = shared_logratio(now - NOW, a, MASK, segments([[0, 0, 1], [0, 1, 1]]), surrogate)
        return jnp.sum(jnp.where(MASK, surrogate.loss(d, a, now), 0.0))

    np.testing.assert_allclose(jax.grad(total)(jnp.asarray(NOW)), np.where(MASK, -a, 0), atol=1e-6)


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_zero_advantage_is_zero_gradient(kind, level):
    surrogate = at_level(kind, level)

    def total(now):
        zeros = jnp.zeros((2, 3))
        d = shared_logratio(now - OLD, zeros, MASK, segments(np.zeros((2, 3), int)), surrogate)
        return jnp.sum(surrogate.loss(d, zeros, now))

    assert not np.asarray(jax.grad(total)(jnp.asarray(NOW))).any()


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_a_positive_factor_of_the_advantage_is_one_of_the_loss(kind, level):
    """So importance weights may scale the advantages."""
    surrogate, a = at_level(kind, level), jnp.asarray(A)
    some = [
        surrogate.loss(shared_logratio(D, scale * a, MASK, segments(np.zeros((2, 3), int)), surrogate), scale * a, NOW)
        for scale in (1.0, 2.5)
    ]
    np.testing.assert_allclose(some[1], 2.5 * np.asarray(some[0]), rtol=1e-6)


@pytest.mark.parametrize("kind", ["clip", "sapo", "ratio"])
def test_gradient_off_policy_by_finite_differences(kind):
    """Token ratios; the detached segment form is held to the direct mean above."""
    surrogate = made(kind, **({"clip_low": 0.15, "clip_high": 0.25} if kind == "clip" else {}))

    def total(now):
        return jnp.sum(surrogate.loss(now - OLD, jnp.asarray(A), now))

    slope = jax.grad(total)(jnp.asarray(NOW))
    for index in np.ndindex(*NOW.shape):
        step = np.zeros_like(NOW)
        step[index] = 1e-2
        numeric = float(total(jnp.asarray(NOW + step)) - total(jnp.asarray(NOW - step))) / 2e-2
        assert float(slope[index]) == pytest.approx(numeric, abs=3e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_low": 1.0},
        {"clip_high": -0.1},
        {"kind": "capped_clip", "dual": 0.5},
        {"kind": "capped_clip", "delta": -1.0},
        {"kind": "geometric", "level": "token"},
        {"kind": "sapo", "dual": 3.0},
        {"kl": {"kind": "k3", "coef": -0.1}},
    ],
)
def test_impossible_settings(settings):
    with pytest.raises(ConfigError, match=r"surrogate"):
        method(surrogate=settings)


P_OLD, P_NOW = np.array([[0.5, 0.5, 0.05, 0.9]]), np.array([[0.75, 0.25, 0.2, 0.65]])
SIGNS = np.array([[1.0, -1, 1, 1]], np.float32)


def dppo(now=None, a=SIGNS, **settings):
    now = jnp.asarray(np.log(P_NOW), jnp.float32) if now is None else now
    return made("dppo", **settings).loss(now - jnp.asarray(np.log(P_OLD), jnp.float32), jnp.asarray(a), now)


def kept(a=SIGNS, **settings):
    return (np.asarray(dppo(a=a, **settings)) != 0).tolist()[0]


def test_dppo_fixture():
    found = dppo(penalty=1e-3)
    np.testing.assert_allclose(found[0], [0.000164, 0.000480, -3.998078, -0.722116], atol=1e-5)
    assert float(found.mean()) == pytest.approx(-1.179887, abs=1e-5)
    assert kept() == [False, False, True, True]
    assert kept(low=0.26, high=0.24) == [False, True, True, True], "each side has its bound"
    assert kept(a=-SIGNS) == [True] * 3 + [False], "a token that returns against its advantage is never out of bounds"
    slope = jax.grad(lambda now: dppo(now).sum())(jnp.asarray(np.log(P_NOW), jnp.float32))
    np.testing.assert_allclose(slope[0], [0, 0, -4, -0.722222], atol=1e-5)


def test_dppo_by_binary_kl():
    """The divergences of the specification, each found between two bounds."""
    assert kept(divergence="kl", low=0.05, high=0.05) == [False, False, False, True]
    for token, (sign, size) in enumerate(zip([1, -1, 1, -1], [0.143841, 0.143841, 0.093943, 0.167604], strict=True)):
        a = np.full((1, 4), sign, np.float32)
        for bound, expected in [(size + 2e-6, True), (size - 2e-6, False)]:
            assert kept(a, divergence="kl", low=bound, high=bound)[token] == expected
    certain = made("dppo", divergence="kl").loss(jnp.zeros((1, 1)), jnp.ones((1, 1)), jnp.zeros((1, 1)))
    assert float(certain[0, 0]) == -1, "p = p_old = 1"


def test_dppo_two_sided():
    assert kept(divergence="two_sided", low=0.1, high=0.1) == [False] * 4
    assert kept(divergence="two_sided", low=0.3, high=0.2) == [False, True, True, True]


def test_tokens_out_of_bounds_are_counted():
    low, high = made("dppo").clipped(jnp.log(P_NOW / P_OLD), jnp.asarray(SIGNS), jnp.log(P_NOW))
    assert low.tolist() == [[False, True, False, False]] and high.tolist() == [[True, False, False, False]]
    low, high = made(clip_low=0.4, clip_high=2.0).clipped(jnp.log(P_NOW / P_OLD), jnp.asarray(SIGNS), jnp.log(P_NOW))
    assert low.tolist() == [[False, True, False, False]] and high.tolist() == [[False, False, True, False]]


@pytest.mark.parametrize("kind", ["clip", "capped_clip", "cispo"])
def test_what_the_ratio_is_taken_against(kind):
    """(a scoring pass, the log-probabilities of the update itself)"""
    choices = {"recorded": (False, False), "scored": (True, False), "current": (False, True)}
    for choice, wanted in choices.items():
        one = made(kind, old_logprobs=choice)
        assert (one.scored_ratio, one.own_ratio) == wanted
