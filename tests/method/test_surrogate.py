"""Surrogates against the fixture F of the family's specification, finite differences and their limits on policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.method.surrogate import segment_logratio
from grpo_roc_jax.settings.cli import ConfigError
from tests.helpers.method_groups import close, method

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


def segments(rows):
    return jnp.asarray(rows, jnp.int32)


WHOLE = segments(np.zeros((2, 3)))
"""One segment a row."""
CLIPPED = [-1.2, -0.904837, -1], [0.818731, 1.648721]


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("clip", {"clip_high": 0.2}, CLIPPED),
        ("clip", {"clip_high": 0.28}, ([-1.28, -0.904837, -1], CLIPPED[1])),
        ("capped_clip", {"clip_high": 0.2, "dual": 3.0, "delta": 4.0}, CLIPPED),
        ("clip", {"level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}, ([-1.0004] * 3, [1.161834] * 2)),
        ("cispo", {"low": 0.0, "high": 5.0}, ([0.944901, 1.900159, 1], [-0.982477, -0.824361])),
        ("cispo", {"low": 0.8, "high": 1.28}, ([0.896, 1.900159, 1], [-0.982477, -0.64])),
    ],
)
def test_losses_by_hand(kind, settings, expected):
    """Of the tokens of each row; their means are in `test_compose.test_grpo_loss_by_hand`."""
    surrogate = made(kind, **settings)
    loss = surrogate.loss(shared_logratio(D, A, MASK, WHOLE, surrogate), jnp.asarray(A), jnp.asarray(NOW))
    close(loss[0], expected[0])
    close(loss[1, :2], expected[1])


@pytest.mark.parametrize(
    ("settings", "advantage", "expected"),
    [
        ({}, -1.0, 6.0),
        ({"dual": 3.0}, -1.0, 3.0),
        ({"delta": 4.0}, -1.0, 4.0),
        ({"dual": 3.0, "delta": 2.0}, -1.0, 2.0),
        ({"dual": 3.0}, 1.0, -1.28),
    ],
)
def test_caps_at_a_ratio_of_6(settings, advantage, expected):
    arrays = jnp.log(jnp.array([[6.0]])), jnp.array([[advantage]]), jnp.zeros((1, 1))
    close(made("capped_clip", **settings).loss(*arrays)[0, 0], expected)


def test_bounds_that_metrics_count_as_clipped():
    assert made(clip_low=0.1, clip_high=0.3).clip_bounds == (0.1, 0.3, 0.0)
    assert made("capped_clip", dual=3.0).clip_bounds == (0.2, 0.28, 3.0)
    assert made("cispo").clip_bounds == (0.2, 0.28, 0.0)
    ratios = jnp.array([[0.79, 0.81, 1.0, 1.27, 1.29]])
    for advantage, expected in ((-1.0, [[0], []]), (1.0, [[], [4]])):
        counted = made("cispo").clipped(jnp.log(ratios), jnp.full((1, 5), advantage), jnp.log(ratios))
        assert [np.flatnonzero(side).tolist() for side in counted] == expected


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


def test_segments_by_hand():
    """The last token is masked out, in a segment with the first one of its row."""
    shared = segment_logratio(jnp.asarray(D), jnp.asarray(MASK), segments([[0, 0, 1], [0, 1, 0]]))
    close(np.exp(shared[0]), [1.105171, 1.105171, 1])
    close(np.exp(shared[1, :2]), [0.818731, 1.648721])


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


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("sapo", {"positive": 0}),
        ("sapo", {"negative": -1}),
        ("capped_clip", {"delta": 0.5}),
        ("capped_clip", {"dual": 1}),
        ("cispo", {"low": 6, "high": 5}),
        ("cispo", {"high": 0.5}),
    ],
)
def test_settings_under_which_a_first_update_has_no_or_another_gradient_are_refused(kind, settings):
    with pytest.raises(ConfigError, match="must"):
        made(kind, **settings)


def test_cispo_keeps_a_gradient_beyond_the_cap():
    cispo = made("cispo", low=0.0, high=1.1)
    slope = jax.grad(lambda now: cispo.loss(now - OLD, jnp.asarray(A), now).sum())(jnp.asarray(NOW))
    close(slope, -np.minimum(np.exp(D), 1.1) * A)


def test_geometric():
    """GMPO by the slow route: clip each log-ratio on the side of its advantage only, average, exponentiate."""
    surrogate = made("geometric", clip_low=0.15, clip_high=0.1)
    d = np.float32([[-0.5, 0.3, 0.05], [0.5, -0.2, 0.0]])

    def total(d):
        return jnp.sum(surrogate.loss(shared_logratio(d, A, MASK, WHOLE, surrogate), jnp.asarray(A), d) * MASK)

    first, second = np.exp(np.mean([-0.5, 0.1, 0.05])), np.exp(np.mean([0.5, -0.15]))
    value, slope = jax.value_and_grad(total)(jnp.asarray(d))
    close(value, -3 * first + 2 * second)
    close(slope, [[-first, 0, -first], [second, 0, 0]])


def test_sapo_gate():
    """Slope 1 at ratio 1, saturating far away."""

    def sapo(d, a, **settings):
        return made("sapo", **settings).loss(d, a, jnp.zeros_like(d))

    slope = jax.grad(lambda d: sapo(d, jnp.asarray(A)).sum())(jnp.zeros((2, 3)))
    close(slope, -A, 1e-6)
    close(sapo(jnp.full((1, 1), 5.0), jnp.ones((1, 1)), positive=1.0), [[-4.0]])
    close(sapo(jnp.zeros((1, 1)), jnp.ones((1, 1)), positive=2.0), [[-1.0]])


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
        d = shared_logratio(now - OLD, zeros, MASK, WHOLE, surrogate)
        return jnp.sum(surrogate.loss(d, zeros, now))

    assert not np.asarray(jax.grad(total)(jnp.asarray(NOW))).any()


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_a_positive_factor_of_the_advantage_is_one_of_the_loss(kind, level):
    """So importance weights may scale the advantages."""
    surrogate, a = at_level(kind, level), jnp.asarray(A)
    some = [
        surrogate.loss(shared_logratio(D, scale * a, MASK, WHOLE, surrogate), scale * a, NOW) for scale in (1.0, 2.5)
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


def inside(a=SIGNS, **settings):
    return (np.asarray(dppo(a=a, **settings)) != 0).tolist()[0]


def test_dppo_fixture():
    objective = dppo(penalty=1e-3)
    close(objective[0], [0.000164, 0.000480, -3.998078, -0.722116])
    close(objective.mean(), -1.179887)
    assert inside() == [False, False, True, True]
    assert inside(low=0.26, high=0.24) == [False, True, True, True], "each side has its bound"
    assert inside(divergence="two_sided", low=0.1, high=0.1) == [False] * 4
    assert inside(divergence="two_sided", low=0.3, high=0.2) == [False, True, True, True]
    assert inside(a=-SIGNS) == [True] * 3 + [False], "a token that returns against its advantage is never out of bounds"
    slope = jax.grad(lambda now: dppo(now).sum())(jnp.asarray(np.log(P_NOW), jnp.float32))
    close(slope[0], [0, 0, -4, -0.722222])


def test_dppo_by_binary_kl():
    """The divergences of the specification, each found between two bounds."""
    assert inside(divergence="kl", low=0.05, high=0.05) == [False, False, False, True]
    for token, (sign, size) in enumerate(zip([1, -1, 1, -1], [0.143841, 0.143841, 0.093943, 0.167604], strict=True)):
        a = np.full((1, 4), sign, np.float32)
        for bound, expected in [(size + 2e-6, True), (size - 2e-6, False)]:
            assert inside(a, divergence="kl", low=bound, high=bound)[token] == expected
    certain = made("dppo", divergence="kl").loss(jnp.zeros((1, 1)), jnp.ones((1, 1)), jnp.zeros((1, 1)))
    assert float(certain[0, 0]) == -1, "p = p_old = 1"


def test_tokens_out_of_bounds_are_counted():
    for surrogate, above in ((made("dppo"), 0), (made(clip_low=0.4, clip_high=2.0), 2)):
        low, high = surrogate.clipped(jnp.log(P_NOW / P_OLD), jnp.asarray(SIGNS), jnp.log(P_NOW))
        assert (np.flatnonzero(low).tolist(), np.flatnonzero(high).tolist()) == ([1], [above])


@pytest.mark.parametrize("kind", ["clip", "capped_clip", "cispo"])
def test_what_the_ratio_is_taken_against(kind):
    """(a scoring pass, the log-probabilities of the update itself)"""
    choices = {"recorded": (False, False), "scored": (True, False), "current": (False, True)}
    for choice, wanted in choices.items():
        surrogate = made(kind, old_logprobs=choice)
        assert (surrogate.scored_ratio, surrogate.own_ratio) == wanted
