"""Score-based objectives: vectors, and every coefficient against finite differences of its objective."""

import numpy as np
import pytest
from method_groups import make_group, method

from grpo_roc_jax.method.advantage import z_score
from grpo_roc_jax.method.family.disco import disco_coefficients, disco_objective
from grpo_roc_jax.method.family.drpo import drpo_coefficients, drpo_objective, drpo_weights
from grpo_roc_jax.method.family.rebel import rebel_coefficients, rebel_loss
from grpo_roc_jax.method.family.reg_grpo import reg_coefficients, reg_loss, reg_targets
from grpo_roc_jax.method.family.score_based import divergence_push
from grpo_roc_jax.method.features import features

SCORES = np.array([-0.5, -0.7, -0.4, -0.9])
CORRECT = np.array([True, True, False, False])
LENGTHS = np.array([2000, 6000, 3000, 3000])


def close(actual, expected, atol=1e-5):
    np.testing.assert_allclose(actual, expected, atol=atol)


def gradient(function, scores, step=1e-5):
    out = np.zeros(len(scores))
    for i in range(len(scores)):
        nudge = np.zeros(len(scores))
        nudge[i] = step
        out[i] = (function(scores + nudge) - function(scores - nudge)) / (2 * step)
    return out


def test_disco_vectors():
    assert disco_objective(SCORES, CORRECT, 10.0) == pytest.approx(0.046875, abs=1e-5)
    assert disco_objective(SCORES, CORRECT, 1.0) == pytest.approx(0.019070, abs=1e-5)
    assert disco_objective(SCORES, CORRECT, np.inf) == pytest.approx(0.05, abs=1e-9)
    close(-disco_coefficients(SCORES, CORRECT, 10.0)[2:], [0.512497, 0.487503])
    close(disco_coefficients(SCORES, CORRECT, 1.0), [0.5, 0.5, -0.622459, -0.377541])
    close(disco_coefficients(SCORES, CORRECT, np.inf), [0.5, 0.5, -0.5, -0.5])
    coefficient = divergence_push(3e-4)
    assert coefficient == pytest.approx(0.2)
    assert coefficient * 3e-4 == pytest.approx(6e-5)
    assert divergence_push(1e-5) == 0.0


def test_drpo_vectors():
    close(drpo_weights(LENGTHS[:2], 8192), [0.992481, 0.007519])
    assert drpo_objective(SCORES, CORRECT, LENGTHS, 8192, 0.1, 10.0) == pytest.approx(0.145372, abs=1e-5)
    close(drpo_coefficients(SCORES, CORRECT, LENGTHS, 8192, 0.1, 10.0), [0.992481, 0.007519, -0.512497, -0.487503])
    close(drpo_coefficients(SCORES, CORRECT, LENGTHS, 8192, 0.1, 1.0)[2:], [-0.622459, -0.377541])


def test_rebel_vectors():
    scores, rewards = np.array([0.3, -0.1]), np.array([1.0, 0.0])
    assert rebel_loss(scores, rewards) == pytest.approx(0.36)
    close(rebel_coefficients(scores, rewards), [1.2, -1.2])


def test_reg_vectors():
    advantages, scores = z_score(np.array([1.0, 0, 0, 0])), np.array([0.2, -0.1, 0, -0.1])
    close(reg_targets(scores), [1.414204, -0.707102, 0, -0.707102])
    assert reg_loss(scores, advantages) == pytest.approx(0.085786, abs=1e-5)
    close(reg_coefficients(scores, advantages), [0.589256, 0.589256, -1.767767, 0.589256], 2e-5)


@pytest.mark.parametrize("seed", range(5))
def test_coefficients_are_gradients(seed):
    generator = np.random.default_rng(seed)
    n = 6
    scores = generator.normal(size=n)
    correct = np.array([True, True, False, False, True, False])
    rewards, lengths = correct.astype(float), generator.integers(100, 900, n)
    for tau in (0.5, 1.0, 10.0):
        close(
            disco_coefficients(scores, correct, tau),
            gradient(lambda s, tau=tau: disco_objective(s, correct, tau), scores),
            1e-6,
        )
        close(
            drpo_coefficients(scores, correct, lengths, 1000, 0.1, tau),
            gradient(lambda s, tau=tau: drpo_objective(s, correct, lengths, 1000, 0.1, tau), scores),
            1e-6,
        )
    close(rebel_coefficients(scores, rewards, 0.7), -gradient(lambda s: rebel_loss(s, rewards, 0.7), scores), 1e-6)
    advantages = z_score(rewards)
    close(reg_coefficients(scores, advantages), -gradient(lambda s: reg_loss(s, advantages), scores), 1e-6)
    tight = 1e-3 * scores  # deviation under the floor: no gradient through it
    close(reg_coefficients(tight, advantages), -gradient(lambda s: reg_loss(s, advantages), tight, 1e-7), 1e-5)


def test_reg_at_the_first_step_is_finite():
    advantages = z_score(np.array([1.0, 0, 0, 1]))
    result = reg_coefficients(np.zeros(4), advantages)
    assert np.isfinite(result).all()
    assert (np.sign(result) == np.sign(advantages)).all()


@pytest.mark.parametrize("score", ["disco", "drpo", "reg", "rebel"])
@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_flat_groups(score, reward):
    rewards = np.full(3, reward)
    found = features(make_group(rewards, lengths=[5] * 3))
    assert not method(advantage=score).advantage.coefficients(np.zeros(3), rewards, found).any()


def test_each_kind_has_the_coefficients_of_its_objective():
    rewards = CORRECT.astype(float)
    found = features(make_group(rewards, lengths=LENGTHS))

    def run(score, **settings):
        return method(advantage={"kind": score, **settings}).advantage.coefficients(SCORES, rewards, found)

    close(run("disco", tau=1.0), disco_coefficients(SCORES, CORRECT, 1.0))
    close(run("drpo"), drpo_coefficients(SCORES, CORRECT, LENGTHS, 8192, 0.1, 10.0))
    close(run("rebel", eta=2.0), rebel_coefficients(SCORES, rewards, 2.0))
    close(run("reg"), reg_coefficients(SCORES, z_score(rewards)))
