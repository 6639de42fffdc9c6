"""Score-based objectives: vectors, and every coefficient and loss against finite differences of its objective."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_roc_jax.contrib.methods.score_based import live_rows
from grpo_roc_jax.method.compose import Scores, train_rows
from grpo_roc_jax.method.features import features
from grpo_roc_jax.method.state import AlgoState
from tests.helpers.method_groups import close, make_group, method, trajectories
from tests.method.test_compose import batch, loss_value


def soft_maximum(scores, tau):
    return scores.mean() if np.isinf(tau) else tau * np.log(np.mean(np.exp(scores / tau)))


def disco(scores, rewards, lengths, tau=10.0):
    """mean_pos s - tau log mean_neg exp(s / tau) (arXiv:2505.12366)."""
    return scores[rewards > 0].mean() - soft_maximum(scores[rewards <= 0], tau)


def drpo(scores, rewards, lengths, tau=10.0, max_length=8192, length_temperature=0.1):
    """sum_pos w s - tau log mean_neg exp(s / tau), w = softmax of 1 - n / L over the successes (arXiv:2510.04474)."""
    shares = np.exp((1 - lengths[rewards > 0] / max_length) / length_temperature)
    return shares @ scores[rewards > 0] / shares.sum() - soft_maximum(scores[rewards <= 0], tau)


def rebel(scores, rewards, lengths, eta=1.0):
    """Minus the mean over all pairs of ((s_i - s_j) - eta (R_i - R_j))^2 (arXiv:2404.16767)."""
    first, second = np.triu_indices(len(scores), 1)
    gaps = (scores[first] - scores[second]) - eta * (rewards[first] - rewards[second])
    return -np.mean(gaps**2)


def reg(scores, rewards, lengths, floor=1.0):
    """Minus mean (A - z)^2 with z = (s - mean) / (max(std, floor) + 1e-6) (arXiv:2506.07464)."""
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    predicted = (scores - scores.mean()) / (max(scores.std(ddof=1), floor) + 1e-6)
    return -np.mean((advantages - predicted) ** 2)


OBJECTIVES = {"disco": disco, "drpo": drpo, "rebel": rebel, "reg": reg}
"""J(scores, rewards, lengths, **settings) of a group, to be maximized, by the kind of `advantage`."""
FOUR = ([-0.5, -0.7, -0.4, -0.9], [1, 1, 0, 0], [2000, 6000, 3000, 3000])


@pytest.mark.parametrize(
    ("kind", "settings", "group", "expected"),
    [
        ("disco", {"tau": 10.0}, FOUR, 0.046875),
        ("disco", {"tau": 1.0}, FOUR, 0.019070),
        ("disco", {"tau": np.inf}, FOUR, 0.05),
        ("drpo", {}, FOUR, 0.145372),
        ("rebel", {}, ([0.3, -0.1], [1, 0], [3, 3]), -0.36),
        ("reg", {"floor": 0.01}, ([0.2, -0.1, 0, -0.1], [1, 0, 0, 0], [1] * 4), -0.085786),
    ],
)
def test_objectives(kind, settings, group, expected):
    """The vectors of the specification."""
    assert OBJECTIVES[kind](*map(np.array, group), **settings) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings", "spread"),
    [
        *(("disco", {"tau": tau}, 1.0) for tau in (0.5, 10.0, np.inf)),
        *(("drpo", {"tau": tau, "max_length": 1000}, 1.0) for tau in (0.5, 10.0)),
        *((kind, {}, 1.0) for kind in OBJECTIVES),
        ("rebel", {"eta": 0.7}, 1.0),
        ("reg", {"floor": 0.01}, 1.0),
        ("reg", {}, 0.1),  # under the floor of its deviation, through which no gradient goes
        *(("reg", {"floor": floor}, 0.0) for floor in (0.5, 1.0)),  # right after sampling
    ],
)
def test_coefficients_are_gradients(kind, settings, spread):
    generator, rewards = np.random.default_rng(0), np.array([1.0, 1, 0, 0, 1, 0])
    for _ in range(3):
        scores, lengths = spread * generator.normal(size=6), generator.integers(100, 900, 6)
        ends = [OBJECTIVES[kind](scores + nudge, rewards, lengths, **settings) for nudge in (1e-5 * np.eye(6))]
        starts = [OBJECTIVES[kind](scores - nudge, rewards, lengths, **settings) for nudge in (1e-5 * np.eye(6))]
        part = method(advantage={"kind": kind, **settings}).advantage
        coefficients = part.coefficients(scores, rewards, features(make_group(rewards, lengths=lengths)))
        close(coefficients, (np.array(ends) - starts) / 2e-5, 1e-6)


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_flat_groups(kind, reward):
    rewards = np.full(3, reward)
    coefficients = method(advantage=kind).advantage.coefficients(np.zeros(3), rewards, features(make_group(rewards)))
    assert not coefficients.any()


@pytest.mark.parametrize(("masks", "rows"), [([[0, 1], [0, 0], [1, 1]], 2), ([[0, 0], [1, 0]], 1), ([[0, 0]], 1)])
def test_rows_with_a_token_that_trains(masks, rows):
    assert live_rows(SimpleNamespace(masks=[np.array(mask, bool) for mask in masks])) == rows


BOUND = {"kl_delta": 0.01, "kl_beta": 2.0}


@pytest.mark.parametrize(
    ("kind", "settings", "bound", "normalizer"),
    [
        ("disco", {"tau": 0.8}, BOUND, "sequence_mean"),
        ("drpo", {"tau": 0.8, "max_length": 10}, BOUND, "sequence_mean"),
        ("rebel", {}, {}, "sequence_sum"),
        ("reg", {}, {}, "sequence_sum"),
    ],
)
@pytest.mark.parametrize("push", [0.0, 1.0])
def test_the_gradient_of_the_loss_is_that_of_the_objective(kind, settings, bound, normalizer, push):
    """d loss / d log-probabilities equals finite differences of the published objective over the whole batch."""
    groups, generator = batch(), np.random.default_rng(2)
    members = trajectories(groups)
    now = [(t.logprobs - 0.3 * push * generator.random(t.length)).astype(np.float64) for t in members]
    advantage = {"kind": kind, **settings, **bound}
    config = method(advantage=advantage, weights={"normalizer": normalizer}, surrogate="logp")
    rows = train_rows(groups, config, AlgoState(), scores=Scores(now))
    slopes = jax.grad(lambda values: loss_value(rows, values, config))([jnp.asarray(x) for x in now])

    def kl(values):
        gaps = [(t.logprobs - v)[t.policy_mask] for v, t in zip(values, members, strict=True)]
        return np.concatenate(gaps).mean()

    factor = max(0.0, 2.0 * (kl(now) - 0.01))
    assert (factor > 0) == (push > 0)

    def objective(values):
        total, rest = 0.0, iter(values)
        for group in groups:
            part = [(next(rest), t) for t in group.trajectories]
            lengths = np.array([t.policy_mask.sum() for _, t in part])
            if bound:
                scores = np.array([v[t.policy_mask].mean() for v, t in part])
            else:
                scores = np.array([(v - t.logprobs)[t.policy_mask].sum() for v, t in part])
            total -= OBJECTIVES[kind](scores, group.rewards, lengths, **settings)
        return total / len(groups) + (factor * kl(values) if bound else 0.0)

    for i, member in enumerate(members):
        for t in np.flatnonzero(member.policy_mask):
            up, down = ([v.copy() for v in now] for _ in range(2))
            up[i][t] += 1e-5
            down[i][t] -= 1e-5
            numeric = (objective(up) - objective(down)) / 2e-5
            assert float(slopes[i][t]) == pytest.approx(numeric, abs=2e-4)
        assert not np.asarray(slopes[i])[~member.policy_mask].any()
